"""Applies transforms to batches, with torch. A backend is given what was drawn, and draws nothing itself."""

from gpuload.stage.memory import OutputPool
from gpuload.stage.plan import Plan, PlanStep
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.stage import BackendName, MemoryFormat, Ragged, Result, Stage, check_stage, compile_stage

__all__ = [
    "BackendName",
    "MemoryFormat",
    "OutputPool",
    "Plan",
    "PlanStep",
    "Ragged",
    "RaggedImages",
    "Result",
    "Stage",
    "check_stage",
    "compile_stage",
]
