"""The order of samples: permutations, ranks' shares, samplers and schedules.

This package runs in the main process; workers use only `place`.
"""
