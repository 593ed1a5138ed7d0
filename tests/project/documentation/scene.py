"""The files and names that the blocks of each page need, as stand-ins for those of a reader."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from helpers import peers
from helpers.generated_images import jpeg_bytes, smooth_image
from helpers.tar_files import archive
from PIL import Image

import gpuload as gl
from gpuload import transforms as T

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Pages whose blocks import and define all names except these, which the reader has.
COMPLETE: dict[str, tuple[str, ...]] = {
    "README.md": ("loader", "train"),
    "docs/decoding.md": (),
    "docs/determinism.md": (),
    "docs/howto/buckets.md": (),
    "docs/howto/dataset.md": (),
    "docs/howto/kornia_and_dali.md": (),
    "docs/howto/mixing.md": (),
    "docs/howto/not_on_the_gpu.md": ("loader", "plain_loader", "train"),
    "docs/howto/transform.md": (),
    "docs/index.md": (),
    "docs/quickstart.md": (),
    "docs/tuning.md": ("loader", "train"),
}


def write_images(folder: Path) -> None:
    """Write the images that most pages read."""
    pictures = [jpeg_bytes(smooth_image(90 + 10 * (number % 2), 120, number)) for number in range(16)]
    for number, picture in enumerate(pictures):
        for part in ("train", "val"):
            _put(folder / "imagenet" / part / ("ant", "bee")[number % 2] / f"{number:02d}.jpg", picture)
        _put(folder / "demo-out" / "photographs" / ("ant", "bee")[number % 2] / f"{number:02d}.jpg", picture)
    for number in range(8):
        _put(folder / "data" / "birds" / f"{number}.jpg", pictures[number])
        for frame in range(6):
            _put(folder / "clips" / f"{number:02d}" / f"{frame:03d}.jpg", pictures[frame])
    birds = [{"file": f"birds/{number}.jpg", "species": number % 3, "weight_g": 20.5} for number in range(8)]
    _put(folder / "data" / "birds.json", json.dumps(birds).encode())


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def page_names(page: str) -> dict[str, Any]:
    """Return the names that a page's blocks expect, and write the page's files into the current folder."""
    import torch

    dataset = gl.ImageFolder("imagenet/train")
    common = {
        "gl": gl,
        "T": T,
        "torch": torch,
        "np": np,
        "Path": Path,
        "dataset": dataset,
        "loader": gl.Loader(dataset, 4, transforms=[T.RandomResizedCrop(32)], num_workers=0),
        "train": lambda images, labels: None,
        "transforms": [T.RandomResizedCrop(32)],
        "device": torch.device("cpu"),
        "mean": MEAN,
        "std": STD,
    }
    all_names = common | SCENES.get(page, dict)()
    return {name: all_names[name] for name in COMPLETE.get(page, all_names)}


class Timm:
    """A stand-in for timm, whose import takes four seconds. The tests of `T.from_timm` use timm itself."""

    class data:
        @staticmethod
        def resolve_model_data_config(model: Any) -> dict[str, Any]:
            return {"input_size": (3, 32, 32), "interpolation": "bicubic", "mean": MEAN, "std": STD, "crop_pct": 0.9}

        resolve_data_config = resolve_model_data_config


def moving() -> dict[str, Any]:
    peers.torchvision()
    import kornia.augmentation
    import torch
    from torch.utils.data import DataLoader
    from torchvision import datasets
    from torchvision.transforms import v2

    images = torch.zeros(2, 3, 48, 64, dtype=torch.uint8)
    masks, boxes = torch.zeros(2, 1, 48, 64), torch.tensor([[[5.0, 5, 20, 30]]] * 2)
    picture = jpeg_bytes(smooth_image(40, 60, 1))
    for shard in range(4):
        members = {f"{n}.{kind}": data for n in range(4) for kind, data in (("jpg", picture), ("cls", b"3"))}
        archive(Path(f"train-{shard:03d}.tar"), members)
    transformed_dataset = [(np.zeros((3, 8, 8), np.float32), number) for number in range(16)]
    return {
        "K": kornia.augmentation,
        "timm": Timm,
        "v2": v2,
        "datasets": datasets,
        "DataLoader": DataLoader,
        "model": None,
        "dataset": transformed_dataset,
        "any_loader": [(images, torch.tensor([0, 1]))],
        "detection_loader": [(images, masks, boxes)],
    }


def keep_your_loader() -> dict[str, Any]:
    """Return other libraries' loaders over small images, and a stand-in for LeRobot's dataset, which is downloaded."""
    import datasets
    import torch
    from torch.utils.data import DataLoader
    from torchdata.stateful_dataloader import StatefulDataLoader

    paths = sorted(map(str, Path("imagenet/train").rglob("*.jpg")))
    images = [torch.from_numpy(np.array(Image.open(path))).movedim(2, 0) for path in paths]
    streamed = datasets.Dataset.from_dict({"image": paths, "label": [0, 1] * 8}).cast_column("image", datasets.Image())

    def episodes(name: str) -> list[dict[str, Any]]:
        cameras = {f"observation.images.{camera}": torch.rand(3, 48, 64) for camera in ("top", "wrist")}
        return [cameras | {"observation.state": torch.rand(14), "action": torch.rand(50, 14), "task": name}] * 8

    def stateful(*arguments: Any, **options: Any) -> Any:
        with warnings.catch_warnings():  # torchdata calls deprecated functions of torch
            warnings.simplefilter("ignore", UserWarning)
            return StatefulDataLoader(*arguments, **options)

    return {
        "DataLoader": DataLoader,
        "StatefulDataLoader": stateful,
        "dataset": list(zip(images, [0, 1] * 8, strict=True)),
        "load_dataset": lambda *arguments, **options: streamed.to_iterable_dataset(),
        "LeRobotDataset": episodes,
    }


def dataset_in_memory() -> dict[str, Any]:
    images = [gl.Image(smooth_image(32, 32, number)) for number in range(16)]
    detections = [
        {"image": image, "mask": gl.Mask(np.zeros((32, 32), np.uint8)), "boxes": gl.Boxes([[4, 4, 20, 24]])}
        for image in images
    ]
    return {"dataset": list(zip(images, range(16), strict=True)), "detection_dataset": detections}


def not_on_the_gpu() -> dict[str, Any]:
    import torch

    return {"plain_loader": [(torch.zeros(4, 3, 48, 64, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))] * 8}


def backends() -> dict[str, Any]:
    peers.torchvision()
    import kornia.augmentation
    from torchvision.transforms import v2

    return {"K": kornia.augmentation, "v2": v2, "module": kornia.augmentation.RandomInvert()}


def dataloader() -> dict[str, Any]:
    import itertools

    from torch.utils.data import DataLoader

    return {"DataLoader": DataLoader, "itertools": itertools}


def targets() -> dict[str, Any]:
    torchvision = peers.torchvision()
    _coco()
    for number in range(8):
        picture = smooth_image(90, 120, number)
        _put(Path(f"yolo/images/{number}.jpg"), jpeg_bytes(picture))
        _put(Path(f"yolo/labels/{number}.txt"), b"2 0.5 0.5 0.25 0.5\n0 0.25 0.5 0.1 0.2\n" * (number % 2))
    return {"torchvision": torchvision, "root": "coco/val2017", "annotation_file": COCO}


COCO = "coco/annotations/instances_val2017.json"


def _coco() -> None:
    boxes = [
        {"id": n, "image_id": n, "category_id": 1, "bbox": [5, 5, 20, 20], "area": 400, "iscrowd": 0} for n in range(8)
    ]
    images = [{"id": n, "file_name": f"{n}.jpg", "width": 120, "height": 90} for n in range(8)]
    annotations = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "ant"}]}
    _put(Path(COCO), json.dumps(annotations).encode())
    for number in range(8):
        _put(Path(f"coco/val2017/{number}.jpg"), jpeg_bytes(smooth_image(90, 120, number)))


def transforms() -> dict[str, Any]:
    image = smooth_image(300, 400, 1)
    bands = np.zeros((13, 32, 32), np.float32)
    return {
        "image": image,
        "mask": np.zeros((300, 400), np.uint8),
        "bands": bands,
        "label": 3,
        "means": [0.5] * 13,
        "stds": [1.0] * 13,
    }


def multispectral() -> dict[str, Any]:
    paths = [Path(f"tile-{number}.npy") for number in range(8)]
    for path in paths:
        np.save(path, np.full((13, 80, 90), 1200, np.uint16))
    xrays = [Path(f"xray-{number}.png") for number in range(8)]
    for number, path in enumerate(xrays):
        Image.fromarray(np.full((110, 120), 4000 * number, np.uint16)).save(path)
    return {"paths": paths, "xrays": xrays}


def text() -> dict[str, Any]:
    paths = sorted(Path("imagenet").rglob("*.jpg"))
    return {"captions": {path: f"a photograph, number {number}" for number, path in enumerate(paths)}}


def data() -> dict[str, Any]:
    """Write small stores of each kind."""
    import h5py
    import lmdb
    import pyarrow as pa
    import pyarrow.parquet
    import zstandard

    picture = jpeg_bytes(smooth_image(20, 24, 1))
    for shard in range(100):
        path = archive(Path(f"data/train-{shard:03d}.tar"), {"0.jpg": picture, "0.cls": b"3"})
        Path(f"{path}.zst").write_bytes(zstandard.compress(path.read_bytes()))
    np.save("train.npy", np.zeros((4, 8, 8, 3), np.uint8))
    np.save("labels.npy", np.arange(4))
    np.save("scans.npy", np.zeros((2, 3, 8, 8), np.float32))
    np.save("ct.npy", np.zeros((2, 8, 8), np.int16))
    Path("images.raw").write_bytes(bytes(16 + 2 * 224 * 224 * 3))
    rows = {"image": [{"bytes": picture, "path": "0.jpg"}] * 4, "label": [0, 1, 0, 1], "caption": list("abcd")}
    table = pa.table(rows)
    pyarrow.parquet.write_table(table, "data/train-0.parquet")
    Path("pairs").mkdir()
    pyarrow.parquet.write_table(pa.table({"jpg": [picture] * 4, "cls": [0, 1, 0, 1]}), "pairs/0.parquet")
    pyarrow.parquet.write_table(pa.table({"file": ["0.jpg"] * 4}), "train.parquet")
    for name, pairs in {
        "train.lmdb": {"0.jpg": picture, "0.cls": b"3"},
        "words.lmdb": {"image-0": picture, "label-0": b"ant"},
        "own.lmdb": {"0": bytes(8) + picture},
    }.items():
        with lmdb.open(name, subdir=False, map_size=1 << 20) as environment, environment.begin(write=True) as writing:
            for key, value in pairs.items():
                writing.put(key.encode(), value)
    Path("train.csv").write_text("path,label\n0.jpg,ant\n")
    Path("train.tsv").write_text("3\t0.jpg\n")
    with h5py.File("train.h5", "w") as file:
        file["labels"] = np.arange(2)
        file["images"] = np.zeros((2, 8, 8, 3), np.uint8)
        file["train/pixels"] = np.zeros((2, 3, 8, 8), np.uint8)
    _coco()
    return {
        "pyarrow": pa,
        "table": table,
        "frame": pa.table({"file": ["0.jpg"], "age": [31.0], "sex": [0]}),
        "path": "written.parquet",
        "labels": [0, 1],
        "classes": np.zeros(10_000_000, np.uint8),
    }


SCENES: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/backends.md": backends,
    "docs/data.md": data,
    "docs/dataloader.md": dataloader,
    "docs/howto/dataset_in_memory.md": dataset_in_memory,
    "docs/howto/keep_your_loader.md": keep_your_loader,
    "docs/howto/moving.md": moving,
    "docs/howto/multispectral.md": multispectral,
    "docs/howto/not_on_the_gpu.md": not_on_the_gpu,
    "docs/howto/text.md": text,
    "docs/targets.md": targets,
    "docs/transforms.md": transforms,
}
