"""The groups of options of a Loader, which validate themselves, and arguments that other libraries' loaders have."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers import lacking
from helpers.peers import timm
from torch.utils.data import DataLoader

import gpuload as gl
from gpuload import transforms as T
from gpuload.batches.collate import BatchOptions
from gpuload.loader.options import ARGUMENTS, Options, WorkerOptions
from gpuload.order.options import OrderOptions
from gpuload.stage.plan import StageOptions
from gpuload.transforms import names as transform_names

DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(gl.Loader).parameters.items()}
# Fields that groups take from each other; they are not arguments of a Loader.
DERIVED = {"combining_transform", "group_size", "sized_argument", "chain", "single", "planned"}


def make_options(**changes) -> Options:
    return Options.of({**DEFAULTS, "dataset": list(range(100)), **changes})


def set_cpus(monkeypatch: pytest.MonkeyPatch, cpus: int, ranks: int = 1) -> None:
    monkeypatch.setattr("gpuload.loader.options.usable_cpus", lambda: cpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))


def test_loader_arguments_each_belong_to_one_group_of_options():
    groups = (OrderOptions, StageOptions, BatchOptions, WorkerOptions)
    names = Counter(field.name for group in groups for field in dataclasses.fields(group) if field.init)
    names.subtract(["seed", "repeats"])  # the groups of batches and of order both have these
    names["workers"] = names.pop("ray_workers")
    counts = {name: count for name, count in names.items() if name not in DERIVED}
    assert counts == dict.fromkeys(DEFAULTS, 1), "edit the groups of options, or DERIVED above for a derived field"


def test_option_groups_are_frozen():
    options = make_options(num_workers=0)
    for group in (options, options.order, options.stage, options.batches, options.workers):
        name = dataclasses.fields(group)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(group, name, None)


def test_generator_that_is_not_torchs_or_comes_with_a_seed_raises():
    with pytest.raises(TypeError, match=r"generator must be a torch.Generator or None, got int"):
        make_options(generator=5)
    with pytest.raises(ValueError, match="seed=3 and generator are both given"):
        make_options(generator=torch.Generator(), seed=3)


@pytest.mark.parametrize(("group", "changes", "text"), [
    ("order", {"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ("stage", {"device": "tpu"}, "device must be 'cpu', 'cuda'"),
    ("batches", {"ragged": "yes"}, "ragged must be one of 'error', 'list', 'pad', got 'yes'"),
    ("batches", {"pad_to": 32}, "pad_to=32 requires ragged='pad'"),
    ("workers", {"timeout": -1}, "timeout must be at least 0, got -1"),
])  # fmt: skip
def test_replaced_option_group_is_validated_again(group, changes, text):
    options = make_options(num_workers=0)
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(getattr(options, group), **changes)


@pytest.mark.parametrize(("changes", "chunk", "plain"), [
    ({"batch_size": 256, "num_workers": 4}, 32, 256),
    ({"batch_size": 256, "num_workers": 3}, 43, 256),
    ({"batch_size": 256, "num_workers": 2}, 64, 256),
    ({"batch_size": 1024, "num_workers": 2}, 64, 1024),
    ({"batch_size": 64, "num_workers": 4}, 16, 64),
    ({"batch_size": 4, "num_workers": 4}, 4, 4),
    ({"batch_size": 64, "num_workers": 4, "chunk_size": 100}, 64, 1),
    ({"batch_size": 64, "num_workers": 4, "chunk_size": 5}, 5, 1),
    ({"batch_size": 64, "num_workers": 4, "collate_fn": list}, 64, 64),
    ({"batch_size": 64, "num_workers": 4, "dataset": {1, 2, 3}}, 64, 64),
])  # fmt: skip
def test_chunk_size_is_a_workers_share_of_the_batch(changes, chunk, plain):
    options = make_options(**changes)
    assert (options.chunk_size, options.plain_chunk_size) == (chunk, plain)


@pytest.mark.parametrize(("cpus", "max_workers"), [(1, 8), (2, 8), (16, 16)])
def test_loader_with_more_workers_than_the_cpus_can_run_warns(cpus, max_workers, monkeypatch):
    set_cpus(monkeypatch, cpus)
    gl.Loader([1, 2], num_workers=max_workers)  # a warning would be an error
    suggested = max(1, cpus - 1)
    text = rf"num_workers={max_workers + 1}, but this process may use only {cpus} CPUs?: .* The default is {suggested};"
    with pytest.warns(RuntimeWarning, match=text):
        gl.Loader([1, 2], num_workers=max_workers + 1)


def test_warning_about_too_many_workers_states_their_cost_and_points_to_the_call(monkeypatch):
    set_cpus(monkeypatch, 2)
    with pytest.warns(RuntimeWarning) as warnings:
        gl.Loader([1, 2], num_workers=40)
    assert [warning.filename for warning in warnings] == [__file__]
    assert str(warnings[0].message) == (
        "num_workers=40, but this process may use only 2 CPUs: starting the workers will occupy all CPUs for about 6 s "
        "before the first batch (many times longer if the dataset imports torch: 40 workers on two CPUs took 23 s), "
        "and then they use about 1.8 GB of memory. The default is 1; more workers than CPUs help only if reading is "
        "slow; num_workers='auto' finds the best number"
    )


@pytest.mark.parametrize(("cpus", "ranks", "count", "max_workers", "chunk"), [
    (1, 1, 1, 16, 16),
    (2, 1, 1, 32, 16),
    (8, 1, 7, 64, 8),
    (64, 1, 8, 64, 8),
    (128, 1, 8, 128, 8),
    (8, 4, 1, 32, 16),
])  # fmt: skip
def test_num_workers_auto_starts_with_few_workers_and_allows_more(cpus, ranks, count, max_workers, chunk, monkeypatch):
    set_cpus(monkeypatch, cpus, ranks)
    options = make_options(batch_size=64, num_workers="auto")
    assert (options.workers.count, options.workers.max_workers, options.chunk_size) == (count, max_workers, chunk)


def test_batches_ahead_with_auto_is_three_chunks_per_worker_and_at_least_prefetch_factor(monkeypatch):
    set_cpus(monkeypatch, 2)
    options = make_options(batch_size=64, num_workers="auto", prefetch_factor=3)
    ahead = [options.batches_ahead(count, 3) for count in (1, 2, 4, 8, 32)]
    assert ahead == [(3, 3), (3, 3), (3, 3), (3, 6), (3, 24)]  # chunks of 16


@pytest.mark.parametrize(
    ("workers", "batch_size", "ahead"),
    [(2, 256, 2), (15, 256, 3), (15, 64, 6), (15, 32, 12), (63, 32, 48), (4, 32, 3), (1, 32, 2), (8, 8, 2)],
)
def test_batches_ahead_by_default_is_three_chunks_per_worker(workers, batch_size, ahead):
    arguments = {"batch_size": batch_size, "num_workers": workers}
    options = make_options(**arguments)
    assert options.batches_ahead(workers, 2) == (2, ahead)
    assert options.prefetch_factor(workers, 2) == ahead
    assert make_options(**arguments, prefetch_factor=2).batches_ahead(workers, 2) == (2, 2)


@pytest.mark.parametrize(("changes", "text"), [
    ({"num_workers": "auto", "dataset": {1, 2}},
     "num_workers='auto' needs a map-style dataset: each worker reads its own share of an iterable dataset, "
     "so changing the number of workers would change the data; give a number"),
    ({"prefetch_factor": "auto", "workers": gl.RayWorkers(count=2)},
     "prefetch_factor='auto' needs workers on this machine"),
    ({"num_workers": "auto", "workers": gl.RayWorkers(count=2)},
     "num_workers='auto' and workers=.* cannot be combined"),
])  # fmt: skip
def test_auto_where_it_does_not_apply_raises(changes, text):
    with pytest.raises(ValueError, match=text):
        make_options(**changes)


def test_num_workers_auto_on_windows_is_zero(monkeypatch):
    monkeypatch.setattr("sys.platform", "win32")
    assert make_options(num_workers="auto").workers.count == 0


@pytest.mark.parametrize(("shape", "batch_size", "workers", "chunk"), [
    ((256, 256, 3), 256, 2, 64),
    ((256, 256, 3), 256, 15, 64),
    ((256, 256, 3), 256, "auto", 64),
    ((256, 256, 3), 1024, 2, 64),
    ((256, 256, 3), 64, 8, 16),
    ((256, 256, 3), 4, 2, 4),
    ((1024, 1024, 3), 256, 15, 18),  # 3 MB each
    ((4, 256, 256, 3), 256, 15, 18),  # clips
])  # fmt: skip
def test_chunk_size_of_an_array_file_is_64_small_images_or_a_share(tmp_path, shape, batch_size, workers, chunk):
    path = tmp_path / "images.bin"
    path.touch()
    os.truncate(path, 300 * math.prod(shape))  # sparse
    dataset = gl.ArrayFile(path, dtype="uint8", shape=(300, *shape))
    assert make_options(dataset=dataset, batch_size=batch_size, num_workers=workers).chunk_size == chunk
    usual = make_options(dataset=range(300), batch_size=batch_size, num_workers=4).chunk_size
    assert usual == min(max(batch_size // 4, 8), 64 if batch_size == 1024 else 32, batch_size)


PAGE = Path(__file__).parents[2] / "docs" / "howto" / "moving.md"


def error_of_arguments(**arguments) -> str:
    with pytest.raises(TypeError) as caught:
        gl.Loader([1, 2], num_workers=0, **arguments)
    return str(caught.value)


@pytest.mark.parametrize(("name", "text"), [
    ("transform", "write transforms=[…], a list from gpuload.transforms"),
    ("num_threads", "write num_workers=…"),
    ("device_id", "write device=…, such as 0 or 'cuda:0'"),
    ("order", "write shuffle=True for OrderOption.RANDOM, shuffle='block' for QUASI_RANDOM, nothing for SEQUENTIAL"),
    ("pipelines", "write transforms=[…], a list from gpuload.transforms; images are decoded and labels collated "
     "automatically"),
    ("batch", "write batch_size=…"),
    ("prefetch_queue_depth", "write prefetch_factor=…, the number of batches prepared ahead of the one in use"),
    ("pin_memory_device", "leave it out: device=… says where batches go"),
    ("pad_size_divisor", "write ragged='pad' and pad_to=…, such as 32"),
    ("hflip", "write transforms=T.from_timm(config, hflip=…)"),
    ("shufle", "did you mean shuffle?"),
    ("batchsize", "did you mean batch_size?"),
    ("nothing", f"its arguments: {', '.join(DEFAULTS)}"),
])  # fmt: skip
def test_unknown_argument_raises_and_names_what_to_write(name, text):
    assert error_of_arguments(**{name: 1}) == f"Loader has no argument {name!r}; {text}"


def test_unknown_argument_in_a_subclass_names_the_loader():
    class Subclass(gl.Loader):
        def __init__(self, dataset, extra):
            super().__init__(dataset, transform=extra)

    with pytest.raises(TypeError, match=r"^Loader has no argument 'transform'; write transforms="):
        Subclass([1], 2)


def unanswered_arguments(parameters: set[str]) -> list[str]:
    return sorted(name for name in parameters - DEFAULTS.keys() if "; its arguments" in error_of_arguments(**{name: 1}))


def test_arguments_of_dataloader_all_have_an_answer():
    parameters = set(inspect.signature(DataLoader.__init__).parameters) - {"self"}
    assert unanswered_arguments(parameters) == [], "add them to ARGUMENTS in gpuload/loader/options.py"
    assert parameters > {"pin_memory_device"}


def test_arguments_of_timms_create_loader_all_have_an_answer():
    timm()
    from timm.data.loader import create_loader

    parameters = set(inspect.signature(create_loader).parameters)
    assert len(parameters) > 40
    assert [name for name in unanswered_arguments(parameters) if not name.startswith("batch_")] == ["re_split"]


@lacking.needs("nvidia.dali")
def test_arguments_of_dalis_iterator_all_have_an_answer():
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    assert unanswered_arguments(set(inspect.signature(DALIGenericIterator.__init__).parameters) - {"self"}) == []


def test_table_of_other_libraries_arguments_has_no_argument_of_loader():
    assert not set(ARGUMENTS) & DEFAULTS.keys(), "remove them from ARGUMENTS in gpuload/loader/options.py"


def test_moving_page_has_the_answers_of_both_tables():
    rows = [row.split(" | ") for row in PAGE.read_text().split("## Names of other libraries")[1].splitlines()]
    answers = {}
    for cells in rows:
        if len(cells) == 2 and (names := re.findall(r"`(\w+)`", cells[0])):
            answers |= dict.fromkeys(names, cells[1].removesuffix(" |").replace("`", ""))
    expected = {**ARGUMENTS, **transform_names.TRANSFORMS, **transform_names.ARGUMENTS}
    assert answers == expected, f"edit the tables of {PAGE}"


@pytest.mark.parametrize("text", sorted({*transform_names.TRANSFORMS.values(), *ARGUMENTS.values()}))
def test_answers_name_only_existing_functions_and_transforms(text):
    called = re.findall(r"\b(?:T\.)?([A-Z]\w+)\(", text)
    assert [name for name in called if name not in {*T.__all__, *gl.__all__, "Subset"}] == []
    for name in re.findall(r"gpuload\.(\w+)", text):
        assert name in gl.__all__
