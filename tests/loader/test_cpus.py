from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuload.loader.cpus import default_workers, usable_cpus


@pytest.fixture
def groups(tmp_path: Path):
    def make(membership: str, files: dict[str, str]) -> int:
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            file = tmp_path / "cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return usable_cpus(tmp_path / "cgroup", tmp_path / "membership")

    return make


AFFINITY = len(os.sched_getaffinity(0))


def test_without_a_quota_the_affinity_mask_counts(groups):
    assert groups("0::/job\n", {"job/cpu.max": "max 100000\n"}) == AFFINITY
    assert usable_cpus(Path("/nowhere"), Path("/nowhere/either")) == AFFINITY


def test_a_quota_of_half_a_cpu_is_one_cpu(groups):
    assert groups("0::/job\n", {"job/cpu.max": "50000 100000\n"}) == 1


def test_the_quota_of_an_ancestor_binds(groups):
    assert groups("0::/pod/job\n", {"pod/job/cpu.max": "max 100000\n", "pod/cpu.max": "100000 100000\n"}) == 1


def test_version_1_quotas_count(groups):
    files = {"cpu/job/cpu.cfs_quota_us": "90000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}
    assert groups("4:cpu,cpuacct:/job\n", files) == 1
    files["cpu/job/cpu.cfs_quota_us"] = "-1\n"
    assert groups("4:cpu,cpuacct:/job\n", files) == AFFINITY


@pytest.mark.parametrize(
    ("cpus", "ranks", "workers"), [(2, 1, 1), (1, 1, 1), (16, 1, 15), (64, 8, 7), (8, 8, 1), (10, 4, 1)]
)
def test_ranks_share_the_cpus_that_they_leave(cpus, ranks, workers):
    assert default_workers(cpus, ranks) == workers
