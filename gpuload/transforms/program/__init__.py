"""What was drawn for a batch: all that a backend may know of transforms. Both sides; no torch."""
