"""Transforms of the user's own: a class with draws and functions of pixels, or a plain function or module.

They are drawn like all others, by numpy, and become a `Call` in the program; `gpuload.stage.user_code` calls them. All
of that happens in the main process: workers get a `StandIn`, since the user's module mostly imports torch, and nothing
that they do depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, get_args

import numpy as np

from gpuload.transforms.arguments import is_module, name_of
from gpuload.transforms.base import EVERYWHERE, Standing, Transform, Uniforms, declaration, marked_on_finished
from gpuload.transforms.program.ops import Call, Record, in_params

if TYPE_CHECKING:
    import torch

__all__ = ["Custom", "Lambda", "StandIn", "stand_ins"]

Per = Literal["batch", "image"]


@declaration
class Custom(Transform):
    """Base of transforms of your own: what is drawn for each sample, and what is done to the images.

    A subclass is a frozen dataclass, whose fields are its arguments. It may stand anywhere in a chain, and within
    `RandomApply` and the like. It has `apply`, mostly `draw`, and for masks, boxes and keypoints what moves them.

    Class variables:
        moves_pixels: whether pixels change their places. True: samples with masks, boxes or keypoints are refused, if
            there is no method for them. False: these stay as they are. None means they stay, and one warning says so.
        float_levels: where images are levels, `apply` gets them as float32, 0 … 255; what it returns is rounded and cut
            to 0 … 255.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Gain(Custom):
        ...     strength: float = 0.1
        ...     float_levels = True
        ...
        ...     def draw(self, uniforms, sizes_hw):
        ...         return 1 + self.strength * (2 * uniforms(1)[:, 0] - 1)
        ...
        ...     def apply(self, images, params):
        ...         return images * params[:, None, None, None]
        >>> Gain(0.2)
        Gain(strength=0.2)
    """

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE
    record: ClassVar[type[Record] | None] = Call
    needs_whole: ClassVar[bool] = True
    moves_pixels: ClassVar[bool | None] = None
    float_levels: ClassVar[bool] = False

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Any:
        """Draw what is random, for all samples of a batch at once; None if nothing is.

        Args:
            uniforms: ``uniforms(n)`` gives n numbers in (0, 1) for each sample, float64 (B, n). They depend on the
                loader's seed, the epoch and the sample's position alone.
            sizes_hw: int64 (B, 2), the sizes of the images there.

        Returns:
            An array with one entry for each sample, (B, …), or a tuple or a dict of these.
        """
        return None

    def apply(self, images: torch.Tensor, params: Any, /) -> torch.Tensor:
        """Change images.

        Args:
            images: N×C×H×W on the device: levels, uint8 unless `float_levels`, or the floats that `ToDtype` or
                `Normalize` made. They are a batch, or some images of it: those of one size, on a CPU a few at a time.
                They may be changed in place, and are overwritten after the call.
            params: what was drawn for these images, as tensors (N, …) on the device; float64 became float32.

        Returns:
            As many images, of the same size and dtype. The result for an image must not depend on the others.
        """
        raise NotImplementedError(f"{type(self).__name__} has no apply(self, images, params)")

    def apply_masks(self, masks: torch.Tensor, params: Any, /) -> torch.Tensor:
        """Change masks like their images: N×K×H×W of the masks' own dtype, K of them for each image; else as
        `apply`."""
        return masks

    def apply_boxes(self, boxes: np.ndarray, params: Any, size_hw: tuple[int, int], /) -> np.ndarray:
        """Move the boxes of one sample: float64 or int64 (n, 4), left, top, right, bottom in pixels.

        Args:
            boxes: as many come back. (`SanitizeBoundingBoxes` leaves out those that are gone.)
            params: what was drawn for the sample: its entry of each array.
            size_hw: of its image.
        """
        return boxes

    def apply_keypoints(self, points: np.ndarray, params: Any, size_hw: tuple[int, int], /) -> np.ndarray:
        """Move the keypoints of one sample: (…, 2), x and y in pixels; else as `apply_boxes`."""
        return points

    def has(self, method: str) -> bool:
        """Whether its class has a method of this name of its own."""
        return getattr(type(self), method) is not getattr(Custom, method)

    @property
    def per(self) -> str:
        """The argument it is called with: a ``"batch"``, an ``"image"``, or any ``"images"`` of one size."""
        return "images"

    @property
    def lanes(self) -> int:
        return 2  # its own draws, and the seed of torch's generators

    def standing(self, where: Standing) -> Transform:
        return self if where.state == "uint8" and not where.ends else marked_on_finished(self)

    def drawn(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Record:
        params = self.draw(uniforms, sizes_hw)
        in_params(params, lambda array: self._check_array(array, len(sizes_hw)))
        seeds = Uniforms(uniforms.key, uniforms.positions, uniforms.lane + 1)(1)[:, 0] * 2.0**32
        return Call(transform=self, params=params, seeds=seeds.astype(np.int64))

    def _check_array(self, array: Any, count: int) -> None:
        if not isinstance(array, np.ndarray) or array.ndim == 0 or len(array) != count:
            got = f"an array of shape {array.shape}" if isinstance(array, np.ndarray) else f"{type(array).__name__}"
            raise ValueError(
                f"{self.called}.draw must return numpy arrays with an entry for each sample, of shape ({count}, …), or "
                f"tuples and dicts of these, or None; got {got}"
            )


@declaration
class Lambda(Custom):
    """Call a plain function, or a torch module, with images.

    What it draws from torch's generators depends on the loader's seed, the epoch and the position of the image
    (``per="image"``), or of the first image of the batch: they are seeded for the call, and put back after it.

    Args:
        fn: takes images, uint8 or the floats of `ToDtype` or `Normalize`, and returns as many, of the same size and
            dtype. They may be changed in place, and are overwritten after the call. The last of a chain with
            ``per="batch"`` may return any tensor with an entry for each image.
        per: ``"batch"``: it gets a batch N×C×H×W, whose images must be of one size. ``"image"``: each image, C×H×W.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> Lambda(abs, per="image")
        Lambda(abs, per='image')
    """

    fn: Callable[[Any], Any]
    per: Per = "batch"  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"Lambda(fn=…) must be a function of images, got {self.fn!r} ({type(self.fn).__name__})")
        if isinstance(self.fn, Transform):
            raise TypeError(f"Lambda(fn=…) is {self.fn!r}, a transform already; write it without Lambda")
        if self.per not in get_args(Per):
            raise ValueError(f"Lambda(per=…) must be 'batch' or 'image', got {self.per!r}")

    def apply(self, images: torch.Tensor, params: Any) -> torch.Tensor:
        return self.fn(images)

    @property
    def called(self) -> str:
        return f"the module {name_of(self.fn)}" if is_module(self.fn) else f"Lambda({name_of(self.fn)})"

    def __repr__(self) -> str:
        return f"Lambda({name_of(self.fn)}" + ("" if self.per == "batch" else f", per={self.per!r}") + ")"


@declaration
class StandIn(Custom):
    """A stand-in, in workers, for a transform of the user's own: nothing is drawn or applied there."""

    name: str

    def drawn(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Record:
        return Call(transform=self, seeds=np.zeros(len(sizes_hw), np.int64))

    def apply(self, images: torch.Tensor, params: Any) -> NoReturn:
        raise RuntimeError(
            f"{self.name} was left out when its transforms were pickled, as they are for workers; give a Loader in "
            "this process the transforms themselves"
        )


def stand_ins(transforms: Iterable[Transform]) -> tuple[Transform, ...]:
    """The transforms as workers get them."""
    results: list[Any] = []
    for transform in transforms:
        stand_in: Any = transform
        if isinstance(transform, Custom):
            stand_in = StandIn(transform.called)
        elif hasattr(transform, "chains"):
            stand_in = replace(stand_in, chains=tuple(map(stand_ins, stand_in.chains)))
        elif transform.children:
            stand_in = replace(stand_in, transforms=stand_ins(transform.children))
        results.append(stand_in)
    return tuple(results)
