"""`pack`: packed sets hold the samples, and their bytes depend only on these; damaged samples; repeated runs."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import lacking
from helpers.generated_images import encode, jpeg_bytes, smooth_image
from helpers.map_datasets import MapDataset
from helpers.programs import run_python

import gpuload as gl
from gpuload.packing import pack as pack_module
from gpuload.packing.manifest import open_packed
from gpuload.packing.pack import BadSamples

from .packed_sets import COUNT, STORES, Packing, Samples, content, pack_and_open, small_jpeg


def decode(encoded: gl.Encoded) -> np.ndarray:
    from gpuload.decode import Decoder

    decoder = Decoder(gl.Decode())
    return decoder.decode(encoded, decoder.header(encoded))


@pytest.mark.parametrize("to", ["tar", "parquet", "lmdb"])
def test_packed_set_holds_the_samples_in_order(folder: Path, packed: Packing, to: str) -> None:
    dataset, path = gl.ImageFolder(folder), packed(to)
    packed_samples = [(image.data, label) for image, label in open_packed(str(path))]
    assert packed_samples == [(image.data, label) for image, label in dataset]
    assert json.loads((path / "classes.json").read_text(encoding="utf-8")) == dataset.classes == ["ant", "bee", "cät"]
    parts = json.loads((path / "manifest.json").read_text())["parts"]
    assert len(parts) > 2
    assert not (path / ".gpuload-pack").exists()
    assert gl.verify(path) == []


def test_array_store_holds_pixels_and_labels(packed: Packing) -> None:
    dataset = Samples(*((small_jpeg(number), number % 2) for number in range(5)))
    path = packed("array", dataset=dataset, short_side=None)
    array = gl.ArrayFile(path / "images.npy", labels=path / "labels.npy")
    for (image, label), (encoded, expected) in zip(array, dataset.samples, strict=True):
        np.testing.assert_array_equal(image.hwc, decode(encoded))
        assert label == expected
    assert gl.verify(path) == []


def test_read_expression_of_the_result_opens_the_set(folder: Path, tmp_path: Path) -> None:
    (folder / "ant" / "other.png").write_bytes(encode(smooth_image(20, 20, 0), "PNG"))
    result = gl.pack(gl.ImageFolder(folder), tmp_path / "set", to="tar", workers=0)
    assert result.read == f"gpuload.TarShards('{tmp_path}/set/shard-*.tar', fields=('jpg;png', 'cls'))"
    dataset = eval(result.read, {"gpuload": gl})
    assert [label for _, label in dataset] == gl.ImageFolder(folder).labels.tolist()
    assert (result.samples, result.files, result.left_out, result.taken_up) == (COUNT + 1, 1, [], 0)


@lacking.needs("pyarrow")
def test_packed_set_can_be_packed_to_another_store(folder: Path, packed: Packing) -> None:
    tar_set = packed("tar")
    parquet_set = packed("parquet", "again", dataset=open_packed(str(tar_set)))
    expected = [(image.data, label) for image, label in gl.ImageFolder(folder)]
    assert open_packed(str(parquet_set)).classes == ["ant", "bee", "cät"]
    assert [(image.data, label) for image, label in open_packed(str(parquet_set))] == expected


@pytest.mark.parametrize("to", STORES)
def test_shards_are_no_larger_than_shard_bytes_and_contain_all_samples(packed: Packing, to: str) -> None:
    path = packed(to, shard_bytes=22_000)
    manifest = json.loads((path / "manifest.json").read_text())
    assert [part["first"] for part in manifest["parts"]] == sorted({part["first"] for part in manifest["parts"]})
    assert sum(part["samples"] for part in manifest["parts"]) == COUNT
    if to in ("tar", "parquet"):
        sizes = [os.path.getsize(path / part["file"]) for part in manifest["parts"]]
        assert max(sizes) <= 22_000
        assert len(sizes) < COUNT


@pytest.mark.processes
@pytest.mark.parametrize("to", STORES)
def test_packed_bytes_do_not_depend_on_workers(packed: Packing, to: str) -> None:
    assert content(packed(to, "alone")) == content(packed(to, "two", workers=2))


DRIVER = """
import os, random, signal, sys, warnings
import numpy, PIL.JpegImagePlugin
import gpuload as gl
from gpuload.packing.pack import pack
source, target, to, shard_bytes, repeats = sys.argv[1:]
if to == "parquet":
    import pyarrow.parquet
draw, calls = random.Random(to), 0

def run(path, last_call):  # packs in a child, which is killed at this call of a C function
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    def count(frame, event, function):
        global calls
        calls += event == "c_call"
        if calls == last_call:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.setprofile(count)
    side = 16 if to == "array" else None
    pack(gl.ImageFolder(source), path, to=to, workers=0, shard_bytes=int(shard_bytes), short_side=side)
    sys.setprofile(None)
    open(f"{target}/calls", "w").write(str(calls))
    os._exit(0)

assert run(f"{target}/uninterrupted", -1) == 0
call_count = int(open(f"{target}/calls").read())
for number in range(int(repeats)):
    kills = sum(run(f"{target}/{number}", draw.randrange(1, call_count)) == signal.SIGKILL for _ in range(3))
    assert run(f"{target}/{number}", -1) == 0
    print(kills)
"""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("to", STORES)
def test_pack_killed_at_random_and_repeated_makes_the_same_bytes(folder: Path, tmp_path: Path, to: str) -> None:
    target, shard_bytes = tmp_path / "sets", 1700 if to == "array" else 16000
    target.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output, _ = run_python(DRIVER, folder, target, to, shard_bytes, 3, env=environment, timeout=200)
    kills = [int(line) for line in output.split()]
    assert sum(kills) > 3, kills  # of 9 runs, several were killed before they ended
    expected = content(target / "uninterrupted")
    for number in range(len(kills)):
        assert content(target / str(number)) == expected


def damage(folder: Path) -> tuple[Path, Path]:
    """Truncate sample 1, of the first class, and overwrite sample 5, of the second class, with text."""
    truncated, text_file = folder / "ant" / "003.jpg", folder / "bee" / "004.jpg"
    truncated.write_bytes(truncated.read_bytes()[:-150])
    text_file.write_bytes(b"nothing")
    return truncated, text_file


@contextlib.contextmanager
def replaced(path: Path, new_content: bytes) -> Iterator[None]:
    """Replace a file's content in this block, and then restore content and modification time."""
    original, mtime_ns = path.read_bytes(), path.stat().st_mtime_ns
    path.write_bytes(new_content)
    yield
    path.write_bytes(original)
    os.utime(path, ns=(mtime_ns, mtime_ns))


@pytest.mark.parametrize("to", STORES)
def test_damaged_images_are_listed_and_dropped_only_with_skip_bad(folder: Path, packed: Packing, to: str) -> None:
    truncated, text_file = damage(folder)
    with pytest.raises(BadSamples) as raised:
        packed(to)
    lines = str(raised.value).splitlines()
    assert lines[0] == f"2 of 12 samples are damaged, so {str(folder.parent / 'set')!r} is not finished:"
    assert lines[1].startswith(f"  {truncated}: DecodeError: the JPEG cannot be decoded: ")
    assert lines[2].startswith(f"  {text_file}: DecodeError: not an image that gpuload decodes: 7 bytes")
    assert "--on-error skip" in lines[3]
    with pytest.raises(FileNotFoundError, match="is not finished: run the same `gpuload pack` command again"):
        gl.verify(folder.parent / "set")
    path = packed(to, skip_bad=True)
    expected = [sample for index, sample in enumerate(gl.ImageFolder(folder)) if index not in (1, 5)]
    dataset = open_packed(str(path))
    assert [label for _, label in dataset] == [label for _, label in expected]
    if to != "array":
        assert [image.data for image, _ in dataset] == [image.data for image, _ in expected]
    manifest = json.loads((path / "manifest.json").read_text())
    sources = {entry["index"]: entry["source"] for entry in manifest["left_out"]}
    assert sources == {1: str(truncated), 5: str(text_file)}
    assert gl.verify(path) == []
    assert content(packed(to, "at once", skip_bad=True)) == content(path)


@pytest.mark.parametrize("to", ["tar", "lmdb"])
def test_fixed_image_is_packed_without_repeating_finished_parts(folder: Path, packed: Packing, to: str) -> None:
    expected = content(packed(to, "expected"))
    path = folder / "ant" / "003.jpg"
    with replaced(path, path.read_bytes()[:-150]), pytest.raises(BadSamples):
        packed(to)
    result = gl.pack(gl.ImageFolder(folder), folder.parent / "set", to=to, workers=0, shard_bytes=12_500)
    assert content(folder.parent / "set") == expected
    assert 0 < result.taken_up < COUNT


@pytest.mark.parametrize("to", ["tar", "lmdb", "parquet"])
def test_text_that_cannot_be_encoded_is_shown_and_can_be_skipped(tmp_path: Path, to: str) -> None:
    dataset = Samples((small_jpeg(0), "cat"), (small_jpeg(1), "\ud800 cat"), (small_jpeg(2), "dog"))
    message = r"the text '\\ud800 cat' cannot be encoded in UTF-8: it has an unpaired surrogate"
    with pytest.raises(BadSamples, match=message):
        gl.pack(dataset, tmp_path / "set", to=to, workers=0)
    assert gl.pack(dataset, tmp_path / "set", to=to, workers=0, skip_bad=True).samples == 2


def test_failed_sample_without_a_path_is_read_again(tmp_path: Path) -> None:
    dataset = Samples(small_jpeg(0), gl.Encoded(b"nothing"), small_jpeg(2))
    with pytest.raises(BadSamples):
        gl.pack(dataset, tmp_path / "set", to="tar", workers=0, shard_bytes=1)
    dataset.samples = (small_jpeg(0), small_jpeg(1), small_jpeg(2))
    result = gl.pack(dataset, tmp_path / "set", to="tar", workers=0, shard_bytes=1)
    assert (result.samples, result.taken_up) == (3, 2)


def test_image_changed_between_runs_is_packed_as_changed(folder: Path, packed: Packing) -> None:
    damage(folder)
    with pytest.raises(BadSamples):
        packed("tar")
    new_jpeg = small_jpeg(5).data
    (folder / "cät" / "002.jpg").write_bytes(new_jpeg)
    path = packed("tar", skip_bad=True)
    assert next(image.data for image, label in open_packed(str(path)) if label == 2) == new_jpeg


def test_finished_set_is_not_written_again(folder: Path, packed: Packing) -> None:
    path = packed("tar")
    mtimes = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    result = gl.pack(gl.ImageFolder(folder), path, to="tar", workers=0, shard_bytes=12_500)
    assert (result.samples, result.taken_up) == (COUNT, COUNT)
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == mtimes


def test_finished_set_whose_source_files_changed_raises(folder: Path, packed: Packing) -> None:
    path, changed_file = packed("tar"), folder / "bee" / "004.jpg"
    expected = content(path)
    parts = json.loads(expected["manifest.json"])["parts"]
    (part,) = (part for part in parts if part["first"] <= 5 < part["first"] + part["samples"])  # the file is sample 5
    message = (
        r"set' holds a finished set, but source files have since changed in size or modification time: among samples "
        rf"{part['first']} to {part['first'] + part['samples'] - 1}\. To pack the changed files, use another "
        r"folder or remove this one; if they were only copied or touched, keep the set: it is complete$"
    )
    with replaced(changed_file, small_jpeg(5).data), pytest.raises(FileExistsError, match=message):
        packed("tar")
    assert content(path) == expected
    assert packed("tar") == path
    for file in folder.rglob("*.jpg"):
        os.utime(file, ns=(5, 5))
    with pytest.raises(FileExistsError, match=r"among samples 0 to \d+ and in other parts \(\d+ in total\)\. To pack"):
        packed("tar")
    for text in ("[5]", "[]", "no JSON"):  # a file that gpuload did not write
        (path / "manifest-sources.json").write_text(text)
        assert packed("tar") == path


def test_set_or_plan_with_different_arguments_or_an_older_version_raises(folder: Path, packed: Packing) -> None:
    def make_older(file: Path) -> None:
        file.write_text(json.dumps({**json.loads(file.read_text()), "format": 1}))

    path = packed("tar")
    end = r"\. Use the same arguments, use another folder, or remove this one$"
    with pytest.raises(FileExistsError, match=f"holds a finished set .*: short_side=None instead of 16{end}"):
        packed("tar", short_side=16)
    make_older(path / "manifest.json")
    message = r"manifest.json' has version 1, but this gpuload reads version 2: pack again, or"
    with pytest.raises(gl.GpuloadError, match=message):
        packed("tar")
    shutil.rmtree(path)
    damage(folder)
    with pytest.raises(BadSamples):
        packed("tar")
    with pytest.raises(FileExistsError, match=f"holds an unfinished set .*: quality=90 instead of 80{end}"):
        packed("tar", quality=80)
    (folder / "ant" / "another.jpg").write_bytes(small_jpeg().data)
    with pytest.raises(FileExistsError, match=f"packed with other arguments: different data{end}"):
        packed("tar")
    make_older(path / ".gpuload-pack" / "plan.json")
    with pytest.raises(FileExistsError, match=r"plan.json' is not a plan of `gpuload pack`: format is 1; expected 2; "):
        packed("tar")


def test_folder_with_files_that_pack_did_not_write_raises(packed: Packing, tmp_path: Path) -> None:
    message = r"holds other files \('ant', 'bee', 'cät' …\); expected a new or empty folder"
    with pytest.raises(FileExistsError, match=message):
        packed("tar", "images")
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError, match="is a file; expected a new or empty folder"):
        packed("tar", "file")


def test_folder_that_another_process_packs_to_raises(packed: Packing, tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "set" / ".gpuload-pack").mkdir(parents=True)
    with open(tmp_path / "set" / ".gpuload-pack" / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(gl.GpuloadError, match="another process is packing to"):
            packed("tar")


@pytest.mark.parametrize(
    ("dataset", "arguments", "error", "message"),
    [
        (Samples(), {}, ValueError, "has no samples to pack"),
        (iter([1]), {}, TypeError, "needs a map-style dataset"),
        (Samples(small_jpeg()), {"exif": True}, ValueError, "exif=True needs to='array', got 'tar'"),
        (Samples(small_jpeg()), {"to": "array", "cuttable": True}, ValueError, "cuttable=True needs JPEG files"),
        (Samples(gl.Encoded(b"1"), gl.Encoded(b"2")), {}, gl.GpuloadError, "none of 2 trial samples of .* can be read"),
    ],
)
def test_pack_of_no_readable_samples_or_with_wrong_arguments_raises(
    tmp_path: Path, dataset: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        gl.pack(dataset, tmp_path / "set", **{"to": "tar", "workers": 0, **arguments})


@pytest.mark.parametrize(
    ("to", "sample", "message"),
    [
        ("tar", "a.jpg", r"sample 0 .* a tar takes samples of Encoded, .*, got a str$"),
        ("tar", (gl.Image(np.zeros((4, 4, 3), np.uint8)), 1), r"to an array \(to='array'\)"),
        ("tar", {"image": small_jpeg(), "boxes": gl.Boxes([])}, "a tar cannot hold a Boxes"),
        ("tar", {"a": small_jpeg(), "a.jpg": small_jpeg()}, r"files with the same name: a\.jpg, a\.jpg; rename one of"),
        ("tar", {"Image": small_jpeg()}, "field names must be lower case.*got 'Image'"),
        ("lmdb", (small_jpeg(), 1.5), "the labels of an LMDB must be int or str, got float"),
        ("parquet", {"a": small_jpeg(), "b": small_jpeg()}, "one column of images, got 2"),
        ("parquet", {"image": small_jpeg(), "box": None}, "column 'box' cannot hold NoneType"),
        ("array", (small_jpeg(), "cat"), "the labels of an array must be numbers, got str"),
    ],
)
def test_sample_that_a_store_cannot_hold_raises(tmp_path: Path, to: str, sample: Any, message: str) -> None:
    with pytest.raises(gl.GpuloadError, match=message):
        gl.pack(Samples(sample), tmp_path / "set", to=to, workers=0)


def test_fields_of_dicts_are_read_back_under_their_names(tmp_path: Path) -> None:
    mask = gl.Mask(gl.Encoded(encode(smooth_image(20, 20, 0), "PNG")))
    samples = [
        {
            "jpg": small_jpeg(number),
            "cls": number,
            "caption": "a wörd",
            "seg.png": mask,
            "boxes": np.arange(8.0).reshape(2, 4),
            "info.json": {"a": [1, None]},
            "score": 0.5,
            "raw": b"123",
        }
        for number in range(3)
    ]
    fields = ["jpg", "cls", "caption.txt", "seg.png", "boxes.npy", "info.json", "score.json", "raw.bin"]
    for number, sample in enumerate(pack_and_open(Samples(*samples), tmp_path / "set", "tar")):
        assert sample.pop("__key__") == f"0000000{number}"
        assert list(sample) == fields
        assert sample["jpg"].data == small_jpeg(number).data
        assert isinstance(sample["seg.png"], gl.Mask)
        np.testing.assert_array_equal(sample["boxes.npy"], samples[0]["boxes"])
        assert (sample["cls"], sample["caption.txt"], sample["score.json"]) == (number, "a wörd", 0.5)
        assert (sample["info.json"], sample["raw.bin"]) == ({"a": [1, None]}, b"123")


@pytest.mark.parametrize("to", ["tar", "parquet", "lmdb"])
def test_single_images_and_text_labels_are_read_back(tmp_path: Path, to: str) -> None:
    images = small_jpeg(0), small_jpeg(1)
    dataset = pack_and_open(Samples(*images), tmp_path / "images", to)
    assert [image.data for image in dataset] == [image.data for image in images]
    dataset = pack_and_open(Samples((images[0], "cat"), (images[1], "dög")), tmp_path / "text", to)
    assert [(image.data, label) for image, label in dataset] == [(images[0].data, "cat"), (images[1].data, "dög")]


@lacking.needs("lmdb")
def test_lmdb_labels_are_text_unless_all_are_numbers(tmp_path: Path) -> None:
    dataset = pack_and_open(Samples((small_jpeg(0), "cat"), (small_jpeg(1), 7)), tmp_path / "set", "lmdb")
    assert [label for _, label in dataset] == ["cat", "7"]


@lacking.needs("pyarrow")
def test_parquet_columns_are_read_back_and_images_have_no_statistics(tmp_path: Path) -> None:
    from pyarrow import parquet

    samples = [{"image": small_jpeg(number), "label": number, "caption": f"no. {number}"} for number in range(3)]
    dataset = pack_and_open(Samples(*samples), tmp_path / "set", "parquet")
    column = parquet.ParquetFile(tmp_path / "set" / "shard-00000.parquet").metadata.row_group(0).column(0)
    assert column.statistics is None  # statistics would contain complete images
    assert [(row["image"].data, row["label"], row["caption"]) for row in dataset] == [
        (row["image"].data, row["label"], row["caption"]) for row in samples
    ]


@lacking.needs("pyarrow")
def test_parquet_row_of_another_type_is_a_bad_sample(tmp_path: Path) -> None:
    with pytest.raises(BadSamples, match=r"1 of 3 samples .*\n  sample 1: Arrow"):
        gl.pack(Samples(*((small_jpeg(), label) for label in (1, "two", 3))), tmp_path / "set", to="parquet", workers=0)


def test_array_of_images_of_several_sizes_raises(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(BadSamples, match=r"the first, \|u1 of shape \(24, 48, 3\), got uint8 of shape \(32, 48, 3\)"):
        gl.pack(gl.ImageFolder(folder), tmp_path / "set", to="array", workers=0)


def test_array_store_holds_clips_and_arrays_of_any_dtype(tmp_path: Path) -> None:
    volumes = [np.full((2, 9, 8, 5), number, np.float32) for number in range(3)]
    gl.pack(Samples(*map(gl.Image, volumes)), tmp_path / "clips", to="array", workers=0)
    gl.pack(Samples(*volumes), tmp_path / "data", to="array", workers=0)
    for name in ("clips", "data"):
        dataset = open_packed(str(tmp_path / name))
        np.testing.assert_array_equal(dataset[2].hwc if name == "clips" else dataset[2], volumes[2])


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [(errno.EMFILE, OSError, "Too many open files"), (errno.EIO, BadSamples, "sample 1: OSError")],
)
def test_os_error_is_a_bad_sample_unless_files_or_memory_are_exhausted(
    tmp_path: Path, code: int, error: type[Exception], message: str
) -> None:
    def fail(index: int) -> Any:
        if index == 1:
            raise OSError(code, os.strerror(code))
        return small_jpeg(index)

    with pytest.raises(error, match=message):
        gl.pack(MapDataset(fail, 3), tmp_path / "set", to="tar", workers=0)


@pytest.mark.parametrize("to", ["tar", "array"])
def test_drafts_are_in_the_work_folder_which_is_removed_at_the_end(
    packed: Packing, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """A worker that is killed while it writes a file, such as the index of a shard, leaves the draft in that folder."""
    moves: list[tuple[str, str]] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: moves.append(paths) or replace(*paths))
    path = packed(to)
    drafts = [source for source, _ in moves if source.endswith(".part")]
    assert {os.path.dirname(draft) for draft in drafts} == {str(path / ".gpuload-pack")}
    assert not (path / ".gpuload-pack").exists()
    indexes = [target for _, target in moves if target.endswith(".gpuload-index")]
    assert len(indexes) == len(list(path.glob("*.tar")))


@pytest.mark.parametrize("to", ["lmdb", "array", "array with a gap"])
def test_pack_interrupted_before_the_manifest_finishes_when_repeated(
    folder: Path, packed: Packing, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    if to == "array with a gap":
        damage(folder)
    to = to.split()[0]
    expected = content(packed(to, "expected", skip_bad=True))

    def write_before_manifest(path: str, *arguments: Any, **options: Any) -> None:
        if path.endswith("manifest.json"):
            raise KeyboardInterrupt
        write(path, *arguments, **options)

    write = pack_module.write_file
    monkeypatch.setattr(pack_module, "write_file", write_before_manifest)
    with pytest.raises(KeyboardInterrupt):
        packed(to, skip_bad=True)
    monkeypatch.undo()
    assert content(packed(to, skip_bad=True)) == expected


@lacking.needs("lmdb")
@pytest.mark.parametrize("has_first_pages", [True, False])
def test_broken_lmdb_pages_are_overwritten_when_pack_is_repeated(
    folder: Path, packed: Packing, has_first_pages: bool
) -> None:
    """If not even the first pages were written, the database is created again."""
    expected = content(packed("lmdb", "expected"))
    path = folder / "cät" / "008.jpg"
    with replaced(path, path.read_bytes()[:-150]), pytest.raises(BadSamples):
        packed("lmdb")
    database = folder.parent / "set" / ".gpuload-pack" / "data.mdb"
    assert database.stat().st_size > 5 * 4096  # more than its first pages
    with open(database, "ab" if has_first_pages else "wb") as file:
        file.write(bytes(range(256)) * 16)  # a page of 4096 bytes that LMDB cannot have written
    assert content(packed("lmdb")) == expected


@pytest.mark.processes
def test_workers_inherit_multiprocessing_shared_memory(tmp_path: Path) -> None:
    data = small_jpeg().data
    shared = multiprocessing.get_context("spawn").RawArray("B", data)
    dataset = MapDataset(lambda index: gl.Encoded(bytes(shared)), 4)
    gl.pack(dataset, tmp_path / "set", to="tar", workers=2, shard_bytes=1)
    assert [image.data for image in open_packed(str(tmp_path / "set"))] == [data] * 4


# A TIFF header and one entry: tag 0x0112 (orientation), type SHORT, count 1, value 6 (a quarter turn).
EXIF_ROTATED = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"


def rotated_images(*exif_settings: bool | None) -> Samples:
    """Make labelled JPEGs with EXIF_ROTATED, one for each of these values of `Encoded.exif`."""
    images = [jpeg_bytes(smooth_image(20, 30, index), exif=EXIF_ROTATED) for index in range(len(exif_settings))]
    return Samples(*((gl.Encoded(images[index], exif=value), index) for index, value in enumerate(exif_settings)))


@pytest.mark.parametrize("to", STORES)
@pytest.mark.parametrize("exif", [True, None])
def test_packed_images_are_upright_if_the_datasets_are(tmp_path: Path, to: str, exif: bool | None) -> None:
    dataset = rotated_images(exif, exif or False)
    result = gl.pack(dataset, tmp_path / "set", to=to, workers=0)
    packed_dataset = open_packed(str(tmp_path / "set"))
    for (image, _), (original, _) in zip(packed_dataset, dataset.samples, strict=True):
        pixels = image.hwc if to == "array" else decode(image)
        assert pixels.shape == ((30, 20, 3) if exif else (20, 30, 3))
        np.testing.assert_array_equal(pixels, decode(original))
    assert ("exif=True" in result.read) == (bool(exif) and to != "array")
    assert [label for _, label in eval(result.read, {"gpuload": gl})] == [0, 1]
    assert gl.verify(tmp_path / "set") == []


def test_images_with_different_exif_settings_raise(tmp_path: Path) -> None:
    message = (
        "sample 2 of .* cannot be packed: its image has exif=True, but earlier images have exif=False: a set turns"
    )
    with pytest.raises(gl.GpuloadError, match=message):
        gl.pack(rotated_images(None, False, True), tmp_path / "set", to="tar", workers=0)
