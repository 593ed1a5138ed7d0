"""The backend ``"dali"``: transforms by NVIDIA's DALI, in its dynamic mode, on the CPU and on CUDA.

DALI's batches are ragged, and most of its operators take a parameter for each sample: so images go through together,
whatever their sizes. Where an operator means something else than Pillow does (contrast, saturation, hue), the meaning
of the reference is built from DALI's arithmetic.

A pipeline with external sources, DALI's other mode, took 3 to 9 % less CPU time (``benchmarks/dali_modes.py``: DALI
2.4.0, one thread, batches of 64, 500×375 to 224, with and without four colour operators in each sample's own order). It
is not used all the same: its graph must hold, in each place of a chain, every operator that any sample may draw there,
branches within branches too, where dynamic mode picks rows.

Importing this package imports no DALI; making a `DaliBackend` does.
"""

from gpuload.stage.dali.backend import DaliBackend

__all__ = ["DaliBackend"]
