"""Other libraries' readers of the stores, each reading the output of its own writer through its own loader.

All readers decode with simplejpeg and transform with torchvision v2, in two worker processes of torch's DataLoader (or
of the library's replacement for it). Each library shuffles in its own way: torchvision and Hugging Face shuffle all
samples; LitData and Mosaic also shuffle all samples, shard by shard; WebDataset shuffles the archives, and samples
within a buffer.
"""

# pyright: reportMissingImports=false
# (The libraries are in a separate environment.)

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import simplejpeg
import torch

from benchmarks.peers.protocol import MEAN, STD
from benchmarks.peers.torchvision_import import torchvision, v2
from benchmarks.sources.stores import SEED, archives_in, labels_in, order, paths_in

SHARD_BYTES: Final = 64 << 20
BUFFER: Final = 1000  # samples in WebDataset's shuffle buffer

Transform = Callable[[bytes], torch.Tensor]


class Native:
    """A library's reader.

    Args:
        base: the folder, laid out as in `stores`.

    Attributes:
        package: the package whose version is reported.
        store: the folder that `write` creates below BASE/stores; a complete one contains the file `finished`.
        is_map: whether samples are accessed by index, so that the loader shuffles them, not the dataset.
    """

    package: str
    store = finished = ""
    is_map = False

    def __init__(self, base: Path) -> None:
        self.base = base
        self.place = str(base / "stores" / self.store)
        if self.finished and not Path(self.place, self.finished).exists():
            self.write(zip((path.read_bytes() for path in paths_in(base)), labels_in(base), strict=True))

    def write(self, samples: Iterator[tuple[bytes, int]]) -> None:
        """Write the store."""

    def dataset(self, random: bool, batch_size: int, transform: Transform | None) -> Any:
        """Open the dataset: its samples are (image, class) with a transform, else the library's undecoded samples."""
        raise NotImplementedError

    def raw(self, random: bool) -> Callable[[], Iterator[Any]]:
        """Return a function that reads the bytes of all files once, in this process."""
        dataset = self.dataset(random, 1, None)
        return lambda: map(dataset.__getitem__, order(len(dataset), random)) if self.is_map else iter(dataset)

    def loader(self, random: bool, workers: int, batch_size: int) -> Iterable[Any]:
        """Make a loader of (images, classes); workers persist from one epoch to the next."""
        options: dict[str, Any] = {"batch_size": batch_size, "num_workers": workers, "persistent_workers": workers > 0}
        options |= {"shuffle": random} if self.is_map else {}
        return self.loader_type()(self.dataset(random, batch_size, transform()), **options)

    def loader_type(self) -> Callable[..., Iterable[Any]]:
        return torch.utils.data.DataLoader


def transform() -> Transform:
    """Make the function that turns encoded bytes into a float tensor, as the recipe requires."""
    chain = v2.Compose(
        [
            v2.RandomResizedCrop(224, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD, inplace=True),
        ]
    )
    return lambda data: chain(torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1))


def _transforming(library: type, function: Transform | None) -> type:
    """Derive a dataset class that transforms its samples."""

    class Transformed(library):
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return function(sample["image"]), sample["label"]  # pyright: ignore[reportOptionalCall]

    return Transformed if function is not None else library


class ImageFolder(Native):
    """torchvision's ImageFolder, over the files."""

    package = "torchvision"
    is_map = True

    def dataset(self, random: bool, batch_size: int, transform: Transform | None) -> Any:
        return torchvision.datasets.ImageFolder(str(self.base / "train"), transform, loader=_file)


def _file(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


class WebDataset(Native):
    """WebDataset, over the archives of `TarShards`."""

    package = "webdataset"

    def dataset(self, random: bool, batch_size: int, transform: Transform | None) -> Any:
        import webdataset as wds

        urls = list(map(str, archives_in(self.base)))
        dataset = wds.WebDataset(urls, shardshuffle=len(urls) if random else False, seed=SEED)
        dataset = (dataset.shuffle(BUFFER) if random else dataset).to_tuple("jpg", "cls")
        return dataset if transform is None else dataset.map_tuple(transform, int).batched(batch_size)

    def loader_type(self) -> Callable[..., Iterable[Any]]:
        import webdataset as wds

        return lambda dataset, batch_size, **options: wds.WebLoader(dataset, batch_size=None, **options)


class HuggingFace(Native):
    """Hugging Face's `datasets`, over its own Arrow files."""

    package = "datasets"
    store, finished = "arrow", "dataset_info.json"
    is_map = True

    def write(self, samples: Iterator[tuple[bytes, int]]) -> None:
        import datasets

        features = datasets.Features({"image": datasets.Image(decode=False), "label": datasets.Value("int64")})
        images, labels = zip(*samples, strict=True)
        table = {"image": [{"bytes": data, "path": None} for data in images], "label": list(labels)}
        datasets.disable_progress_bars()
        datasets.Dataset.from_dict(table, features).save_to_disk(self.place)

    def dataset(self, random: bool, batch_size: int, transform: Transform | None) -> Any:
        import datasets

        dataset = datasets.load_from_disk(self.place)
        if transform is None:
            return dataset

        def transformed(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
            return {"image": [transform(image["bytes"]) for image in rows["image"]], "label": rows["label"]}

        return dataset.with_transform(transformed)

    def loader_type(self) -> Callable[..., Iterable[Any]]:
        return lambda dataset, **options: _Values(torch.utils.data.DataLoader(dataset, **options))


class _Values:
    """The batches of a loader of dictionaries, as tuples."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return ((batch["image"], batch["label"]) for batch in self._batches)


class LitData(Native):
    """LitData, over its own chunks."""

    package = "litdata"
    store, finished = "litdata", "index.json"

    def write(self, samples: Iterator[tuple[bytes, int]]) -> None:
        from litdata.streaming.writer import BinaryWriter

        writer = BinaryWriter(self.place, chunk_bytes=SHARD_BYTES)
        for number, (data, label) in enumerate(samples):
            writer[number] = {"image": data, "label": label}
        writer.done()
        writer.merge()

    def dataset(self, random: bool, batch_size: int, transform: Transform | None) -> Any:
        from litdata import StreamingDataset

        return _transforming(StreamingDataset, transform)(self.place, shuffle=random, drop_last=False, seed=SEED)

    def loader_type(self) -> Callable[..., Iterable[Any]]:
        from litdata import StreamingDataLoader

        return StreamingDataLoader


class Mosaic(Native):
    """Mosaic Streaming, over its own shards (MDS)."""

    package = "mosaicml-streaming"
    store, finished = "mds", "index.json"

    def __init__(self, base: Path) -> None:
        _stand_in_for_transformers()
        super().__init__(base)

    def write(self, samples: Iterator[tuple[bytes, int]]) -> None:
        from streaming import MDSWriter

        columns = {"image": "bytes", "label": "int"}
        with MDSWriter(out=self.place, columns=columns, size_limit=SHARD_BYTES) as writer:
            for data, label in samples:
                writer.write({"image": data, "label": label})

    def dataset(self, random: bool, batch_size: int, transform: Transform | None) -> Any:
        from streaming import StreamingDataset

        options: dict[str, Any] = {"shuffle": random, "batch_size": batch_size, "num_canonical_nodes": 1}
        return _transforming(StreamingDataset, transform)(local=self.place, **options)


def _stand_in_for_transformers() -> None:
    """Provide the names that Mosaic's package imports from `transformers`. They are not used here, and the real package
    has many dependencies."""
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
