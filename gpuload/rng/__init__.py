"""Counter-based random numbers, their distributions, and the global generators of a sample. Both sides; no torch."""
