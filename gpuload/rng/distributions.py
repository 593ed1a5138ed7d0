"""Normal, gamma, beta and Dirichlet variates, computed from uniform numbers in the open interval (0, 1).

Each variate consumes a fixed number of uniforms, so it remains a pure function of their counters. All functions are
vectorised over the leading axes. Workers import this module, so it uses neither torch nor scipy.

Source of the gamma variates: Marsaglia, Tsang, "A simple method for generating gamma variables", ACM TOMS 26 (2000).
They are computed as logarithms, because gamma variates with a small shape underflow float64: a beta variate with both
shapes 0.001 would be 0/0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

__all__ = ["beta", "beta_count", "dirichlet", "dirichlet_count", "gamma_count", "log_gamma", "normal"]

TRIES: Final = 8  # each try is accepted with a probability of at least 0.95: all 8 fail once in 10**10 variates


def normal(uniforms: np.ndarray) -> np.ndarray:
    """Turn uniforms into the same number of standard normal numbers (Box-Muller). The length of the last axis must be
    even; the first half of the result comes from cosines, the second half from sines."""
    half = uniforms.shape[-1] // 2
    radius = np.sqrt(-2 * np.log(uniforms[..., :half]))
    angle = (2 * math.pi) * uniforms[..., half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)


def gamma_count(shape: float) -> int:
    """Return how many uniforms a gamma variate consumes: 1 for shape 1, else 17."""
    return 1 if shape == 1 else 2 * TRIES + 1


def log_gamma(uniforms: np.ndarray, shape: float) -> np.ndarray:
    """Return the logarithms of gamma variates with `shape` > 0 and scale 1. The length of the last axis of `uniforms`
    must be `gamma_count(shape)`."""
    if shape == 1:
        return np.log(-np.log(uniforms[..., 0]))
    # For a shape below 1, draw a variate with shape + 1 and multiply it by u ** (1 / shape).
    third = (shape + 1 if shape < 1 else shape) - 1 / 3
    deviates = normal(uniforms[..., :TRIES])
    cubes = (1 + deviates / math.sqrt(9 * third)) ** 3
    log_cubes = np.log(np.maximum(cubes, 1e-300))
    accepted = np.log(uniforms[..., TRIES:-1]) < 0.5 * deviates**2 + third * (1 - cubes + log_cubes)
    accepted &= cubes > 0
    first_accepted = accepted.argmax(axis=-1)[..., None]
    log_variates = np.take_along_axis(log_cubes, first_accepted, axis=-1)[..., 0]
    log_variates = math.log(third) + np.where(accepted.any(axis=-1), log_variates, 0.0)
    return log_variates + np.log(uniforms[..., -1]) / shape if shape < 1 else log_variates


def beta_count(a: float, b: float) -> int:
    """Return how many uniforms a beta variate consumes."""
    return 1 if a == b == 1 else gamma_count(a) + gamma_count(b)


def beta(uniforms: np.ndarray, a: float, b: float) -> np.ndarray:
    """Return beta variates with shapes a, b > 0. The length of the last axis of `uniforms` must be
    `beta_count(a, b)`."""
    if a == b == 1:
        return uniforms[..., 0]
    return dirichlet(uniforms, (a, b))[..., 0]


def dirichlet_count(shapes: Sequence[float]) -> int:
    """Return how many uniforms a Dirichlet variate consumes."""
    return sum(gamma_count(shape) for shape in shapes)


def dirichlet(uniforms: np.ndarray, shapes: Sequence[float]) -> np.ndarray:
    """Return Dirichlet variates: the last axis holds one share for each of `shapes` (all > 0), and the shares sum to 1.
    The length of the last axis of `uniforms` must be `dirichlet_count(shapes)`."""
    logs, start = [], 0
    for shape in shapes:
        end = start + gamma_count(shape)
        logs.append(log_gamma(uniforms[..., start:end], shape))
        start = end
    logs = np.stack(logs, axis=-1)
    shares = np.exp(logs - logs.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)
