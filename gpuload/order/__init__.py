"""Which sample is where: permutation, shares of ranks, samplers, schedules. Main process; places travel to workers."""
