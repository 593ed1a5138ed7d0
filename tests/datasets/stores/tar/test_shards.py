"""`open_shards` and `find_shards`: index files and their folders, processes, and patterns of paths."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from helpers.programs import run_python
from helpers.tar_files import archive, shards_of_pictures

import gpuload as gl
from gpuload.datasets.stores.tar import shards as shards_module
from gpuload.datasets.stores.tar.shards import SUFFIX, expand, find_shards, open_shards


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPULOAD_CACHE", str(tmp_path / "cache" / "gpuload"))
    return tmp_path / "cache/gpuload/tar"


def was_built(paths: list[str], **options: object) -> dict[str, bool]:
    """Open the shards. Return for each whether its index was built."""
    was_built_by_name: dict[str, bool] = {}
    opened = open_shards(
        paths, progress=lambda path, new: was_built_by_name.update({os.path.basename(path): new}), **options
    )
    assert [shard.path for shard in opened] == paths
    return was_built_by_name


def test_open_shards_builds_an_index_once_and_again_for_a_newer_archive(tmp_path: Path) -> None:
    path = str(archive(tmp_path / "x.tar", {"a.jpg": b"1"}))
    assert was_built([path]) == {"x.tar": True}
    assert sorted(os.listdir(tmp_path)) == ["x.tar", f"x.tar{SUFFIX}"]
    assert was_built([path, path]) == {"x.tar": False}
    assert was_built([path], rebuild=True) == {"x.tar": True}
    status = os.stat(path)
    archive(tmp_path / "x.tar", {"b.jpg": b"2"})
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert os.stat(path).st_size == status.st_size
    assert was_built([path]) == {"x.tar": True}
    assert open_shards([path])[0].key(0) == "b"


@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_open_shards_rebuilds_a_damaged_index_with_a_warning(tmp_path: Path, damage: str) -> None:
    path = str(archive(tmp_path / "x.tar", {"a.jpg": b"1"}))
    open_shards([path])
    index = Path(path + SUFFIX).read_bytes()
    Path(path + SUFFIX).write_bytes(index[:-8] if damage == "cut" else b"garbage, " * 50)
    with pytest.warns(UserWarning, match=r"index file '.*x.tar.gpuload-index' cannot be used and is rebuilt: it "):
        assert open_shards([path])[0].samples == 1
    assert Path(path + SUFFIX).read_bytes() == index


def make_unwritable(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Refuse to write to these folders, which would be possible for the superuser, who may run the tests."""
    replace = os.replace

    def refuse(source: str, target: str) -> None:
        if any(Path(target).is_relative_to(folder) for folder in folders):
            raise PermissionError(13, "Permission denied", target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)


def test_open_shards_saves_to_cache_if_read_only(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    path = str(archive(tmp_path / "data/x.tar", {"a.jpg": b"1"}))
    make_unwritable(monkeypatch, tmp_path / "data")
    assert was_built([path]) == {"x.tar": True}
    assert os.listdir(tmp_path / "data") == ["x.tar"]
    [name] = os.listdir(cache)
    assert name.endswith(SUFFIX)
    assert was_built([path]) == {"x.tar": False}
    os.utime(path, ns=(1, 1))
    assert was_built([path]) == {"x.tar": True}
    assert os.listdir(cache) == [name]


def test_open_shards_builds_each_time_if_nothing_is_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(archive(tmp_path / "x.tar", {"a.jpg": b"1"}))
    make_unwritable(monkeypatch, tmp_path)
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"saved neither next to it nor in '.*/cache/gpuload/tar' \(.*denied"):
            assert open_shards([path])[0].samples == 1


def test_open_shards_names_all_damaged_shards_and_saves_valid_indices(tmp_path: Path) -> None:
    paths = [str(archive(tmp_path / f"{number}.tar", {"a.jpg": bytes(600)})) for number in range(6)]
    for path in paths[1:]:
        os.truncate(path, 700)
    with pytest.raises(ValueError, match=r"^5 of 6 shards cannot be indexed:\n  '.*1.tar' is truncated at 700 .*\n.*\n"
                                         r".*3.tar.*\n  and 2 more$"):  # fmt: skip
        open_shards(paths)
    assert os.path.exists(paths[0] + SUFFIX)
    os.remove(paths[2])
    with pytest.raises(ValueError, match=r"^2 of 2 shards (.|\n)*truncated.*\n.*No such file"):
        open_shards(paths[1:3])


@pytest.mark.processes
def test_open_shards_with_processes_writes_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = find_shards(shards_of_pictures(tmp_path, 3, 2))
    os.truncate(paths[2], 1536)  # after the first member
    with pytest.warns(UserWarning, match="without the empty blocks"):
        open_shards(paths)
    expected = [Path(path + SUFFIX).read_bytes() for path in paths]
    for path in paths:
        os.remove(path + SUFFIX)
    broken = str(archive(tmp_path / "broken.tar", {}))
    os.truncate(broken, 100)
    monkeypatch.setattr(shards_module, "MIN_PROCESS_BYTES", 1)
    with pytest.warns(UserWarning, match="without the empty blocks"), pytest.raises(ValueError, match=r"broken\.tar"):
        open_shards([*paths, broken], workers=2)
    assert [Path(path + SUFFIX).read_bytes() for path in paths] == expected


def test_warning_about_an_unsaved_index_names_the_file_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(archive(tmp_path / "x.tar", {"a.jpg": b"1"}))
    make_unwritable(monkeypatch, tmp_path)
    with pytest.warns(UserWarning, match="can be saved neither") as caught:
        gl.TarShards(path)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.processes
def test_tar_shards_import_no_torch_and_no_decompressors(tmp_path: Path) -> None:
    open_shards(find_shards(shards_of_pictures(tmp_path, 1, 1)))
    program = """if True:
        import sys
        before = set(sys.modules)  # a measurement of coverage imports some of these modules, too
        import gpuload
        gpuload.TarShards(sys.argv[1])[0]
        slow = {"torch", "zstandard", "gzip", "lzma", "hashlib", "multiprocessing", "tarfile"}
        print(sorted(slow & (set(sys.modules) - before)))
    """
    assert run_python(program, tmp_path / "*.tar")[0] == "[]\n"


@pytest.mark.parametrize(
    "pattern",
    ["x", "a{1..3}", "a{01..10}", "a{8..12}", "a{000..002}.{tar,gz}", "{a,b{1..2},c}d", "{3..1}", "{0..10..5}",
     "a{,b}", "{x}", "{}", "{1..2}{a,b}", "x{a}{1,2}", "{a,b}{", "{-1..1}", "{1,{2,{3,4}}}"],
)  # fmt: skip
def test_expand_braces_like_a_shell(pattern: str) -> None:
    shell = subprocess.run(["bash", "-c", f"echo {pattern}"], capture_output=True, text=True, check=True)
    assert list(expand(pattern)) == shell.stdout.split()


def test_find_shards_takes_paths_wildcards_and_lists_in_order(tmp_path: Path) -> None:
    for name in ("b-1.tar", "b-0.tar", "a.tar", "odd[1].tar"):
        (tmp_path / name).touch()
    root = str(tmp_path)
    assert find_shards(tmp_path / "a.tar") == [f"{root}/a.tar"]
    assert find_shards(f"{root}/b-*.tar") == [f"{root}/b-0.tar", f"{root}/b-1.tar"]
    assert find_shards([f"{root}/b-{{1,0}}.tar", tmp_path / "a.tar"]) == [
        f"{root}/{x}.tar" for x in ("b-1", "b-0", "a")
    ]
    assert find_shards(f"{root}/odd[1].tar") == [f"{root}/odd[1].tar"]


def test_find_shards_makes_paths_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.tar").touch()
    monkeypatch.chdir(tmp_path)
    assert find_shards("a.tar") == [f"{tmp_path}/a.tar"]


def test_find_shards_names_missing_shards(tmp_path: Path) -> None:
    root = re.escape(str(tmp_path))
    (tmp_path / "x-0.tar").touch()
    with pytest.raises(FileNotFoundError, match=rf"^no shards match '{root}/y-\*.tar' \(searched for "):
        find_shards(f"{tmp_path}/y-*.tar")
    with pytest.raises(FileNotFoundError, match=rf"^4 of 5 shards are missing: '{root}/x-1.tar', .*, …$"):
        find_shards(f"{tmp_path}/x-{{0..4}}.tar")
    with pytest.raises(FileNotFoundError, match=rf"^1 of 1 shards is missing: '{root}/z.tar'$"):
        find_shards(tmp_path / "z.tar")
    with pytest.raises(FileNotFoundError, match="the list of shards is empty"):
        find_shards([])
    with pytest.raises(TypeError, match="shards must be paths, got None "):
        gl.TarShards(None)
    with pytest.raises(TypeError, match="shards must be paths, got 3 "):
        find_shards([3])
    with pytest.raises(ValueError, match="expands to more than 10,000,000 shards"):
        find_shards("{0..99999999}")
