"""An argument of another library's loader: the error says what to write for a `Loader`."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import lacking
import pytest
from originals import timm
from torch.utils.data import DataLoader

import gpuload as gl
from gpuload import transforms as T
from gpuload.loader.names import ARGUMENTS
from gpuload.transforms import names as of_transforms

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "moving.md"
OWN = set(inspect.signature(gl.Loader).parameters)


def refusal(**arguments) -> str:
    with pytest.raises(TypeError) as caught:
        gl.Loader([1, 2], num_workers=0, **arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("transform", "write transforms=[…], a list from gpuload.transforms"),
        ("num_threads", "write num_workers=…"),
        ("device_id", "write device=…, such as 0 or 'cuda:0'"),
        (
            "order",
            "write shuffle=True for OrderOption.RANDOM, shuffle='block' for QUASI_RANDOM, nothing for SEQUENTIAL",
        ),
        (
            "pipelines",
            "write transforms=[…], a list from gpuload.transforms; images are decoded, and labels put together, "
            "without being declared",
        ),
        ("batch", "write batch_size=…"),
        ("prefetch_queue_depth", "write prefetch_factor=…, the number of batches in work besides the one in use"),
        ("pin_memory_device", "leave it out: device=… says where batches go"),
        ("hflip", "write transforms=T.from_timm(config, hflip=…)"),
        ("shufle", "did you mean shuffle?"),
        ("batchsize", "did you mean batch_size?"),
        ("nothing", f"its arguments: {', '.join(inspect.signature(gl.Loader).parameters)}"),
    ],
)
def test_it_is_told_what_to_write(name, text):
    assert refusal(**{name: 1}) == f"Loader has no argument {name!r}; {text}"


def test_in_a_subclass_the_loader_is_named():
    class Own(gl.Loader):
        def __init__(self, dataset, extra):
            super().__init__(dataset, transform=extra)

    with pytest.raises(TypeError, match=r"^Loader has no argument 'transform'; write transforms="):
        Own([1], 2)


def silent(parameters: set[str]) -> list[str]:
    return sorted(name for name in parameters - OWN if "; its arguments" in refusal(**{name: 1}))


def test_all_arguments_of_dataloader_have_an_answer():
    parameters = set(inspect.signature(DataLoader.__init__).parameters) - {"self"}
    assert silent(parameters) == []
    assert parameters > {"pin_memory_device"}


def test_all_arguments_of_timms_create_loader_have_an_answer():
    timm()
    from timm.data.loader import create_loader

    parameters = set(inspect.signature(create_loader).parameters)
    assert len(parameters) > 40
    assert [name for name in silent(parameters) if not name.startswith("batch_")] == ["re_split"]


def test_all_arguments_of_dalis_iterator_have_an_answer():
    lacking.require("nvidia.dali")
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    assert silent(set(inspect.signature(DALIGenericIterator.__init__).parameters) - {"self"}) == []


def test_no_argument_of_a_loader_is_in_the_table():
    assert set(ARGUMENTS) & OWN == set()


def test_a_warning_names_the_line_that_makes_the_loader(monkeypatch):
    monkeypatch.setattr("gpuload.loader.options.usable_cpus", lambda: 1)
    with pytest.warns(RuntimeWarning, match="num_workers=9") as warned:
        gl.Loader([1, 2], num_workers=9)
    assert [warning.filename for warning in warned] == [__file__]


def test_the_page_has_the_tables():
    rows = [row.split(" | ") for row in PAGE.read_text().split("## Names of other libraries")[1].splitlines()]
    answers = {}
    for cells in rows:
        if len(cells) == 2 and (names := re.findall(r"`(\w+)`", cells[0])):
            answers |= dict.fromkeys(names, cells[1].removesuffix(" |").replace("`", ""))
    assert answers == {**ARGUMENTS, **of_transforms.TRANSFORMS, **of_transforms.ARGUMENTS}


@pytest.mark.parametrize("text", sorted({*of_transforms.TRANSFORMS.values(), *ARGUMENTS.values()}))
def test_what_an_answer_names_is_there(text):
    called = re.findall(r"\b(?:T\.)?([A-Z]\w+)\(", text)
    assert [name for name in called if name not in {*T.__all__, *gl.__all__, "Subset"}] == []
    for name in re.findall(r"gpuload\.(\w+)", text):
        assert name in gl.__all__
