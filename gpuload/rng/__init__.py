"""Counter-based random numbers, their distributions, and the global generators. Both sides; no torch."""
