"""The user's own transforms: a class that draws parameters and changes pixels, or a plain function or module.

Like all other transforms, these transforms draw with numpy. Each becomes a `Call` in the program, which
`gpuload.stage.user_code` executes. The user's code runs only in the main process. Workers get a `StandIn` instead,
since the user's code usually imports torch, which workers do not need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, get_args

import numpy as np

from gpuload.checks import argument, function, one_of
from gpuload.transforms.arguments import is_module, name_of, refuse_albumentations
from gpuload.transforms.base import (
    EVERYWHERE,
    ChainPosition,
    Transform,
    Uniforms,
    copy_for_finished_images,
    declaration,
)
from gpuload.transforms.program.ops import Call, Record, map_params

if TYPE_CHECKING:
    import torch

__all__ = ["Custom", "Lambda", "StandIn", "replace_with_stand_ins"]

Per = Literal["batch", "image"]


@declaration
class Custom(Transform):
    """Base class of your own transforms, which can draw parameters for each sample, and change the images.

    A subclass is a frozen dataclass whose fields are its arguments. It can be used anywhere in a chain, and within
    `RandomApply` and similar transforms. It defines `apply`, usually `draw`, and methods for masks, boxes and keypoints
    if the transform moves pixels.

    Class variables:
        moves_pixels: whether the transform moves pixels. If True, a sample with masks, boxes or keypoints is an error
            unless the class has a method for them. If False, these targets are not changed. If None, they are not
            changed, and a warning is issued once.
        float_levels: whether `apply` gets uint8 images as float32, with values 0 … 255; its result is then rounded and
            clipped to 0 … 255. Has no effect on images that are already floats.

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
    needs_full_image: ClassVar[bool] = True
    moves_pixels: ClassVar[bool | None] = None
    float_levels: ClassVar[bool] = False

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Any:
        """Draw the random parameters for all samples of a batch; return None if there are no parameters.

        Args:
            uniforms: ``uniforms(n)`` returns n numbers in (0, 1) for each sample, float64 (B, n). They depend only on
                the loader's seed, the epoch and the sample's position.
            sizes_hw: int64 (B, 2), the sizes of the images that reach this transform.

        Returns:
            An array with one entry per sample, (B, …), or a tuple or dict of such arrays.
        """
        return None

    def apply(self, images: torch.Tensor, params: Any, /) -> torch.Tensor:
        """Transform the images.

        Args:
            images: an N×C×H×W tensor on the device: the entire batch or a part of it, on a CPU a few images at a time.
                Before `ToDtype` and `Normalize` the images are uint8, or float32 if `float_levels`; afterwards they are
                the floats that these transforms produce. You can change them in place; gpuload overwrites them after
                the call.
            params: the result of `draw` for these images, as tensors of shape (N, …) on the device; float64 is
                converted to float32.

        Returns:
            N images of the same size and dtype. Each result must depend only on its own image and parameters.
        """
        raise NotImplementedError(f"{type(self).__name__} has no apply(self, images, params)")

    def apply_masks(self, masks: torch.Tensor, params: Any, /) -> torch.Tensor:
        """Transform masks like their images. Masks are N×K×H×W, K masks per image, in the dtype of the sample's mask;
        the parameters and the result are as for `apply`."""
        return masks

    def apply_boxes(self, boxes: np.ndarray, params: Any, size_hw: tuple[int, int], /) -> np.ndarray:
        """Move the boxes of one sample.

        Args:
            boxes: float64 or int64 (n, 4): left, top, right, bottom in pixels.
            params: the sample's entry in each array that `draw` returned.
            size_hw: the size of the sample's image.

        Returns:
            The same number of boxes; `SanitizeBoundingBoxes` removes boxes outside the image.
        """
        return boxes

    def apply_keypoints(self, points: np.ndarray, params: Any, size_hw: tuple[int, int], /) -> np.ndarray:
        """Move the keypoints of one sample, (…, 2): x and y in pixels. Other arguments are as for `apply_boxes`."""
        return points

    def has(self, method: str) -> bool:
        """Return whether the class overrides the method of this name."""
        return getattr(type(self), method) is not getattr(Custom, method)

    @property
    def per(self) -> str:
        """The argument of `apply`: a ``"batch"``, one ``"image"``, or any number of ``"images"`` of one size."""
        return "images"

    @property
    def lanes(self) -> int:
        return 2  # one for the draws, one for the seed of torch's generators

    def bind(self, position: ChainPosition) -> Transform:
        if position.state == "uint8" and not position.only_custom_follows:
            return self
        return copy_for_finished_images(self)

    def drawn(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Record:
        params = self.draw(uniforms, sizes_hw)
        map_params(params, lambda array: self._check_array(array, len(sizes_hw)))
        seeds = Uniforms(uniforms.key, uniforms.positions, uniforms.lane + 1)(1)[:, 0] * 2.0**32
        return Call(transform=self, params=params, seeds=seeds.astype(np.int64))

    def _check_array(self, array: object, count: int) -> None:
        if not isinstance(array, np.ndarray) or array.ndim == 0 or len(array) != count:
            actual = f"an array of shape {array.shape}" if isinstance(array, np.ndarray) else f"{type(array).__name__}"
            raise ValueError(
                f"{self.display_name}.draw must return numpy arrays with one entry for each sample, of shape "
                f"({count}, …), or tuples and dicts of such arrays, or None; got {actual}"
            )


@declaration
class Lambda(Custom):
    """Call a plain function, or a torch module, with images.

    torch's generators are seeded before the call and restored after it. The seed depends on the loader's seed, the
    epoch and the position of the image (``per="image"``) or of the batch's first image, so the function's random draws
    are reproducible.

    Args:
        fn: a function that takes images, which are uint8 or the floats from `ToDtype` or `Normalize`, and returns the
            same number of images, of the same size and dtype. It can change its argument in place; gpuload overwrites
            that argument after the call. At the end of a chain, a function with ``per="batch"`` can return any tensor
            with one entry per image.
        per: ``"batch"`` calls `fn` with an N×C×H×W batch, whose images must have the same size; ``"image"`` calls
            `fn` with each C×H×W image.

    Example:
        >>> Lambda(abs, per="image")
        Lambda(abs, per='image')
    """

    fn: Callable[[Any], Any] = argument(function)
    per: Per = argument(one_of, default="batch", choices=get_args(Per))  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.fn, Transform):
            raise TypeError(f"Lambda(fn=…) is {self.fn!r}, which is already a transform; remove the Lambda around it")
        refuse_albumentations("Lambda(fn=…)", self.fn)

    def apply(self, images: torch.Tensor, params: Any) -> torch.Tensor:
        return self.fn(images)

    @property
    def display_name(self) -> str:
        return f"the module {name_of(self.fn)}" if is_module(self.fn) else f"Lambda({name_of(self.fn)})"

    def __repr__(self) -> str:
        return f"Lambda({name_of(self.fn)}" + ("" if self.per == "batch" else f", per={self.per!r}") + ")"


@declaration
class StandIn(Custom):
    """A placeholder for one of the user's own transforms in workers, which neither draw nor apply such transforms."""

    name: str

    def drawn(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Record:
        return Call(transform=self, seeds=np.zeros(len(sizes_hw), np.int64))

    def apply(self, images: torch.Tensor, params: Any) -> NoReturn:
        raise RuntimeError(
            f"{self.name} was removed when its chain was pickled, since workers do not need it; pass the original "
            "transforms to a Loader in this process"
        )


def replace_with_stand_ins(transforms: Iterable[Transform]) -> tuple[Transform, ...]:
    """Return the transforms with each of the user's own transforms replaced by a `StandIn`, to be sent to workers."""
    results: list[Any] = []
    for transform in transforms:
        stand_in: Any = transform
        if isinstance(transform, Custom):
            stand_in = StandIn(transform.display_name)
        elif hasattr(transform, "chains"):
            stand_in = replace(stand_in, chains=tuple(map(replace_with_stand_ins, stand_in.chains)))
        elif transform.children:
            stand_in = replace(stand_in, transforms=replace_with_stand_ins(transform.children))
        results.append(stand_in)
    return tuple(results)
