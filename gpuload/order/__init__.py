"""Which sample is where: permutation, shares of ranks, samplers, schedules. Main process; places go to workers."""
