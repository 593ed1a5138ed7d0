"""Which paths a pattern stands for."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from gpuload.datasets.stores.tar.patterns import expand, find_shards


@pytest.mark.parametrize(
    "pattern",
    ["x", "a{1..3}", "a{01..10}", "a{8..12}", "a{000..002}.{tar,gz}", "{a,b{1..2},c}d", "{3..1}", "{0..10..5}",
     "a{,b}", "{x}", "{}", "{1..2}{a,b}", "x{a}{1,2}", "{a,b}{", "{-1..1}", "{1,{2,{3,4}}}"],
)  # fmt: skip
def test_braces_are_expanded_as_a_shell_does(pattern: str) -> None:
    shell = subprocess.run(["bash", "-c", f"echo {pattern}"], capture_output=True, text=True, check=True)
    assert list(expand(pattern)) == shell.stdout.split()


def test_paths_wildcards_and_lists_in_their_order(tmp_path: Path) -> None:
    for name in ("b-1.tar", "b-0.tar", "a.tar", "odd[1].tar"):
        (tmp_path / name).touch()
    root = str(tmp_path)
    assert find_shards(tmp_path / "a.tar") == [f"{root}/a.tar"]
    assert find_shards(f"{root}/b-*.tar") == [f"{root}/b-0.tar", f"{root}/b-1.tar"]
    assert find_shards([f"{root}/b-{{1,0}}.tar", tmp_path / "a.tar"]) == [
        f"{root}/{x}.tar" for x in ("b-1", "b-0", "a")
    ]
    assert find_shards(f"{root}/odd[1].tar") == [f"{root}/odd[1].tar"]


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.tar").touch()
    monkeypatch.chdir(tmp_path)
    assert find_shards("a.tar") == [f"{tmp_path}/a.tar"]


def test_no_shard_is_found(tmp_path: Path) -> None:
    root = re.escape(str(tmp_path))
    (tmp_path / "x-0.tar").touch()
    with pytest.raises(FileNotFoundError, match=rf"^no shard is found for '{root}/y-\*.tar' \(looked for "):
        find_shards(f"{tmp_path}/y-*.tar")
    with pytest.raises(FileNotFoundError, match=rf"^4 of 5 shards are missing: '{root}/x-1.tar', .*, …$"):
        find_shards(f"{tmp_path}/x-{{0..4}}.tar")
    with pytest.raises(FileNotFoundError, match=rf"^1 of 1 shards is missing: '{root}/z.tar'$"):
        find_shards(tmp_path / "z.tar")
    with pytest.raises(FileNotFoundError, match="an empty list"):
        find_shards([])
    with pytest.raises(TypeError, match="shards are given as paths, got 3 "):
        find_shards([3])
    with pytest.raises(ValueError, match="stands for more than 10,000,000 shards"):
        find_shards("{0..99999999}")
