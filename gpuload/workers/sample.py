"""Reading and decoding of single samples: flattens a sample, reads its headers, decodes its pixels into a slot, and
converts the samples of a chunk to columns.

Each leaf of a sample is numbered here, depth first, and keeps its number up to the batch. Runs in workers or, with
``num_workers=0``, in the main process. It imports no torch, and keeps no data of a sample for the next one.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gpuload.datasets.files import EXTENSIONS
from gpuload.datasets.recognise import fewer_frames, find_leaves, find_unrecognized_targets, unfold_clips
from gpuload.datasets.sample import META, Boxes, Encoded, Image, Keypoints, Mask, Target, plain_meta, to_xyxy
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
from gpuload.decode.header import has_eoi
from gpuload.errors import one_line
from gpuload.ring.columns import Columns, ImageColumn, ValueColumn, merge_equal
from gpuload.ring.packing import ALIGN
from gpuload.ring.ring import align
from gpuload.transforms.program.draws import IMAGE
from gpuload.transforms.program.ops import Box, filter_codes
from gpuload.transforms.program.windows import FILTERS
from gpuload.workers.box_fields import box_droppers, check_transforms, find_fields, mask_misfit, size_remark, size_text
from gpuload.workers.counters import Counters
from gpuload.workers.job import Job

__all__ = ["ImageFailure", "Region", "Sample", "SampleReader", "as_columns"]

CUT_BYTES = 8 << 20  # files of about this total size are cut together before their first image is decoded
SEARCHED_SAMPLES = 16  # samples per worker that are searched for unrecognized targets

Region = list[int]  # top, left, height, width


class Resized(NamedTuple):
    """A resize that is part of decoding an image: the decoder's scale in eighths, the final size, and the filter."""

    eighths: int
    size_hw: tuple[int, int]
    interpolation: str


@dataclass(slots=True)
class Picture:
    """An image or mask of a sample, with the header if it is a file. `kind`, the dtype and number of axes, is set for
    masks and for images that are not uint8. `channels` is the number of bytes per pixel of the result."""

    leaf: Encoded | Image | Mask
    header: Any
    height: int
    width: int
    channels: int
    kind: tuple[str, int] | None = None
    region: Region = field(default_factory=list)  # the region to decode; empty until it is drawn
    resized: Resized | None = None
    encoded_fields: tuple[Any, ...] = ()  # the fields of `EncodedImage` from the offset on, if the device decodes it
    offset: int = -1  # the offset of the decoded pixels in the slot
    part: Cut | None = None  # the bytes cut out of the file by `SampleReader.cut`, if any

    @property
    def is_device_decodable(self) -> bool:
        """Return whether a device can decode it: only a uint8 image in a complete JPEG file with a single scan."""
        leaf, header = self.leaf, self.header
        if self.kind is not None or not isinstance(leaf, Encoded) or (jpeg := header.jpeg) is None:
            return False
        keeps_mode = leaf.mode in ("RGB", "unchanged") or (leaf.mode == "L" and jpeg.components == 1)
        return keeps_mode and jpeg.has_single_scan and has_eoi(leaf.data, jpeg)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of its decoded region, after any resize."""
        height, width = self.region[2:] if self.resized is None else self.resized.size_hw
        return height, width, self.channels


@dataclass(slots=True)
class Sample:
    """A sample: its row, the dataset's original object, its structure, and its leaves, keyed by leaf number."""

    row: int
    original: Any
    structure: Structure
    images: dict[int, Picture]
    values: dict[int, Any]
    source: str | None
    masks: dict[int, Picture] = field(default_factory=dict)
    points: dict[int, Boxes | Keypoints] = field(default_factory=dict)
    fields: tuple[int, ...] = ()  # see `gpuload.ring.columns.Columns`

    @property
    def pictures(self) -> list[Picture]:
        """Return its images and masks, which are decoded."""
        return [*self.images.values(), *self.masks.values()]

    @property
    def place(self) -> str:
        """Return the place of its images in the sample, for error messages."""
        return join_key_paths(self.structure, self.images)

    def plain(self) -> Any:
        """Return the original sample, with metadata as plain objects."""
        if META.isdisjoint(map(type, self.values.values())):
            return self.original
        return unflatten(self.structure, [plain_meta(self.values[leaf]) for leaf in range(len(self.values))])

    def boxes(self) -> np.ndarray:
        """Return the boxes that random draws depend on: left, top, right, bottom."""
        boxes = next(value for value in self.points.values() if isinstance(value, Boxes))
        return to_xyxy(boxes.array, boxes.format)


class ImageFailure(Exception):
    """An error with the source and the place in the sample of a failed image. Its `__cause__` is the original error."""

    def __init__(self, source: str | None, place: str) -> None:
        super().__init__(source, place)
        self.source, self.place = source, place


class SampleReader:
    """A reader that flattens and decodes the samples of a job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._remarks: list[str] = []
        self._searches_left = SEARCHED_SAMPLES
        self._sizes_differ = False  # whether boxes for another image size were found and reported
        self._decoder = Decoder(job.decode)
        self.set_counters(Counters())
        self._frames = job.chain.frames
        self._needs_boxes = job.chain.reads_boxes or bool(box_droppers(job.chain))
        self._targets_refusal = check_transforms(job.chain)

    @property
    def is_search_over(self) -> bool:
        """Return whether the search of the first samples for unrecognized targets is over, and its remark sent."""
        return not self._searches_left and not self.remark

    @property
    def remark(self) -> str:
        """Return the next remark for the user, on unrecognized targets, sizes or decoding; "" if there is none."""
        return self._remarks[0] if self._remarks else self._decoder.warning

    def clear_remark(self) -> None:
        """Drop the current `remark` after it was sent with a reply; the next remark replaces it."""
        if self._remarks:
            del self._remarks[0]
        else:
            self._decoder.warning = ""

    def set_counters(self, counters: Counters) -> None:
        """Count decoded images and the bytes of samples in `counters`."""
        self._counters, self._decoder.counts = counters, counters.decoded

    def read(self, row: int, original: Any) -> Sample:
        """Flatten a sample and read its headers.

        Raises:
            TypeError, ValueError: the sample lacks an image that is needed, or its targets do not match its image.
            ImageFailure: a header cannot be read.
        """
        if original is None and self._job.collate_fn is None:
            raise TypeError(
                "the dataset returned None; return a sample, raise an error, or pass a collate_fn that drops None"
            )
        leaves: list[Any] = []
        structure = flatten(original, leaves)
        declared, targets = find_leaves(structure, leaves, plain=self._job.plain)
        structure, leaves, declared, targets = unfold_clips(structure, leaves, declared, targets, self._frames)
        if self._frames:
            structure, leaves, declared, targets = fewer_frames(self._frames, structure, leaves, declared, targets)
        if not declared and len(self._job.chain) and self._job.collate_fn is None:
            raise TypeError(
                f"the sample, {one_line(describe(structure, leaves))}, has no image for the transforms"
                f"{_nearly_an_image(structure, leaves)}; return gpuload.Encoded(bytes), gpuload.Image, a PIL image, or "
                "a uint8 array H×W×C or tensor C×H×W; or remove the transforms"
            )
        images: dict[int, Picture] = {}
        source = None
        for leaf, image in declared.items():
            if isinstance(image, Encoded):
                source = source or image.source
            try:
                images[leaf] = self._picture(image)
            except Exception as error:
                raise ImageFailure(source, key_paths_of(structure)[leaf]) from error
        values = {leaf: value for leaf, value in enumerate(leaves) if leaf not in declared and leaf not in targets}
        sample = Sample(row, original, structure, images, values, source)
        if targets or self._needs_boxes:
            self._add_targets(sample, leaves, targets)
        if self._searches_left and images:
            self._search(sample, leaves, targets)
        return sample

    def _picture(self, image: Encoded | Image) -> Picture:
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
        if dtype == "uint8":
            return Picture(image, header, height, width, channels)
        return Picture(image, header, height, width, channels * np.dtype(dtype).itemsize, (dtype, 3))

    def _search(self, sample: Sample, leaves: list[Any], targets: dict[int, Target]) -> None:
        """Search a sample for unrecognized targets."""
        remark = find_unrecognized_targets(sample.structure, leaves, sample.images, targets, moves=self._job.moves)
        self._searches_left -= 1
        if remark:
            self._searches_left, self._remarks = 0, [remark, *self._remarks]

    def _add_targets(self, sample: Sample, leaves: list[Any], targets: dict[int, Target]) -> None:
        """Add the masks, boxes and keypoints of a sample."""
        images = list(sample.images.items())
        if not images:
            raise TypeError(
                f"the sample, {one_line(describe(sample.structure, leaves))}, has masks, boxes or keypoints, but no "
                f"image that they belong to{_nearly_an_image(sample.structure, leaves)}; return it in the same sample"
            )
        if targets and self._targets_refusal is not None:
            raise ValueError(self._targets_refusal)
        size = images[0][1].height, images[0][1].width
        for leaf, image in images[1:]:
            if (other_size := (image.height, image.width)) != size:
                places = key_paths_of(sample.structure)
                raise ValueError(
                    "masks, boxes and keypoints belong to all images of their sample, which must have the same size, "
                    f"but {places[images[0][0]]} has {size_text(size)} and {places[leaf]} has {size_text(other_size)} "
                    "(height × width)"
                )
        for leaf, target in targets.items():
            if isinstance(target, Mask):
                sample.masks[leaf] = self._mask(sample, leaf, target, size)
            else:
                sample.points[leaf] = target
        if not self._sizes_differ:
            remark = size_remark(sample.points.values(), images[0][1].leaf, size, sample.source, self._job.decode)
            if remark:
                self._sizes_differ, self._remarks = True, [*self._remarks, remark]
        sample.fields = find_fields(sample.original, leaves, targets, self._job.chain)

    def _mask(self, sample: Sample, leaf: int, mask: Mask, size_hw: tuple[int, int]) -> Picture:
        place = key_paths_of(sample.structure)[leaf]
        header, axes, count = None, 2, 1
        if isinstance(mask.array, Encoded):
            sample.source = sample.source or mask.array.source
            self._counters.bytes_read += len(mask.array.data)
            try:
                header = self._decoder.header(mask.array)
                dtype = self._decoder.mask_dtype(header)
            except Exception as error:
                raise ImageFailure(mask.array.source, place) from error
            shape = self._decoder.size_hw(header)
        else:
            dtype, axes, shape = mask.array.dtype.name, mask.array.ndim, mask.array.shape
            count = len(mask.array) if axes == 3 else 1
        if (misfit := mask_misfit(place, shape, next(iter(sample.images.values())), self._job.decode)) is not None:
            raise ValueError(misfit)
        return Picture(mask, header, *size_hw, count * np.dtype(dtype).itemsize, (dtype, axes))

    def resize(self, pictures: Sequence[Picture], resize: Box) -> None:
        """Choose the images to resize while they are decoded, and set their regions to the boxes of the resize."""
        boxes, sizes = resize.box_tlhw.tolist(), resize.size_hw.tolist()
        codes = filter_codes(resize.filters, len(boxes)).tolist()
        for picture, box, size, code in zip(pictures, boxes, sizes, codes, strict=True):
            if picture.header is None or not isinstance(picture.leaf, Encoded):
                continue
            filter, (top, left, height, width) = FILTERS[code], box
            eighths = self._decoder.eighths(picture.leaf, picture.header, (top, left, height, width), size, filter)
            if eighths:
                picture.resized, picture.region = Resized(eighths, (size[0], size[1]), filter), box

    def send(self, sample: Sample, offset: int) -> int:
        """Choose the images that the device decodes, and assign places in the slot to their files from `offset` on;
        return the end. Nothing is written yet, since the slot may be too small."""
        for picture in sample.images.values():
            if picture.is_device_decodable:
                leaf: Any = picture.leaf
                is_grey = leaf.mode != "RGB" and picture.header.jpeg.components == 1
                source = None if leaf.source == sample.source else leaf.source
                picture.encoded_fields = (offset, len(leaf.data), picture.header.orientation, int(is_grey), source)
                offset = align(offset + len(leaf.data), ALIGN)
        return offset

    def cut(self, samples: Sequence[Sample]) -> int:
        """Cut the bytes that the regions need out of the image files, where that saves time, before the images are
        decoded. Cut the files of the first samples together, and return the number of these samples."""
        pictures: list[Picture] = []
        requests: list[tuple[Encoded, Any, tuple[int, int, int, int]]] = []
        nbytes = number = 0
        while number < len(samples) and nbytes < CUT_BYTES:
            for picture in samples[number].images.values():
                leaf, (top, left, height, width) = picture.leaf, picture.region
                if isinstance(leaf, Encoded) and picture.resized is None and not picture.encoded_fields:
                    pictures.append(picture)
                    requests.append((leaf, picture.header, (top, left, height, width)))
                    nbytes += len(leaf.data)
            number += 1
        with contextlib.suppress(Exception):  # raised again when the bad file is decoded
            for picture, part in zip(pictures, self._decoder.cut_files(requests), strict=True):
                picture.part = part
        return number

    def decode(self, sample: Sample, slot: np.ndarray, offset: int) -> int:
        """Decode the regions of a sample's images and masks into the slot from `offset` on; return the end. The
        files of images that the device decodes are copied to their places.

        Raises:
            ImageFailure: an image or mask cannot be decoded.
        """
        for number, picture in enumerate(sample.pictures):
            if picture.encoded_fields:
                start, length = picture.encoded_fields[:2]
                slot[start : start + length] = np.frombuffer(picture.leaf.data, np.uint8)  # pyright: ignore
                continue
            height, width, channels = picture.shape
            end = offset + height * width * channels
            try:
                self._decode(picture, slot[offset:end])
            except Exception as error:
                file = picture.leaf.array if isinstance(picture.leaf, Mask) else picture.leaf
                source = getattr(file, "source", None) or sample.source
                leaf = [*sample.images, *sample.masks][number]
                raise ImageFailure(source, key_paths_of(sample.structure)[leaf]) from error
            picture.offset, offset = offset, align(end, ALIGN)
        return offset

    def _decode(self, picture: Picture, out: np.ndarray) -> None:
        """Decode the region of an image, H×W×C, or of a mask, H×W×N."""
        leaf, header, resized = picture.leaf, picture.header, picture.resized
        top, left, height, width = picture.region
        region_tlhw = top, left, height, width
        if picture.kind is not None:
            out = out.view(picture.kind[0])
        if resized is not None:
            assert isinstance(leaf, Encoded)
            out = out.reshape(picture.shape)
            self._decoder.decode_resized(leaf, header, region_tlhw, resized.eighths, resized.interpolation, out)
        elif isinstance(leaf, Encoded):
            part, picture.part = picture.part, None
            self._decoder.decode(leaf, header, region_tlhw, out.reshape(height, width, -1), part)
        elif isinstance(leaf, Image):
            out.reshape(height, width, -1)[...] = leaf.hwc[top : top + height, left : left + width]
        elif header is not None:
            self._decoder.decode_mask(leaf.array, header, region_tlhw, out.reshape(height, width))
        else:
            cropped = leaf.array[..., top : top + height, left : left + width]
            channels = cropped[:, :, None] if cropped.ndim == 2 else cropped.transpose(1, 2, 0)
            out.reshape(channels.shape)[...] = channels


def as_columns(samples: Sequence[Sample], encoded_bytes: int = 0) -> Columns:
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
    for number in range(max(map(len, samples), default=0)):
        rows = [row for row, pictures in enumerate(samples) if len(pictures) > number]
        entries = [list(samples[row].items())[number] for row in rows]
        table_rows = [(p.offset, *p.shape, p.height, p.width, *p.region) for _, p in entries]
        table = np.array(table_rows, np.int64).view(IMAGE)[:, 0]
        leaves = merge_equal([leaf for leaf, _ in entries])
        kinds = [picture.kind for _, picture in entries]
        kinds = merge_equal(kinds) if any(kinds) else []
        columns.append(ImageColumn(table, leaves, None if len(rows) == len(samples) else np.array(rows), kinds))
    return columns


def _value_columns(samples: Sequence[Mapping[int, Any]]) -> dict[int, ValueColumn]:
    columns = {}
    for leaf in sorted(set().union(*samples)):
        rows = [row for row, values in enumerate(samples) if leaf in values]
        values = [samples[row][leaf] for row in rows]
        columns[leaf] = ValueColumn(values, None if len(rows) == len(samples) else np.array(rows))
    return columns


def _nearly_an_image(structure: Structure, leaves: Sequence[Any]) -> str:
    """Return a hint about the first leaf that is probably meant as an image but is not one; "" if there is none."""
    located = zip(key_paths_of(structure), leaves, strict=True)
    for place, leaf in sorted(located, key=lambda entry: not hasattr(entry[1], "shape")):
        if isinstance(leaf, os.PathLike) or (isinstance(leaf, str) and leaf.lower().endswith(EXTENSIONS)):
            return (
                f": {place} is the path {os.fspath(leaf)!r}; return gpuload.read(path) instead "
                "(gpuload.ImageFiles and gpuload.ImageFolder read entire folders)"
            )
        if isinstance(leaf, bytes):
            return f": {place} is bytes of an unknown kind; if they are an image file, return gpuload.Encoded(bytes)"
        if not isinstance(leaf, np.ndarray) and not is_tensor(leaf):
            continue
        array: Any = leaf
        axes, dtype = len(array.shape), dtype_of(array)
        is_deep = axes == 3 and dtype.startswith(("float", "bfloat", "uint16"))
        if is_deep or (dtype == "uint8" and axes in (2, 3)):
            argument = "tensor, layout='CHW'" if is_tensor(leaf) and axes == 3 else "array"
            scaled = "; for uint8 remove the dataset's ToTensor, or whatever else scales the image" if is_deep else ""
            return f": {place}, {describe_leaf(leaf)}, is an image only as gpuload.Image({argument}){scaled}"
    return ""
