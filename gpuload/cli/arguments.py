"""Arguments that several commands have, as typer reads them."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

__all__ = ["Data", "Device", "Fields", "Image", "JsonFile", "Plot", "Recipe", "Target", "Workers", "examples"]


def examples(*commands: str) -> str:
    """The end of a command's help."""
    return "\n\n".join(["Examples:", *commands])


# Optional[…]: typer evaluates these annotations at run time.
Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="A folder of class folders or of images, a packed set, or a store: 'shards-*.tar', '*.parquet', an LMDB, "
        ".h5, .npy, a .csv of paths.",
    ),
]
Recipe = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="FILE.py:NAME",
        help="Your transforms: a list of them, or a Chain, in a Python file. Default: a random crop to 224×224, a "
        "flip, ImageNet's mean.",
    ),
]
Device = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="cpu, cuda or xpu. Default: a GPU if there is one."),
]
Workers = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(min=0, help="Worker processes, for both loaders. Default: the CPUs of this process, up to 8."),
]
JsonFile = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--json", metavar="FILE", help="Write all figures there. '-' is stdout; the rest goes to stderr."),
]
Plot = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="FILE.png", help="Draw the figures there; needs matplotlib."),
]
Fields = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Of tar shards: 'jpg,cls'. Default: all."),
]
Image = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Of a store: the column, or the pattern of keys, of images."),
]
Target = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Of a store: that of labels; '' for none."),
]
