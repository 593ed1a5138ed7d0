"""The commands and their options. Each is done by its own module, imported when it is run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

__all__ = ["app"]

app = typer.Typer(
    name="gpuload", no_args_is_help=True, add_completion=False, help="The image data loader for GPU training."
)


def _version(wanted: bool) -> None:
    if wanted:
        from gpuload import __version__

        typer.echo(f"gpuload {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None: ...


# Optional[…]: typer evaluates these annotations at run time.
@app.command()
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
    """Load real photographs with gpuload and with torch's DataLoader, compare, and train on them."""
    from gpuload.cli.demo import Settings, run

    settings = Settings(
        data=data, out=out, workers=workers, batch_size=batch_size, epochs=epochs, device=device, images=images
    )
    raise typer.Exit(run(settings))


@app.command()
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
    """Make the indexes that gpuload.TarShards reads, so that no training has to wait for them."""
    from gpuload.cli.index import run

    raise typer.Exit(run(shards, workers=workers, again=again))
