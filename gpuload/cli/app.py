"""The commands and their options. Each command's module is imported when the command runs, so --help needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

__all__ = ["app"]

app = typer.Typer(name="gpuload", no_args_is_help=True, help="The image data loader for GPU training.")

# Arguments that several commands share.
KINDS = (
    "A folder of class folders or of images, a packed set, or a store: 'shards-*.tar', '*.parquet', an LMDB, .h5, "
    ".npy, a .csv of paths."
)
Data = Annotated[str, typer.Argument(metavar="DATA", help=KINDS)]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or xpu. Default: a GPU if there is one.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Images per batch.")]
Rounds = Annotated[
    int, typer.Option(min=1, help="Number of rounds. Each round measures gpuload and the DataLoader once.")
]
Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the results to a JSON file. '-' is stdout; other output then goes to stderr.",
    ),
]
Fields = Annotated[
    str | None, typer.Option(help="For tar shards: the fields to read, such as 'jpg,cls'. Default: all.")
]
Image = Annotated[str | None, typer.Option(help="For a store: the column or key pattern of the images.")]
Target = Annotated[str | None, typer.Option(help="For a store: the column or key pattern of the labels; '' for none.")]
Recipe = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:NAME",
        help="Your transforms: a list or a Chain in a Python file. Default: a random crop to 224×224, a flip, and "
        "normalization with ImageNet's mean and std.",
    ),
]


def command(implementation: str, *examples: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command. The decorated function declares the options, and its docstring is the help text.
    `implementation` names the ``module.function`` of `gpuload.cli` that takes these options and returns the exit
    status."""
    module, _, function = implementation.partition(".")

    def register(declaration: Callable[..., None]) -> Callable[..., None]:
        @wraps(declaration)
        def run(**options: Any) -> None:
            raise typer.Exit(getattr(import_module(f"gpuload.cli.{module}"), function)(**options))

        return app.command(epilog="\n\n".join(["Examples:", *examples]))(run)

    return register


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from gpuload import __version__

        typer.echo(f"gpuload {__version__}")
        raise typer.Exit


def _check_pixels(pixels: str) -> str:
    if pixels != "all" and not pixels.isdecimal():
        raise typer.BadParameter(f"expected a number of images, or 'all', got {pixels!r}")
    return pixels


def _check_bytes(text: str) -> str:
    from gpuload.cli.pack import parse_bytes

    try:
        parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@command("doctor.run", "gpuload doctor", "gpuload doctor --json doctor.json")
def doctor(as_json: Json = None) -> None:
    """Report what works on this machine, what does not, and how to fix it.

    Checks processors, memory, limits, the driver, torch and the GPUs.

    Also tests a worker, each decoder and the optional packages, in separate processes.

    Exit status: 0 if everything required works; 1 if something is broken.
    """


@command("demo.run", "gpuload demo", "gpuload demo --data my/photos --workers 4")
def demo(
    data: Annotated[
        str | None,
        typer.Option(
            help="Your own images, in class folders (root/class/*.jpg) or in one folder. Default: variations of "
            "scikit-image's photos."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder for the photographs and the page about them.")] = Path(
        "demo-out"
    ),
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Worker processes per loader. Default: one per available CPU, up to 8."),
    ] = None,
    batch_size: BatchSize = 32,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds per measurement.")] = 3.0,
    rounds: Rounds = 2,
    device: Device = None,
    images: Annotated[int, typer.Option(min=8, help="Number of photographs to create without --data.")] = 500,
) -> None:
    """Load real photographs with gpuload and torch's DataLoader, alternating, and write a page about them.

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
        int | None,
        typer.Option(min=0, help="Measure only with this number of workers. Default: try several numbers."),
    ] = None,
    batch_size: BatchSize = 64,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds per measurement.")] = 3.0,
    rounds: Rounds = 3,
    device: Device = None,
    fields: Fields = None,
    image: Image = None,
    target: Target = None,
    as_json: Json = None,
) -> None:
    """Compare how fast gpuload and torch's DataLoader load your data, find the bottleneck, and recommend settings.

    Both loaders are measured with several numbers of workers, then their best settings head to head.

    They do the same work: a random crop to 224×224, a flip, and normalization with ImageNet's mean and std.

    Caches are not cleared: files come from the disk or the kernel's page cache, as in an epoch started now.

    Images that cannot be loaded are skipped in both loaders.

    Exit status: 0; 1 if the data or an option cannot be used.
    """


@command(
    "inspect.run",
    "gpuload inspect imagenet/train",
    "gpuload inspect train val --recipe recipe.py:train --html report.html",
    "gpuload inspect 'shards/train-*.tar' --fields jpg,cls --limit 50000 --json -",
)
def inspect(
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA", help=f"{KINDS} If there are several, images that are in more than one are reported."
        ),
    ],
    recipe: Recipe = None,
    html: Annotated[str, typer.Option(metavar="FILE", help="The page to write; '' for none.")] = "inspect.html",
    as_json: Json = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Check this many files of each DATA, drawn at random. Default: all.")
    ] = None,
    pixels: Annotated[
        str,
        typer.Option(
            metavar="N", callback=_check_pixels, help="The number of images to decode, drawn at random; or 'all'."
        ),
    ] = "4000",
    images: Annotated[int, typer.Option(min=0, max=100, help="Images on the contact sheet.")] = 8,
    draws: Annotated[
        int, typer.Option(min=1, max=50, help="Random outputs of the recipe per image on the contact sheet.")
    ] = 6,
    seed: Annotated[int, typer.Option(min=0, help="The seed for everything that is drawn at random.")] = 0,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Worker processes. Default: one per available CPU.")
    ] = None,
    extensions: Annotated[
        str | None, typer.Option(help="For a folder: the file name extensions of images, such as '.jpg,.avif'.")
    ] = None,
    fields: Fields = None,
    image: Image = None,
    target: Target = None,
) -> None:
    """Inspect datasets, and write an HTML page about them.

    It shows sizes, formats, classes, damage, duplicates, mean and std, and images before and after augmentation.

    Exit status: 0; 3 if there are damaged images, or the same image in several datasets; 1 if the inspection failed.
    """


@command(
    "pack.run_pack",
    "gpuload pack imagenet/train packed --to tar",
    "gpuload pack imagenet/train packed --to array --short-side 256",
    "gpuload pack 'parts/*.parquet' packed --to lmdb --image jpeg --target label",
)
def pack(
    data: Data,
    folder: Annotated[str, typer.Argument(help="The packed set: a new folder, or the folder of an unfinished run.")],
    to: Annotated[str, typer.Option(help="The format: tar, lmdb, parquet or array.")],
    short_side: Annotated[
        int | None, typer.Option(min=1, help="Resize larger images so that the shorter side has this many pixels.")
    ] = None,
    quality: Annotated[int, typer.Option(min=1, max=100, help="The quality of resized JPEGs.")] = 90,
    cuttable: Annotated[
        bool, typer.Option("--cuttable", help="Write JPEGs with an index, so that crops are cut out before decoding.")
    ] = False,
    shard_bytes: Annotated[
        str, typer.Option(callback=_check_bytes, help="The approximate maximum size of a shard.")
    ] = "256MB",
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Worker processes. Default: one per available CPU, up to 16; none for a single shard.",
        ),
    ] = None,
    on_error: Annotated[
        Literal["raise", "skip"],
        typer.Option(help="What to do with damaged images: report them and stop, or skip them."),
    ] = "raise",
    check: Annotated[bool, typer.Option("--check", help="Decode every image, to find all damage.")] = False,
    exif: Annotated[bool, typer.Option("--exif", help="With --to array: turn images upright.")] = False,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on a Ray cluster; 'auto' means the cluster on this machine."),
    ] = None,
    fields: Fields = None,
    image: Image = None,
    target: Target = None,
    classes: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="For class folders or a .csv: another dataset whose classes define the labels, such as the train "
            "split or its packed set.",
        ),
    ] = None,
) -> None:
    """Write a dataset to a few large files, for fast training. To continue after an interruption, run it again.

    Exit status: 0; 1 if samples are damaged, or packing failed; 130 if it was stopped with ctrl-C.
    """


@command("pack.run_verify", "gpuload verify packed")
def verify(folder: Annotated[str, typer.Argument(help="A packed set.")]) -> None:
    """Check a packed set against the hashes in its manifest: report damaged, missing and extra files.

    Exit status: 0 if the set is intact; 1 if not.
    """


@command("pack.run_index", "gpuload index packed", "gpuload index 'shards/train-{000..099}.tar' --again")
def index(
    shards: Annotated[
        list[str],
        typer.Argument(help="Folders of tar archives, or archives; 'train-{000..099}.tar' names 100 archives."),
    ],
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Worker processes. Default: one per available CPU, up to 16; none for a single shard.",
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also rebuild indexes that are up to date.")] = False,
) -> None:
    """Build the indexes that gpuload.TarShards reads, so that training does not wait for them.

    Exit status: 0; 1 if a shard is missing or damaged.
    """
