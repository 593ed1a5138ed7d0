"""The backend ``"dali"``: transforms by NVIDIA's DALI, in its dynamic mode, on the CPU and on CUDA.

DALI's batches are ragged, and its operators take a parameter for each sample, so images of all sizes go through
together, and images that a record is not for go through it with parameters that change nothing: no image is taken out
of its batch.

A pipeline with external sources, DALI's other mode, took 3 to 9 % less CPU time (DALI 2.4.0, one thread,
batches of 64, 500×375 to 224). Still it is not used: at each step of a chain its graph must hold every operator that
any sample may draw there, nested branches included.

Importing this package imports no DALI; making a `DaliBackend` does.
"""

from gpuload.stage.dali.backend import DaliBackend

__all__ = ["DaliBackend"]
