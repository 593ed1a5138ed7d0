"""The draws of timm's automatic augmentation, as gpuload's operations."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from PIL import Image

from gpuload.transforms.program.ops import OPS
from gpuload.transforms.timm_policies import TIMM

__all__ = ["HEIGHT", "WIDTH", "run_timm", "translate"]

HEIGHT, WIDTH = 60, 47


def translate(name: str, argument: float | None) -> tuple:
    """Translate one of timm's operations to the format of `described`."""
    base_name = name.replace("Rel", "")
    operation = OPS[TIMM.codes[TIMM.names.index(base_name)]]
    values = np.zeros(8)
    if operation == "warp":
        assert argument is not None
        coefficients = {"ShearX": 1, "ShearY": 3, "TranslateX": 2, "TranslateY": 5}
        values[[0, 4]] = 1
        if base_name == "Rotate":
            angle, (x, y) = -np.radians(argument), (WIDTH / 2, HEIGHT / 2)
            cosine, sine = np.cos(angle), np.sin(angle)
            values[:6] = cosine, sine, x - cosine * x - sine * y, -sine, cosine, y + sine * x - cosine * y
        else:
            values[coefficients[base_name]] = argument * {"TranslateX": WIDTH, "TranslateY": HEIGHT}.get(base_name, 1)
    elif base_name == "SolarizeAdd":
        values[:2] = 128, argument
    elif base_name == "Desaturate":
        assert argument is not None
        values[0] = min(1.0, max(0.0, 1 - argument))
    elif operation == "posterize":
        values[0] = min(max(argument, 0), 8)
    elif argument is not None:
        values[0] = argument
    return (operation, *(round(value, 4) for value in values.tolist()))


def run_timm(published: Any, original: Any, operations: list[Any], n: int) -> tuple[list[tuple], list[Any], list[int]]:
    """Run timm's implementation on n images without changing pixels. Return the operations of each image, the filters
    of all operations, and the number of operations of each image."""
    calls: list[tuple] = []

    def record(name):
        def apply(image, *arguments, resample, fillcolor):
            resample = published._interpolation({"resample": resample})
            calls.append((translate(name, *arguments) if arguments else translate(name, None), resample))
            return image

        return apply

    for operation in operations:
        operation.aug_fn = record(operation.name)
    image, operations_by_image, filters = Image.new("RGB", (WIDTH, HEIGHT)), [], []
    state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(1)
    np.random.seed(2)
    try:
        for _ in range(n):
            calls.clear()
            original(image)
            operations_by_image.append(tuple(entry for entry, _ in calls))
            filters += [resample for _, resample in calls]
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
    return operations_by_image, filters, [len(entry) for entry in operations_by_image]
