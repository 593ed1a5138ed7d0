"""Counter-based random numbers, distributions, and seeding of the global generators. Used by workers and by the main
process; does not import torch."""
