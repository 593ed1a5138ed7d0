"""The backend ``"dali"``: transforms with NVIDIA's DALI, in its dynamic mode, on the CPU and on CUDA.

DALI's batches are ragged, and its operators take one parameter per sample. So images of different sizes are processed
together. Results are DALI's, also where DALI defines an operation differently from Pillow; the random parameters are
gpuload's. `gpuload.stage.dali.operators` lists the definitions. The code for CUDA has not been run on a GPU.

DALI's other mode, a pipeline with external sources, took 3 to 9% less CPU time (DALI 2.4.0, one thread, batches of 64,
500×375 to 224). It is not used, because its graph would need, at each step of a chain, every operator that any sample
could need there, including operators in nested branches.

Importing this package does not import DALI; creating a `DaliBackend` does.
"""

from gpuload.stage.dali.backend import DaliBackend

__all__ = ["DaliBackend"]
