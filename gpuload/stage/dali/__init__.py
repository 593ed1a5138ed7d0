"""The backend ``"dali"``: transforms by NVIDIA's DALI, in its dynamic mode, on the CPU and on CUDA.

DALI's batches are ragged, and most of its operators take a parameter for each sample, so images of all sizes go through
together. If an operator means something else than Pillow does (contrast, saturation, hue), the meaning of the reference
is built from DALI's arithmetic.

A pipeline with external sources, DALI's other mode, took 3 to 9 % less CPU time (``benchmarks/dali_modes.py``: DALI
2.4.0, one thread, batches of 64, 500×375 to 224, with and without four colour operators in each sample's own order).
Still it is not used: at each step of a chain its graph must hold every operator that any sample may draw there, nested
branches included, where dynamic mode just picks rows.

Importing this package imports no DALI; making a `DaliBackend` does.
"""

from gpuload.stage.dali.backend import DaliBackend

__all__ = ["DaliBackend"]
