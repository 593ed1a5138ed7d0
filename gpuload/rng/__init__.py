"""Counter-based random numbers, distributions, and seeding of the global generators. Workers and the main process use
this package, which does not import torch."""
