"""The order of samples: permutations, ranks' shares, samplers and schedules.

Runs in the main process; workers use only `place`.
"""
