"""`has_state` searches the objects that user code refers to for parameters and buffers, which training changes."""

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
STATELESS = torch.nn.ReLU()
NUMBERS = [1.0] * 99
LOG = logging.getLogger(__name__)


def make_closure(content: Any) -> Callable[..., Any]:
    return lambda images: images + content


def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
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


def reads_stateless_globals(images: Any) -> Any:
    LOG.debug("called")
    return torch.nn.functional.relu(STATELESS(images)) * NUMBERS[0] * np.pi


class Holder:
    def __init__(self, content: Any) -> None:
        self.content = content

    def method(self, images: Any) -> Any:
        return images


class Slotted:
    __slots__ = ("content", "unset")

    def __init__(self, content: Any) -> None:
        self.content = content


class Called:
    def __call__(self, images: Any) -> Any:
        return NET(images)


class Module(torch.nn.Module):
    """A module without parameters."""

    def __init__(self, content: Any) -> None:
        super().__init__()
        self.content = content


def make_reference_cycle(content: Any) -> list[Any]:
    cycle: list[Any] = [{}]
    cycle[0]["back"] = cycle
    return [cycle, content]


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda content: content,
    "closure": make_closure,
    "default": lambda content: lambda images, attribute=content: images,
    "decorated": lambda content: decorate(make_closure(content)),
    "cached": lambda content: functools.lru_cache(make_closure(content)),
    "partial": lambda content: functools.partial(max, content),
    "partial's keyword": lambda content: functools.partial(max, key=content),
    "method": lambda content: Holder(content).method,
    "object": Holder,
    "slots": Slotted,
    "named": lambda content: SimpleNamespace(attribute=content),
    "list": lambda content: [0, [content]],
    "dict": lambda content: {"net": {"module": content}},
    "module's list": lambda content: torch.nn.Sequential(Module([content])),
    "reference_cycle": make_reference_cycle,
    "all": lambda content: Holder({"net": [functools.partial(make_closure(content))]}).method,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_has_state_finds_modules_with_state_in_any_holder(holder):
    make_holder = HOLDERS[holder]
    for content in (NET, torch.nn.BatchNorm2d(3, affine=False), torch.ones(1, requires_grad=True)):
        assert has_state(make_holder(content)), content


@pytest.mark.parametrize("holder", HOLDERS)
def test_has_state_ignores_objects_that_training_does_not_change(holder):
    make_holder = HOLDERS[holder]
    for content in (STATELESS, torch.ones(3), np.ones(3), NUMBERS, "text", torch.nn.Conv2d, torch, LOG, len, None):
        assert not has_state(make_holder(content)), content


def test_has_state_follows_the_globals_of_functions():
    functions = reads_a_global, reads_a_global_in_an_inner_function, calls_a_function_that_reads_a_global, Called()
    for function in functions:
        assert has_state(function), function
    for function in (reads_stateless_globals, torch.nn.functional.interpolate, torch.ones(3).mul):
        assert not has_state(function), function
    assert has_state(torch.ones(3, requires_grad=True).mul)


def test_has_state_is_true_for_more_objects_than_it_searches():
    objects = [[number] for number in range(MAX_OBJECTS)]
    assert has_state(make_closure(objects))
    assert not has_state(make_closure(objects[: MAX_OBJECTS // 2]))


@dataclass(frozen=True)
class CustomTransform(T.Custom):
    content: Any = field(default=None, compare=False)
    class_attribute = None

    def apply(self, images: Any, params: Any) -> Any:
        return images


class HasClassAttribute(CustomTransform):
    class_attribute = NET  # pyright: ignore[reportAssignmentType]


class CallsAMethod(CustomTransform):
    def helper(self, images: Any) -> Any:
        return NET(images)


def make_custom(content: Any) -> CustomTransform:
    class Inner(CustomTransform):
        def apply(self, images: Any, params: Any) -> Any:
            return content(images)

    return Inner()


def test_chain_holds_state_of_custom_transforms_and_functions():
    functions = T.Lambda(make_closure(NET)), T.Lambda(reads_a_global), T.Lambda(Holder(NET).method, per="image")
    for transform in (
        CustomTransform(NET),
        CustomTransform([NET]),
        HasClassAttribute(),
        CallsAMethod(),
        make_custom(NET),
        T.RandomApply([CustomTransform(NET)]),
        *functions,
    ):
        assert Chain([transform, T.RandomHorizontalFlip()]).holds_state, transform
    for transform in (
        CustomTransform(),
        CustomTransform(STATELESS),
        CustomTransform(torch.ones(3)),
        make_custom(STATELESS),
        T.Lambda(make_closure(3)),
        T.Lambda(abs),
    ):
        assert not Chain([transform, T.RandomHorizontalFlip()]).holds_state, transform


def test_chain_ends_in_state_of_modules_at_its_end():
    for module, expected in ((NET, True), (Module([NET]), True), (STATELESS, False), (Module([STATELESS]), False)):
        assert Chain([module]).ends_in_state == expected, module
    assert Chain([NET, STATELESS]).ends_in_state
    assert Chain([STATELESS, NET, STATELESS]).ends_in_state
    assert not Chain([NET, STATELESS]).holds_state  # only the modules at the end wait, not the entire batch
    assert not Chain([STATELESS, STATELESS]).ends_in_state
