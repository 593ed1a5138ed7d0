"""Loaders measured end to end on a GPU, alone and feeding networks, beside the ceilings of the same run."""
