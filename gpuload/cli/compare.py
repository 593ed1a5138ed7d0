"""``gpuload compare``: gpuload beside torch's DataLoader, over the user's own data, in alternating rounds.

Both do the same work with as many workers, and give the batches to the same device. Each round begins with batches that
do not count: what was made ahead while the other one ran.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gpuload.cli.arguments import Data, Device, Fields, Image, JsonFile, Plot, Target, Workers

if TYPE_CHECKING:
    from rich.console import Console

    from gpuload.cli.measure import Round

__all__ = ["EXAMPLES", "Compared", "compare", "judged", "run"]

EXAMPLES: Final = (
    "gpuload compare imagenet/train",
    "gpuload compare 'shards/train-*.tar' --workers 8 --rounds 5",
    "gpuload compare images --json compare.json --plot compare.png",
)
PREFETCH: Final = 2  # batches ahead: gpuload's in total, DataLoader's for each worker; the defaults of both


def compare(
    data: Data,
    workers: Workers = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images in a batch.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of a round, for each of the two.")] = 5.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often the two take turns.")] = 3,
    device: Device = None,
    fields: Fields = None,
    image: Image = None,
    target: Target = None,
    as_json: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Measure gpuload beside torch's DataLoader, over your own data.

    Both decode, crop at random to 224×224, flip and normalise, with as many workers.

    The DataLoader decodes with simplejpeg, and resizes with torch: the fastest way that it has.

    Figures are medians of the rounds. Exit status: 0; 1 if the data or an option cannot be used.
    """
    given = {"fields": fields, "image": image, "target": target}
    options = {"workers": workers, "batch_size": batch_size, "seconds": seconds, "rounds": rounds, "device": device}
    raise typer.Exit(run(data, given=given, as_json=as_json, plot=plot, **options))


@dataclass(frozen=True)
class Compared:
    """Medians of the rounds of both. A ratio is the median of the ratios within the rounds: above 1, gpuload is faster,
    or takes less."""

    images_per_s: float
    peer_images_per_s: float
    rate_ratio: float
    cpu_s_per_1000: float
    peer_cpu_s_per_1000: float
    cpu_ratio: float


def judged(mine: list[Round], theirs: list[Round]) -> Compared:
    """The medians of rounds, which were measured by turns."""
    pairs = list(zip(mine, theirs, strict=True))
    return Compared(
        images_per_s=statistics.median(one.images_per_s for one in mine),
        peer_images_per_s=statistics.median(one.images_per_s for one in theirs),
        rate_ratio=statistics.median(a.images_per_s / b.images_per_s for a, b in pairs),
        cpu_s_per_1000=statistics.median(one.cpu_s_per_1000 for one in mine),
        peer_cpu_s_per_1000=statistics.median(one.cpu_s_per_1000 for one in theirs),
        cpu_ratio=statistics.median(b.cpu_s_per_1000 / a.cpu_s_per_1000 if a.cpu_s_per_1000 else 1 for a, b in pairs),
    )


def run(
    data: str,
    *,
    given: dict[str, str | None],
    workers: int | None,
    batch_size: int,
    seconds: float,
    rounds: int,
    device: str | None,
    as_json: str | None = None,
    plot: str | None = None,
    console: Console | None = None,
) -> int:
    """Measure both and tell. Returns the exit status."""
    import torch

    import gpuload as gl
    from gpuload.cli.console import count_of, fail, make_console, progress, say
    from gpuload.cli.measure import forever, one_round
    from gpuload.cli.output import busy, check_plot, context, device_of, draw_bars, opened, write_json
    from gpuload.cli.recipe import MEAN, SIZE, STD, usual_recipe
    from gpuload.cli.torch_way import Pictures, usual_way
    from gpuload.errors import GpuloadError
    from gpuload.loader.limits import usable_cpus

    console = console or make_console(stderr=as_json == "-")
    try:
        check_plot(plot)
        dataset = opened(data, given)
        place = device_of(device)
        workers = min(8, usable_cpus()) if workers is None else workers
        way = usual_way()
        say(console, f"{dataset!r}")
        say(console, f"on {place}: {count_of(workers, 'worker')} each, {count_of(usable_cpus(), 'CPU')}, batches of "
            f"{batch_size}, torch {torch.__version__}")  # fmt: skip
        say(console, f"The DataLoader decodes with {way.name} ({way.note})\n")
        if remark := busy(os.getloadavg()[0], os.cpu_count() or 1):
            say(console, remark, "yellow")
        options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "num_workers": workers}
        loader = gl.Loader(dataset, transforms=usual_recipe(), device=place, on_error="skip", **options)
        peer = torch.utils.data.DataLoader(
            Pictures(dataset, way.decode, SIZE, MEAN, STD),
            persistent_workers=workers > 0,
            pin_memory=place.type != "cpu",
            **options,
        )
        mine: list[Round] = []
        theirs: list[Round] = []
        with loader, progress(console, "rounds", 2 * rounds) as tell:
            turns = [
                ("gpuload", forever(loader), mine, 1 + PREFETCH),
                (f"DataLoader, {way.name}", forever(peer), theirs, 1 + PREFETCH * max(1, workers)),
            ]
            for _ in range(rounds):
                for name, batches, made, skip in turns:
                    made.append(one_round(batches, seconds, place, skip=skip))
                    tell(len(mine) + len(theirs), note=f"{name}: {made[-1].images_per_s:,.0f} images/s")
            failed = len(loader.errors)
        del turns, peer  # ends its workers
        compared = judged(mine, theirs)
        console.print(_table(compared, way.name))
        if failed:
            say(
                console,
                f"{count_of(failed, 'sample')} cannot be loaded and were left out: see gpuload inspect",
                "yellow",
            )
        say(console, f"gpuload loads {_times(compared.rate_ratio)} the images of DataLoader + {way.name} in a second, "
            f"with {_times(1 / compared.cpu_ratio)} the CPU time for each", "bold")  # fmt: skip
        if as_json is not None:
            write_json(
                as_json,
                {
                    **context(data, dataset, place),
                    "peer": way.name,
                    "peer_note": way.note,
                    "num_workers": workers,
                    "batch_size": batch_size,
                    "seconds": seconds,
                    **asdict(compared),
                    "rounds": [{"gpuload": asdict(a), "peer": asdict(b)} for a, b in zip(mine, theirs, strict=True)],
                },
            )
        if plot is not None:
            names = ("gpuload", f"DataLoader, {way.name}")
            rates = (compared.images_per_s, compared.peer_images_per_s)
            costs = (compared.cpu_s_per_1000, compared.peer_cpu_s_per_1000)
            panels = {"images/s": list(zip(names, rates, strict=True))}
            panels["CPU seconds per 1,000 images"] = list(zip(names, costs, strict=True))
            draw_bars(plot, f"gpuload compare {data}", panels)
    except (GpuloadError, OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        return fail(console, error)
    return 0


def _times(ratio: float) -> str:
    return f"{ratio:.2f} ×"


def _table(compared: Compared, peer: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("median")
    for name in ("gpuload", f"DataLoader, {peer}", "ratio"):
        table.add_column(name, justify="right")
    rates = compared.images_per_s, compared.peer_images_per_s
    costs = compared.cpu_s_per_1000, compared.peer_cpu_s_per_1000
    table.add_row("images/s", *(f"{rate:,.0f}" for rate in rates), f"{compared.rate_ratio:.2f}")
    table.add_row("CPU s per 1,000 images", *(f"{cost:.2f}" for cost in costs), f"{compared.cpu_ratio:.2f}")
    return table
