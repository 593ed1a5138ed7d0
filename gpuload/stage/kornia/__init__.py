"""The backend ``"kornia"``: Kornia's own functional operators with our draws.

Kornia's are batched, but for what they leave to their caller: which images of a batch are changed, by which operations,
and in which order. Importing this package imports no Kornia; making the backend does.
"""

from gpuload.stage.kornia.backend import KorniaBackend

__all__ = ["KorniaBackend"]
