"""What the user's own code refers to, and whether training may write to it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpuload import transforms as T
from gpuload.transforms import Chain
from gpuload.transforms.state import MAX_OBJECTS, has_state

NET = torch.nn.Conv2d(3, 3, 1)
PLAIN = torch.nn.ReLU()
NUMBERS = [1.0] * 99
LOG = logging.getLogger(__name__)


def enclosed(held: Any) -> Callable[..., Any]:
    return lambda images: images + held


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(images: Any) -> Any:
        return function(images)

    return wrapper


def reads_a_global(images: Any) -> Any:
    return NET(images)


def reads_a_global_within(images: Any) -> Any:
    return [(lambda image: NET(image))(image) for image in images]


def reads_a_function_that_does(images: Any) -> Any:
    return reads_a_global(images)


def reads_plain_globals(images: Any) -> Any:
    LOG.debug("called")
    return torch.nn.functional.relu(PLAIN(images)) * NUMBERS[0] * np.pi


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held

    def method(self, images: Any) -> Any:
        return images


class Slotted:
    __slots__ = ("held", "unset")

    def __init__(self, held: Any) -> None:
        self.held = held


class Called:
    def __call__(self, images: Any) -> Any:
        return NET(images)


class Module(torch.nn.Module):
    """Has no parameters of its own."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


def circle(held: Any) -> list[Any]:
    around: list[Any] = [{}]
    around[0]["back"] = around
    return [around, held]


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda held: held,
    "closure": enclosed,
    "default": lambda held: lambda images, own=held: images,
    "decorated": lambda held: decorated(enclosed(held)),
    "cached": lambda held: functools.lru_cache(enclosed(held)),
    "partial": lambda held: functools.partial(max, held),
    "partial's keyword": lambda held: functools.partial(max, key=held),
    "method": lambda held: Holder(held).method,
    "object": Holder,
    "slots": Slotted,
    "named": lambda held: SimpleNamespace(own=held),
    "list": lambda held: [0, [held]],
    "dict": lambda held: {"net": {"own": held}},
    "module's list": lambda held: torch.nn.Sequential(Module([held])),
    "circle": circle,
    "all": lambda held: Holder({"net": [functools.partial(enclosed(held))]}).method,
}


@pytest.mark.parametrize("way", HOLDERS)
def test_state_is_found_whatever_holds_it(way):
    hold = HOLDERS[way]
    for held in (NET, torch.nn.BatchNorm2d(3, affine=False), torch.ones(1, requires_grad=True)):
        assert has_state(hold(held)), held


@pytest.mark.parametrize("way", HOLDERS)
def test_what_training_does_not_write_to_is_no_state(way):
    hold = HOLDERS[way]
    for held in (PLAIN, torch.ones(3), np.ones(3), NUMBERS, "text", torch.nn.Conv2d, torch, LOG, len, None):
        assert not has_state(hold(held)), held


def test_what_a_function_names_as_a_global():
    for function in (reads_a_global, reads_a_global_within, reads_a_function_that_does, Called()):
        assert has_state(function)
    for function in (reads_plain_globals, torch.nn.functional.interpolate, torch.ones(3).mul):
        assert not has_state(function)
    assert has_state(torch.ones(3, requires_grad=True).mul)


def test_what_refers_to_more_than_can_be_searched_is_taken_for_state():
    some = [[number] for number in range(MAX_OBJECTS)]
    assert has_state(enclosed(some))
    assert not has_state(enclosed(some[: MAX_OBJECTS // 2]))


@dataclass(frozen=True)
class Own(T.Custom):
    held: Any = field(default=None, compare=False)
    of_class = None

    def apply(self, images: Any, params: Any) -> Any:
        return images


class OfClass(Own):
    of_class = NET  # pyright: ignore[reportAssignmentType]


class Calls(Own):
    def helper(self, images: Any) -> Any:
        return NET(images)


def of_a_function(held: Any) -> Own:
    class Inner(Own):
        def apply(self, images: Any, params: Any) -> Any:
            return held(images)

    return Inner()


def test_chains():
    functions = T.Lambda(enclosed(NET)), T.Lambda(reads_a_global), T.Lambda(Holder(NET).method, per="image")
    for own in (Own(NET), Own([NET]), OfClass(), Calls(), of_a_function(NET), T.RandomApply([Own(NET)]), *functions):
        assert Chain([own, T.RandomHorizontalFlip()]).holds_state
    for own in (Own(), Own(PLAIN), Own(torch.ones(3)), of_a_function(PLAIN), T.Lambda(enclosed(3)), T.Lambda(abs)):
        assert not Chain([own, T.RandomHorizontalFlip()]).holds_state


def test_modules_at_the_end():
    assert all(Chain([module]).ends_in_state for module in (NET, Module([NET])))
    assert not any(Chain([module]).ends_in_state for module in (PLAIN, Module([PLAIN])))
    assert Chain([NET, PLAIN]).ends_in_state
    assert Chain([PLAIN, NET, PLAIN]).ends_in_state
    assert not Chain([NET, PLAIN]).holds_state  # only the modules at the end wait, not the rest of the batch
    assert not Chain([PLAIN, PLAIN]).ends_in_state
