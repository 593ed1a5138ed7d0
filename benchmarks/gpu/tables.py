"""The report: text tables, and the aims. Pure functions of the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.gpu.plan import FEEDS, FILES, NETWORKS, PARTS, ROWS, SESSIONS
from benchmarks.running import MARKS, Verdict, format_table, median

Results = Mapping[str, Any]
"""The content of the results file: "machine", "rows" by name, and so on."""

MOST_WAITING = 0.01  # share of ResNet-50's time
LIGHT_RATE = 30_000  # light photographs per second
PACKED_RATE = 13_000  # what ResNet-18 takes from one resident batch on an H200
ARRAY_SIDE = 256
DALI, TORCH, LIGHT = ("dali_mixed", "dali_cpu"), ("torch_pillow", "torch_device"), ("light_workers", "light_device")
ABOUT_LOADERS = """\
alone: nothing is done with the batches; ratio: gpuload's fastest rate over the row's; of the decoder: the rate over
  that of the CPU's decoder alone on all cores; CPU ms: of the main thread for a next(), median; MB: device memory,
  networks included: torch's MB is the peak of its allocator, all MB is everything in use at the row's end
feeding: a training step in bfloat16; of one batch: the rate over that of the same network on one resident batch;
  waiting: the share of the device's time between the end of a step and the beginning of the next, including what peers
  do to images on the same stream; idle: the same in ms per step; next(): ms on the host, median"""
ABOUT_SESSIONS = """\
workers: batches discarded; alone: next() only; device, host: next(), then the device or the host is busy; medians of
  the windows; µs, faults and switches: of all workers, per image; busy, idle: shares of the workers' time; steal: of
  all CPUs; main: CPUs that the main process uses; by workers: the share of batches that workers planned; next(): ms"""


def report(results: Results) -> str:
    """Format all tables, the reasons for missing measurements, and the aims."""
    recipe, photos, machine, rows = results["recipe"], results["photos"], results["machine"], results["rows"]
    sizes = "; ".join(f"{FILES[kind]}: {mean_kb:.0f} KB" for kind, mean_kb in photos["mean_kb"].items())
    lines = [
        f"{machine['device']}; {machine['cpu']}, {machine['cpus']} CPUs",
        f"{photos['source']}: {photos['files']:,} files in the page cache",
        sizes,
        f"crop to {recipe['size']}, flip, ColorJitter, normalise; batch {recipe['batch_size']} unless the row says "
        f"otherwise, {recipe['dtype']}{', channels last' if recipe['channels_last'] else ''}",
        ", ".join(f"{name} {version}" for name, version in results["versions"].items()),
    ]
    if results["simulated"]:
        lines.append("SIMULATED on the CPU: the figures mean nothing; this only shows whether each row runs")
    tables = []
    if sessions := [name for name in SESSIONS if name in rows]:
        lines.append(ABOUT_SESSIONS)
        tables += [_session(rows[name], ROWS[name]) for name in sessions]
    if feeds := [name for name in FEEDS if name in rows]:
        lines.append(ABOUT_LOADERS)
        tables += [_alone(results, feeds), *(_feeding(results, feeds, *network) for network in NETWORKS.items())]
    if parts := [name for name in PARTS if name in rows]:
        tables.append(_parts(results, parts))
    aims = [f"{MARKS[aim.met]} {aim.text}" for aim in judge(results)]
    return "\n\n".join(["\n".join(lines), *tables, "\n".join(_notes(results)), "\n".join(aims)]).rstrip()


def device_share(results: Results) -> float:
    """Return the share of images that the GPU should decode while workers decode the others, from the rates of both
    decoders alone; one half if they were not measured."""
    decoder, device = _decoders(results)
    return min(max(round(device / (device + decoder), 2), 0.01), 0.99) if decoder and device else 0.5


def judge(results: Results) -> list[Verdict]:
    """Check each aim all of whose rows are in the results, whether or not they were measured."""
    ours, (decoder, device) = _rate(results, "fused"), _decoders(results)
    both = None if decoder is None or device is None else decoder + device
    fed_packed = median(_row(results, "packed_cuttable").get("resnet18", {}).get("images_per_s"))
    waiting = _waiting(results)
    aims = [
        (("fused", "decoder"), "of the CPU's decoder alone", _over(ours, decoder), 0.85, "{:.0%}"),
        (
            ("fused", *DALI),
            "times DALI's own pipeline, the faster one",
            _over(ours, _fastest(results, DALI)),
            2.0,
            "{:.2f}",
        ),
        (
            ("fused", *TORCH),
            "times DataLoader + torchvision, the faster one",
            _over(ours, _fastest(results, TORCH)),
            4.0,
            "{:.2f}",
        ),
        (("packed_cuttable",), "images/s to ResNet-18, packed and cuttable", fed_packed, PACKED_RATE, "{:,.0f}"),
        # FFCV's published rate with 96 virtual CPUs.
        (
            ("array_file",),
            "arrays of 256×256 a second, to the device",
            _direct(results, "array_file"),
            173_000,
            "{:,.0f}",
        ),
        (
            ("resident",),
            "of the stage alone, a resident CIFAR-10",
            _row(results, "resident").get("share"),
            0.9,
            "{:.0%}",
        ),
        (
            ("device_decode", "device_decoder"),
            "of nvImageCodec alone on the device, decoding there",
            _over(_rate(results, "device_decode"), device),
            0.85,
            "{:.0%}",
        ),
        (
            LIGHT,
            "light photographs a second, decoded by workers or the device, the faster one",
            _fastest(results, LIGHT),
            LIGHT_RATE,
            "{:,.0f}",
        ),
        (
            ("both_decode", "decoder", "device_decoder"),
            "of the sum of both decoders alone, decoding with both",
            _over(_rate(results, "both_decode"), both),
            0.8,
            "{:.0%}",
        ),
    ]
    verdicts = [
        Verdict(
            f"at least {form.format(minimum)} {what}: {_number(figure, form, 'not measured')}",
            None if figure is None else figure >= minimum,
        )
        for rows, what, figure, minimum, form in aims
        if results["rows"].keys() >= {*rows}
    ]
    if results["rows"].keys() >= {"fused", "device"}:
        text = f"ResNet-50 waits less than {MOST_WAITING:.0%} of the time: {_number(waiting, '{:.2%}', 'not measured')}"
        verdicts.append(Verdict(text, None if waiting is None else waiting < MOST_WAITING))
    return [verdict._replace(met=None) for verdict in verdicts] if results["simulated"] else verdicts


def _session(row: Mapping[str, Any], label: str) -> str:
    """Format the windows of a session: a line for the first epoch, and one for each way with medians of its windows."""
    windows: dict[str, list[Mapping[str, Any]]] = {}
    if "first_epoch" in row:
        windows["first epoch"] = [row["first_epoch"]]
    for window in row.get("windows", []):
        windows.setdefault(window["way"], []).append(window)
    lines = []
    for way, figures in windows.items():

        def of(read: Callable[[Mapping[str, Any]], float | None], form: str, figures: Any = figures) -> str:
            values = [value for window in figures if (value := read(window)) is not None]
            return _number(median(values), form)

        per_image = [of(lambda window, key=key: window["worker_per_image"][key], form) for key, form in PER_IMAGE]
        lines.append(
            [
                way,
                of(lambda window: window["images_per_s"], "{:,.0f}"),
                *per_image,
                *(
                    of(lambda window, key=key: window[key], "{:.0%}")
                    for key in ("workers_busy", "workers_idle", "steal")
                ),
                of(lambda window: window["main_cpu"], "{:.2f}"),
                of(lambda window: _over(window["planned_by_workers"], window["batches"]), "{:.0%}"),
                *(of(lambda window, key=key: window.get(f"next_{key}_ms"), "{:.2f}") for key in NEXT),
            ]
        )
    about = f"{label}: first batch {_number(row.get('first_batch_s'), '{:.2f} s')}"
    about += f", look-ahead {_number(row.get('first_epoch', {}).get('look_ahead'))} batches"
    headings = ["way", "images/s", "user µs", "system µs", "faults", "taken off", "busy", "idle", "steal", "main"]
    return format_table([*headings, "by workers", "next() mean", "median", "p95", "CPU mean"], lines, about)


# Figures of the workers per image, with their formats.
PER_IMAGE = (
    ("user_us", "{:,.0f}"),
    ("system_us", "{:,.0f}"),
    ("minor_faults", "{:.1f}"),
    ("involuntary_switches", "{:.2f}"),
)
NEXT = ("mean", "median", "p95", "cpu_mean")


def _alone(results: Results, names: Sequence[str]) -> str:
    best = _fastest(results, [name for name in names if FEEDS[name].is_gpuload])
    decoder = _direct(results, "decoder")
    rows = []
    for name in names:
        feed, row = FEEDS[name], _row(results, name)
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


def _feeding(results: Results, names: Sequence[str], network: str, label: str) -> str:
    resident = _row(results, "device").get(network, {})
    rates = {f"{label}, one resident batch": resident} if resident else {}
    rates |= {FEEDS[name].label: _row(results, name).get(network, {}) for name in names if FEEDS[name].feeds}
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


def _parts(results: Results, names: Sequence[str]) -> str:
    """Format gpuload's parts next to their upper bounds."""
    decoder, device, resident = (_row(results, name) for name in ("decoder", "device", "resident"))
    images, gb = "{:,.0f} images/s", "{:.2f} GB/s"

    def gb_s(name: str, side: int) -> float | None:
        rate = _direct(results, name)
        return None if rate is None else rate * 3 * side**2 / 1e9

    alone, upload = f"the decoder alone, {decoder.get('decoder', 'not measured')}", device.get("upload_gb_s")
    parts = {
        "workers": (_direct(results, "workers"), images, alone, _direct(results, "decoder")),
        "arrays": (gb_s("arrays", results["recipe"]["size"]), gb, "a page-locked copy", upload),
        "array_file": (gb_s("array_file", ARRAY_SIDE), gb, "a page-locked copy", upload),
        "resident": (_direct(results, "resident"), images, "its stage alone", median(resident.get("stage"))),
    }
    rows = [
        [PARTS[name], _number(reached, form), ceiling, _number(most, form), _number(_over(reached, most), "{:.0%}")]
        for name, (reached, form, ceiling, most) in parts.items()
        if name in names
    ]
    return format_table(["parts", "reached", "ceiling", "of it", "share"], rows)


def _notes(results: Results) -> list[str]:
    """List missing rows, failures, fallbacks to torch, and packages that are not installed."""
    lines = []
    for name, row in results["rows"].items():
        if row.get("missing"):
            lines.append(f"– not measured: {ROWS[name]}: {row['missing']}")
        if row.get("failed"):
            lines.append(f"– FAILED: {ROWS[name]}: {row['failed']}")
        if row.get("falls_back"):
            lines.append(f"* {ROWS[name]}: torch in its place: {', '.join(row['falls_back'])}")
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
