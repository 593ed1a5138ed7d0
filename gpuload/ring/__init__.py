"""The slots in shared memory, and what is in them. Both sides; no torch."""
