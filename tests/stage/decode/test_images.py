"""Images that the device decodes: the same batches, faults and order as where workers decode all of them."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.generated_images import jpeg_bytes, smooth_image
from PIL import Image
from simulated.decoder import ENGINE, OTHER, decoding_with

import gpuload as gl
from gpuload import transforms as T
from gpuload.decode.options import select_device_samples

COUNT = 20
CROPS = [T.RandomResizedCrop(24), T.RandomHorizontalFlip()]


def photo(number: int, height: int = 50, width: int = 70, **options: Any) -> bytes:
    return jpeg_bytes(smooth_image(height + number, width - number, number), **options)


def patched(data: bytes, at: int, *values: int) -> bytes:
    return data[:at] + bytes(values) + data[at + len(values) :]


def frame(data: bytes) -> int:
    """Where the SOF marker is."""
    return data.index(b"\xff\xc0")


def damaged(data: bytes) -> bytes:
    """With a marker in the midst of its scan, where libjpeg loses its way."""
    middle = (data.index(b"\xff\xda") + len(data)) // 2
    return patched(data, middle, *b"\xff\xd5\xff\xd6\xff\xd7")


def without_tables(data: bytes) -> bytes:
    """Nobody decodes it, and its header says nothing of that."""
    while (at := data.find(b"\xff\xdb")) >= 0:
        data = data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :]
    return data


def cmyk(number: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(smooth_image(50, 60, number)).convert("CMYK").save(file, "JPEG")
    return file.getvalue()


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(smooth_image(50, 60, number)).save(file, "PNG")
    return file.getvalue()


def grey(number: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(smooth_image(50, 60, number)).convert("L").save(file, "JPEG")
    return file.getvalue()


# What a file may be, and who decodes it: the device, the CPU after it (refused), a worker, or nobody.
KINDS: dict[str, tuple[Callable[[int], bytes], str]] = {
    "plain": (photo, "device"),
    "4:4:4": (lambda number: photo(number, subsampling=0), "device"),
    "restart markers": (lambda number: photo(number, restart_marker_blocks=2), "device"),
    "grey": (grey, "device"),
    "many scans": (lambda number: photo(number, progressive=True), "worker"),
    "CMYK": (cmyk, "worker"),
    "PNG": (png, "worker"),
    "arithmetic": (lambda number: patched(photo(number), frame(photo(number)) + 1, 0xC9), "worker"),
    "12 bits": (lambda number: patched(photo(number), frame(photo(number)) + 4, 12), "nobody"),
    "cut off": (lambda number: photo(number)[:-700], "nobody"),
    "damaged in the middle": (lambda number: damaged(photo(number)), "refused"),
    "a header that lies": (lambda number: patched(photo(number), frame(photo(number)) + 5, 0, 200), "refused"),
    "no tables": (lambda number: without_tables(photo(number)), "nobody after the device"),
    "no image": (lambda number: b"no image", "nobody"),
}


class Photos:
    """Files of all kinds, the plain ones between them."""

    def __init__(self, files: list[bytes], mode: Any = "RGB") -> None:
        self.files, self.mode = files, mode

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        return gl.Encoded(self.files[index], mode=self.mode, source=f"{index}.jpg"), index


def mixed(*kinds: str) -> Photos:
    """One of each kind, and plain ones before and after."""
    files = [photo(number) for number in range(COUNT)]
    for number, kind in enumerate(kinds):
        files[(3 * number + 2) % COUNT] = KINDS[kind][0](number)
    return Photos(files)


def loader(dataset: Any, **given: Any) -> gl.Loader:
    options = {"batch_size": 5, "shuffle": True, "transforms": CROPS, "num_workers": 0, "device": "cpu", "info": True}
    return gl.Loader(dataset, **options | given)


def batches(dataset: Any, *, resumed: bool = False, **given: Any) -> tuple[list[Any], list[Any], gl.Loader]:
    """All batches of an epoch and what failed, by position; `resumed`: by two loaders, one after the other."""
    found, errors, state = [], [], None
    for part in range(1 + resumed):
        with loader(dataset, **given) as made:
            if state is not None:
                made.load_state_dict(state)
            for (images, labels), info in made:
                found.append((images.clone(), labels.tolist(), info.positions.tolist()))
                state = made.state_dict()
                if resumed and not part and len(found) == 2:
                    break
        errors += [e for e in made.errors if part or not resumed or e.position < 10]
    told = sorted((e.position, e.index, e.source, e.cause, e.kinds, e.replaced_by or -1) for e in errors)
    return found, told, made


def assert_same(found: Any, expected: Any) -> None:
    assert len(found[0]) == len(expected[0])
    for (images, labels, positions), (images_, labels_, positions_) in zip(found[0], expected[0], strict=True):
        assert (labels, positions) == (labels_, positions_)
        assert torch.equal(images, images_)
    assert found[1] == expected[1]


BAD = ("many scans", "CMYK", "PNG", "12 bits", "arithmetic", "damaged in the middle", "no tables", "no image")
DECODES = {
    "device": gl.Decode(where="device"),
    "a third": gl.Decode(where="both", device_share=0.3),
    "most": gl.Decode(where="both", device_share=0.8),
}


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("decode", DECODES)
@pytest.mark.filterwarnings("ignore:.*it was (skipped|replaced by):RuntimeWarning")
def test_order_draws_and_faults_are_those_of_the_cpu(decode, on_error, resumed):
    given: dict[str, Any] = {"resumed": resumed, "on_error": on_error, "seed": 3}
    expected = batches(mixed(*BAD), **given)
    with decoding_with():
        assert_same(batches(mixed(*BAD), decode=DECODES[decode], **given), expected)
    assert len(expected[1]) >= 3


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.filterwarnings("ignore:.*it was (skipped|replaced by):RuntimeWarning")
def test_the_same_with_workers(on_error):
    given: dict[str, Any] = {"on_error": on_error, "seed": 3, "chunk_size": 3}
    expected = batches(mixed(*BAD), **given)
    with decoding_with():
        for decode in DECODES.values():
            assert_same(
                batches(mixed(*BAD), decode=decode, num_workers=2, resumed=on_error == "skip", **given), expected
            )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*it was (skipped|replaced by):RuntimeWarning")
def test_who_decodes_what(kind):
    make, who = KINDS[kind]
    files = Photos([make(number) for number in range(3)])
    expected = batches(files, on_error="skip", batch_size=3) if "nobody" not in who else None
    with decoding_with(), loader(files, on_error="raise", decode=DECODES["device"], batch_size=3) as made:
        if expected is None:
            with pytest.raises(gl.SampleError) as there:
                next(iter(made))
            with pytest.raises(gl.SampleError) as here, loader(files, batch_size=3) as on_cpu:
                next(iter(on_cpu))
            assert str(there.value).splitlines()[0] == str(here.value).splitlines()[0]
        else:
            [((images, _), _)] = list(made)
            assert torch.equal(images, expected[0][0][0])
        stats = made.stats()
        on_device = stats.decode.counts.get(ENGINE, 0) + stats.decode.counts.get(OTHER, 0)
        assert on_device == (3 if who == "device" else 0)
        assert sum(stats.decode.refused.values()) == (3 if who in ("refused", "nobody after the device") else 0)
        assert stats.part("device decode").count == (3 if who not in ("worker", "nobody") else 0)


def test_a_batch_of_which_every_image_is_refused():
    files = Photos([photo(number) for number in range(10)])
    expected = batches(files)
    with decoding_with(refuses=lambda data: "too green"):
        found = batches(files, decode=DECODES["device"])
    assert_same(found, expected)
    stats = found[2].stats()
    assert stats.decode.refused == {"too green": 10}
    assert sum(stats.decode.counts.values()) == 10
    assert "refused   10 by the device's decoder: too green" in str(stats)


def test_a_large_image_beside_small_ones_goes_to_the_cpu_alone():
    files = Photos([photo(number) for number in range(9)] + [jpeg_bytes(smooth_image(400, 500, 1))])
    expected = batches(files, batch_size=10)
    with decoding_with() as made:
        found = batches(files, batch_size=10, decode=gl.Decode(where="device", device_memory=60_000))
    assert_same(found, expected)
    stats = found[2].stats()
    assert stats.decode.refused == {"more than device_memory=60,000 bytes": 1}
    assert sum(made[0].calls) == 9
    assert len(made[0].calls) > 1
    assert 30_000 < stats.decode.peak_bytes <= 60_000


def test_where_the_device_has_no_room_fewer_are_tried_and_no_more_from_then_on():
    files = Photos([photo(number) for number in range(COUNT)])
    expected = batches(files, batch_size=10)
    with decoding_with(room_bytes=35_000) as made:
        found = batches(files, batch_size=10, decode=DECODES["device"])
    assert_same(found, expected)
    assert (sum(made[0].calls), max(made[0].calls)) == (COUNT, 2)
    assert found[2].stats().decode.refused == {}


@pytest.mark.filterwarnings("ignore:.*it was (skipped|replaced by):RuntimeWarning")
def test_of_a_decoder_that_has_regions_these_are_what_takes_memory():
    large = [jpeg_bytes(smooth_image(400, 500, number)) for number in range(4)]
    files = Photos([*mixed(*BAD).files, *large])
    given: dict[str, Any] = {"transforms": [T.RandomCrop(24)], "batch_size": 12, "on_error": "skip"}
    expected = batches(files, **given)
    with decoding_with(regions=True) as made:
        found = batches(files, decode=gl.Decode(where="device", device_memory=3 * 24 * 24 * 3), **given)
    assert_same(found, expected)
    assert max(made[0].calls) == 3
    assert found[2].stats().decode.peak_bytes == 3 * 24 * 24 * 3
    assert not any("device_memory" in why for why in found[2].stats().decode.refused)


def test_an_image_for_which_the_device_has_no_room_alone_goes_to_the_cpu():
    files = Photos([photo(number) for number in range(4)])
    expected = batches(files, batch_size=4)
    with decoding_with(room_bytes=1000):
        found = batches(files, batch_size=4, decode=DECODES["device"])
    assert_same(found, expected)
    assert found[2].stats().decode.refused == {"out of memory": 4}


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright_as_on_the_cpu(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    files = Photos([photo(number, exif=exif.tobytes()) for number in range(4)])
    for upright, regions in ((True, False), (True, True), (False, False)):
        expected = batches(files, batch_size=4, decode=gl.Decode(exif=upright))
        with decoding_with(regions=regions):
            assert_same(batches(files, batch_size=4, decode=gl.Decode(exif=upright, where="device")), expected)
        assert gl.Loader(files, decode=gl.Decode(where="device")).stats().images == 0


@pytest.mark.parametrize("mode", ["RGB", "L", "unchanged", "RGBA"])
def test_every_mode_is_decoded_as_on_the_cpu(mode):
    for make in (photo, grey):
        files = Photos([make(number) for number in range(4)], mode)
        with decoding_with():
            found = batches(files, batch_size=4, decode=DECODES["device"])
        assert_same(found, batches(files, batch_size=4))
        own = mode != "RGBA" and (mode != "L" or make is grey)
        assert found[2].stats().part("device decode").count == 4 * own


class Pairs:
    """Two images, a mask, and an array that is long enough for a block; `broken` ones have a second image that nobody
    decodes."""

    def __init__(self, broken: tuple[int, ...] = ()) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        first, second = photo(index % 5), photo(index % 5, subsampling=0)
        if index in self.broken:
            second = without_tables(second)
        sample = {
            "image": gl.Encoded(first, source=f"{index}a.jpg"),
            "other": gl.Encoded(second, source=f"{index}b.jpg"),
            "mask": gl.Mask(np.full((50 + index % 5, 70 - index % 5), index, np.uint8)),
            "long": np.full(3000, index, np.int32),
            "index": index,
        }
        return sample


@pytest.mark.parametrize("decode", DECODES)
@pytest.mark.filterwarnings("ignore:.*it was (skipped|replaced by):RuntimeWarning")
def test_what_belongs_to_an_image_that_failed_goes_with_it(decode):
    def run(**given: Any) -> Any:
        with loader(Pairs(broken=(1, 7)), batch_size=4, on_error="skip", info=False, **given) as made:
            return [dict(batch) for batch in made], [(e.index, e.source, e.cause) for e in made.errors]

    expected, failed = run()
    with decoding_with():
        found, failed_ = run(decode=DECODES[decode])
    assert sorted(failed_) == sorted(failed)
    assert {source for _, source, _ in failed} == {"1b.jpg", "7b.jpg"}
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        for number in range(COUNT):
            make = KINDS["no tables" if number % 6 == 3 else "plain"][0]
            yield gl.Encoded(make(number), source=f"{number}.jpg"), np.full(3000, number)


@pytest.mark.filterwarnings("ignore:.*it was (skipped|replaced by):RuntimeWarning")
def test_an_iterable_dataset_goes_on_after_what_the_device_could_not_decode():
    def run(**given: Any) -> Any:
        with loader(Stream(), shuffle=None, on_error="skip", info=False, **given) as made:
            return [(images.clone(), labels[:, 0].tolist()) for images, labels in made], [e.index for e in made.errors]

    expected = run()
    with decoding_with():
        found = run(decode=DECODES["device"])
    assert found[1] == expected[1] == [3, 9, 15]
    assert [labels for _, labels in found[0]] == [labels for _, labels in expected[0]]
    assert all(torch.equal(one, other) for (one, _), (other, _) in zip(found[0], expected[0], strict=True))


@pytest.mark.filterwarnings("ignore:.*it was (skipped|replaced by):RuntimeWarning")
def test_too_many_that_the_device_could_not_decode_are_an_error():
    files = Photos([KINDS["no tables" if number % 2 else "plain"][0](number) for number in range(40)])
    # Ten may fail, whatever the rate; half of 40 do.
    with decoding_with(), loader(files, on_error="skip", decode=DECODES["device"]) as made:
        found = iter(made)
        with pytest.raises(gl.TooManyErrors, match="samples of this epoch could not be loaded"):
            deque(found)


def test_decoded_images_are_lent_to_nobody():
    files = Photos([photo(number) for number in range(6)])
    given: dict[str, Any] = {"transforms": [], "ragged": "list", "batch_size": 3, "info": False, "shuffle": False}
    with decoding_with(), loader(files, decode=DECODES["a third"], **given) as made, loader(files, **given) as cpu:
        for (images, _), (images_, _) in zip(made, cpu, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(images, images_, strict=True))


def test_a_sample_is_replayed_with_the_decoder_that_its_position_has():
    files = Photos([photo(number) for number in range(8)])
    with decoding_with() as made, loader(files, decode=DECODES["a third"], info=False) as own:
        for position in range(4):
            own.replay(0, position)
    assert [sum(decoder.calls) for decoder in made] == select_device_samples(np.arange(4), 0.3).tolist() == [1, 0, 1, 0]


def test_a_session_gives_the_decoder_back():
    files = Photos([photo(number) for number in range(4)])
    with decoding_with() as made, loader(files, decode=DECODES["device"]) as own:
        list(own)
        own.plan()
        assert [decoder.closed for decoder in made] == [False, True]
    assert [decoder.closed for decoder in made] == [True, True]
