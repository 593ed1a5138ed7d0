"""has_state searches the objects that a user's code refers to for parameters and buffers, which training changes."""

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


def reads_a_global_in_an_inner_function(images: Any) -> Any:
    return [(lambda image: NET(image))(image) for image in images]


def calls_a_function_that_reads_a_global(images: Any) -> Any:
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
    """A module without parameters."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


def reference_cycle(held: Any) -> list[Any]:
    around: list[Any] = [{}]
    around[0]["back"] = around
    return [around, held]


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda held: held,
    "closure": enclosed,
    "default": lambda held: lambda images, attribute=held: images,
    "decorated": lambda held: decorated(enclosed(held)),
    "cached": lambda held: functools.lru_cache(enclosed(held)),
    "partial": lambda held: functools.partial(max, held),
    "partial's keyword": lambda held: functools.partial(max, key=held),
    "method": lambda held: Holder(held).method,
    "object": Holder,
    "slots": Slotted,
    "named": lambda held: SimpleNamespace(attribute=held),
    "list": lambda held: [0, [held]],
    "dict": lambda held: {"net": {"module": held}},
    "module's list": lambda held: torch.nn.Sequential(Module([held])),
    "reference_cycle": reference_cycle,
    "all": lambda held: Holder({"net": [functools.partial(enclosed(held))]}).method,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_has_state_finds_modules_with_state_in_any_holder(holder):
    hold = HOLDERS[holder]
    for held in (NET, torch.nn.BatchNorm2d(3, affine=False), torch.ones(1, requires_grad=True)):
        assert has_state(hold(held)), held


@pytest.mark.parametrize("holder", HOLDERS)
def test_has_state_ignores_objects_that_training_does_not_change(holder):
    hold = HOLDERS[holder]
    for held in (PLAIN, torch.ones(3), np.ones(3), NUMBERS, "text", torch.nn.Conv2d, torch, LOG, len, None):
        assert not has_state(hold(held)), held


def test_has_state_follows_the_globals_of_functions():
    for function in (
        reads_a_global,
        reads_a_global_in_an_inner_function,
        calls_a_function_that_reads_a_global,
        Called(),
    ):
        assert has_state(function)
    for function in (reads_plain_globals, torch.nn.functional.interpolate, torch.ones(3).mul):
        assert not has_state(function)
    assert has_state(torch.ones(3, requires_grad=True).mul)


def test_has_state_is_true_for_more_objects_than_it_searches():
    objects = [[number] for number in range(MAX_OBJECTS)]
    assert has_state(enclosed(objects))
    assert not has_state(enclosed(objects[: MAX_OBJECTS // 2]))


@dataclass(frozen=True)
class CustomTransform(T.Custom):
    held: Any = field(default=None, compare=False)
    class_attribute = None

    def apply(self, images: Any, params: Any) -> Any:
        return images


class HasClassAttribute(CustomTransform):
    class_attribute = NET  # pyright: ignore[reportAssignmentType]


class CallsAMethod(CustomTransform):
    def helper(self, images: Any) -> Any:
        return NET(images)


def custom_of_function(held: Any) -> CustomTransform:
    class Inner(CustomTransform):
        def apply(self, images: Any, params: Any) -> Any:
            return held(images)

    return Inner()


def test_chain_holds_state_of_custom_transforms_and_functions():
    functions = T.Lambda(enclosed(NET)), T.Lambda(reads_a_global), T.Lambda(Holder(NET).method, per="image")
    for transform in (
        CustomTransform(NET),
        CustomTransform([NET]),
        HasClassAttribute(),
        CallsAMethod(),
        custom_of_function(NET),
        T.RandomApply([CustomTransform(NET)]),
        *functions,
    ):
        assert Chain([transform, T.RandomHorizontalFlip()]).holds_state
    for transform in (
        CustomTransform(),
        CustomTransform(PLAIN),
        CustomTransform(torch.ones(3)),
        custom_of_function(PLAIN),
        T.Lambda(enclosed(3)),
        T.Lambda(abs),
    ):
        assert not Chain([transform, T.RandomHorizontalFlip()]).holds_state


def test_chain_ends_in_state_of_modules_at_its_end():
    assert all(Chain([module]).ends_in_state for module in (NET, Module([NET])))
    assert not any(Chain([module]).ends_in_state for module in (PLAIN, Module([PLAIN])))
    assert Chain([NET, PLAIN]).ends_in_state
    assert Chain([PLAIN, NET, PLAIN]).ends_in_state
    assert not Chain([NET, PLAIN]).holds_state  # only the modules at the end wait, not the rest of the batch
    assert not Chain([PLAIN, PLAIN]).ends_in_state
