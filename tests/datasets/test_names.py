"""Arguments of other libraries' datasets: errors that name gpuload's arguments for the same purpose."""

from __future__ import annotations

import inspect

import pytest

import gpuload as gl
from gpuload.datasets.names import REPLACEMENTS

DATASETS = (
    gl.ArrayFile, gl.Cached, gl.Coco, gl.FileList, gl.HDF5, gl.ImageFiles, gl.ImageFolder, gl.LMDB, gl.Parquet,
    gl.TarShards,
)  # fmt: skip


@pytest.mark.parametrize("kind", DATASETS)
def test_datasets_refuse_transform_and_name_the_loader(kind):
    text = rf"^{kind.__name__} has no argument 'transform'; images are transformed in batches, by gpuload.Loader\("
    with pytest.raises(TypeError, match=text):
        kind("x", transform=None)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: gl.Coco("images", annFile="a.json"), "Coco has no argument 'annFile'; write annotations=…"),
        (lambda: gl.TarShards(urls="a.tar"), "TarShards has no argument 'urls'; write shards=…"),
        (lambda: gl.TarShards("a.tar", field="jpg"), "TarShards has no argument 'field'; did you mean fields?"),
        (
            lambda: gl.ImageFiles("a", classes=["ant"]),
            "ImageFiles has no argument 'classes'; its images have no labels",
        ),
        (lambda: gl.Cached([1], limit=3), "Cached has no argument 'limit'; did you mean bytes_limit?"),
    ],
)
def test_datasets_refuse_arguments_of_other_libraries_with_their_replacement(make, text):
    with pytest.raises(TypeError) as caught:
        make()
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("kind", DATASETS)
def test_dataset_signatures_name_each_argument(kind):
    parameters = inspect.signature(kind).parameters
    variable = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    assert not {parameter.kind for parameter in parameters.values()} & variable
    assert set(REPLACEMENTS) & set(parameters) <= {"classes"}, "remove from REPLACEMENTS in gpuload/datasets/names.py"
