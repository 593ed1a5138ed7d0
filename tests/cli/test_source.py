"""``--recipe FILE.py:name``: accepted values and errors. `test_pack` tests the sources of data."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from gpuload import transforms as T
from gpuload.cli.source import default_recipe, load_recipe

RECIPE_FILE = """
import torch
from gpuload import transforms as T
from its_neighbour import SIZE

crop = T.RandomResizedCrop(SIZE)
train = [crop, T.Normalize([0.5] * 3, [0.5] * 3)]
chain = T.Chain([*train, torch.nn.Identity()])
ours = T.Compose(train)
number = 3
wrong = [crop, "flip"]

class Compose: ...
Compose.__module__ = "torchvision.transforms.v2"
composed = Compose()
"""


@pytest.fixture
def recipe_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "its_neighbour.py").write_text("SIZE = 32\n")
    (tmp_path / "random.py").write_text("raise RuntimeError('this is not the standard library')\n")
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE_FILE)
    return path


def test_load_recipe_accepts_a_list_a_compose_and_a_chain(recipe_file: Path) -> None:
    train = load_recipe(f"{recipe_file}:train")
    assert [type(step) for step in train] == [T.RandomResizedCrop, T.Normalize]
    assert train[0].size == (32, 32)
    assert load_recipe(f"{recipe_file}:ours") == train
    chain = load_recipe(f"{recipe_file}:chain")
    assert [type(step) for step in chain] == [T.RandomResizedCrop, T.Normalize, torch.nn.Identity]
    assert [type(step) for step in default_recipe()] == [T.RandomResizedCrop, T.RandomHorizontalFlip, T.Normalize]


def test_load_recipe_keeps_lambdas(recipe_file: Path) -> None:
    recipe_file.write_text(RECIPE_FILE + "double = [*train, T.Lambda(lambda images: images * 2)]\n")
    recipe = load_recipe(f"{recipe_file}:double")
    assert [type(step) for step in recipe] == [T.RandomResizedCrop, T.Normalize, T.Lambda]
    assert T.Chain(recipe).modules == (recipe[2].fn,)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "recipe.py",
            "--recipe expects FILE.py:name, where `name` is a list of transforms in that file, got 'recipe.py'",
        ),
        ("recipe.py:2x", "--recipe expects FILE.py:name"),
        ("none.py:train", "--recipe none.py:train: the file 'none.py' does not exist"),
        ("{file}:val", "{file} has no 'val'; it has train, chain, wrong"),
        ("{file}:number", "number must be a list of gpuload's transforms or a Chain, got type int"),
        (
            "{file}:crop",
            "crop must be a list of gpuload's transforms or a Chain, got type RandomResizedCrop from gpuload",
        ),
        ("{file}:composed", "got type Compose from torchvision; convert it with gpuload.transforms.from_torchvision"),
        ("{file}:wrong", "--recipe {file}:wrong: "),
    ],
)
def test_load_recipe_of_a_wrong_spec_raises_value_error(recipe_file: Path, spec: str, message: str) -> None:
    with pytest.raises(ValueError, match="--recipe") as raised:
        load_recipe(spec.format(file=recipe_file))
    assert message.format(file=recipe_file) in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nx / 0", "the file cannot be run: ZeroDivisionError in line 2: division by zero"),
        ("x = (", "the file cannot be run: SyntaxError in line 1: '(' was never closed"),
        ("import no_such_module", "ModuleNotFoundError in line 1: No module named 'no_such_module'"),
        ("raise SystemExit('done')", "the file cannot be run: SystemExit in line 1: done"),
        ("x = 1", "has no 'train'; it has no list or Chain"),
    ],
)
def test_load_recipe_of_a_file_that_fails_raises_value_error(recipe_file: Path, text: str, message: str) -> None:
    recipe_file.write_text(text)
    with pytest.raises(ValueError, match=r"recipe\.py") as raised:
        load_recipe(f"{recipe_file}:train")
    assert message in str(raised.value)
