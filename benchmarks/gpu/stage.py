"""The stage by itself, from levels on the device to a batch: the benchmark of augmenting, for its headline only.

python -m benchmarks.gpu.stage RECIPE PACE PHOTOS

Prints a line of JSON: images a second of each way that was measured, and the rate of a plain copy of as many bytes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.augmentation.__main__ import main as augment
from benchmarks.gpu.plan import Pace
from benchmarks.peers.recipe import Recipe

__all__ = ["main"]

ONLY = "channels_last"  # the headline in the layout that is measured here


def main() -> int:
    recipe, pace, photos = Recipe(**json.loads(sys.argv[1])), Pace(**json.loads(sys.argv[2])), sys.argv[3]
    options = ["--device", recipe.device, "--photos", photos, "--batch-size", str(recipe.batch_size)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stage.json"
        status = augment(
            [
                *options,
                *("--only", ONLY, "--backends", "torch,fused", "--peers", "none"),
                *("--rounds", str(pace.rounds), "--json", str(path)),
            ]
        )
        device: dict[str, Any] = json.loads(path.read_text())["devices"][recipe.device]
    (case,) = device["cases"]
    rates = {
        name: [1000 * device["batch"] / reading["ms"] for reading in row["readings"]]
        for name, row in case["rows"].items()
        if row["readings"]
    }
    missing = {name: row["missing"] for name, row in case["rows"].items() if row["missing"]}
    print(json.dumps({"rates": rates, "copy": 1000 * device["batch"] / case["roofline_ms"], "ways_missing": missing}))
    return status


if __name__ == "__main__":
    sys.exit(main())
