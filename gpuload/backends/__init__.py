"""What applies transforms to batches: torch is at home here, and nowhere below.

A backend is given what was drawn, and applies it; it draws nothing itself.
"""

from gpuload.backends.compile import Backend, MemoryFormat, Ragged, Result, Stage, compile_stage
from gpuload.backends.memory import OutputPool
from gpuload.backends.ragged import RaggedImages

__all__ = ["Backend", "MemoryFormat", "OutputPool", "Ragged", "RaggedImages", "Result", "Stage", "compile_stage"]
