"""The order of samples: permutations, ranks' shares, samplers and schedules. Main process; workers get only places."""
