"""gpuload's workers, with a consumer that only takes their slots and gives them back: no stage, no tensors.

Held against `decoder_alone`: the difference is reading headers, drawing crops, and carrying pixels and messages.
Reaches into the Loader for its feed, as no user should.
"""

from __future__ import annotations

import json
import os
import sys
import time

import gpuload as gl
from gpuload import transforms as T
from gpuload.cli.processes import cpu_seconds
from gpuload.order.place import Place
from gpuload.order.schedule import schedule_of


def main() -> None:
    recipe = json.loads(sys.argv[1])
    loader = gl.Loader(
        gl.ImageFolder(recipe["root"]),
        batch_size=recipe["batch_size"],
        shuffle=True,
        transforms=[T.RandomResizedCrop(recipe["size"])],
        num_workers=recipe["workers"],
        device="cpu",
    )
    iter(loader)
    session = loader._session
    assert session is not None
    feed = session.feed

    def epoch(number: int) -> int:
        count = 0
        feed.begin(schedule_of(loader._options.order, loader.num_workers).batches(Place(number, 0)))
        while (batch := feed.take()) is not None:
            count += len(batch.spec.positions)
            feed.release(batch)
        return count

    epoch(0)
    rates, cpus = [], []
    for number in range(1, recipe["epochs"]):
        cpu_before = cpu_seconds(os.getpid())
        started = time.perf_counter()
        count = epoch(number)
        rates.append(count / (time.perf_counter() - started))
        cpus.append(1000 * (cpu_seconds(os.getpid()) - cpu_before) / count)
    loader.close()
    print(json.dumps({"images_per_s": rates, "cpu_s_per_1000": cpus, "versions": {"gpuload": gl.__version__}}))


if __name__ == "__main__":
    main()
