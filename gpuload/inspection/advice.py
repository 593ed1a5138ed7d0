"""What to do about what was found: rules over the summary, the worst first."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

from gpuload.decode.options import Decode

__all__ = ["Advice", "advise", "is_bad"]

Level = Literal["bad", "odd", "note"]
UNEQUAL: Final = 10  # times as large as the smallest class
LARGE: Final = 1_500_000  # pixels


class Advice(NamedTuple):
    """One thing that was found: how bad it is, what it is, what it means and what to do, and code for that.

    `level`: "bad" spoils training or its evaluation; "odd" is probably not meant; "note" is to be known.
    """

    level: Level
    title: str
    text: str
    code: str = ""


def is_bad(summary: dict[str, Any]) -> bool:
    """Whether there are damaged images, or images that are in several data sets: what the exit status says."""
    return bool(summary["damaged"]["count"]) or any(
        summary["duplicates"][kind]["several_data"] for kind in ("files", "pixels")
    )


def advise(summary: dict[str, Any]) -> list[Advice]:
    """All advice, the worst first."""
    found = [*_damage(summary), *_duplicates(summary), *_classes(summary), *_formats(summary), *_sizes(summary)]
    return sorted(found, key=lambda advice: ("bad", "odd", "note").index(advice.level))


def _images(count: int) -> str:
    return "1 image" if count == 1 else f"{count:,} images"


def _groups(count: int) -> str:
    return "1 picture" if count == 1 else f"{count:,} pictures"


def _damage(summary: dict[str, Any]) -> list[Advice]:
    found = []
    if count := summary["damaged"]["count"]:
        found.append(
            Advice(
                "bad",
                f"{_images(count)} {'is' if count == 1 else 'are'} damaged",
                "Training stops at the first of them. Fix or remove the files; or have them left out.",
                'gl.Loader(…, on_error="skip")',
            )
        )
    if count := summary["refused"]["count"]:
        found.append(
            Advice(
                "odd",
                f"{_images(count)} {'is' if count == 1 else 'are'} refused by a limit",
                f"They cost more than Decode allows (by default {Decode().max_pixels:,} pixels): a decompression bomb, "
                "or a very large picture. If you trust them, raise the limit that the list names.",
                "gl.Loader(…, decode=gl.Decode(max_pixels=…))",
            )
        )
    return found


def _duplicates(summary: dict[str, Any]) -> list[Advice]:
    found: list[Advice] = []
    duplicates = summary["duplicates"]
    for kind, how in (
        ("files", "the same file"), ("pixels", "the same pixels in another file"), ("looks", "very alike"),
    ):  # fmt: skip
        told = duplicates[kind]
        certain = kind != "looks"
        if count := told["several_data"]:
            found.append(
                Advice(
                    "bad" if certain else "odd",
                    f"{_groups(count)} {'is' if count == 1 else 'are'} in several data sets ({how})",
                    "A model is tested on what it was trained on, and looks better than it is. Remove them from one.",
                )
            )
        if count := told["several_classes"]:
            found.append(
                Advice(
                    "odd",
                    f"{_groups(count)} {'is' if count == 1 else 'are'} in several classes ({how})",
                    "At least one of the labels is wrong, or the classes overlap.",
                )
            )
        if count := told["surplus"]:
            found.append(
                Advice(
                    "note",
                    f"{_images(count)} {'is there' if count == 1 else 'are there'} once more ({how})",
                    "A picture that is there twice counts twice in training.",
                )
            )
    if count := duplicates["flat"]:
        found.append(
            Advice("odd", f"{_images(count)} of one colour", "They show nothing; look whether they are meant.")
        )
    return found


def _classes(summary: dict[str, Any]) -> list[Advice]:
    classes = summary["classes"]
    if not classes:
        return []
    found = []
    if classes["imbalance"] is None or classes["imbalance"] > UNEQUAL:
        ratio = "" if classes["imbalance"] is None else f": the largest has {classes['imbalance']:.0f} times as many"
        found.append(
            Advice(
                "odd",
                f"Classes differ much in size{ratio}",
                "Draw samples with weights, or weigh the loss, if small classes matter as much as large ones.",
                "counts = np.bincount(dataset.labels)\ngl.Loader(dataset, weights=1 / counts[dataset.labels], …)",
            )
        )
    if count := classes["few"]:
        found.append(
            Advice(
                "note",
                f"Fewer than 10 images in {count:,} of {classes['count']:,} classes",
                "Too few to learn much from, or to measure with.",
            )
        )
    for one in classes["missing"] if len(summary["data"]) > 1 else ():
        some = len(one["classes"])
        found.append(
            Advice(
                "odd",
                f"{some:,} {'class has' if some == 1 else 'classes have'} no images in {one['data']}",
                "Labels number the classes that a data set has, so they mean the same in all only if all are given the "
                "same classes.",
                "gl.ImageFolder(…, classes=train)",
            )
        )
    return found


def _formats(summary: dict[str, Any]) -> list[Advice]:
    found = []
    formats, known = summary["formats"], sum(summary["formats"]["formats"].values())
    if count := formats["turned"]:
        found.append(
            Advice(
                "odd",
                f"{_images(count)} {'is' if count == 1 else 'are'} stored turned or mirrored, by EXIF orientation",
                "Viewers turn such pictures upright; a loader does only where it is told to.",
                "gl.Loader(…, decode=gl.Decode(exif=True))",
            )
        )
    if count := formats["deep"]:
        found.append(
            Advice(
                "odd",
                f"{_images(count)} with more than 8 bits a channel",
                "As 8 bits they lose what the others hold, and grey ones are refused.",
                'gl.ImageFolder(…, mode="unchanged")',
            )
        )
    if count := formats["alpha"]:
        found.append(
            Advice(
                "note",
                f"{_images(count)} with transparency",
                'mode="RGB", the default, drops the alpha channel, and shows the colour that lies beneath.',
                'gl.ImageFolder(…, mode="RGBA")',
            )
        )
    if known and formats["grey"] == known:
        found.append(
            Advice(
                "note",
                "All images are grey",
                "As RGB they are three equal channels: three times the memory and the copying.",
                'gl.ImageFolder(…, mode="L")',
            )
        )
    elif count := formats["grey"]:
        found.append(Advice("note", f"{_images(count)} {'is' if count == 1 else 'are'} grey", "They become RGB."))
    if count := formats["cmyk"]:
        found.append(
            Advice(
                "note",
                f"{_images(count)} for print, in CMYK",
                "Pillow turns them to RGB, without their colour profile: colours are off, and decoding takes longer.",
            )
        )
    if count := formats["progressive"]:
        found.append(
            Advice(
                "note",
                f"{_images(count)} as progressive JPEG",
                "These take more memory to decode, and no region can be cut out of their bytes. jpegtran makes them "
                "sequential without loss.",
            )
        )
    if count := formats["misnamed"]:
        found.append(
            Advice(
                "note",
                f"{_images(count)} of another format than the name says",
                "gpuload goes by the content; other programs may not.",
            )
        )
    for one in summary["data"]:
        if one["ignored"]:
            total = sum(one["ignored"].values())
            shown = ", ".join(f"{count:,} × {ending}" for ending, count in list(one["ignored"].items())[:5])
            found.append(
                Advice(
                    "note",
                    f"{total:,} {'file is' if total == 1 else 'files are'} not read in {one['name']}",
                    f"{shown}. Name the endings of those that are images.",
                    'gl.ImageFolder(…, extensions=(".jpg", …))',
                )
            )
    return found


def _sizes(summary: dict[str, Any]) -> list[Advice]:
    sizes = summary["sizes"]
    if not sizes:
        return []
    found = []
    if count := sizes["small"]:
        found.append(
            Advice(
                "note",
                f"{_images(count)} with a side of fewer than 32 pixels",
                f"The smallest has {sizes['smallest'][0]}×{sizes['smallest'][1]}. A crop to 224 enlarges them.",
            )
        )
    if sizes["pixels"]["median"] > LARGE:
        found.append(
            Advice(
                "note",
                f"Images are large: half of them have more than {sizes['pixels']['median'] / 1e6:.1f} megapixels",
                "Most of that is decoded only to be made smaller. Packed with a short side of 512 they load faster.",
                "gpuload pack DATA FOLDER --to tar --short-side 512",
            )
        )
    return found
