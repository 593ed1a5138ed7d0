"""The backend ``"kornia"``: Kornia's operators, for operations that Kornia defines in the same way as Pillow.

Importing this package does not import Kornia; creating the backend does.
"""

from gpuload.stage.kornia.backend import KorniaBackend

__all__ = ["KorniaBackend"]
