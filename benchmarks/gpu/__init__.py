"""Loaders measured end to end on a GPU, alone and feeding networks, with their upper bounds from the same run."""
