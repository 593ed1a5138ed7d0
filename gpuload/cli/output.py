"""What ``bench`` and ``compare`` share: their data and device checked, results as JSON and as a picture."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import gpuload as gl
from gpuload.cli.source import source_of
from gpuload.loader.limits import usable_cpus
from gpuload.stage import device as devices
from gpuload.stage.plan import check_device

__all__ = ["busy", "check_plot", "context", "device_of", "draw_bars", "opened", "write_json"]


def opened(data: str, given: Mapping[str, str | None]) -> Any:
    """The dataset that a command line names; errors as for `source_of`, and a ValueError if it is empty."""
    dataset = source_of(data, {name: value for name, value in given.items() if value is not None})
    if not len(dataset):
        raise ValueError(f"{dataset!r} has no images; expected some to measure with")
    return dataset


def device_of(name: str | None) -> torch.device:
    """The device of ``--device``, by default a GPU if there is one.

    Raises:
        ValueError: it is none, or there is no such device.
    """
    device = check_device(name or devices.usual_type())
    if device.type != "cpu" and device.type != devices.usual_type():
        kind = device.type.upper()
        raise ValueError(f"--device {device}, but torch finds no {kind} device; leave --device out to run on the CPU")
    return device


def busy(load: float, cpus: int) -> str:
    """What to say of a machine with this load (``os.getloadavg``) before anything is measured; "" if it is idle."""
    if load <= cpus / 2:
        return ""
    return f"This machine is busy: a load of {load:.1f} on {cpus} CPUs. Figures depend on what else runs"


def check_plot(path: str | None) -> None:
    """ImportError if a picture is asked for, and matplotlib is missing: before anything is measured."""
    if path is not None and find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib, which is not installed: pip install matplotlib")


def context(data: str, dataset: Any, device: torch.device) -> dict[str, Any]:
    """What was measured, with what: the first entries of a JSON file."""
    return {
        "data": data,
        "dataset": repr(dataset),
        "images": len(dataset),
        "device": str(device),
        "cpus": usable_cpus(),
        "machine": platform.machine(),
        "gpuload": gl.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def write_json(path: str, value: Mapping[str, Any]) -> None:
    """Write JSON to a file; ``-`` is stdout."""
    text = json.dumps(value, indent=2) + "\n"
    if path == "-":
        print(text, end="")
    else:
        Path(path).write_text(text)


def draw_bars(path: str, title: str, panels: Mapping[str, Sequence[tuple[str, float]]]) -> None:
    """Draw named numbers as horizontal bars, a panel for each unit, and write the picture to `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = sum(map(len, panels.values()))
    figure = Figure(figsize=(8, 1.2 + 0.4 * rows + 0.5 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[len(bars) for bars in panels.values()])
    for (unit, bars), (axis,) in zip(panels.items(), axes, strict=True):
        names, values = [name for name, _ in bars], [value for _, value in bars]
        drawn = axis.barh(names, values, color="#3b82f6", height=0.65)
        axis.bar_label(drawn, [f"{value:,.2f}" if value < 100 else f"{value:,.0f}" for value in values], padding=4)
        axis.invert_yaxis()
        axis.set_xlabel(unit)
        axis.set_xlim(0, 1.18 * max(values))
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)
