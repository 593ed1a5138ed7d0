"""The random draws for a batch: the only information that backends have about transforms."""
