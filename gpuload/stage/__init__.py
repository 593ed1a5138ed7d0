"""Applies transforms to batches, with torch. Backends get random numbers that are already drawn, and draw none
themselves."""

from gpuload.stage.memory import OutputPool
from gpuload.stage.plan import Plan
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.stage import Stage, check_stage, compile_stage

__all__ = ["OutputPool", "Plan", "RaggedImages", "Stage", "check_stage", "compile_stage"]
