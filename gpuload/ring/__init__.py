"""The slots in shared memory, and what lies in them. Both sides; no torch."""
