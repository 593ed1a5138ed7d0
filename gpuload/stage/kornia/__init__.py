"""The backend ``"kornia"``: Kornia's own operators, for the operations where they mean what Pillow's do.

Importing this package imports no Kornia; making the backend does.
"""

from gpuload.stage.kornia.backend import KorniaBackend

__all__ = ["KorniaBackend"]
