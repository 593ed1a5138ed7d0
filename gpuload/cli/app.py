"""The commands and their options. Each is done by its own module, imported when it is run: --help needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

__all__ = ["app"]

app = typer.Typer(name="gpuload", no_args_is_help=True, help="The image data loader for GPU training.")

# Arguments that several commands have.
KINDS = (
    "A folder of class folders or of images, a packed set, or a store: 'shards-*.tar', '*.parquet', an LMDB, .h5, "
    ".npy, a .csv of paths."
)
Data = Annotated[str, typer.Argument(metavar="DATA", help=KINDS)]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or xpu. Default: a GPU if there is one.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Images in a batch.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often gpuload and the DataLoader take turns.")]
Json = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write all figures there. '-' is stdout; the rest goes to stderr."),
]
Fields = Annotated[str | None, typer.Option(help="Of tar shards: 'jpg,cls'. Default: all.")]
Image = Annotated[str | None, typer.Option(help="Of a store: the column, or the pattern of keys, of images.")]
Target = Annotated[str | None, typer.Option(help="Of a store: that of labels; '' for none.")]
Recipe = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:NAME",
        help="Your transforms: a list of them, or a Chain, in a Python file. Default: a random crop to 224×224, a "
        "flip, ImageNet's mean.",
    ),
]


def command(done_by: str, *examples: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function that declares its options and whose docstring is its help. It is done by a function,
    ``module.function`` of `gpuload.cli`, that takes these options and returns the exit status."""
    module, _, function = done_by.partition(".")

    def register(declaration: Callable[..., None]) -> Callable[..., None]:
        @wraps(declaration)
        def run(**options: Any) -> None:
            raise typer.Exit(getattr(import_module(f"gpuload.cli.{module}"), function)(**options))

        return app.command(epilog="\n\n".join(["Examples:", *examples]))(run)

    return register


def _version(wanted: bool) -> None:
    if wanted:
        from gpuload import __version__

        typer.echo(f"gpuload {__version__}")
        raise typer.Exit


def _check_pixels(pixels: str) -> str:
    if pixels != "all" and not pixels.isdecimal():
        raise typer.BadParameter(f"expected a number of images, or 'all', got {pixels!r}")
    return pixels


def _check_bytes(text: str) -> str:
    from gpuload.cli.pack import bytes_of

    try:
        bytes_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@command("doctor.run", "gpuload doctor", "gpuload doctor --json doctor.json")
def doctor(as_json: Json = None) -> None:
    """Say what works on this machine, what does not, and how to fix it.

    It looks at processors, memory, limits, the driver, torch and the GPUs.

    It really tries each decoder, a worker, and what else is installed, in processes of their own.

    Exit status: 0 if all that is needed works; 1 if something is broken.
    """


@command("demo.run", "gpuload demo", "gpuload demo --data my/photos --workers 4")
def demo(
    data: Annotated[
        str | None,
        typer.Option(help="Your own images, as root/class/*.jpg or flat. Default: scikit-image's photographs, varied."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the photographs and the page about them go.")] = Path("demo-out"),
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Worker processes of each. Default: the CPUs of this process, up to 8."),
    ] = None,
    batch_size: BatchSize = 32,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of a turn.")] = 3.0,
    rounds: Rounds = 2,
    device: Device = None,
    images: Annotated[int, typer.Option(min=8, help="How many photographs are made (without --data).")] = 500,
) -> None:
    """Load real photographs with gpuload and with torch's DataLoader, by turns, and write a page about them.

    Exit status: 0; 1 if the data or the device cannot be used.
    """


@command(
    "bench.run",
    "gpuload bench imagenet/train",
    "gpuload bench 'shards/train-*.tar' --recipe recipe.py:train --batch-size 256",
    "gpuload bench images --workers 8 --json bench.json",
)
def bench(
    data: Data,
    recipe: Recipe = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Measure with this many workers alone. Default: with several numbers.")
    ] = None,
    batch_size: BatchSize = 64,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each measurement.")] = 3.0,
    rounds: Rounds = 3,
    device: Device = None,
    fields: Fields = None,
    image: Image = None,
    target: Target = None,
    as_json: Json = None,
) -> None:
    """Measure how fast your data load, next to torch's DataLoader; name the bottleneck, recommend a setting.

    Both are measured with several numbers of workers, then the best of both take turns.

    They do the same work: a random crop to 224×224, a flip, ImageNet's mean.

    Files come from the disk or from the kernel's cache, as in an epoch that begins now.

    Images that cannot be loaded are left out on both sides.

    Exit status: 0; 1 if the data or an option cannot be used.
    """


app.command(
    "compare",
    help="The same as bench, by its former name.\n\nExit status: 0; 1 if the data or an option cannot be used.",
    epilog="Examples:\n\ngpuload compare images",
)(bench)


@command(
    "inspect.run",
    "gpuload inspect imagenet/train",
    "gpuload inspect train val --recipe recipe.py:train --html report.html",
    "gpuload inspect 'shards/train-*.tar' --fields jpg,cls --limit 50000 --json -",
)
def inspect(
    data: Annotated[
        list[str],
        typer.Argument(metavar="DATA", help=f"{KINDS} Of several, images that are in more than one are found."),
    ],
    recipe: Recipe = None,
    html: Annotated[str, typer.Option(metavar="FILE", help="The page that is written; '' for none.")] = "inspect.html",
    as_json: Json = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Look at this many files of each DATA, drawn at random. Default: all.")
    ] = None,
    pixels: Annotated[
        str,
        typer.Option(
            metavar="N", callback=_check_pixels, help="How many images are decoded, drawn at random; or 'all'."
        ),
    ] = "4000",
    images: Annotated[int, typer.Option(min=0, max=100, help="Images on the contact sheet.")] = 8,
    draws: Annotated[int, typer.Option(min=1, max=50, help="Draws of the recipe for each of these.")] = 6,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn.")] = 0,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Worker processes. Default: one for each CPU of this process.")
    ] = None,
    extensions: Annotated[
        str | None, typer.Option(help="Of a folder: the endings of images, as in '.jpg,.avif'.")
    ] = None,
    fields: Fields = None,
    image: Image = None,
    target: Target = None,
) -> None:
    """Look at data sets, and write one HTML page about them.

    It has sizes, formats, classes, damaged files, duplicates, mean and std, and images before and after augmentation.

    Exit status: 0; 3 if there are damaged images, or the same image in several data sets; 1 if it cannot be done.
    """


@command(
    "pack.run_pack",
    "gpuload pack imagenet/train packed --to tar",
    "gpuload pack imagenet/train packed --to array --short-side 256",
    "gpuload pack 'parts/*.parquet' packed --to lmdb --image jpeg --target label",
)
def pack(
    data: Data,
    folder: Annotated[str, typer.Argument(help="Where the set goes: a new folder, or one where this was begun.")],
    to: Annotated[str, typer.Option(help="tar, lmdb, parquet or array.")],
    short_side: Annotated[
        int | None, typer.Option(min=1, help="Resize larger images so that their shorter side has as many pixels.")
    ] = None,
    quality: Annotated[int, typer.Option(min=1, max=100, help="Of JPEGs that are resized.")] = 90,
    cuttable: Annotated[
        bool, typer.Option("--cuttable", help="JPEGs with an index: crops are cut before they are decoded.")
    ] = False,
    shard_bytes: Annotated[str, typer.Option(callback=_check_bytes, help="How large a shard may be, about.")] = "256MB",
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, help="Processes. Default: one for each CPU of this process, up to 16; none for a single shard."
        ),
    ] = None,
    on_error: Annotated[
        Literal["raise", "skip"],
        typer.Option(help="What to do with damaged images: name them and stop, or leave them out."),
    ] = "raise",
    check: Annotated[bool, typer.Option("--check", help="Decode every image, to find all damage.")] = False,
    exif: Annotated[bool, typer.Option("--exif", help="With --to array: turn images upright.")] = False,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on a Ray cluster; 'auto' is the one that this machine belongs to."),
    ] = None,
    fields: Fields = None,
    image: Image = None,
    target: Target = None,
    classes: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Of class folders or a .csv: another data set, as the train split or its packed set, whose classes "
            "number the labels.",
        ),
    ] = None,
) -> None:
    """Write a data set to few large files, for fast training. Killed, it goes on when it is run again.

    Exit status: 0; 1 if samples are damaged, or it cannot be done; 130 if it was stopped with ctrl-C.
    """


@command("pack.run_verify", "gpuload verify packed")
def verify(folder: Annotated[str, typer.Argument(help="A packed set.")]) -> None:
    """Say what is damaged, missing or too much in a packed set, by the hashes in its manifest.

    Exit status: 0 if all is as it was packed; 1 if not.
    """


@command("pack.run_index", "gpuload index packed", "gpuload index 'shards/train-{000..099}.tar' --again")
def index(
    shards: Annotated[
        list[str],
        typer.Argument(help="Folders of tar archives, or archives; 'train-{000..099}.tar' stands for several."),
    ],
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes. Default: one for each CPU of this process, up to 16; none for a single shard."
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Make fresh indexes again, too.")] = False,
) -> None:
    """Make the indexes that gpuload.TarShards reads, so that no training has to wait for them.

    Exit status: 0; 1 if a shard is missing or damaged.
    """
