"""The facts of this machine, and that all of it is looked at."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from gpuload.cli.doctor import gather
from gpuload.cli.doctor.finding import summary

LONG = ("kornia", "torchvision", *gather.DALI.values())  # these take seconds to import


@pytest.mark.slow
@pytest.mark.processes
def test_this_machine_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_version", lambda name: None if name in LONG else _version(name))
    told: list[tuple[int, int]] = []
    findings = gather.examine(lambda done, total: told.append((done, total)))
    by_name = {finding.name: finding for finding in findings}
    assert len(by_name) == len(findings) == 23
    assert told[0][0] == 0
    assert told[-1][0] == told[-1][1]
    assert by_name["workers"].state == "works", by_name["workers"]
    assert by_name["workers"].found.startswith("one started and gave its batch in ")
    assert by_name["torch"].found.startswith(metadata.version("torch"))
    assert {by_name[name].state for name in ("simplejpeg", "Pillow")} == {"works"}
    assert by_name["kornia"].found.startswith("not installed; for the backend 'kornia'")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def tried(**others: Any) -> dict[str, Any]:
    ok = {"ok": True, "said": ""}
    torch = {**ok, "version": "2.9.1", "cuda": "13.0", "other": "", "devices": []}
    return {"torch": torch, "simplejpeg": ok, "Pillow": ok, **others}


def test_an_installation_without_nvimagecodec(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = (*gather.NVIMGCODEC.values(), *LONG)
    monkeypatch.setattr(gather, "_version", lambda name: None if name in absent else "1.0")
    findings = gather._on_packages(tried())
    told = "All that is needed works. What holds it back most is nvImageCodec: not installed"
    assert summary(findings).startswith(told)
    assert findings[0].mend == "pip install 'gpuload[cu13]'"
    assert findings[1].found == "1.0: decodes all JPEGs here"


def test_the_wheel_for_another_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_version", lambda name: "0.9" if name.endswith("-cu12") else None)
    findings = gather._on_packages(tried(nvImageCodec={"ok": True, "said": ""}))
    assert findings[0].found.startswith("0.9 for CUDA 12, but torch is built for CUDA 13.0")


def cgroup(root: Path, membership: str, files: dict[str, str]) -> str:
    for name, text in {"proc/self/cgroup": membership, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


def test_processes_by_control_groups_of_both_versions(tmp_path: Path) -> None:
    v2 = {
        "sys/fs/cgroup/a/b/pids.max": "max\n",
        "sys/fs/cgroup/a/b/pids.current": "5\n",
        "sys/fs/cgroup/a/pids.max": "100\n",
        "sys/fs/cgroup/a/pids.current": "40\n",
    }
    assert gather.processes_left(cgroup(tmp_path / "2", "0::/a/b\n", v2), uid=0) == 60
    v1 = {"sys/fs/cgroup/pids/job/pids.max": "30\n", "sys/fs/cgroup/pids/job/pids.current": "31\n"}
    assert gather.processes_left(cgroup(tmp_path / "1", "8:pids:/job\n4:memory:/x\n", v1), uid=0) == 0
    assert gather.processes_left(str(tmp_path / "none"), uid=0) is None
