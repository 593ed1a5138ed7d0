"""Substitutes of failed samples, the count of errors, and `Loader.errors`."""

from __future__ import annotations

import warnings

import pytest

from gpuload.errors import ErrorRecord, TooManyErrors
from gpuload.workers.faults import LOG_RECORDS, ErrorLog, Tally, substitutes


def make_record(number: int, **changes) -> ErrorRecord:
    defaults = {"epoch": 0, "position": number, "index": number + 100, "source": f"{number}.jpg"}
    return ErrorRecord(**{**defaults, "cause": "DecodeError: broken", "traceback": "", **changes})


def test_substitutes_depend_on_seed_epoch_and_position():
    arguments = {"seed": 3, "epoch": 1, "position": 17, "index": 4, "samples": 1000}
    indices = list(substitutes(**arguments))
    assert indices == list(substitutes(**arguments))
    assert len(set(indices)) == len(indices) >= 55  # of 64 draws, some of which repeat
    assert 0 <= min(indices) <= max(indices) < 1000
    for changes in ({"seed": 4}, {"epoch": 2}, {"position": 18}):
        assert list(substitutes(**{**arguments, **changes})) != indices


def test_substitutes_are_spread_over_the_dataset():
    counts = [0] * 4
    for position in range(2000):
        counts[next(substitutes(seed=0, epoch=0, position=position, index=-1, samples=4))] += 1
    assert 400 < min(counts) <= max(counts) < 600  # 500 expected, 6 standard deviations are 116


@pytest.mark.parametrize("samples", [1, 2, 5, 64])
def test_substitutes_of_a_small_dataset_are_its_remaining_samples_once_each(samples):
    for position in range(50):
        assert sorted([0, *substitutes(0, 0, position, 0, samples)]) == list(range(samples))


def test_tally_allows_ten_errors_and_then_max_error_rate():
    tally = Tally(0.01)
    tally.add(20, [make_record(number) for number in range(10)])
    tally.check()
    tally.add(10, [make_record(10)])
    with pytest.raises(TooManyErrors) as caught:
        tally.check()
    text = str(caught.value)
    assert text.startswith(
        "11 of 30 samples of this epoch could not be loaded, more than max_error_rate=0.01 of 1,000 allows; the last "
    )
    shown = "; ".join(
        f"sample {n + 100} ({n}.jpg), at position {n} of epoch 0: DecodeError: broken" for n in (8, 9, 10)
    )
    assert f"failures: {shown}. Check that the files can still be reached; loader.errors lists the failures" in text
    tally.add(1070, [])
    tally.check()  # 11 of 1,100


def test_tally_of_rate_zero_allows_no_error_and_of_rate_one_all_errors():
    strict, lenient = Tally(0), Tally(1)
    strict.check()
    strict.add(100_000, [make_record(0)])
    with pytest.raises(TooManyErrors):
        strict.check()
    lenient.add(5000, [make_record(number) for number in range(5000)])
    lenient.check()


def test_error_log_warns_of_the_first_error_and_records_all():
    log = ErrorLog()
    with pytest.warns(RuntimeWarning) as warned:
        log.extend([make_record(1), make_record(2)], warn=True)
    assert [str(warning.message) for warning in warned] == [
        "sample 101 (1.jpg), at position 1 of epoch 0: DecodeError: broken; it was skipped. Further failures are only "
        "recorded, in loader.errors"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.extend([make_record(3)], warn=True)
    assert [record.position for record in log] == [1, 2, 3]
    assert [record.position for record in log[1:]] == [2, 3]
    assert repr(log).splitlines()[:2] == [
        "<3 failed samples:",
        "  sample 101 (1.jpg), at position 1 of epoch 0: DecodeError: broken",
    ]


def test_error_log_names_the_substitute():
    with pytest.warns(RuntimeWarning, match="it was replaced by sample 7"):
        ErrorLog().extend([make_record(1, replaced_by=7)], warn=True)


def test_error_log_keeps_the_latest_records_and_counts_all():
    log = ErrorLog()
    log.extend([make_record(number) for number in range(LOG_RECORDS + 5)], warn=False)
    assert (len(log), log.total) == (LOG_RECORDS, LOG_RECORDS + 5)
    assert (log[0].position, log[-1].position) == (5, LOG_RECORDS + 4)
    assert len(repr(log).splitlines()) == 22  # a title, 20 records, and how many more there are
