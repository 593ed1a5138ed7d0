"""The backend ``"kornia"``: Kornia's functional operators with our draws.

The operators are batched; which images of a batch are changed, by which operations and in which order, is decided here.
Importing this package imports no Kornia; making the backend does.
"""

from gpuload.stage.kornia.backend import KorniaBackend

__all__ = ["KorniaBackend"]
