"""What was drawn for a batch: all that a backend may know about transforms."""
