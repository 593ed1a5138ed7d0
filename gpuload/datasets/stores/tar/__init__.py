"""Tar archives that follow the WebDataset convention: random access by an index, or one pass over a stream."""
