"""The backend ``"dali"``: transforms by NVIDIA's DALI, in its dynamic mode, on the CPU and on CUDA.

DALI's batches are ragged, and most of its operators take a parameter for each sample: so images go through together,
whatever their sizes. Where an operator means something else than Pillow does (contrast, saturation, hue), the meaning
of the reference is built from DALI's arithmetic. Importing this package imports no DALI; making a `DaliBackend` does.
"""

from gpuload.backends.dali.backend import DaliBackend

__all__ = ["DaliBackend"]
