"""The benchmark of small rows runs, with both loaders beside each other."""

from __future__ import annotations

import json

import pytest

from benchmarks import rows


@pytest.mark.processes
def test_it_runs(tmp_path, capsys):
    path = tmp_path / "rows.json"
    assert rows.main(["--workers", "0", "--rounds", "1", "--rows", "2048", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert list(found) == [f"{kind} 0" for kind in rows.KINDS]
    assert all(rate > 0 for rates in found.values() for own in rates.values() for rate in own)
    assert capsys.readouterr().out.count("\n") == 1 + len(rows.KINDS)


@pytest.mark.parametrize("kind", rows.KINDS)
def test_both_loaders_give_all_of_it(kind):
    dataset = rows.build_dataset(kind, 4096)
    for loader in rows.build_loaders(dataset, 0).values():
        assert sum(len(batch[0] if isinstance(batch, list | tuple) else batch) for batch in loader) == len(dataset)
