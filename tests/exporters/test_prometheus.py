"""A loader watched by Prometheus: what a scrape gets, over HTTP and while the loop runs."""

from __future__ import annotations

import gc
import sys
import threading
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

import gpuload as gl
from gpuload import transforms as T
from gpuload.exporters.prometheus import COUNTERS, GAUGES


def loader_of(count: int = 12, **options) -> gl.Loader:
    pictures = [np.full((20, 24, 3), number, np.uint8) for number in range(count)]
    options = {"transforms": [T.CenterCrop(16)], "num_workers": 0, "device": "cpu", **options}
    return gl.Loader(pictures, 4, **options)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def scraped(port: int) -> dict[str, dict[tuple[str, ...], float]]:
    """The samples of a scrape: by name, then by the values of their labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    assert len({family.name for family in text_string_to_metric_families(text)}) == text.count("# TYPE")
    return found


def test_a_scrape(registry):
    with loader_of() as train, loader_of(8) as val:
        gl.exporters.Prometheus(train, name="train", registry=registry)
        gl.exporters.Prometheus(val, name="val", registry=registry)
        server, thread = start_http_server(0, "127.0.0.1", registry)
        try:
            for _ in range(2):  # epochs
                for _ in train:
                    pass
            next(iter(val))
            found = scraped(server.server_port)
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
        stats = train.stats()
    assert found["gpuload_batches_total"] == {("train",): 6, ("val",): 1}
    assert found["gpuload_images_total"] == {("train",): 24, ("val",): 4}
    assert found["gpuload_epoch"] == {("train",): 1, ("val",): 0}
    assert found["gpuload_ring_limit_bytes"][("train",)] == 2 << 30
    assert 0 < found["gpuload_ring_bytes"][("train",)] <= 2 << 30
    assert 0 < found["gpuload_wait_seconds_total"][("train",)] <= found["gpuload_loop_seconds_total"][("train",)]
    parts = {key[1:] for key in found["gpuload_part_seconds_total"] if key[0] == "train"}
    assert {(part.name, part.where) for part in stats.parts} <= parts
    names = {f"{metric.name}_total" for metric in COUNTERS if not metric.labels}
    assert names | {metric.name for metric in GAUGES if not metric.labels} <= found.keys()


def test_counters_begin_where_the_watch_begins(registry):
    with loader_of() as loader:
        batches = iter(loader)
        next(batches)
        gl.exporters.Prometheus(loader, registry=registry)
        assert registry.get_sample_value("gpuload_batches_total", {"loader": "default"}) == 0
        next(batches)
        assert registry.get_sample_value("gpuload_batches_total", {"loader": "default"}) == 1


def test_gauges_are_of_the_last_epoch(registry):
    with loader_of() as loader:
        initial = loader.stats()
        gl.exporters.Prometheus(loader, registry=registry)
        for _ in range(2):
            for _ in loader:
                pass
        found = registry.get_sample_value("gpuload_next_seconds", {"loader": "default"})
        assert found == loader.stats().next_ms / 1e3 != loader.stats(since=initial).next_ms / 1e3


def test_counters_begin_anew_with_the_workers(registry):
    """As those of a program that is started again, which Prometheus expects."""
    loader = loader_of(persistent_workers=False)
    gl.exporters.Prometheus(loader, registry=registry)
    seen = []
    for _ in range(3):
        for _ in loader:
            seen.append(registry.get_sample_value("gpuload_images_total", {"loader": "default"}))
    assert seen == [4, 8, 12] * 3


@pytest.mark.processes
def test_scrapes_from_another_thread_while_it_runs(registry):
    ended, seen, errors = threading.Event(), [], []

    def scrape() -> None:
        while not ended.is_set():
            try:
                list(registry.collect())
                seen.append(registry.get_sample_value("gpuload_batches_total", {"loader": "default"}))
            except Exception as error:
                errors.append(error)
                return

    with loader_of(24, num_workers=1) as loader:
        gl.exporters.Prometheus(loader, registry=registry)
        thread = threading.Thread(target=scrape)
        thread.start()
        try:
            given = sum(1 for _ in range(2) for _ in loader)
        finally:
            ended.set()
            thread.join()
        assert registry.get_sample_value("gpuload_worker_busy_ratio", {"loader": "default", "worker": "0"}) > 0
    assert not errors
    assert seen == sorted(seen)
    assert given == 12 == registry.get_sample_value("gpuload_batches_total", {"loader": "default"})


def test_a_loader_that_is_gone_is_not_told(registry):
    loader = loader_of()
    gl.exporters.Prometheus(loader, registry=registry)
    assert registry.get_sample_value("gpuload_epoch", {"loader": "default"}) == 0
    del loader
    gc.collect()
    assert registry.get_sample_value("gpuload_epoch", {"loader": "default"}) is None
    gl.exporters.Prometheus(other := loader_of(), registry=registry)  # its name is free
    assert registry.get_sample_value("gpuload_epoch", {"loader": "default"}) == other.epoch == 0


def test_closing(registry):
    loader = loader_of()
    first = gl.exporters.Prometheus(loader, registry=registry)
    first.close()
    first.close()
    assert list(registry.collect()) == []
    second = gl.exporters.Prometheus(loader, registry=registry)
    first.close()  # not the second one's
    assert registry.get_sample_value("gpuload_epoch", {"loader": "default"}) == 0
    second.close()


def test_names_are_taken_once(registry):
    loader = loader_of()
    gl.exporters.Prometheus(loader, registry=registry)
    with pytest.raises(ValueError, match="a loader named 'default' is already watched in this registry") as caught:
        gl.exporters.Prometheus(loader_of(), registry=registry)
    assert "choose another name=…, or close() the Prometheus exporter of the other" in str(caught.value)


def test_a_registry_that_refuses_once_is_asked_again(registry, monkeypatch):
    def refuse(collector):
        raise RuntimeError("not now")

    loader = loader_of()
    with monkeypatch.context() as patch:
        patch.setattr(registry, "register", refuse)
        with pytest.raises(RuntimeError, match="not now"):
            gl.exporters.Prometheus(loader, registry=registry)
    gl.exporters.Prometheus(loader, registry=registry)
    assert registry.get_sample_value("gpuload_epoch", {"loader": "default"}) == 0


def test_a_name_is_a_text(registry):
    with pytest.raises(TypeError, match=r"name must be a string, got 3 \(int\)"):
        gl.exporters.Prometheus(loader_of(), name=3, registry=registry)


def test_without_the_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        gl.exporters.Prometheus(loader_of())
    assert str(caught.value) == (
        "gpuload.exporters.Prometheus needs prometheus_client, which is not installed: pip install 'gpuload[metrics]'"
    )


def test_the_page_names_every_metric():
    page = (Path(__file__).parents[2] / "docs" / "observing.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `gpuload_")]
    told = {row[1].strip(" `"): (row[2].strip(), row[3].strip(" .")) for row in rows}
    counters = {f"{metric.name}_total": metric for metric in COUNTERS}
    everything = counters | {metric.name: metric for metric in GAUGES}
    expected = {
        name: (", ".join(f"`{label}`" for label in metric.labels), metric.text.strip("."))
        for name, metric in everything.items()
    }
    assert told == expected


def test_the_usual_registry_is_the_default():
    from prometheus_client import REGISTRY

    watched = gl.exporters.Prometheus(loader := loader_of(), name="of this test")
    try:
        assert REGISTRY.get_sample_value("gpuload_epoch", {"loader": "of this test"}) == loader.epoch
    finally:
        watched.close()
    assert REGISTRY.get_sample_value("gpuload_epoch", {"loader": "of this test"}) is None
