"""Samples that fail: raised, skipped or replaced, counted, and listed in `Loader.errors`."""

from __future__ import annotations

import csv
import re
import warnings

import numpy as np
import pytest
import torch

import gpuload as gl
from gpuload import transforms as T

SIDE = 16
SKIP_ALL = gl.Faults(on_error="skip", max_error_rate=1.0)


class Numbered:
    """Images of level i % 251, each with its number i. The samples in `bad` raise an error."""

    def __init__(self, samples: int, bad=()) -> None:
        self.samples = samples
        self.bad = frozenset(bad)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError(5, "Input/output error", f"/data/{index}.jpg")
        return np.full((SIDE, SIDE, 3), index % 251, np.uint8), index


def make_loader(dataset, batch_size=8, **options):
    return gl.Loader(dataset, batch_size, **{"num_workers": 0, "device": "cpu", "info": True, **options})


def load_epoch(loader):
    """Return (images, numbers, info) of each batch."""
    return [(images, numbers.tolist(), info) for (images, numbers), info in loader]


def loaded_numbers(batches):
    return [number for _, numbers, _ in batches for number in numbers]


pytestmark = pytest.mark.filterwarnings("ignore:sample .* Further failures are only recorded:RuntimeWarning")


@pytest.mark.parametrize("workers", [0, 2])
def test_on_error_raise_names_the_sample_and_continues_with_the_next_batch(workers):
    with make_loader(Numbered(24, bad=[9]), num_workers=workers) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(
            gl.SampleError, match=r"sample 9 \(/data/9.jpg\), at position 9 .* could not be loaded: OSError"
        ):
            next(batches)
        (_, numbers), _ = next(batches)
        assert numbers.tolist() == list(range(16, 24))
        assert [(entry.index, entry.replaced_by) for entry in loader.errors] == [(9, None)]


@pytest.mark.parametrize("workers", [0, 2])
def test_on_error_skip_drops_the_sample_and_lists_it(workers):
    loader = make_loader(Numbered(24, bad=[0, 9, 10]), num_workers=workers, on_error="skip", chunk_size=3)
    with (
        loader,
        pytest.warns(RuntimeWarning, match=r"sample 0 \(/data/0.jpg\), at position 0 of epoch 0: .*it was skipped"),
    ):
        batches = load_epoch(loader)
    assert [numbers for _, numbers, _ in batches] == [
        [1, 2, 3, 4, 5, 6, 7],
        [8, 11, 12, 13, 14, 15],
        list(range(16, 24)),
    ]
    for images, numbers, info in batches:
        assert info.positions.tolist() == info.indices.tolist() == numbers
        assert info.valid.tolist() == [True] * len(numbers)
        assert images[:, 0, 0, 0].tolist() == numbers
    [first, second, third] = loader.errors
    assert (first.index, first.position, first.epoch, first.source, first.replaced_by) == (0, 0, 0, "/data/0.jpg", None)
    assert first.cause == "OSError: [Errno 5] Input/output error: '/data/0.jpg'"
    assert "in __getitem__" in first.traceback
    assert (second.index, third.index) == (9, 10)


@pytest.mark.parametrize("workers", [0, 2])
def test_on_error_replace_returns_substitutes_for_failed_samples(workers):
    bad = {0, 9, 10, 11}
    with make_loader(Numbered(64, bad=bad), num_workers=workers, on_error="replace", chunk_size=3) as loader:
        batches = load_epoch(loader)
    assert len(batches) == 8
    replaced = {entry.position: entry.replaced_by for entry in loader.errors}
    assert set(replaced) == bad
    for step, (images, numbers, info) in enumerate(batches):
        assert info.positions.tolist() == list(range(8 * step, 8 * step + 8))
        for position, number in zip(info.positions.tolist(), numbers, strict=True):
            assert number == replaced.get(position, position)
            assert number not in bad
        assert info.indices.tolist() == images[:, 0, 0, 0].tolist() == numbers


def test_replacements_are_the_same_for_any_workers_chunks_and_batches():
    dataset = Numbered(60, bad=range(0, 60, 5))
    chain = [T.RandomCrop(8), T.ColorJitter(0.4, 0.4, 0.4)]

    def run(batch_size, **options):
        faults = gl.Faults(on_error="replace", max_error_rate=1.0)
        with make_loader(
            dataset, batch_size, shuffle=True, seed=5, faults=faults, transforms=chain, **options
        ) as loader:
            batches = load_epoch(loader)
        errors = sorted((entry.position, entry.index, entry.replaced_by) for entry in loader.errors)
        return torch.cat([images for images, _, _ in batches]), loaded_numbers(batches), errors

    expected = run(10, num_workers=0)
    for batch_size, options in ((10, {"num_workers": 1, "chunk_size": 1}), (6, {"num_workers": 2, "chunk_size": 4})):
        result = run(batch_size, **options)
        assert torch.equal(result[0], expected[0])
        assert result[1:] == expected[1:]


@pytest.mark.parametrize("workers", [0, 2])
def test_on_error_skip_fills_a_batch_that_would_be_empty(workers):
    with make_loader(Numbered(64, bad=range(8, 16)), num_workers=workers, on_error="skip") as loader:
        batches = load_epoch(loader)
    assert [len(numbers) for _, numbers, _ in batches] == [8] * 8
    _, numbers, info = batches[1]
    assert info.positions.tolist() == list(range(8, 16))
    assert not set(numbers) & set(range(8, 16))
    assert {entry.position: entry.replaced_by for entry in loader.errors} == dict(
        zip(range(8, 16), numbers, strict=True)
    )


def test_failed_samples_do_not_change_the_number_of_batches():
    for on_error in ("skip", "replace"):
        faults = gl.Faults(on_error=on_error, max_error_rate=1.0)
        with make_loader(Numbered(40, bad=range(3, 37)), batch_size=4, faults=faults) as loader:
            assert len(load_epoch(loader)) == len(loader) == 10


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_more_errors_than_max_error_rate_allows_end_the_epoch(on_error):
    with make_loader(Numbered(400, bad=range(100, 400)), on_error=on_error, num_workers=2) as loader:
        seen = []

        def consume():
            for (_, numbers), _ in loader:
                seen.extend(numbers.tolist())

        with pytest.raises(gl.TooManyErrors, match=r"samples of this epoch .*max_error_rate=0.01 of 1,000") as caught:
            consume()
        assert len(seen) <= 120  # 100 good samples, and the batches in flight when there were too many errors
        assert "/data/" in str(caught.value)
        assert len(loader.errors) > 10  # the limit: 1% of 1,000
        assert {entry.index for entry in loader.errors} <= set(range(100, 400))


def test_ten_errors_in_a_small_dataset_do_not_exceed_max_error_rate():
    with make_loader(Numbered(16, bad=range(1, 11)), batch_size=16, on_error="skip") as loader:
        [(_, numbers, _)] = load_epoch(loader)
    assert numbers == [0, *range(11, 16)]


def test_the_error_count_restarts_with_each_epoch():
    with make_loader(Numbered(16, bad=range(1, 8)), batch_size=16, on_error="skip") as loader:
        for _ in range(3):
            load_epoch(loader)
    assert loader.errors.total == 3 * 7
    assert [entry.epoch for entry in loader.errors[::7]] == [0, 1, 2]


def test_a_dataset_of_one_bad_sample_raises_too_many_errors_that_names_it():
    with make_loader(Numbered(1, bad=[0]), on_error="replace") as loader:
        with pytest.raises(
            gl.TooManyErrors, match=r"the sample at position 0 .* could not be replaced.*sample 0 \(/data/0.jpg\)"
        ):
            load_epoch(loader)
        assert [entry.index for entry in loader.errors] == [0]


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_an_image_that_fails_in_a_late_transform_is_one_bad_sample(on_error):
    class Sizes(Numbered):
        def __getitem__(self, index):
            side = 8 if index in self.bad else SIDE
            return np.full((side, side, 3), index, np.uint8), index

    # Contrast needs the entire image, so workers do not know of the crop after it.
    chain = [T.ColorJitter(contrast=0.5), T.RandomCrop(12)]
    with make_loader(Sizes(16, bad=[3]), on_error=on_error, transforms=chain, num_workers=1) as loader:
        numbers = loaded_numbers(load_epoch(loader))
    assert 3 not in numbers
    assert len(numbers) == (15 if on_error == "skip" else 16)
    [entry] = loader.errors
    assert entry.index == 3
    assert "the image of 8×8 (height × width) is smaller than the crop" in entry.cause


@pytest.mark.parametrize(("options", "text"), [
    ({"on_error": ""}, "got ''"),
    ({"on_error": "skip", "faults": SKIP_ALL}, "combined; write faults=Faults(on_error='skip', …)"),
])  # fmt: skip
def test_invalid_on_error_and_conflicting_faults_are_refused(options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        make_loader(Numbered(4), **options)


@pytest.fixture(scope="module")
def odd_files(corpus):
    with (corpus / "SOURCES.tsv").open() as table:
        names = [name for name, *_ in csv.reader(table, delimiter="\t")]
    paths = [corpus / name for name in names if (corpus / name).is_file()]
    assert len(paths) > 50, "files of the corpus are missing"
    return paths


class Paths:
    def __init__(self, paths) -> None:
        self.paths = [str(path) for path in paths]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index):
        return gl.read(self.paths[index]), index


@pytest.mark.parametrize("on_error", ["raise", "skip", "replace"])
def test_each_odd_file_is_loaded_or_is_one_bad_sample(odd_files, jpeg_folder, on_error):
    good = next(jpeg_folder.rglob("*.jpg"))
    chain = [T.Resize((32, 32))]
    failed_count = 0
    for path in odd_files:
        with make_loader(Paths([path, good]), batch_size=1, on_error=on_error, transforms=chain) as loader:
            seen, raised = [], []
            batches = iter(loader)
            while True:
                try:
                    (images, numbers), _ = next(batches)
                except StopIteration:
                    break
                except gl.SampleError as error:
                    raised.append((error.index, error.source))
                else:
                    assert images.shape == (1, 3, 32, 32)
                    seen += numbers.tolist()
            entries = list(loader.errors)
            failed_count += bool(entries)
            if not entries:
                assert seen == [0, 1], path
            else:
                assert seen == ([1] if on_error == "raise" else [1, 1]), path
                assert [(entry.index, entry.source) for entry in entries] == [(0, str(path))], path
                assert entries[0].replaced_by == (None if on_error == "raise" else 1)
            assert raised == ([(0, str(path))] if entries and on_error == "raise" else []), path
    assert failed_count > 10  # the corpus holds damaged files
    assert failed_count < len(odd_files)


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_odd_files_together_are_loaded_or_listed_and_kill_no_worker(odd_files, jpeg_folder, on_error):
    good = [next(jpeg_folder.rglob("*.jpg"))] * 40
    faults = gl.Faults(on_error=on_error, max_error_rate=1.0)
    chain = [T.Resize((32, 32))]
    with make_loader(
        Paths([*odd_files, *good]), faults=faults, transforms=chain, num_workers=2, shuffle=True
    ) as loader:
        batches = load_epoch(loader)
        assert not loader._session.engine.deaths.causes  # pyright: ignore[reportAttributeAccessIssue]
    seen = loaded_numbers(batches)
    bad = {entry.index for entry in loader.errors}
    assert not bad & set(seen)
    assert bad | set(seen) >= set(range(len(odd_files)))


def test_max_error_rate_holds_for_batches_that_are_issued_ahead(monkeypatch):
    from gpuload.stage.transfer import CpuTransfer
    from gpuload.workers.feed import Feed

    def pop_complete_batch(feed):  # the workers are always ahead of the consumer
        while feed._batches and feed._batches[0].open_part_count:
            feed.pump(1.0)
        return pop_ready_batch(feed)

    pop_ready_batch = Feed.pop_ready_batch
    monkeypatch.setattr(CpuTransfer, "is_asynchronous", True)  # as on CUDA
    monkeypatch.setattr(Feed, "pop_ready_batch", pop_complete_batch)
    with make_loader(Numbered(800, bad=range(80, 800, 2)), on_error="skip", num_workers=1) as loader:
        batches, batch_count = iter(loader), 0

        def consume():
            nonlocal batch_count
            for _ in batches:
                batch_count += 1

        with pytest.raises(gl.TooManyErrors):
            consume()
        assert batch_count < 20  # of 100: ten good batches, and the batches that were issued ahead
        error_count = len(loader.errors)
        with pytest.raises(gl.TooManyErrors):
            next(batches)
        assert len(loader.errors) == error_count  # each failure is recorded once


def test_a_warning_that_is_raised_as_an_error_loses_no_batch():
    with make_loader(Numbered(16, bad=[1]), on_error="skip") as loader, warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = iter(loader)
        with pytest.raises(RuntimeWarning, match="sample 1"):
            next(batches)
        assert [numbers.tolist() for (_, numbers), _ in batches] == [[0, 2, 3, 4, 5, 6, 7], list(range(8, 16))]
        assert [entry.index for entry in loader.errors] == [1]


def test_an_exception_whose_str_raises_is_one_bad_sample():
    class UnprintableError(Exception):
        def __str__(self):
            raise KeyError("odd")

    class RaisesUnprintable(Numbered):
        def __getitem__(self, index):
            if index in self.bad:
                raise UnprintableError
            return super().__getitem__(index)

    with make_loader(RaisesUnprintable(16, bad=[3]), on_error="skip") as loader:
        assert 3 not in loaded_numbers(load_epoch(loader))
    assert [entry.cause for entry in loader.errors] == ["UnprintableError: (its text is not available: KeyError)"]


@pytest.mark.parametrize("batch_size", [1, 2])
def test_replaced_rows_of_a_padded_batch_keep_their_order(batch_size):
    def load_positions(bad, **options):
        shard = {"rank": 4, "world_size": 8, "uneven": "pad"}
        with make_loader(Numbered(9, bad), batch_size, **shard, **options) as loader:
            return [info.positions.tolist() for _, _, info in load_epoch(loader)]

    expected = load_positions([])
    if batch_size == 2:
        assert expected == [[8, 0]]  # rank 4 of 8 has the last of 9 samples, and position 0 as padding
    assert load_positions([8], on_error="replace") == expected
