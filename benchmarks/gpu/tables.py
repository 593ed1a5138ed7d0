"""The report: text tables, and the aims. Pure functions of the results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.plan import CEILINGS, FEEDS, LIGHT, NETWORKS, PARTS
from benchmarks.running import MARKS, Verdict, format_table, median

Results = Mapping[str, Any]
"""The content of the results file: "machine", "rows" by name, and so on."""

MOST_WAITING = 0.01  # share of ResNet-50's time
LIGHT_RATE = 30_000  # light photographs per second
ARRAY_SIDE = 256
DALI, TORCH = ("dali_mixed", "dali_cpu"), ("torch_pillow", "torch_device")
ABOUT = """\
alone: nothing is done with the batches; ratio: gpuload's fastest rate over the row's; of the decoder: the rate over
  that of the CPU's decoder alone on all cores; CPU ms: of the main thread for a next(), median; MB: device memory,
  networks included: torch's MB is the peak of its allocator, all MB is everything in use at the row's end
feeding: a training step in bfloat16; of one batch: the rate over that of the same network on one resident batch;
  waiting: the share of the device's time between the end of a step and the beginning of the next, including what peers
  do to images on the same stream; idle: the same in ms per step; next(): ms on the host, median"""


def report(results: Results) -> str:
    """Format all tables, the reasons for missing measurements, and the aims."""
    recipe, photos, machine = results["recipe"], results["photos"], results["machine"]
    lines = [
        f"{machine['device']}; {machine['cpu']}, {machine['cpus']} CPUs",
        f"{photos['source']}: {photos['files']:,} files of {photos['mean_kb']:.0f} KB, in the page cache",
        f"crop to {recipe['size']}, flip, ColorJitter, normalise; batch {recipe['batch_size']}, {recipe['dtype']}"
        f"{', channels last' if recipe['channels_last'] else ''}",
        ", ".join(f"{name} {version}" for name, version in results["versions"].items()),
        ABOUT,
    ]
    if results["simulated"]:
        lines.append("SIMULATED on the CPU: the figures mean nothing; this only shows whether each row runs")
    tables = [_alone(results), *(_feeding(results, name, label) for name, label in NETWORKS.items()), _parts(results)]
    aims = [f"{MARKS[aim.met]} {aim.text}" for aim in judge(results)]
    return "\n\n".join(["\n".join(lines), *tables, "\n".join(_notes(results)), "\n".join(aims)])


def device_share(results: Results) -> float:
    """Return the share of images that the GPU should decode while workers decode the others, from the rates of both
    decoders alone; one half if they were not measured."""
    decoder, device = _decoders(results)
    return min(max(round(device / (device + decoder), 2), 0.01), 0.99) if decoder and device else 0.5


def judge(results: Results) -> list[Verdict]:
    """Check each aim, whether or not it was measured."""
    ours, (decoder, device) = _rate(results, "fused"), _decoders(results)
    waiting, both = _waiting(results), None if decoder is None or device is None else decoder + device
    stage_rates = _row(results, "stage").get("rates", {})
    kernels = max((statistics.median(rates) for way, rates in stage_rates.items() if "kernels" in way), default=None)
    aims = [
        ("of the CPU's decoder alone", _over(ours, decoder), 0.85, "{:.0%}"),
        ("times DALI's own pipeline, the faster one", _over(ours, _fastest(results, DALI)), 2.0, "{:.2f}"),
        ("times DataLoader + torchvision, the faster one", _over(ours, _fastest(results, TORCH)), 4.0, "{:.2f}"),
        ("images/s, the fused kernels alone", kernels, 3e6, "{:,.0f}"),
        # FFCV's published rate with 96 virtual CPUs.
        ("arrays of 256×256 a second, to the device", _direct(results, "array_file"), 173_000, "{:,.0f}"),
        ("of the stage alone, a resident CIFAR-10", _row(results, "resident").get("share"), 0.9, "{:.0%}"),
        (
            "of nvImageCodec alone on the device, decoding there",
            _over(_rate(results, "device_decode"), device),
            0.85,
            "{:.0%}",
        ),
        (
            "light photographs a second, decoded by workers or the device, the faster one",
            _fastest(results, list(LIGHT)),
            LIGHT_RATE,
            "{:,.0f}",
        ),
        (
            "of the sum of both decoders alone, decoding with both",
            _over(_rate(results, "both_decode"), both),
            0.8,
            "{:.0%}",
        ),
    ]
    verdicts = [
        Verdict(
            f"at least {form.format(least)} {what}: {_number(figure, form, 'not measured')}",
            None if figure is None else figure >= least,
        )
        for what, figure, least, form in aims
    ]
    text = f"ResNet-50 waits less than {MOST_WAITING:.0%} of the time: {_number(waiting, '{:.2%}', 'not measured')}"
    verdicts.insert(3, Verdict(text, None if waiting is None else waiting < MOST_WAITING))
    return [verdict._replace(met=None) for verdict in verdicts] if results["simulated"] else verdicts


def _alone(results: Results) -> str:
    best = _fastest(results, [name for name, feed in FEEDS.items() if feed.is_gpuload])
    decoder = _direct(results, "decoder")
    rows = []
    for name, feed in FEEDS.items():
        row = _row(results, name)
        alone = row.get("alone", {})
        rates = alone.get("images_per_s", [])
        rate = median(rates)
        rows.append(
            [
                feed.label + ("*" if row.get("falls_back") else ""),
                _number(rate),
                f"{min(rates):,.0f} … {max(rates):,.0f}" if rates else "",
                _number(_over(best, rate), "{:.2f}"),
                _number(_over(rate, decoder), "{:.0%}"),
                _number(row.get("first_batch_s"), "{:.2f}"),
                _number(median(alone.get("next_cpu_ms")), "{:.2f}"),
                _number(row.get("peak_mb")),
                _number(row.get("device_mb")),
            ]
        )
    headings = ["alone", "images/s", "least … greatest", "ratio", "of the decoder", "first batch, s", "CPU ms"]
    return format_table([*headings, "torch's MB", "all MB"], rows)


def _feeding(results: Results, network: str, label: str) -> str:
    resident = _row(results, "device").get(network, {})
    rates = {f"{label}, one resident batch": resident}
    rates |= {feed.label: _row(results, name).get(network, {}) for name, feed in FEEDS.items()}
    rows = [
        [
            name,
            _number(median(row.get("images_per_s"))),
            _number(_over(median(row.get("images_per_s")), median(resident.get("images_per_s"))), "{:.1%}"),
            _number(median(row.get("waiting")), "{:.2%}"),
            _number(median(row.get("idle_ms")), "{:.3f}"),
            _number(median(row.get("next_ms")), "{:.2f}"),
        ]
        for name, row in rates.items()
    ]
    return format_table([f"feeding {label}", "images/s", "of one batch", "waiting", "idle", "next()"], rows)


def _parts(results: Results) -> str:
    """Format gpuload's parts next to their upper bounds."""
    decoder, device, resident = (_row(results, name) for name in ("decoder", "device", "resident"))
    rates, copy = _row(results, "stage").get("rates", {}), _row(results, "stage").get("copy")
    way = max(rates, key=lambda name: statistics.median(rates[name]), default=PARTS["stage"])
    images, gb = "{:,.0f} images/s", "{:.2f} GB/s"

    def gb_s(name: str, side: int) -> float | None:
        rate = _direct(results, name)
        return None if rate is None else rate * 3 * side**2 / 1e9

    alone, upload = f"the decoder alone, {decoder.get('decoder', 'not measured')}", device.get("upload_gb_s")
    light = f"their aim, files of {_number(results['photos'].get('light_kb'))} KB"
    on_device = f"a copy on the device, {_number(device.get('copy_gb_s'))} GB/s"
    parts = [
        (PARTS["workers"], _direct(results, "workers"), images, alone, _direct(results, "decoder")),
        (PARTS["arrays"], gb_s("arrays", results["recipe"]["size"]), gb, "a page-locked copy", upload),
        (PARTS["array_file"], gb_s("array_file", ARRAY_SIDE), gb, "a page-locked copy", upload),
        (PARTS["resident"], _direct(results, "resident"), images, "its stage alone", median(resident.get("stage"))),
        *((PARTS[name], _rate(results, name), images, light, LIGHT_RATE) for name in LIGHT),
        (way, median(rates.get(way)), images, on_device, copy),
    ]
    rows = [
        [part, _number(reached, form), ceiling, _number(most, form), _number(_over(reached, most), "{:.0%}")]
        for part, reached, form, ceiling, most in parts
    ]
    return format_table(["parts", "reached", "ceiling", "of it", "share"], rows)


def _notes(results: Results) -> list[str]:
    """List missing rows, failures, fallbacks to torch, and packages that are not installed."""
    labels = {**CEILINGS, **{name: feed.label for name, feed in FEEDS.items()}, **PARTS}
    lines = []
    for name, row in results["rows"].items():
        if row.get("missing"):
            lines.append(f"– not measured: {labels[name]}: {row['missing']}")
        if row.get("failed"):
            lines.append(f"– FAILED: {labels[name]}: {row['failed']}")
        if row.get("falls_back"):
            lines.append(f"* {labels[name]}: torch in its place: {', '.join(row['falls_back'])}")
        lines += [f"– not measured: {way}: {why}" for way, why in row.get("ways_missing", {}).items()]
    lines += [f"– not installed: {package}; skipped: {skipped}" for package, skipped in results["absent"].items()]
    return lines or ["all rows were measured"]


def _row(results: Results, name: str) -> dict[str, Any]:
    return results["rows"].get(name, {})


def _direct(results: Results, name: str) -> float | None:
    """Return the rate of a row that measures a single rate."""
    return median(_row(results, name).get("images_per_s"))


def _decoders(results: Results) -> tuple[float | None, float | None]:
    return _direct(results, "decoder"), _direct(results, "device_decoder")


def _rate(results: Results, name: str) -> float | None:
    """Return the rate of a loader alone."""
    return median(_row(results, name).get("alone", {}).get("images_per_s"))


def _fastest(results: Results, names: Sequence[str]) -> float | None:
    return max((rate for name in names if (rate := _rate(results, name)) is not None), default=None)


def _waiting(results: Results) -> float | None:
    """Return the share of time that ResNet-50 waits: the larger of its idle time between steps and the loss of rate
    against one resident batch, which is larger if it waits within a step."""
    fed, resident = (_row(results, name).get("resnet50", {}) for name in ("fused", "device"))
    relative_rate = _over(median(fed.get("images_per_s")), median(resident.get("images_per_s")))
    shares = [median(fed.get("waiting")), None if relative_rate is None else 1 - relative_rate]
    return max((share for share in shares if share is not None), default=None)


def _over(value: float | None, other: float | None) -> float | None:
    return None if value is None or not other else value / other


def _number(value: float | None, form: str = "{:,.0f}", without: str = "–") -> str:
    return without if value is None else form.format(value)
