"""What each transform of torchvision becomes: which of ours, with which arguments. Data only.

The tables are for both `torchvision.transforms` and `torchvision.transforms.v2`, whose classes have the same names and,
where both exist, the same attributes. Tests compare them with torchvision's signatures: an argument in no table would
be lost silently.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ARGUMENTS", "MODULE", "NOTHING_TO_DO", "PRESETS", "PRESET_RESIZE", "REFUSED", "RENAMED", "TO_DTYPE"]

# Ours has the same name and arguments; theirs keeps each argument in an attribute of that name.
ARGUMENTS: Final[dict[str, tuple[str, ...]]] = {
    "AugMix": ("severity", "mixture_width", "chain_depth", "alpha", "all_ops", "interpolation", "fill"),
    "AutoAugment": ("policy", "interpolation", "fill"),
    "CenterCrop": ("size",),
    "ClampBoundingBoxes": ("clamping_mode",),
    "ColorJitter": ("brightness", "contrast", "saturation", "hue"),
    "ConvertBoundingBoxFormat": ("format",),
    "CutMix": ("alpha", "num_classes", "labels_getter"),
    "ElasticTransform": ("alpha", "sigma", "interpolation", "fill"),
    "GaussianBlur": ("kernel_size", "sigma"),
    "GaussianNoise": ("mean", "sigma", "clip"),
    "Grayscale": ("num_output_channels",),
    "JPEG": ("quality",),
    "MixUp": ("alpha", "num_classes", "labels_getter"),
    "Normalize": ("mean", "std", "inplace"),
    "Pad": ("padding", "fill", "padding_mode"),
    "RandAugment": ("num_ops", "magnitude", "num_magnitude_bins", "interpolation", "fill"),
    "RandomAdjustSharpness": ("sharpness_factor", "p"),
    "RandomAffine": ("degrees", "translate", "scale", "shear", "interpolation", "fill", "center"),
    "RandomAutocontrast": ("p",),
    "RandomChannelPermutation": (),
    "RandomCrop": ("size", "padding", "pad_if_needed", "fill", "padding_mode"),
    "RandomEqualize": ("p",),
    "RandomErasing": ("p", "scale", "ratio", "value", "inplace"),
    "RandomGrayscale": ("p",),
    "RandomHorizontalFlip": ("p",),
    "RandomInvert": ("p",),
    "RandomIoUCrop": ("min_scale", "max_scale", "min_aspect_ratio", "max_aspect_ratio", "sampler_options", "trials"),
    "RandomPerspective": ("distortion_scale", "p", "interpolation", "fill"),
    "RandomPhotometricDistort": ("brightness", "contrast", "saturation", "hue", "p"),
    "RandomPosterize": ("bits", "p"),
    "RandomResize": ("min_size", "max_size", "interpolation", "antialias"),
    "RandomResizedCrop": ("size", "scale", "ratio", "interpolation", "antialias"),
    "RandomRotation": ("degrees", "interpolation", "expand", "center", "fill"),
    "RandomShortestSize": ("min_size", "max_size", "interpolation", "antialias"),
    "RandomSolarize": ("threshold", "p"),
    "RandomVerticalFlip": ("p",),
    "RandomZoomOut": ("fill", "side_range", "p"),
    "Resize": ("size", "interpolation", "max_size", "antialias"),
    "SanitizeBoundingBoxes": ("min_size", "min_area", "labels_getter"),
    "ScaleJitter": ("target_size", "scale_range", "interpolation", "antialias"),
    "TrivialAugmentWide": ("num_magnitude_bins", "interpolation", "fill"),
}

# Arguments that they keep in an attribute of another name.
RENAMED: Final[dict[tuple[str, str], str]] = {
    ("CutMix", "labels_getter"): "_labels_getter",
    ("MixUp", "labels_getter"): "_labels_getter",
    ("RandomIoUCrop", "sampler_options"): "options",
}

# They only change the type of a Python object; a batch of gpuload is always a tensor.
NOTHING_TO_DO: Final = ("Identity", "PILToTensor", "ToImage", "ToPILImage", "ToPureTensor")

TO_DTYPE: Final = ("ConvertImageDtype", "ToDtype", "ToTensor")  # they become our ToDtype

# A module that takes a batch goes after what `from_torchvision` returns, not into what it reads.
MODULE: Final = "write transforms=[*T.from_torchvision(…), module]"

# The presets of models' weights, in `torchvision.transforms._presets`, and what to write instead; but
# ImageClassification becomes four transforms. Names in braces are attributes of the preset.
PRESET_RESIZE: Final = "T.Resize({resize_size[0]}, {interpolation!r}), "  # left out where resize_size is None
PRESETS: Final[dict[str, str]] = {
    "ObjectDetection": "write transforms=[T.ToDtype('float32', scale=True)]",
    "OpticalFlow": (
        "return both images in a sample, and write transforms=[T.ToDtype('float32', scale=True), "
        "T.Normalize([0.5] * 3, [0.5] * 3)]"
    ),
    "SemanticSegmentation": (
        f"write transforms=[{PRESET_RESIZE}T.ToDtype('float32', scale=True), "
        "T.Normalize({mean}, {std})]; masks beside the image move with it"
    ),
    "VideoClassification": "it takes the frames of a video; do it in the dataset's __getitem__",
}

# What gpuload does not have, and what to do instead.
REFUSED: Final[dict[str, str]] = {
    "ClampKeyPoints": "keypoints that leave the image keep their coordinates; clip them in the finished batch",
    "FiveCrop": "it makes five images of one; write MultiView([...]) with a chain for each",
    "Lambda": (
        "torchvision calls its function with all that a sample holds; gpuload's own, T.Lambda(fn, per='image'), calls "
        "it with each image, a tensor C×H×W, and T.Lambda(fn) with a batch"
    ),
    "LinearTransformation": f"do it to the finished batch, or make an nn.Module of it, and {MODULE}",
    "RGB": "leave it out: gpuload.Encoded decodes to RGB by itself, whatever the file holds",
    "SanitizeKeyPoints": "select keypoints in the finished batch",
    "SetClampingMode": "leave it out: gpuload cuts boxes to the image, torchvision's mode 'soft'",
    "TenCrop": "it makes ten images of one; write MultiView([...]) with a chain for each",
    "UniformTemporalSubsample": "it is for videos; select frames in the dataset's __getitem__",
}
