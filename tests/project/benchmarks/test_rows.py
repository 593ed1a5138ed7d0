"""The benchmark of small rows measures both loaders."""

from __future__ import annotations

import json

import pytest

from benchmarks import rows


@pytest.mark.processes
def test_rows_benchmark_measures_each_kind(tmp_path, capsys):
    path = tmp_path / "rows.json"
    assert rows.main(["--workers", "0", "--rounds", "1", "--rows", "2048", "--json", str(path)]) == 0
    results = json.loads(path.read_text())
    assert list(results) == [f"{kind} 0" for kind in rows.KINDS]
    assert min(rate for rates in results.values() for loader_rates in rates.values() for rate in loader_rates) > 0
    assert capsys.readouterr().out.count("\n") == 1 + len(rows.KINDS)


@pytest.mark.parametrize("kind", rows.KINDS)
def test_loaders_of_each_kind_deliver_all_rows(kind):
    dataset = rows.build_dataset(kind, 4096)
    for loader in rows.build_loaders(dataset, 0).values():
        assert sum(len(batch[0] if isinstance(batch, list | tuple) else batch) for batch in loader) == len(dataset)
