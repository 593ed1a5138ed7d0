"""The Prometheus exporter: the metrics of a scrape, over HTTP and while the loop runs."""

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


def make_loader(count: int = 12, **options) -> gl.Loader:
    pictures = [np.full((20, 24, 3), number, np.uint8) for number in range(count)]
    options = {"transforms": [T.CenterCrop(16)], "num_workers": 0, "device": "cpu", **options}
    return gl.Loader(pictures, 4, **options)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def metric_value(registry: CollectorRegistry, name: str) -> float | None:
    """Return a metric of the loader with the default name."""
    return registry.get_sample_value(f"gpuload_{name}", {"loader": "default"})


def scrape_samples(port: int) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the samples by name, then by the values of their labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        text = response.read().decode()
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    assert len({family.name for family in text_string_to_metric_families(text)}) == text.count("# TYPE")
    return samples


def test_scrape_has_the_metrics_of_each_watched_loader(registry):
    with make_loader() as train, make_loader(8) as val:
        gl.exporters.Prometheus(train, name="train", registry=registry)
        gl.exporters.Prometheus(val, name="val", registry=registry)
        server, thread = start_http_server(0, "127.0.0.1", registry)
        try:
            for _ in range(2):  # epochs
                for _ in train:
                    pass
            next(iter(val))
            samples = scrape_samples(server.server_port)
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
        stats = train.stats()
    assert samples["gpuload_batches_total"] == {("train",): 6, ("val",): 1}
    assert samples["gpuload_images_total"] == {("train",): 24, ("val",): 4}
    assert samples["gpuload_epoch"] == {("train",): 1, ("val",): 0}
    assert samples["gpuload_ring_limit_bytes"][("train",)] == 2 << 30
    assert 0 < samples["gpuload_ring_bytes"][("train",)] <= 2 << 30
    assert 0 < samples["gpuload_wait_seconds_total"][("train",)] <= samples["gpuload_loop_seconds_total"][("train",)]
    assert {("train", part.name, part.where) for part in stats.parts} <= samples["gpuload_part_seconds_total"].keys()
    counter_names = {f"{metric.name}_total" for metric in COUNTERS if not metric.labels}
    assert counter_names | {metric.name for metric in GAUGES if not metric.labels} <= samples.keys()


def test_counters_start_at_zero_when_the_exporter_is_created(registry):
    with make_loader() as loader:
        batches = iter(loader)
        next(batches)
        gl.exporters.Prometheus(loader, registry=registry)
        assert metric_value(registry, "batches_total") == 0
        next(batches)
        assert metric_value(registry, "batches_total") == 1


def test_gauges_cover_only_the_last_epoch(registry):
    with make_loader() as loader:
        initial = loader.stats()
        gl.exporters.Prometheus(loader, registry=registry)
        for _ in range(2):
            for _ in loader:
                pass
        next_seconds = metric_value(registry, "next_seconds")
        assert next_seconds == loader.stats().next_ms / 1e3 != loader.stats(since=initial).next_ms / 1e3


def test_counters_restart_at_zero_when_workers_are_not_persistent(registry):
    loader = make_loader(persistent_workers=False)
    gl.exporters.Prometheus(loader, registry=registry)
    counts = []
    for _ in range(3):
        for _ in loader:
            counts.append(metric_value(registry, "images_total"))
    assert counts == [4, 8, 12] * 3


@pytest.mark.processes
def test_scrapes_from_another_thread_raise_no_error_and_see_no_counter_decrease(registry):
    loop_ended, counts, errors = threading.Event(), [], []

    def scrape() -> None:
        while not loop_ended.is_set():
            try:
                list(registry.collect())
                counts.append(metric_value(registry, "batches_total"))
            except Exception as error:
                errors.append(error)
                return

    with make_loader(24, num_workers=1) as loader:
        gl.exporters.Prometheus(loader, registry=registry)
        thread = threading.Thread(target=scrape)
        thread.start()
        try:
            batch_count = sum(1 for _ in range(2) for _ in loader)
        finally:
            loop_ended.set()
            thread.join()
        assert registry.get_sample_value("gpuload_worker_busy_ratio", {"loader": "default", "worker": "0"}) > 0
    assert errors == []
    assert counts == sorted(counts) != [], "no scrape, or a counter decreased"
    assert batch_count == 12 == metric_value(registry, "batches_total")


def test_collected_loader_leaves_the_registry_and_frees_its_name(registry):
    loader = make_loader()
    gl.exporters.Prometheus(loader, registry=registry)
    assert metric_value(registry, "epoch") == 0
    del loader
    gc.collect()
    assert metric_value(registry, "epoch") is None
    gl.exporters.Prometheus(next_loader := make_loader(), registry=registry)  # its name is free
    assert metric_value(registry, "epoch") == next_loader.epoch == 0


def test_close_unregisters_the_exporter_and_can_be_repeated(registry):
    loader = make_loader()
    closed_exporter = gl.exporters.Prometheus(loader, registry=registry)
    closed_exporter.close()
    closed_exporter.close()
    assert list(registry.collect()) == []
    next_exporter = gl.exporters.Prometheus(loader, registry=registry)
    closed_exporter.close()  # the second exporter stays
    assert metric_value(registry, "epoch") == 0
    next_exporter.close()


def test_second_loader_of_the_same_name_raises_value_error(registry):
    loader = make_loader()
    gl.exporters.Prometheus(loader, registry=registry)
    with pytest.raises(ValueError, match="a loader named 'default' is already watched in this registry") as caught:
        gl.exporters.Prometheus(make_loader(), registry=registry)
    assert "choose another name=…, or close() the Prometheus exporter of the other" in str(caught.value)


def test_exporter_can_be_created_again_after_register_failed(registry, monkeypatch):
    def refuse(collector):
        raise RuntimeError("not now")

    loader = make_loader()
    with monkeypatch.context() as patch:
        patch.setattr(registry, "register", refuse)
        with pytest.raises(RuntimeError, match="not now"):
            gl.exporters.Prometheus(loader, registry=registry)
    gl.exporters.Prometheus(loader, registry=registry)
    assert metric_value(registry, "epoch") == 0


def test_name_that_is_not_a_string_raises_type_error(registry):
    with pytest.raises(TypeError, match=r"name must be a string, got 3 \(int\)"):
        gl.exporters.Prometheus(make_loader(), name=3, registry=registry)


def test_missing_prometheus_client_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        gl.exporters.Prometheus(make_loader())
    assert str(caught.value) == (
        "gpuload.exporters.Prometheus needs prometheus_client, which is not installed: pip install 'gpuload[metrics]'"
    )


def test_observing_page_lists_every_metric():
    page = (Path(__file__).parents[2] / "docs" / "observing.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `gpuload_")]
    documented = {row[1].strip(" `"): (row[2].strip(), row[3].strip(" .")) for row in rows}
    metrics = {f"{metric.name}_total": metric for metric in COUNTERS} | {metric.name: metric for metric in GAUGES}
    assert documented == {
        name: (", ".join(f"`{label}`" for label in metric.labels), metric.text.strip("."))
        for name, metric in metrics.items()
    }, "edit the table of metrics in docs/observing.md"


def test_default_registry_is_that_of_prometheus_client():
    from prometheus_client import REGISTRY

    exporter = gl.exporters.Prometheus(loader := make_loader(), name="of this test")
    try:
        assert REGISTRY.get_sample_value("gpuload_epoch", {"loader": "of this test"}) == loader.epoch
    finally:
        exporter.close()
    assert REGISTRY.get_sample_value("gpuload_epoch", {"loader": "of this test"}) is None
