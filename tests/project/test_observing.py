"""The blocks of docs/observing.md that log to TensorBoard, wandb and Lightning run with stand-ins for the loggers."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpuload as gl
from gpuload import transforms as T
from gpuload.loader.stats import Part

PAGE = (Path(__file__).parents[2] / "docs" / "observing.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def code_block(word: str) -> str:
    """Return the block with this word, changed to log every 2nd step instead of every 50th."""
    [text] = [text for text in BLOCKS if word in text]
    return text.replace("% 50 == 49", "% 2 == 1").replace("every=50", "every=2")


@pytest.fixture
def namespace() -> Any:
    samples = [(np.full((20, 24, 3), number, np.uint8), number) for number in range(12)]
    with gl.Loader(samples, 2, transforms=[T.CenterCrop(16)], num_workers=0, device="cpu") as loader:
        namespace: dict[str, Any] = {"loader": loader, "train": lambda images, labels: None}
        exec(code_block("def loader_metrics"), namespace)
        yield namespace


def check_logged(logged: list[tuple[dict[str, float], int]], steps: list[int]) -> None:
    assert [step for _, step in logged] == steps
    for figures, _ in logged:
        assert {"loader/images_per_s", "loader/waiting", "loader/main/stage", "loader/main/decode"} <= figures.keys()
        assert {name: value for name, value in figures.items() if not isinstance(value, int | float)} == {}
        assert figures["loader/images_per_s"] > 0
        assert 0 < figures["loader/waiting"] <= 1


def test_loader_metrics_have_names_without_spaces_and_parts_as_shares(namespace):
    waiting = Part("slot wait", "main", 1.0, 3)
    assert namespace["loader_metrics"](gl.Stats(seconds=2.0, images_per_s=5.0, waiting=0.25, parts=(waiting,))) == {
        "loader/images_per_s": 5.0,
        "loader/waiting": 0.25,
        "loader/workers_busy": 0,
        "loader/main/slot_wait": 0.5,
    }


def test_tensorboard_example_logs_loader_metrics(namespace, monkeypatch):
    logged: dict[int, dict[str, float]] = {}
    writer = SimpleNamespace(add_scalar=lambda name, value, step: logged.setdefault(step, {}).update({name: value}))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=lambda: writer))
    exec(code_block("SummaryWriter"), namespace)
    check_logged([(figures, step) for step, figures in logged.items()], [1, 3, 5])


def test_wandb_example_logs_loader_metrics_and_advice(namespace, monkeypatch):
    logged: list[tuple[dict[str, float], int]] = []
    run = SimpleNamespace(log=lambda figures, step: logged.append((figures, step)), summary={})
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda project: run))
    exec(code_block("wandb"), namespace)
    check_logged(logged, [1, 3, 5])
    assert run.summary["loader/advice"] == namespace["loader"].stats().advice


def test_lightning_example_logs_loader_metrics(namespace, monkeypatch):
    registered: list[Any] = []
    stand_in = SimpleNamespace(Callback=object, Trainer=lambda max_epochs, callbacks: registered.extend(callbacks))
    monkeypatch.setitem(sys.modules, "pytorch_lightning", stand_in)
    exec(code_block("pl.Callback"), namespace)
    [callback] = registered
    logged: list[tuple[dict[str, float], int]] = []
    for step, batch in enumerate(namespace["loader"]):
        module = SimpleNamespace(log_dict=lambda figures, step=step: logged.append((figures, step)))
        callback.on_train_batch_end(None, module, None, batch, step)
    check_logged(logged, [1, 3, 5])
