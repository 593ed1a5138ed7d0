"""Which part is the bottleneck, and which setting to take: functions of the measured rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpuload.cli.console import count_of

__all__ = ["Part", "Setting", "bound_by", "candidates", "recommended", "worth_trying"]

NEAR: Final = 0.97  # of the best rate: as good, with fewer processes
READS: Final = 0.5  # of a worker's time: then reading is the bottleneck, else decoding


@dataclass(frozen=True)
class Part:
    """A part of loading, measured alone.

    Attributes:
        name: ``"read"``, ``"decode"`` (with reading), ``"augment"`` or ``"copy"``.
        where: who did it.
        images_per_s: its rate.
        cpu_s_per_1000: processor seconds of all processes for 1,000 images.
        image_bytes: bytes of an image that it read, made or copied, on average; None: not counted.
    """

    name: str
    where: str
    images_per_s: float
    cpu_s_per_1000: float
    image_bytes: float | None

    @property
    def mb_per_s(self) -> float | None:
        """Megabytes (10⁶) a second."""
        return None if self.image_bytes is None else self.images_per_s * self.image_bytes / 1e6


@dataclass(frozen=True)
class Setting:
    """A setting of the loader, and its rate; `advice` is what ``loader.stats()`` says of it, and `better` the number of
    workers and the prefetch_factor that this names, if it does."""

    num_workers: int
    prefetch_factor: int
    images_per_s: float
    cpu_s_per_1000: float
    advice: str = ""
    better: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """In words."""
        return f"{count_of(self.num_workers, 'worker')}, prefetch {self.prefetch_factor}"


def candidates(cpus: int, usual: int) -> list[int]:
    """The numbers of workers that are tried: one, half the CPUs, the default, all CPUs, and half as many again, which
    help where workers wait for a disk."""
    return sorted({1, max(1, cpus // 2), usual, cpus, cpus + max(1, cpus // 2)})


def worth_trying(settings: Sequence[Setting]) -> tuple[int, int] | None:
    """What ``loader.stats()`` of the best setting names, if it was not tried: more workers, which wait for a disk."""
    workers = max(setting.num_workers for setting in settings)
    better = recommended(settings).better
    return better if better is not None and better[0] > workers else None


def recommended(settings: Sequence[Setting]) -> Setting:
    """Of those that are nearly as fast as the fastest, the one with the fewest workers, and then batches ahead."""
    best = max(setting.images_per_s for setting in settings)
    good = [setting for setting in settings if setting.images_per_s >= NEAR * best]
    return min(good, key=lambda setting: (setting.num_workers, setting.prefetch_factor))


def bound_by(*, read: Part, decode: Part, augment: Part, copy: Part, cpus: int, on_cpu: bool) -> tuple[str, str]:
    """The name of the part that is the bottleneck, and a sentence with the figures.

    Args:
        read, decode: by all workers; `decode` includes reading.
        augment, copy: alone.
        on_cpu: batches are made on the CPU: the stage then takes processors away from the workers, and nothing is
            copied. There it is the part that takes more processor time, unless workers wait for the disk.
    """
    waits = decode.images_per_s / read.images_per_s > READS
    worker = "reading" if waits else "decoding"
    if on_cpu and not (waits and decode.images_per_s < augment.images_per_s):
        name = "decoding" if decode.cpu_s_per_1000 >= augment.cpu_s_per_1000 else "augmenting"
        return name, (
            f"{name} is the bottleneck: of the {count_of(cpus, 'CPU')}, an image takes workers "
            f"{decode.cpu_s_per_1000:.2f} ms and the transforms {augment.cpu_s_per_1000:.2f} ms"
        )
    rates = {worker: decode.images_per_s, "augmenting": augment.images_per_s}
    rates |= {} if on_cpu else {"copying": copy.images_per_s}
    name = min(rates, key=lambda part: rates[part])
    others = ", ".join(f"{part} alone {rate:,.0f}" for part, rate in rates.items() if part != name)
    return name, f"{name} is the bottleneck, at {rates[name]:,.0f} images/s; {others}"
