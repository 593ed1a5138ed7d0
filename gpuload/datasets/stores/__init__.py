"""Datasets that keep many samples in few files, one module each. None imports its library before it is used."""
