"""`Decoder`: reads an image's header, then decodes a region with the first library that accepts the file.

A decoder belongs to one thread. It holds no pixels between calls except nvImageCodec's image memory; see `jpeg`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import numpy as np

from gpuload.datasets.sample import Encoded, Mode, explain_deep_pixels
from gpuload.decode.cut import cut_files
from gpuload.decode.grid import Cut
from gpuload.decode.header import (
    Header,
    JpegHeader,
    Region,
    end_of_scan,
    has_eoi,
    is_transposed,
    read_header,
    stored_region,
    turn_upright,
)
from gpuload.decode.jpeg import JpegDecoder, NvImageCodecRegions, SimpleJpeg
from gpuload.decode.native_messages import run_and_capture
from gpuload.decode.options import Decode
from gpuload.decode.pillow_images import CHANNELS, MASK_DTYPES, open_image, truncated_flag_hint
from gpuload.decode.scaled import Scaled, choose_eighths, decode_scaled, resample
from gpuload.decode.tiff import REMEDY, remedy
from gpuload.errors import DecodeError, one_line

__all__ = ["COUNT_KEYS", "DECODERS", "UNUSABLE", "Decoder"]

DECODERS: Final = (NvImageCodecRegions.name, SimpleJpeg.name, "Pillow", "cut", "scaled")
# The keys of `Decoder.counts`. Images are counted by decoder, with "cut" and "scaled" as separate decoders. "whole"
# counts crops for which the entire JPEG was decoded because nvImageCodec cannot be used.
COUNT_KEYS: Final = (*DECODERS, "whole")

UNUSABLE: Final = "nvImageCodec is installed but cannot be used"  # the start of `Decoder.warning`
ENDS_EARLY: Final = "Premature end of JPEG file"  # libjpeg's text; simplejpeg reports only the first warning


class Decoder:
    """A decoder that decodes one image at a time.

    Args:
        options: the limits, and whether to turn images upright.

    Attributes:
        counts: the number of images decoded so far, keyed by `COUNT_KEYS`.
        warning: a message to the user if nvImageCodec is installed but cannot be used; empty otherwise, or once the
            message has been shown.

    Example:
        >>> import io
        >>> from PIL import Image
        >>> file = io.BytesIO()
        >>> Image.new("RGB", (60, 40)).save(file, "JPEG")
        >>> photo = Encoded(file.getvalue())
        >>> decoder = Decoder(Decode())
        >>> header = decoder.header(photo)
        >>> decoder.size_hw(header), decoder.channels(header, photo.mode)
        ((40, 60), 3)
        >>> decoder.decode(photo, header, (10, 20, 16, 24)).shape
        (16, 24, 3)
    """

    def __init__(self, options: Decode) -> None:
        self._options = options
        self.counts = dict.fromkeys(COUNT_KEYS, 0)
        self.warning = ""

    @cached_property
    def jpeg_decoders(self) -> tuple[list[JpegDecoder], list[str]]:
        """The usable decoders that JPEGs are passed to before Pillow, and a message for each unusable decoder."""
        usable: list[JpegDecoder] = []
        unusable: list[str] = []
        for kind in (NvImageCodecRegions, SimpleJpeg):
            try:
                usable.append(kind())
            except Exception as error:  # whatever a broken installation raises, the next decoder takes over
                unusable.append(one_line(f"{kind.name}: not usable ({type(error).__name__}: {error})"))
                if kind is NvImageCodecRegions and _is_installed("nvidia.nvimgcodec"):
                    self.warning = one_line(
                        f"{UNUSABLE} ({error}): each JPEG is decoded in full by another decoder, which is slower for "
                        "crops. Run: pip install --upgrade 'gpuload[cu13]' (or cu12, to match torch.version.cuda); for "
                        "details run: gpuload doctor"
                    )
        return usable, unusable

    def header(self, encoded: Encoded) -> Header:
        """Read format, size and orientation without decoding; raises the errors of `read_header`."""
        return read_header(encoded.data, self._options, exif=self.turns_upright(encoded))

    def turns_upright(self, encoded: Encoded) -> bool:
        """Return whether an image is turned upright: `Decode.exif` decides, or else `Encoded.exif`."""
        return bool(encoded.exif if self._options.exif is None else self._options.exif)

    def size_hw(self, header: Header) -> tuple[int, int]:
        """Return the height and width that regions refer to: upright if `turns_upright`, else as stored."""
        if is_transposed(header.orientation):
            return header.width, header.height
        return header.height, header.width

    def channels(self, header: Header, mode: Mode) -> int:
        """Return the number of channels that `decode` returns for an `Encoded` of this mode.

        Raises:
            DecodeError: the image has more than 8 bits per channel; or, with ``mode="unchanged"``, a part of the file's
                content would be lost, or its channels cannot be represented.
        """
        if mode == "unchanged" and (lost := _lost_content(header)) is not None:
            raise DecodeError(f"mode='unchanged' returns everything in a file, but this TIFF has {lost}; {REMEDY}")
        if mode == "unchanged" and self.dtype(header) != "uint8":
            return CHANNELS.get(header.mode, 1)
        alternative = "gpuload.Encoded(data, mode='unchanged')"
        if mode == "unchanged":
            alternative = f"gpuload.Image(array){' with the result of tifffile.imread' * (header.format == 'TIFF')}"
        if (complaint := explain_deep_pixels(f"this {header.format}", header.mode, alternative)) is not None:
            raise DecodeError(complaint)
        if mode != "unchanged":
            return CHANNELS[mode]
        if header.mode not in CHANNELS:
            raise DecodeError(
                f"mode='unchanged' cannot represent this {header.format}, whose Pillow mode is {header.mode!r}; use "
                "mode='RGB' or 'L'" + (f", or {REMEDY}" if header.format == "TIFF" else "")
            )
        return CHANNELS[header.mode]

    def dtype(self, header: Header) -> str:
        """Return the dtype that `decode` returns with ``mode="unchanged"``; other modes return uint8."""
        return "uint8" if header.opened is None else header.opened.dtype

    def mask_dtype(self, header: Header) -> str:
        """Return the dtype that `decode_mask` returns; raise DecodeError if a pixel has more than one value."""
        if header.mode not in MASK_DTYPES:
            raise DecodeError(
                f"a mask must be a file with one value per pixel (grey or with a palette), but the Pillow mode "
                f"of this {header.format} is {header.mode!r}; if its colours are classes, decode it in the dataset and "
                "yield gpuload.Mask(array)"
            )
        if (lost := _lost_content(header)) is not None:
            raise DecodeError(
                f"a mask must be a file with one value per pixel, but this TIFF has {lost}; read it in the "
                "dataset, for example with tifffile.imread(path), and yield gpuload.Mask(array)"
            )
        return MASK_DTYPES[header.mode]

    def decode_mask(self, encoded: Encoded, header: Header, region_tlhw: Region, out: np.ndarray) -> None:
        """Decode a region's stored values to `out`, H×W of `mask_dtype`. Arguments and errors are as for `decode`."""
        if header.jpeg is not None:
            grey = Encoded(encoded.data, "L", encoded.source)
            self.decode(grey, header, region_tlhw, out[:, :, None])
            return
        assert header.opened is not None
        values, complaint = run_and_capture(header.opened.values, self._as_stored(header, region_tlhw))
        if values is None:
            hints = f"{remedy(header.format, encoded.data)}{truncated_flag_hint()}"
            raise DecodeError(f"the {header.format} cannot be decoded: Pillow: {complaint}{hints}")
        self.counts["Pillow"] += 1
        np.copyto(out[:, :, None], turn_upright(values[:, :, None], header.orientation), casting="unsafe")

    def cut_files(self, requests: Sequence[tuple[Encoded, Header, Region]]) -> list[Cut | None]:
        """For each request, cut out the part of the JPEG that its region needs, to pass to `decode` as `part`.

        A request holds the first three arguments of `decode`. If cutting does not pay off, the cut is the entire file.
        For a file that is not a JPEG, the result is None.

        Cutting several files in a row takes less than half as long as cutting and decoding them in turn, because the
        CPU's cache cannot hold the code of both.
        """
        files = [(encoded.data, header.jpeg, self._as_stored(header, region)) for encoded, header, region in requests]
        parts = cut_files([(data, None if _is_whole(jpeg, region) else jpeg, region) for data, jpeg, region in files])
        return [
            part if part is not None or jpeg is None else Cut(data, jpeg, region)
            for part, (data, jpeg, region) in zip(parts, files, strict=True)
        ]

    def decode(
        self,
        encoded: Encoded,
        header: Header,
        region_tlhw: Region | None = None,
        out: np.ndarray | None = None,
        part: Cut | None = None,
    ) -> np.ndarray:
        """Decode a region to H×W×C uint8, or to `dtype` with ``mode="unchanged"``.

        Args:
            encoded: the file's bytes and the mode.
            header: the result of `header` for `encoded`.
            region_tlhw: top, left, height, width within `size_hw`; None means the entire image.
            out: the array to write to, of the result's dtype and shape; None means a new array.
            part: the result of `cut_files` for the region; None means that `decode` cuts the file if that pays off.

        Raises:
            DecodeError: no decoder accepts the file (the message lists each decoder's complaint), or as for `channels`.
            ValueError: the region is empty or exceeds the image, or `out` has the wrong dtype or shape.
        """
        size_hw = full_height, full_width = self.size_hw(header)
        if region_tlhw is None:
            region_tlhw = (0, 0, full_height, full_width)
        top, left, height, width = region_tlhw
        if not (0 <= top < top + height <= full_height and 0 <= left < left + width <= full_width):
            raise ValueError(f"the region (top, left, height, width) = {region_tlhw} is not within H×W = {size_hw}")
        shape = (height, width, self.channels(header, encoded.mode))
        dtype = self.dtype(header) if encoded.mode == "unchanged" else "uint8"
        if out is None:
            out = np.empty(shape, dtype)
        elif out.shape != shape or out.dtype != dtype:
            raise ValueError(f"out must be {dtype} of shape {shape}, got {out.dtype} of shape {out.shape}")
        region, is_turned = self._as_stored(header, region_tlhw), header.orientation != 1
        stored = self._decode_as_stored(encoded, header, region, part, None if is_turned else out)
        if not np.may_share_memory(stored, out):
            np.copyto(out, turn_upright(stored, header.orientation))
        return out

    def eighths(
        self, encoded: Encoded, header: Header, region_tlhw: Region, size_hw: tuple[int, int], interpolation: str
    ) -> int:
        """Return the scale, in eighths, at which `decode_resized` decodes an image whose region is resized to
        `size_hw`; 0 if `decode` costs less, or the image cannot be decoded at a smaller size. The result depends only
        on the file and the arguments, not on the installed decoders."""
        jpeg = header.jpeg
        if jpeg is None or not _is_direct(jpeg, encoded.mode):
            return 0
        if is_transposed(header.orientation):
            size_hw = size_hw[1], size_hw[0]
        return choose_eighths(encoded.data, jpeg, self._as_stored(header, region_tlhw), size_hw, interpolation)

    def decode_resized(
        self, encoded: Encoded, header: Header, region_tlhw: Region, eighths: int, interpolation: str, out: np.ndarray
    ) -> None:
        """Decode a region at `eighths` / 8 of its size and resize it to `out`, H×W×C uint8.

        If the image cannot be decoded at that scale because the file is damaged or simplejpeg is missing, the region is
        decoded as in `decode`, with the same errors, and resized.
        """
        jpeg = header.jpeg
        assert jpeg is not None
        grey = _is_grey(jpeg, encoded.mode)
        region, (height, width) = self._as_stored(header, region_tlhw), out.shape[:2]
        size_hw = (width, height) if is_transposed(header.orientation) else (height, width)
        usable, scaled = self.jpeg_decoders[0], None
        if usable and isinstance(decoder := usable[-1], SimpleJpeg):
            scaled = decode_scaled(decoder.decode_jpeg, encoded.data, jpeg, grey, region, eighths)
        if scaled is None:
            pixels = self._decode_as_stored(encoded, header, region, None)
            scaled = Scaled(pixels, (0.0, 0.0, *pixels.shape[:2]))
        else:
            self.counts["scaled"] += 1
        np.copyto(out, turn_upright(resample(scaled, size_hw, interpolation), header.orientation))

    def _as_stored(self, header: Header, region_tlhw: Region) -> Region:
        return stored_region(region_tlhw, header.orientation, self.size_hw(header))

    def _decode_as_stored(
        self, encoded: Encoded, header: Header, region_tlhw: Region, part: Cut | None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Return a region as stored, converted to the mode, in `out` or in memory that the next call can overwrite."""
        data, mode, jpeg = encoded.data, encoded.mode, header.jpeg
        reasons: list[str] = []
        if jpeg is not None:
            grey, is_direct = _is_grey(jpeg, mode), _is_direct(jpeg, mode)
            decoders, unusable = self.jpeg_decoders
            is_whole = _is_whole(jpeg, region_tlhw)
            attempts = [(decoder.name, decoder, Cut(data, jpeg, region_tlhw)) for decoder in decoders]
            if is_whole:  # simplejpeg first: it decodes directly into `out`, 10% faster, with the same pixels
                attempts.reverse()
            if decoders and part is None and not is_whole:
                part = cut_files([(data, jpeg, region_tlhw)])[0]
            if decoders and part is not None and part.data is not data:
                attempts.insert(0, ("cut", decoders[-1], part))
            complaints: dict[str, str] = {}
            for name, decoder, (coded, coded_header, region) in attempts:
                pixels, complaints[name] = decoder.decode(coded, coded_header, grey, region, out if is_direct else None)
                if pixels is not None:
                    self.counts[name] += 1
                    if unusable and not is_whole and name == decoders[0].name:
                        self.counts["whole"] += 1
                    return pixels if is_direct else _convert(pixels, mode)
            reasons = [f"{decoder.name}: {complaints[decoder.name]}" for decoder in decoders] + unusable
        pixels, complaint = run_and_capture(_decode_with_pillow, data, header, mode, region_tlhw)
        if pixels is None:
            reasons.append(f"Pillow: {complaint}")
            if jpeg is not None and not has_eoi(data, jpeg):
                pixels, complaint = run_and_capture(_decode_before_damage, data, jpeg, mode, region_tlhw)
                if pixels is None and not complaint:
                    top, _, height, _ = region_tlhw
                    reasons.append(f"the damage extends into the needed rows of the file, {top} to {top + height}")
        if pixels is None:
            hints = f"{remedy(header.format, data)}{truncated_flag_hint()}"
            raise DecodeError(f"the {header.format} cannot be decoded: {'; '.join(reasons)}{hints}")
        self.counts["Pillow"] += 1
        return pixels


def _is_installed(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the parent package is missing
        return False
    return spec is not None and spec.origin is not None  # an empty folder that pip left behind is not a package


def _lost_content(header: Header) -> str | None:
    return None if header.opened is None else header.opened.lost_content


def _is_whole(jpeg: JpegHeader | None, region_tlhw: Region) -> bool:
    return jpeg is not None and tuple(region_tlhw[2:]) == (jpeg.height, jpeg.width)


def _is_grey(jpeg: JpegHeader, mode: Mode) -> bool:
    """Return whether a JPEG has one channel and is decoded to one channel with this mode."""
    return jpeg.components == 1 and mode in ("L", "unchanged")


def _is_direct(jpeg: JpegHeader, mode: Mode) -> bool:
    """Return whether the JPEG decoders produce the mode without a conversion."""
    return _is_grey(jpeg, mode) or mode in ("RGB", "unchanged")


def _decode_with_pillow(data: bytes, header: Header, mode: Mode, region_tlhw: Region) -> np.ndarray:
    opened = header.opened if header.opened is not None else open_image(data, header.format)
    return opened.pixels(mode, region_tlhw)


def _decode_before_damage(data: bytes, jpeg: JpegHeader, mode: Mode, region_tlhw: Region) -> np.ndarray | None:
    # Stop at the first marker: libjpeg would fill the picture with grey from there on. An interrupted download into a
    # preallocated file ends in zeros, which would decode as pixels.
    scan = data[: end_of_scan(data, jpeg)].rstrip(b"\0")
    # The early end must be the only problem: a premature restart marker also leaves grey areas within the picture.
    _, complaint = SimpleJpeg().decode(scan, jpeg, jpeg.components == 1, region_tlhw)
    return open_image(scan, "JPEG").pixels_before_damage(mode, region_tlhw) if ENDS_EARLY in complaint else None


def _convert(rgb: np.ndarray, mode: str) -> np.ndarray:
    from PIL import Image

    pixels = np.asarray(Image.fromarray(rgb).convert(mode))
    return pixels if pixels.ndim == 3 else pixels[:, :, None]
