"""gpuload's equivalents of other libraries' names and arguments, for error messages about unknown names.

This module is imported when a name in `gpuload` or `gpuload.transforms`, or an argument of a transform, is not found,
and by `gpuload.transforms.interop`. It does not import torch. docs/howto/moving.md shows `TRANSFORMS` and `ARGUMENTS`.
"""

from __future__ import annotations

import sys
from typing import Final

from gpuload.errors import did_you_mean

__all__ = [
    "ARGUMENTS",
    "DATASET_REMEDY",
    "MODULE_REMEDY",
    "TOP_LEVEL",
    "TO_DTYPE",
    "TRANSFORMS",
    "TYPE_CONVERSIONS",
    "UNSUPPORTED",
    "albumentations_remedy",
    "missing_name_error",
]

# Names of torch, torchvision and earlier versions that a user may look for in `gpuload`.
TOP_LEVEL: Final = {
    "BoundingBoxes": "write gpuload.Boxes(array, format)",
    "CocoCaptions": "write gpuload.wrap(torchvision.datasets.CocoCaptions(…))",
    "CocoDetection": "write gpuload.wrap(torchvision.datasets.CocoDetection(…))",
    "DataLoader": "write gpuload.Loader, which takes its arguments",
    "DatasetFolder": "write gpuload.ImageFolder(root, extensions=…)",
    "DeviceCached": "keep the images in a tensor for gpuload.Augment, as in docs/howto/dataset_in_memory.md",
    "DistributedSampler": "leave it out: gpuload.Loader divides samples among ranks by itself",
    "ImageNet": "write gpuload.ImageFolder(root / 'train'), and gpuload.ImageFolder(root / 'val', classes=train)",
    "KeyPoints": "write gpuload.Keypoints(array)",
    "StatefulDataLoader": "write gpuload.Loader, which has state_dict() and load_state_dict() too",
    "Video": "return a list of images",
    "WeightedRandomSampler": "write gpuload.Loader(weights=…)",
    "create_loader": "write gpuload.Loader(dataset, transforms=T.from_timm(config, is_training=…))",
    "default_collate": "leave it out: gpuload.Loader does the same without a collate_fn",
    "read_image": "write gpuload.read(path), which leaves the decoding to gpuload.Loader",
}
TORCHVISION_DATASETS: Final = (
    "CIFAR10", "CIFAR100", "Caltech101", "Caltech256", "CelebA", "Cityscapes", "DTD", "EMNIST", "EuroSAT",
    "FGVCAircraft", "FakeData", "FashionMNIST", "Flowers102", "Food101", "Imagenette", "MNIST", "OxfordIIITPet",
    "Places365", "STL10", "SVHN", "StanfordCars", "VOCDetection", "VOCSegmentation",
)  # fmt: skip
# Classes and functions of torch.utils.data that work with a `Loader`.
USABLE_AS_IS: Final = (
    "BatchSampler", "ChainDataset", "ConcatDataset", "Dataset", "IterableDataset", "RandomSampler", "Sampler",
    "SequentialSampler", "StackDataset", "Subset", "SubsetRandomSampler", "TensorDataset", "random_split",
)  # fmt: skip

# Transforms of albumentations that gpuload does not have.
ALBUMENTATIONS_ONLY: Final = (
    "AdditiveNoise", "AdvancedBlur", "AtLeastOneBBoxRandomCrop", "ChannelDropout", "ChromaticAberration",
    "ConstrainedCoarseDropout", "CropAndPad", "CropNonEmptyMaskIfExists", "CubicSymmetry", "Defocus", "Emboss",
    "FDA", "FancyPCA", "FrequencyMasking", "FromFloat", "GlassBlur", "GridDistortion", "GridDropout",
    "GridElasticDeform", "HEStain", "HistogramMatching", "ISONoise", "MaskDropout", "MedianBlur",
    "Morphological", "MultiplicativeNoise", "OpticalDistortion", "OverlayElements", "PiecewiseAffine",
    "PixelDistributionAdaptation", "PixelDropout", "PlasmaBrightnessContrast", "PlasmaShadow",
    "RGBShift", "RandomCropFromBorders", "RandomCropNearBBox", "RandomFog", "RandomGravel",
    "RandomGridShuffle", "RandomRain", "RandomSnow", "RandomSunFlare", "RandomToneCurve",
    "RingingOvershoot", "SaltAndPepper", "ShotNoise", "Spatter", "Superpixels", "TextImage",
    "ThinPlateSpline", "TimeMasking", "TimeReverse", "ToSepia", "UnsharpMask", "XYMasking", "ZoomBlur",
)  # fmt: skip

DATASET_REMEDY: Final = (
    "call albumentations in the dataset's __getitem__ and return gpuload.Image(transform(image=array)['image'])"
)
CUSTOM_REMEDY: Final = "for a transform of your own write a subclass of Custom, or Lambda(function)"
TENSOR_REMEDY: Final = "leave it out: batches hold tensors, whatever the dataset returns"
PROBABILITY_HINT: Final = "RandomApply([…], p=…) applies it with a probability"
DEVICE_REMEDY: Final = "leave it out: gpuload.Loader(device=…) moves batches to the device"

# Transforms that only convert an image to another Python type; gpuload's batches are always tensors.
TYPE_CONVERSIONS: Final = ("Identity", "PILToTensor", "ToImage", "ToPILImage", "ToPureTensor")

TO_DTYPE: Final = ("ConvertImageDtype", "ToDtype", "ToTensor")  # these become gpuload's ToDtype

# The remedy for modules that take a batch, which `from_torchvision` does not convert.
MODULE_REMEDY: Final = "write transforms=[*T.from_torchvision(…), module]"

# torchvision transforms that gpuload does not have, with the remedies.
UNSUPPORTED: Final[dict[str, str]] = {
    "FiveCrop": "it makes five images from one; write MultiView([…]) with one chain per image",
    "Lambda": (
        "torchvision calls its function with every part of a sample; with gpuload, write T.Lambda(fn, per='image') to "
        "call it with each image, a C×H×W tensor, or T.Lambda(fn) to call it with a batch"
    ),
    "LinearTransformation": f"apply it to the batch, or wrap it in an nn.Module, and {MODULE_REMEDY}",
    "RGB": "leave it out: gpuload.Encoded decodes every file to RGB",
    "SetClampingMode": "leave it out: gpuload clips boxes to the image, like torchvision's mode 'soft'",
    "TenCrop": "it makes ten images from one; write MultiView([…]) with one chain per image",
}

# Other names that a user may look for in `gpuload.transforms`.
TRANSFORMS: Final = {
    # torchvision
    "AutoAugmentPolicy": "write AutoAugment(policy='imagenet'), 'cifar10' or 'svhn'",
    "InterpolationMode": "write its name, as in Resize(224, interpolation='bicubic')",
    "Transform": CUSTOM_REMEDY,
    # timm
    "AugMixAugment": "write TimmAugMix",
    "FastCollateMixup": "write RandomChoice([MixUp(num_classes=…), CutMix(num_classes=…)]) after Normalize",
    "MaybePILToTensor": TENSOR_REMEDY,
    "MaybeToTensor": TENSOR_REMEDY,
    "Mixup": "write MixUp(num_classes=…), or RandomChoice([MixUp(num_classes=…), CutMix(num_classes=…)]) for both; "
    "both take label_smoothing=…",
    "RandomPad": "write RandomCrop(size, pad_if_needed=True)",
    "RandomResizedCropAndInterpolation": "write RandomResizedCrop(size, interpolation='random')",
    "ToNumpy": TENSOR_REMEDY,
    "create_transform": "write from_timm(config, is_training=…)",
    # albumentations
    "Affine": "write RandomAffine(degrees, translate, scale, shear)",
    "AutoContrast": "write RandomAutocontrast(p)",
    "BasicTransform": CUSTOM_REMEDY,
    "BBoxSafeRandomCrop": "write RandomIoUCrop()",
    "Blur": "write GaussianBlur(kernel_size)",
    "ChannelShuffle": f"write RandomChannelPermutation(); {PROBABILITY_HINT}",
    "CoarseDropout": "write RandomErasing(p, scale, max_count=…)",
    "Crop": "write CenterCrop(size) or RandomCrop(size)",
    "Cutout": "write RandomErasing(p, scale, ratio=(1, 1))",
    "Downscale": "write RandomApply([Resize(small), Resize(large)], p=…)",
    "D4": "write RandomRotate90(p=1) and RandomTranspose()",
    "DualTransform": CUSTOM_REMEDY,
    "Equalize": "write RandomEqualize(p)",
    "Erasing": "write RandomErasing(p, scale, ratio)",
    "GaussNoise": f"write GaussianNoise(sigma=…); {PROBABILITY_HINT}",
    "HorizontalFlip": "write RandomHorizontalFlip(p)",
    "HueSaturationValue": f"write ColorJitter(saturation=…, hue=…); {PROBABILITY_HINT}",
    "Illumination": "write GaussianIllumination(…)",
    "ImageCompression": f"write JPEG(quality); {PROBABILITY_HINT}",
    "ImageOnlyTransform": CUSTOM_REMEDY,
    "InvertImg": "write RandomInvert(p)",
    "LongestMaxSize": "write Resize(None, max_size=…)",
    "NoOp": "write Identity()",
    "OneOf": "write RandomChoice([…], p=[…])",
    "OneOrOther": "write RandomChoice([first, second], p=[…])",
    "PadIfNeeded": "write CenterCropOrPad(size), or RandomCrop(size, pad_if_needed=True)",
    "Perspective": "write RandomPerspective(distortion_scale, p)",
    "Posterize": "write RandomPosterize(bits, p)",
    "RandomBrightnessContrast": f"write ColorJitter(brightness=…, contrast=…); {PROBABILITY_HINT}",
    "RandomScale": "write RandomResize(min_size, max_size) or ScaleJitter(target_size, scale_range)",
    "RandomSizedBBoxSafeCrop": "write RandomIoUCrop() and Resize((height, width))",
    "RandomSizedCrop": "write RandomResizedCrop(size, scale)",
    "ReplayCompose": "leave it out: gpuload.Loader.replay(epoch, position) recreates a sample",
    "Rotate": f"write RandomRotation(degrees); {PROBABILITY_HINT}",
    "SafeRotate": "write RandomRotation(degrees, expand=True) and Resize((height, width))",
    "Sequential": "write Compose([…])",
    "Sharpen": "write RandomAdjustSharpness(sharpness_factor, p)",
    "ShiftScaleRotate": f"write RandomAffine(degrees, translate, scale); {PROBABILITY_HINT}",
    "SmallestMaxSize": "write Resize(size), where a single number is the shorter side",
    "SelectiveChannelTransform": "write a Custom, which gets all channels",
    "Solarize": "write RandomSolarize(threshold, p)",
    "SomeOf": "write RandomApply([…], p=…) for each, or RandomChoice([…])",
    "SquareSymmetry": "write RandomRotate90(p=1) and RandomTranspose()",
    "ToFloat": "write ToDtype('float32', scale=True)",
    "ToGray": "write RandomGrayscale(p), or Grayscale(3)",
    "ToRGB": "leave it out: gpuload.Encoded decodes every file to RGB",
    "ToTensorV2": TENSOR_REMEDY,
    "Transpose": "write RandomTranspose(p)",
    "VerticalFlip": "write RandomVerticalFlip(p)",
    # FFCV
    "CenterCropRGBImageDecoder": "write CenterCropOrPad(size), or Resize(size) and CenterCrop(size)",
    "Convert": "write ToDtype('float16'), or gpuload.Loader(dtype='float16')",
    "ImageMixup": "write MixUp(num_classes=…) after Normalize",
    "LabelMixup": "write MixUp(num_classes=…), which mixes the labels too",
    "MixupToOneHot": "write MixUp(num_classes=…), which makes labels soft",
    "ModuleWrapper": "write the module itself, at the end of the transforms",
    "NormalizeImage": "write Normalize(mean, std), with mean and std for images in 0 … 1",
    "RandomResizedCropRGBImageDecoder": "write RandomResizedCrop(size)",
    "RandomTranslate": "write RandomCrop(size, padding=…)",
    "SimpleRGBImageDecoder": "leave it out: gpuload.Loader decodes the result of gpuload.read",
    "Squeeze": "leave it out: labels have the shape (N,)",
    "ToDevice": DEVICE_REMEDY,
    "ToTorchImage": "leave it out: images are N×C×H×W",
    # DALI
    "brightness_contrast": "write ColorJitter(brightness=…, contrast=…)",
    "cast": "write ToDtype(dtype), or gpuload.Loader(dtype=…)",
    "color_twist": "write ColorJitter(brightness=…, contrast=…, saturation=…, hue=…)",
    "crop_mirror_normalize": "write CenterCrop(size) or RandomCrop(size), RandomHorizontalFlip(), Normalize(mean, std)",
    "flip": "write RandomHorizontalFlip(p) or RandomVerticalFlip(p)",
    "hsv": "write ColorJitter(saturation=…, hue=…)",
    "image_decoder": "leave it out: gpuload.Loader decodes; Decode(where='device') does so on the GPU",
    "image_decoder_random_crop": "write RandomResizedCrop(size): workers decode only the crop",
    "jpeg_compression_distortion": "write JPEG(quality)",
    "rotate": "write RandomRotation(degrees)",
    "warp_affine": "write RandomAffine(degrees, translate, scale, shear)",
}

# Arguments of other libraries' transforms, and their replacements.
ARGUMENTS: Final = {
    "always_apply": "leave it out: p=1 always applies it",
    "blur_limit": "write kernel_size=…, and sigma=(low, high)",
    "border_mode": "write padding_mode=…",
    "brightness_limit": "write brightness=…",
    "contrast_limit": "write contrast=…",
    "cutmix_alpha": "write CutMix(alpha=…)",
    "fillcolor": "write fill=…",
    "height": "write size=(height, width)",
    "label_smoothing": "write MixUp(label_smoothing=…), or "
    "smooth in the loss: torch.nn.CrossEntropyLoss(label_smoothing=…)",
    "max_area": "write scale=(min_area, max_area)",
    "max_aspect": "write ratio=(min_aspect, max_aspect)",
    "max_pixel_value": "leave it out: mean and std are for images in 0 … 1",
    "min_area": "write scale=(min_area, max_area)",
    "min_aspect": "write ratio=(min_aspect, max_aspect)",
    "mixup_alpha": "write MixUp(alpha=…)",
    "prob": "write p=…",
    "probability": "write p=…",
    "quality_range": "write quality=(low, high)",
    "resample": "write interpolation=…",
    "switch_prob": "write RandomChoice([MixUp(…), CutMix(…)], p=[…])",
    "width": "write size=(height, width)",
}


def missing_name_error(module: str, name: str) -> AttributeError:
    """Return the error for a name that a gpuload module does not have. The message suggests gpuload's equivalent of
    another library's name, or else a similar name."""
    text, obj = f"module {module!r} has no attribute {name!r}", sys.modules[module]
    if not name.startswith("_"):
        hint = _hint_for_transform_name(name) if "." in module else _hint_for_top_level_name(name)
        if hint := hint or did_you_mean(name, obj.__all__):
            text, obj = f"{text}; {hint}", None  # otherwise Python would add its own suggestion from `obj`
    return AttributeError(text, name=name, obj=obj)


def _hint_for_top_level_name(name: str) -> str | None:
    if name in sys.modules["gpuload.transforms"].__all__:
        return f"write gpuload.transforms.{name}"
    if name in USABLE_AS_IS:
        return f"use torch.utils.data.{name}, which works with gpuload.Loader"
    if name in TORCHVISION_DATASETS:
        return f"use torchvision.datasets.{name}, which works with gpuload.Loader"
    return TOP_LEVEL.get(name)


def _hint_for_transform_name(name: str) -> str | None:
    if name in TO_DTYPE:
        return "write ToDtype('float32', scale=True), or leave it out: Normalize scales too, and batches hold tensors"
    if name in TYPE_CONVERSIONS:
        return TENSOR_REMEDY
    if name in sys.modules["gpuload"].__all__ and name != "transforms":
        return f"write gpuload.{name}"
    if name in ALBUMENTATIONS_ONLY:
        return f"{DATASET_REMEDY}, or write a Custom"
    return TRANSFORMS.get(name) or UNSUPPORTED.get(name)


def albumentations_remedy(name: str) -> str:
    """Return the remedy for a transform of albumentations that cannot be converted."""
    if name in sys.modules["gpuload.transforms"].__all__ and name not in ("Compose", "Lambda"):
        return f"write gpuload.transforms.{name}(…), or {DATASET_REMEDY}"
    return f"{TRANSFORMS[name]}, or {DATASET_REMEDY}" if name in TRANSFORMS else DATASET_REMEDY
