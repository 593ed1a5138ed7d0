"""Applies transforms to batches, with torch. Backends get the drawn random numbers, and draw nothing themselves."""

from gpuload.stage.memory import OutputPool
from gpuload.stage.plan import Plan
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.stage import Stage, check_stage, compile_stage

__all__ = ["OutputPool", "Plan", "RaggedImages", "Stage", "check_stage", "compile_stage"]
