"""Reading and decoding of single samples: flattens a sample, reads its headers, decodes its pixels into a slot, and
converts the samples of a chunk to columns.

The leaves of a sample are numbered here, depth first, and have the same numbers in the batch. This module runs in
workers or, with ``num_workers=0``, in the main process. It does not import torch, and no data of a sample persists for
the next sample.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from gpuload.datasets.files import EXTENSIONS
from gpuload.datasets.recognise import (
    find_leaves,
    find_shared_draws,
    find_unrecognized_targets,
    is_pillow_image,
    unfold_clips,
)
from gpuload.datasets.sample import (
    META,
    PIXELS,
    Boxes,
    Encoded,
    Image,
    Keypoints,
    Mask,
    Target,
    explain_batch_form,
    explain_float_range,
    is_batch_form,
    plain_meta,
    to_xyxy,
)
from gpuload.datasets.tree import (
    Structure,
    describe,
    describe_leaf,
    dtype_of,
    flatten,
    is_tensor,
    join_key_paths,
    key_paths_of,
    unflatten,
)
from gpuload.decode import Decoder
from gpuload.decode.grid import Cut
from gpuload.decode.header import check_size, has_eoi
from gpuload.errors import one_line
from gpuload.ring.columns import Columns, ImageColumn, ValueColumn, merge_equal
from gpuload.ring.packing import ALIGN
from gpuload.ring.ring import align
from gpuload.transforms.chain import Chain
from gpuload.transforms.convert import Normalize, ToDtype, Window, entry_conversion
from gpuload.transforms.program.draws import IMAGE
from gpuload.transforms.program.ops import Box, ChainMixture, Ops, filter_codes
from gpuload.transforms.program.windows import FILTERS
from gpuload.workers.box_fields import (
    box_droppers,
    check_visibility,
    explain_target_conflict,
    find_fields,
    format_size,
    mask_mismatch,
    size_warning,
    unit_warning,
)
from gpuload.workers.counters import WorkerCounters
from gpuload.workers.job import Job

__all__ = ["ImageFailure", "Region", "Sample", "SampleReader", "make_columns"]

PILLOW_BYTES: Final = 4  # per pixel of a decoded PIL image
CUT_BYTES = 8 << 20  # files of about this total size are cut together before their first image is decoded
SEARCHED_SAMPLES = 16  # the number of samples per worker whose targets are checked

Region = list[int]  # top, left, height, width


class DecodeResize(NamedTuple):
    """A resize that is part of decoding an image: the decoder's scale in eighths, the final size, and the filter."""

    eighths: int
    size_hw: tuple[int, int]
    interpolation: str


@dataclass(slots=True)
class Picture:
    """An image or mask of a sample, with its header if it is a file.

    `dtype_axes`, the dtype and number of axes, is set for masks and for images that are not uint8. `channels` is the
    number of bytes per pixel of the result.
    """

    leaf: Encoded | Image | Mask
    header: Any
    height: int
    width: int
    channels: int
    dtype_axes: tuple[str, int] | None = None
    region: Region = field(default_factory=list)  # the region to decode; empty until it is drawn
    resize: DecodeResize | None = None
    encoded_fields: tuple[Any, ...] = ()  # the fields of `EncodedImage` after `row`; empty if workers decode the image
    offset: int = -1  # the offset of the decoded pixels in the slot
    cut: Cut | None = None  # the bytes that `SampleReader.cut_files` cut out of the file, if any

    @property
    def draws(self) -> int:
        return self.leaf.draws or 0

    @property
    def is_device_decodable(self) -> bool:
        """Return whether a device can decode the picture. It must be a uint8 image in a complete JPEG file with a
        single scan."""
        leaf, header = self.leaf, self.header
        if self.dtype_axes is not None or not isinstance(leaf, Encoded) or (jpeg := header.jpeg) is None:
            return False
        keeps_mode = leaf.mode in ("RGB", "unchanged") or (leaf.mode == "L" and jpeg.components == 1)
        return keeps_mode and jpeg.has_single_scan and has_eoi(leaf.data, jpeg)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of the decoded region, after any resize."""
        height, width = self.region[2:] if self.resize is None else self.resize.size_hw
        return height, width, self.channels


@dataclass(slots=True)
class Sample:
    """A sample: its row, the dataset's original object, its structure, and its leaves, keyed by leaf index."""

    row: int
    original: Any
    structure: Structure
    images: dict[int, Picture]
    values: dict[int, Any]
    source: str | None
    masks: dict[int, Picture] = field(default_factory=dict)
    points: dict[int, Boxes | Keypoints] = field(default_factory=dict)
    fields: dict[int, tuple[int, ...]] = field(default_factory=dict)  # see `gpuload.ring.columns.Columns`

    @property
    def pictures(self) -> list[Picture]:
        """Return the images and masks, which have to be decoded."""
        return [*self.images.values(), *self.masks.values()]

    @property
    def location(self) -> str:
        """Return the location of the images in the sample, for error messages."""
        return join_key_paths(self.structure, self.images)

    def to_plain(self) -> Any:
        """Return the original sample, with metadata converted to plain objects."""
        if META.isdisjoint(map(type, self.values.values())):
            return self.original
        return unflatten(self.structure, [plain_meta(self.values[leaf]) for leaf in range(len(self.values))])

    def boxes(self, draws: int) -> np.ndarray:
        """Return the boxes on which the random parameters of images with these `draws` depend: left, top, right,
        bottom."""
        points = (value for value in self.points.values() if (value.draws or 0) == draws)
        boxes = next(value for value in points if isinstance(value, Boxes))
        return to_xyxy(boxes.array, boxes.format)


class ImageFailure(Exception):
    """An error with the source of a failed image and its location in the sample. The `__cause__` is the original
    error."""

    def __init__(self, source: str | None, location: str) -> None:
        super().__init__(source, location)
        self.source, self.location = source, location


class SampleReader:
    """A reader that flattens the samples of a job, and decodes their images."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._warnings: list[str] = []
        self._searches_left = SEARCHED_SAMPLES
        self._has_warned_of_draws = False  # whether images that share draws without saying so were reported
        self._has_warned_of_sizes = False  # whether boxes for another image size were found and reported
        self._decoder = Decoder(job.decode)
        self.set_counters(WorkerCounters())
        self._frames = job.chain.frames
        self._needs_boxes = job.chain.reads_boxes or bool(box_droppers(job.chain))
        self._target_conflict = explain_target_conflict(job.chain)
        # A `collate_fn` gets PIL images as the dataset returned them.
        self._keeps_pillow_images = job.plain and job.collate_fn is not None
        self._conversion = entry_conversion(job.chain)
        self._changes_colors = _changes_colors(job.chain)
        self._needs_fractions = self._changes_colors or _normalizes_fractions(job.chain)

    @property
    def is_search_over(self) -> bool:
        """Return whether the first samples were searched for targets to warn of, and all warnings were sent."""
        return not self._searches_left and not self.warning

    @property
    def warning(self) -> str:
        """Return the next warning for the user, about unrecognized targets, sizes or decoding; "" if there is none."""
        return self._warnings[0] if self._warnings else self._decoder.warning

    def clear_warning(self) -> None:
        """Drop the current `warning` after it was sent with a reply; the next warning replaces it."""
        if self._warnings:
            del self._warnings[0]
        else:
            self._decoder.warning = ""

    def set_counters(self, counters: WorkerCounters) -> None:
        """Set the counters in which decoded images and the bytes of samples are counted."""
        self._counters, self._decoder.counts = counters, counters.decoded

    def read(self, row: int, original: Any) -> Sample:
        """Flatten a sample and read its headers.

        Raises:
            TypeError, ValueError: the sample lacks a required image, or its targets do not match its image.
            ImageFailure: a header cannot be read.
        """
        if original is None and self._job.collate_fn is None:
            raise TypeError(
                "the dataset returned None; return a sample, raise an error, or pass a collate_fn that drops None"
            )
        leaves: list[Any] = []
        structure = flatten(original, leaves)
        declared, targets = find_leaves(
            structure, leaves, plain=self._job.plain, keeps_pillow_images=self._keeps_pillow_images
        )
        structure, leaves, declared, targets = unfold_clips(structure, leaves, declared, targets, self._frames)
        if not declared and len(self._job.chain) and self._job.collate_fn is None:
            raise TypeError(
                f"the sample, {one_line(describe(structure, leaves))}, has no image for the transforms"
                f"{_image_hint(structure, leaves)}; return gpuload.Encoded(bytes), gpuload.Image, a PIL image, or "
                "a uint8 H×W×C array or C×H×W tensor; or remove the transforms"
            )
        images: dict[int, Picture] = {}
        source = None
        for leaf, image in declared.items():
            if isinstance(image, Encoded):
                source = source or image.source
            try:
                images[leaf] = self._make_picture(image)
            except Exception as error:
                raise ImageFailure(getattr(image, "source", None) or source, key_paths_of(structure)[leaf]) from error
        values = {leaf: value for leaf, value in enumerate(leaves) if leaf not in declared and leaf not in targets}
        if self._keeps_pillow_images:
            for leaf, value in values.items():
                if is_pillow_image(value):
                    self._load_pillow_image(value, key_paths_of(structure)[leaf])
        sample = Sample(row, original, structure, images, values, source)
        if targets or self._needs_boxes:
            self._add_targets(sample, leaves, targets)
        if self._searches_left and images:
            self._search_targets(sample, leaves, targets)
        return sample

    def _load_pillow_image(self, image: Any, location: str) -> None:
        """Decode an image that `collate_fn` gets, so that a damaged file is a failure of its sample."""
        if getattr(image, "fp", None) is None:  # it has been decoded
            return
        try:
            check_size(image.height, image.width, image.height * image.width * PILLOW_BYTES, self._job.decode)
            image.load()
        except Exception as error:
            image.close()  # Pillow leaves the file open
            raise ImageFailure(getattr(image, "filename", "") or None, location) from error

    def _make_picture(self, image: Encoded | Image) -> Picture:
        """Return an image as a `Picture`, with its header if it is a file."""
        if isinstance(image, Encoded):
            self._counters.bytes_read += len(image.data)
            header = self._decoder.header(image)
            height, width = self._decoder.size_hw(header)
            channels = self._decoder.channels(header, image.mode)
            dtype = self._decoder.dtype(header) if image.mode == "unchanged" else "uint8"
        else:
            header, hwc = None, image.hwc
            (height, width, channels), dtype = hwc.shape, "uint8" if hwc.itemsize == 1 else hwc.dtype.name
            self._counters.bytes_read += hwc.nbytes
        if dtype == "uint8" and isinstance(self._conversion, Window):
            raise TypeError(
                "Window takes intensities of 16 bits or floats, but this image has 8 bits; return gpuload.Image(array) "
                "of uint16 or float32, or gpuload.Encoded(data, mode='unchanged') for a file of 16 bits or floats"
            )
        if dtype == "uint8" or self._conversion is not None:
            return Picture(image, header, height, width, channels)
        return Picture(image, header, height, width, channels * np.dtype(dtype).itemsize, (dtype, 3))

    def _search_targets(self, sample: Sample, leaves: list[Any], targets: dict[int, Target]) -> None:
        """Search a sample for unrecognized targets, and for targets in another unit than pixels."""
        warning = find_unrecognized_targets(
            sample.structure, leaves, sample.images, targets, moves_pixels=self._job.moves_pixels
        )
        if not warning and (self._job.chain.moves_pixels or self._needs_boxes) and not self._has_warned_of_sizes:
            paths = key_paths_of(sample.structure)
            sizes = {image.draws: (image.height, image.width) for image in reversed(sample.images.values())}
            points = {paths[leaf]: (target, sizes[target.draws or 0]) for leaf, target in sample.points.items()}
            warning = unit_warning(points)
        if not self._has_warned_of_draws and any(line.is_random for line in self._job.chain.lines):
            shared = find_shared_draws(sample.structure, {leaf: image.leaf for leaf, image in sample.images.items()})
            self._has_warned_of_draws = bool(shared)
            self._warnings += filter(None, [shared])
        self._searches_left -= 1
        if warning:
            self._searches_left, self._warnings = 0, [warning, *self._warnings]

    def _add_targets(self, sample: Sample, leaves: list[Any], targets: dict[int, Target]) -> None:
        """Add the masks, boxes and keypoints of a sample."""
        if not sample.images:
            raise TypeError(
                f"the sample, {one_line(describe(sample.structure, leaves))}, has masks, boxes or keypoints, but no "
                f"image to which they belong{_image_hint(sample.structure, leaves)}; return both in one sample"
            )
        if targets and self._target_conflict is not None:
            raise ValueError(self._target_conflict)
        for target in filter(is_batch_form, targets.values()):
            raise ValueError(explain_batch_form(target))
        check_visibility(sample.structure, leaves, targets)
        numbers = dict.fromkeys(image.draws for image in sample.images.values())
        for leaf, target in targets.items():
            if (target.draws or 0) not in numbers:
                raise ValueError(
                    f"{key_paths_of(sample.structure)[leaf]} has draws={target.draws or 0}, but the images of its "
                    f"sample have draws={', '.join(map(str, numbers))}; pass the draws= of the image that it belongs to"
                )
        for draws in numbers:
            selected = {leaf: target for leaf, target in targets.items() if (target.draws or 0) == draws}
            self._add_targets_of(sample, selected, draws)
            if fields := find_fields(sample.original, leaves, targets, self._job.chain, draws):
                sample.fields[draws] = fields

    def _add_targets_of(self, sample: Sample, targets: dict[int, Target], draws: int) -> None:
        """Add the targets of the images with these `draws`."""
        images = [(leaf, image) for leaf, image in sample.images.items() if image.draws == draws]
        first = images[0][1]
        size = first.height, first.width
        for leaf, image in images[1:] if targets else ():
            if (other_size := (image.height, image.width)) != size:
                places = key_paths_of(sample.structure)
                raise ValueError(
                    "masks, boxes and keypoints belong to all images of their sample, which must have the same size, "
                    f"but {places[images[0][0]]} has {format_size(size)} and {places[leaf]} has "
                    f"{format_size(other_size)} (height × width); return only images of one size in such a sample, or "
                    "pass another draws= to the images that they do not belong to"
                )
        for leaf, target in targets.items():
            if isinstance(target, Mask):
                sample.masks[leaf] = self._make_mask(sample, leaf, target, first)
            else:
                sample.points[leaf] = target
        if not self._has_warned_of_sizes:
            source = getattr(first.leaf, "source", None) or sample.source
            warning = size_warning(targets.values(), first.leaf, size, source, self._job.decode)
            if warning:
                self._has_warned_of_sizes, self._warnings = True, [*self._warnings, warning]

    def _make_mask(self, sample: Sample, leaf: int, mask: Mask, image: Picture) -> Picture:
        location = key_paths_of(sample.structure)[leaf]
        header, axes, count = None, 2, 1
        if isinstance(mask.array, Encoded):
            self._counters.bytes_read += len(mask.array.data)
            try:
                header = self._decoder.header(mask.array)
                dtype = self._decoder.mask_dtype(header)
            except Exception as error:
                raise ImageFailure(mask.array.source, location) from error
            shape = self._decoder.size_hw(header)
        else:
            dtype, axes, shape = mask.array.dtype.name, mask.array.ndim, mask.array.shape
            count = len(mask.array) if axes == 3 else 1
        if (mismatch := mask_mismatch(location, shape, image, self._job.decode)) is not None:
            raise ValueError(mismatch)
        return Picture(mask, header, image.height, image.width, count * np.dtype(dtype).itemsize, (dtype, axes))

    def resize(self, pictures: Sequence[Picture], resize: Box) -> None:
        """Choose the images that can be resized while they are decoded, and set their regions to the boxes of
        `resize`."""
        boxes, sizes = resize.box_tlhw.tolist(), resize.size_hw.tolist()
        codes = filter_codes(resize.filters, len(boxes)).tolist()
        for picture, box, size, code in zip(pictures, boxes, sizes, codes, strict=True):
            if picture.header is None or not isinstance(picture.leaf, Encoded):
                continue
            filter, (top, left, height, width) = FILTERS[code], box
            eighths = self._decoder.eighths(picture.leaf, picture.header, (top, left, height, width), size, filter)
            if eighths:
                picture.resize, picture.region = DecodeResize(eighths, (size[0], size[1]), filter), box

    def reserve_encoded(self, sample: Sample, offset: int) -> int:
        """Choose the images that the device decodes, and reserve space in the slot for their files from `offset` on.
        Return the end of this space. Nothing is written yet, since the slot may be too small."""
        for picture in sample.images.values():
            if picture.is_device_decodable:
                leaf: Any = picture.leaf
                is_grey = leaf.mode != "RGB" and picture.header.jpeg.components == 1
                source = None if leaf.source == sample.source else leaf.source
                picture.encoded_fields = (offset, len(leaf.data), picture.header.orientation, int(is_grey), source)
                offset = align(offset + len(leaf.data), ALIGN)
        return offset

    def cut_files(self, samples: Sequence[Sample]) -> int:
        """Cut the bytes that the regions need out of the image files, where this saves time, before the images are
        decoded. Process the files of the first samples together, up to `CUT_BYTES`; return the number of these
        samples."""
        pictures: list[Picture] = []
        requests: list[tuple[Encoded, Any, tuple[int, int, int, int]]] = []
        nbytes = count = 0
        while count < len(samples) and nbytes < CUT_BYTES:
            for picture in samples[count].images.values():
                leaf, (top, left, height, width) = picture.leaf, picture.region
                if isinstance(leaf, Encoded) and picture.resize is None and not picture.encoded_fields:
                    pictures.append(picture)
                    requests.append((leaf, picture.header, (top, left, height, width)))
                    nbytes += len(leaf.data)
            count += 1
        with contextlib.suppress(Exception):  # raised again when the bad file is decoded
            for picture, cut in zip(pictures, self._decoder.cut_files(requests), strict=True):
                picture.cut = cut
        return count

    def decode(self, sample: Sample, slot: np.ndarray, offset: int) -> int:
        """Decode the regions of a sample's images and masks into the slot from `offset` on; return the end. The files
        of images that the device decodes are copied to the space that `reserve_encoded` reserved.

        Raises:
            ImageFailure: an image or mask cannot be decoded.
        """
        for i, picture in enumerate(sample.pictures):
            if picture.encoded_fields:
                start, length = picture.encoded_fields[:2]
                slot[start : start + length] = np.frombuffer(picture.leaf.data, np.uint8)  # pyright: ignore
                continue
            height, width, channels = picture.shape
            end = offset + height * width * channels
            try:
                self._decode(picture, slot[offset:end])
                is_float_image = picture.dtype_axes == ("float32", 3) and not isinstance(picture.leaf, Mask)
                if is_float_image and self._needs_fractions:
                    _check_fractions(slot[offset:end].view(np.float32), allows_nan=not self._changes_colors)
            except Exception as error:
                file = picture.leaf.array if isinstance(picture.leaf, Mask) else picture.leaf
                source = getattr(file, "source", None) or sample.source
                leaf = [*sample.images, *sample.masks][i]
                raise ImageFailure(source, key_paths_of(sample.structure)[leaf]) from error
            picture.offset, offset = offset, align(end, ALIGN)
        return offset

    def _decode(self, picture: Picture, out: np.ndarray) -> None:
        """Decode the region of an image to H×W×C, or of a mask to H×W×N."""
        leaf, header, resize = picture.leaf, picture.header, picture.resize
        top, left, height, width = picture.region
        region_tlhw = top, left, height, width
        if picture.dtype_axes is not None:
            out = out.view(picture.dtype_axes[0])
        if resize is not None:
            assert isinstance(leaf, Encoded)
            out = out.reshape(picture.shape)
            self._decoder.decode_resized(leaf, header, region_tlhw, resize.eighths, resize.interpolation, out)
        elif isinstance(leaf, Encoded):
            cut, picture.cut = picture.cut, None
            out = out.reshape(height, width, -1)
            if self._conversion and leaf.mode == "unchanged" and self._decoder.dtype(header) != "uint8":
                out[...] = _convert(self._conversion, self._decoder.decode(leaf, header, region_tlhw, None, cut))
            else:
                self._decoder.decode(leaf, header, region_tlhw, out, cut)
        elif isinstance(leaf, Image):
            pixels = leaf.hwc[top : top + height, left : left + width]
            out.reshape(height, width, -1)[...] = _convert(self._conversion, pixels) if self._conversion else pixels
        elif header is not None:
            self._decoder.decode_mask(leaf.array, header, region_tlhw, out.reshape(height, width))
        else:
            cropped = leaf.array[..., top : top + height, left : left + width]
            channels = cropped[:, :, None] if cropped.ndim == 2 else cropped.transpose(1, 2, 0)
            out.reshape(channels.shape)[...] = channels


def _changes_colors(chain: Chain) -> bool:
    """Return whether the chain has colour transforms, which Kornia also applies to float images in 0 … 1."""
    outlines = (outline for line in chain.lines for transform in line.transforms for outline in transform.outline)
    return any(issubclass(outline.kind, Ops | ChainMixture) for outline in outlines)


def _normalizes_fractions(chain: Chain) -> bool:
    """Return whether a `Normalize` has the mean and std of images in 0 … 1, so that float images must be in this range.
    More than three channels, as of satellites, can have any range, and so can the results of the user's own
    transforms."""
    transforms = [] if chain.calls else [transform for line in chain.lines for transform in line.transforms]
    return any(
        isinstance(transform, Normalize)
        and len(transform.mean) <= 3
        and max(*map(abs, transform.mean), *transform.std) <= 1
        for transform in transforms
    )


def _check_fractions(pixels: np.ndarray, *, allows_nan: bool = True) -> None:
    low, high = float(pixels.min()), float(pixels.max())
    if low < 0 or high > 1 or (low != low and not allows_nan):
        raise ValueError(f"the image {explain_float_range(low, high)}")


def _convert(conversion: ToDtype | Window, pixels: np.ndarray) -> np.ndarray:
    """Convert an image to uint8."""
    if pixels.dtype == np.float32 and (isinstance(conversion, ToDtype) or np.isnan(pixels).any()):
        _check_fractions(pixels, allows_nan=False)
    return conversion.levels(pixels)


def make_columns(samples: Sequence[Sample], encoded_bytes: int = 0) -> Columns:
    """Return a chunk's decoded samples as columns; the first `encoded_bytes` of its slot are files for the device."""
    return Columns(
        [sample.row for sample in samples],
        merge_equal([sample.structure for sample in samples]),
        _image_columns([sample.images for sample in samples]),
        _value_columns([sample.values for sample in samples]),
        [sample.source for sample in samples],
        masks=_image_columns([sample.masks for sample in samples]),
        points=_value_columns([sample.points for sample in samples]),
        fields=merge_equal([sample.fields for sample in samples]) if any(sample.fields for sample in samples) else [],
        encoded=_encoded_rows([sample.images for sample in samples]) if encoded_bytes else [],
        encoded_bytes=encoded_bytes,
    )


def _encoded_rows(samples: Sequence[Mapping[int, Picture]]) -> list[tuple[Any, ...]]:
    """Return the fields of `EncodedImage` for all images that the device decodes, in the order of their files."""
    rows = Counter()  # keyed by column
    encoded = []
    for images in samples:
        for column, picture in enumerate(images.values()):
            if picture.encoded_fields:
                encoded.append((column, rows[column], *picture.encoded_fields))
            rows[column] += 1
    return encoded


def _image_columns(samples: Sequence[Mapping[int, Picture]]) -> list[ImageColumn]:
    columns = []
    for position in range(max(map(len, samples), default=0)):
        rows = [row for row, pictures in enumerate(samples) if len(pictures) > position]
        entries = [list(samples[row].items())[position] for row in rows]
        table_rows = [(p.offset, *p.shape, p.height, p.width, *p.region) for _, p in entries]
        table = np.array(table_rows, np.int64).view(IMAGE)[:, 0]
        leaves = merge_equal([leaf for leaf, _ in entries])
        kinds = [picture.dtype_axes for _, picture in entries]
        kinds = merge_equal(kinds) if any(kinds) else []
        draws = merge_equal([picture.draws for _, picture in entries])
        columns.append(ImageColumn(table, leaves, None if len(rows) == len(samples) else np.array(rows), kinds, draws))
    return columns


def _value_columns(samples: Sequence[Mapping[int, Any]]) -> dict[int, ValueColumn]:
    columns = {}
    for leaf in sorted(set().union(*samples)):
        rows = [row for row, values in enumerate(samples) if leaf in values]
        values = [samples[row][leaf] for row in rows]
        columns[leaf] = ValueColumn(values, None if len(rows) == len(samples) else np.array(rows))
    return columns


def _image_hint(structure: Structure, leaves: Sequence[Any]) -> str:
    """Return a hint about the first leaf that is probably intended as an image but is not one; "" if there is none."""
    located = zip(key_paths_of(structure), leaves, strict=True)
    for location, leaf in sorted(located, key=lambda entry: not hasattr(entry[1], "shape")):
        if isinstance(leaf, os.PathLike) or (isinstance(leaf, str) and leaf.lower().endswith(EXTENSIONS)):
            return (
                f": {location} is the path {os.fspath(leaf)!r}; return gpuload.read(path) instead "
                "(gpuload.ImageFiles and gpuload.ImageFolder read entire folders)"
            )
        if isinstance(leaf, bytes):
            return f": {location} is a bytes object; if it holds an image file, return gpuload.Encoded(bytes)"
        if not isinstance(leaf, np.ndarray) and not is_tensor(leaf):
            continue
        array: Any = leaf
        axes, dtype = len(array.shape), dtype_of(array)
        is_deep = axes == 3 and dtype.startswith(("float", "bfloat", "uint16"))
        if is_deep or (dtype == "uint8" and axes in (2, 3)):
            array_text, to_float = ("tensor", ".float()") if is_tensor(leaf) else ("array", ".astype('float32')")
            layout = ", layout='CHW'" if is_tensor(leaf) and axes == 3 else ""
            argument = f"{array_text}{'' if dtype in PIXELS else to_float}{layout}"
            advice = "; to return uint8 instead, remove ToTensor or other scaling from the dataset" if is_deep else ""
            return f": {location}, {describe_leaf(leaf)}, counts as an image only as gpuload.Image({argument}){advice}"
    for location, leaf in zip(key_paths_of(structure), leaves, strict=True):
        if leaf is None:
            return (
                f": {location} is None, which cv2.imread returns for a file that it cannot read; if it should be the "
                "image, check the path, or use gpuload.read(path), whose errors name the file"
            )
    return ""
