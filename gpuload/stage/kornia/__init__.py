"""The backend ``"kornia"``: transforms with Kornia's operators and definitions, on the CPU and on CUDA.

Importing this package does not import Kornia; creating the backend does.
"""

from gpuload.stage.kornia.backend import KorniaBackend

__all__ = ["KorniaBackend"]
