"""The records of a batch's random parameters, which are all that backends know about transforms."""
