"""The commands and their options. Each is done by its own module, imported when it is run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from gpuload.cli import compare as comparing
from gpuload.cli import inspect as inspecting
from gpuload.cli.arguments import examples
from gpuload.cli.bench import command as benching
from gpuload.cli.doctor import command as doctoring

__all__ = ["app"]

app = typer.Typer(name="gpuload", no_args_is_help=True, help="The image data loader for GPU training.")


def _version(wanted: bool) -> None:
    if wanted:
        from gpuload import __version__

        typer.echo(f"gpuload {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


# Optional[…]: typer evaluates these annotations at run time.
@app.command(epilog=examples("gpuload demo", "gpuload demo --data my/photos --workers 4 --epochs 5"))
def demo(
    data: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Your own JPEGs, as root/class/*.jpg or flat. Default: scikit-image's photographs, varied."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the photographs and the contact sheet go.")] = Path("demo-out"),
    workers: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="Worker processes, for both loaders. Default: the CPUs of this process, up to 8."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images in a batch.")] = 32,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data, for each loader and for training.")] = 3,
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="cpu, cuda or xpu. Default: a GPU if there is one."),
    ] = None,
    images: Annotated[int, typer.Option(min=8, help="How many photographs are made (without --data).")] = 500,
) -> None:
    """Load real photographs with gpuload and with torch's DataLoader, compare, and train on them.

    Exit status: 0; 1 if the data or the device cannot be used.
    """
    from gpuload.cli.demo import Settings, run

    settings = Settings(
        data=data, out=out, workers=workers, batch_size=batch_size, epochs=epochs, device=device, images=images
    )
    raise typer.Exit(run(settings))


@app.command(epilog=examples("gpuload index 'shards/train-{000..099}.tar'", "gpuload index 'shards/*.tar' --again"))
def index(
    shards: Annotated[
        list[str], typer.Argument(help="Tar archives; 'train-{000..099}.tar' and 'train-*.tar' stand for several.")
    ],
    workers: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Processes. Default: one for each CPU of this process, up to 16."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Make fresh indexes again, too.")] = False,
) -> None:
    """Make the indexes that gpuload.TarShards reads, so that no training has to wait for them.

    Exit status: 0; 1 if a shard is missing or damaged.
    """
    from gpuload.cli.index import run

    raise typer.Exit(run(shards, workers=workers, again=again))


@app.command(
    epilog=examples(
        "gpuload pack imagenet/train packed --to tar",
        "gpuload pack imagenet/train packed --to array --short-side 256",
        "gpuload pack 'parts/*.parquet' packed --to lmdb --image jpeg --target label",
    )
)
def pack(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder of class folders or of images, a packed set, or a store: 'shards-*.tar', '*.parquet', an "
            "LMDB, .h5, .npy, a .csv of paths."
        ),
    ],
    folder: Annotated[str, typer.Argument(help="Where the set goes: a new folder, or one where this was begun.")],
    to: Annotated[str, typer.Option(help="tar, lmdb, parquet or array.")],
    short_side: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Resize larger images so that their shorter side has as many pixels."),
    ] = None,
    quality: Annotated[int, typer.Option(min=1, max=100, help="Of JPEGs that are resized.")] = 90,
    cuttable: Annotated[
        bool, typer.Option("--cuttable", help="JPEGs with an index: crops are cut before they are decoded.")
    ] = False,
    shard_bytes: Annotated[str, typer.Option(help="How large a shard may be, about.")] = "256MB",
    workers: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="Processes. Default: one for each CPU of this process, up to 16."),
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave damaged images out.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Decode every image, to find all damage.")] = False,
    exif: Annotated[bool, typer.Option("--exif", help="With --to array: turn images upright.")] = False,
    ray: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="ADDRESS", help="Run on a Ray cluster; 'auto' is the one that this machine belongs to."),
    ] = None,
    fields: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Of tar shards that are read: 'jpg,cls'. Default: all."),
    ] = None,
    image: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Of a store that is read: the column, or the pattern of keys, of images."),
    ] = None,
    target: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Of a store that is read: that of labels; '' for none."),
    ] = None,
    classes: Annotated[
        Optional[str],  # noqa: UP045
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
    from gpuload.cli.pack import run_pack, size_of

    try:
        nbytes = size_of(shard_bytes)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--shard-bytes") from None
    status = run_pack(
        source,
        folder,
        given={"fields": fields, "image": image, "target": target, "classes": classes},
        to=to,
        short_side=short_side,
        quality=quality,
        cuttable=cuttable,
        shard_bytes=nbytes,
        workers=workers,
        skip_bad=skip_bad,
        check=check,
        exif=exif,
        ray=ray,
    )
    raise typer.Exit(status)


@app.command(epilog=examples("gpuload verify packed"))
def verify(folder: Annotated[str, typer.Argument(help="A packed set.")]) -> None:
    """Say what is damaged, missing or too much in a packed set, by the hashes in its manifest.

    Exit status: 0 if all is as it was packed; 1 if not.
    """
    from gpuload.cli.pack import run_verify

    raise typer.Exit(run_verify(folder))


# Commands whose options stand in files of their own.
app.command(epilog=examples(*benching.EXAMPLES))(benching.bench)
app.command(epilog=examples(*comparing.EXAMPLES))(comparing.compare)
app.command(epilog=examples(*doctoring.EXAMPLES))(doctoring.doctor)
app.command(epilog=examples(*inspecting.EXAMPLES))(inspecting.inspect)
