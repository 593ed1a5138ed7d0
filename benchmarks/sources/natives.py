"""Other libraries' readers of the stores, each reading what its own writer wrote, through its own loader.

All of them decode with simplejpeg and transform with torchvision v2, in two worker processes of torch's DataLoader (or
of what the library has in its place). What is shuffled is what the library shuffles: torchvision and Hugging Face all
samples; LitData and Mosaic all of them too, shard by shard; WebDataset the order of archives, and samples in a buffer.

`Native.raw` gives the bytes of files, in one process; `Native.loader` batches of floats.
"""

# pyright: reportMissingImports=false
# (They are in an environment of their own.)

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import simplejpeg
import torch

from benchmarks.peers.recipe import MEAN, STD
from benchmarks.peers.torchvision_import import torchvision, v2
from benchmarks.sources.stores import SEED, SHARDS, labels_in, order, paths_in

__all__ = ["NATIVES", "Native"]

SHARD_BYTES: Final = 64 << 20
BUFFER: Final = 1000  # of WebDataset's shuffle


class Native:
    """A library's reader.

    Args:
        base: the folder, as `stores` lays it out.
    """

    package: str  # whose version is told
    store = ""  # the folder that `write` makes, below BASE/stores

    def __init__(self, base: Path) -> None:
        self.base = base
        self.place = str(base / "stores" / self.store)

    def write(self) -> None:
        """Write the store, where it is not there."""

    def raw(self, random: bool) -> Callable[[], Iterator[int]]:
        """What reads all files' bytes once, each time it is called, and gives the bytes of each."""
        raise NotImplementedError

    def loader(self, random: bool, workers: int, batch_size: int) -> Iterable[Any]:
        """A loader of (images, classes); workers stay from one epoch to the next."""
        raise NotImplementedError


def _samples(base: Path) -> Iterator[tuple[bytes, int]]:
    for path, label in zip(paths_in(base), labels_in(base), strict=True):
        yield path.read_bytes(), label


class Transform:
    """Bytes to a float tensor, as the recipe says."""

    def __init__(self) -> None:
        self.chain = v2.Compose(
            [
                v2.RandomResizedCrop(224, antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD, inplace=True),
            ]
        )

    def __call__(self, data: bytes) -> torch.Tensor:
        return self.chain(torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1))


def _file(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _data_loader(dataset: Any, workers: int, batch_size: int | None, shuffle: bool = False, **options: Any) -> Any:
    return torch.utils.data.DataLoader(
        dataset, batch_size=batch_size, shuffle=shuffle, num_workers=workers, persistent_workers=workers > 0, **options
    )


class ImageFolder(Native):
    """torchvision's, over the files."""

    package = "torchvision"

    def raw(self, random: bool) -> Callable[[], Iterator[int]]:
        dataset = torchvision.datasets.ImageFolder(str(self.base / "train"), loader=_file)
        return lambda: (len(dataset[number][0]) for number in order(len(dataset), random))

    def loader(self, random: bool, workers: int, batch_size: int) -> Iterable[Any]:
        root = str(self.base / "train")
        return _data_loader(
            torchvision.datasets.ImageFolder(root, Transform(), loader=_file), workers, batch_size, random
        )


class WebDataset(Native):
    """Over the archives of `TarShards`."""

    package = "webdataset"

    def _dataset(self, random: bool) -> Any:
        import webdataset as wds

        urls = f"{self.place}/train-{{000..{SHARDS - 1:03d}}}.tar"
        dataset = wds.WebDataset(urls, shardshuffle=SHARDS if random else False, seed=SEED)
        return (dataset.shuffle(BUFFER) if random else dataset).to_tuple("jpg", "cls")

    def raw(self, random: bool) -> Callable[[], Iterator[int]]:
        dataset = self._dataset(random)
        return lambda: (len(data) for data, _ in dataset)

    def loader(self, random: bool, workers: int, batch_size: int) -> Iterable[Any]:
        import webdataset as wds

        dataset = self._dataset(random).map_tuple(Transform(), int).batched(batch_size)
        return wds.WebLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)


class HuggingFace(Native):
    """`datasets`, over its own Arrow files."""

    package = "datasets"
    store = "arrow"

    def write(self) -> None:
        import datasets

        if not Path(self.place, "dataset_info.json").exists():
            features = datasets.Features({"image": datasets.Image(decode=False), "label": datasets.Value("int64")})
            images, labels = zip(*_samples(self.base), strict=True)
            table = {"image": [{"bytes": data, "path": None} for data in images], "label": list(labels)}
            datasets.disable_progress_bars()
            datasets.Dataset.from_dict(table, features).save_to_disk(self.place)

    def _dataset(self) -> Any:
        import datasets

        return datasets.load_from_disk(self.place)

    def raw(self, random: bool) -> Callable[[], Iterator[int]]:
        dataset = self._dataset()
        return lambda: (len(dataset[number]["image"]["bytes"]) for number in order(len(dataset), random))

    def loader(self, random: bool, workers: int, batch_size: int) -> Iterable[Any]:
        transform = Transform()

        def transformed(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
            return {"image": [transform(image["bytes"]) for image in rows["image"]], "label": rows["label"]}

        batches = _data_loader(self._dataset().with_transform(transformed), workers, batch_size, random)
        return _Mapped(batches, lambda batch: (batch["image"], batch["label"]))


class LitData(Native):
    """Over its own chunks."""

    package = "litdata"
    store = "litdata"

    def write(self) -> None:
        if Path(self.place, "index.json").exists():
            return
        from litdata.streaming.writer import BinaryWriter

        writer = BinaryWriter(self.place, chunk_bytes=SHARD_BYTES)
        for number, (data, label) in enumerate(_samples(self.base)):
            writer[number] = {"image": data, "label": label}
        writer.done()
        writer.merge()

    def raw(self, random: bool) -> Callable[[], Iterator[int]]:
        from litdata import StreamingDataset

        dataset = StreamingDataset(self.place, shuffle=random, drop_last=False, seed=SEED)
        return lambda: (len(sample["image"]) for sample in dataset)

    def loader(self, random: bool, workers: int, batch_size: int) -> Iterable[Any]:
        from litdata import StreamingDataLoader, StreamingDataset

        transform = Transform()

        class Transformed(StreamingDataset):
            def __getitem__(self, index: Any) -> Any:
                sample = super().__getitem__(index)
                return transform(sample["image"]), sample["label"]

        dataset = Transformed(self.place, shuffle=random, drop_last=False, seed=SEED)
        return StreamingDataLoader(dataset, batch_size=batch_size, num_workers=workers, persistent_workers=workers > 0)


class Mosaic(Native):
    """Over its own shards (MDS)."""

    package = "mosaicml-streaming"
    store = "mds"

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        _stand_in_for_transformers()

    def write(self) -> None:
        if Path(self.place, "index.json").exists():
            return
        from streaming import MDSWriter

        columns = {"image": "bytes", "label": "int"}
        with MDSWriter(out=self.place, columns=columns, size_limit=SHARD_BYTES) as writer:
            for data, label in _samples(self.base):
                writer.write({"image": data, "label": label})

    def _options(self, random: bool, batch_size: int) -> dict[str, Any]:
        return {"local": self.place, "shuffle": random, "batch_size": batch_size, "num_canonical_nodes": 1}

    def raw(self, random: bool) -> Callable[[], Iterator[int]]:
        from streaming import StreamingDataset

        dataset = StreamingDataset(**self._options(random, 1))
        return lambda: (len(sample["image"]) for sample in dataset)

    def loader(self, random: bool, workers: int, batch_size: int) -> Iterable[Any]:
        from streaming import StreamingDataset

        transform = Transform()

        class Transformed(StreamingDataset):
            def __getitem__(self, at: Any) -> Any:
                sample = super().__getitem__(at)
                return transform(sample["image"]), sample["label"]

        return _data_loader(Transformed(**self._options(random, batch_size)), workers, batch_size)


class _Mapped:
    """Batches of a loader in another form."""

    def __init__(self, batches: Iterable[Any], function: Callable[[Any], Any]) -> None:
        self._batches, self._function = batches, function

    def __iter__(self) -> Iterator[Any]:
        return map(self._function, self._batches)


def _stand_in_for_transformers() -> None:
    """Mosaic's package imports names of `transformers`, which are of no use here, and wants much else."""
    names = {
        "feature_extraction_utils": "BatchFeature",
        "tokenization_utils_base": "BatchEncoding",
        "models.auto.tokenization_auto": "AutoTokenizer",
    }
    for module, name in names.items():
        stand_in = types.ModuleType(f"transformers.{module}")
        setattr(stand_in, name, type(name, (), {}))
        sys.modules.setdefault(f"transformers.{module}", stand_in)
    for module in ("transformers", "transformers.models", "transformers.models.auto"):
        sys.modules.setdefault(module, types.ModuleType(module))


NATIVES: Final[dict[str, type[Native]]] = {
    "torchvision ImageFolder": ImageFolder,
    "WebDataset": WebDataset,
    "Hugging Face datasets": HuggingFace,
    "LitData": LitData,
    "Mosaic Streaming": Mosaic,
}
