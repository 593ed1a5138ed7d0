"""Datasets that store many samples in few files, one per module. Libraries are imported on first use."""
