"""``gpuload inspect``: its options. `gpuload.cli.inspecting`, which imports torch, does it."""

from __future__ import annotations

from typing import Annotated, Final, Optional

import typer

from gpuload.cli.arguments import Fields, Image, JsonFile, Target

__all__ = ["EXAMPLES", "inspect"]

EXAMPLES: Final = (
    "gpuload inspect imagenet/train",
    "gpuload inspect train val --recipe recipe.py:train --html report.html",
    "gpuload inspect 'shards/train-*.tar' --fields jpg,cls --limit 50000 --json -",
)


# Optional[…]: typer evaluates these annotations at run time.
def inspect(
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA",
            help="What `gpuload pack` takes as a source; of several, images that are in more than one are found.",
        ),
    ],
    recipe: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="FILE.py:NAME",
            help="Your transforms, for the contact sheet: a list of them, or a Chain, in a Python file. Default: a "
            "random crop to 224×224 and a flip.",
        ),
    ] = None,
    html: Annotated[str, typer.Option(metavar="FILE", help="The page that is written; '' for none.")] = "inspect.html",
    as_json: JsonFile = None,
    limit: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Look at so many files of each DATA, drawn at random. Default: all."),
    ] = None,
    pixels: Annotated[
        str, typer.Option(metavar="N", help="How many images are decoded, drawn at random; or 'all'.")
    ] = "4000",
    images: Annotated[int, typer.Option(min=0, max=100, help="Images on the contact sheet.")] = 8,
    draws: Annotated[int, typer.Option(min=1, max=50, help="Draws of the recipe for each of these.")] = 6,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn.")] = 0,
    workers: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="Worker processes. Default: one for each CPU of this process."),
    ] = None,
    extensions: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Of a folder: the endings of images, as in '.jpg,.avif'."),
    ] = None,
    fields: Fields = None,
    image: Image = None,
    target: Target = None,
) -> None:
    """Look at data sets, and write one HTML page about them.

    It has sizes, formats, classes, damaged files, duplicates, mean and std, and images before and after augmentation.

    Exit status: 0; 3 if there are damaged images, or the same image in several data sets; 1 if it cannot be done.
    """
    from gpuload.cli.inspecting import Settings, run

    if pixels != "all" and not pixels.isdecimal():
        raise typer.BadParameter(f"expected a number of images, or 'all', got {pixels!r}", param_hint="--pixels")
    given = {"fields": fields, "image": image, "target": target, "extensions": extensions and extensions.lower()}
    settings = Settings(
        data=data,
        recipe=recipe,
        html=html or None,
        json=as_json,
        limit=limit,
        pixels=None if pixels == "all" else int(pixels),
        images=images,
        draws=draws,
        seed=seed,
        workers=workers,
        given={name: value for name, value in given.items() if value is not None},
    )
    raise typer.Exit(run(settings))
