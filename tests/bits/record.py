"""Records the bits of all batches again: ``python tests/bits/record.py``.

Run it only if bits are meant to change, or if the versions of other libraries have changed. It writes ``recorded.json``
and prints which hashes changed. With ``--new``, only cases that have no hashes yet are run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
sys.path.insert(0, str(Path(__file__).parents[1]))

from bits.cases import CASES
from bits.running import INPUTS, RECORDED, batch_hash, environment, input_hashes


def main() -> None:
    empty_record = {"environment": environment(), "hashes": {}, "inputs": {}}
    previous = json.loads(RECORDED.read_text()) if RECORDED.exists() else empty_record
    only_new = "--new" in sys.argv[1:]
    if only_new and previous["environment"] != environment():
        sys.exit(f"recorded with {previous['environment']}, not {environment()}: record all cases, without --new")
    reused = previous if only_new else empty_record
    runs = {f"{name}/{run}": (case, run) for name, case in CASES.items() for run in case.runs}
    hashes = {key: reused["hashes"].get(key) or batch_hash(case, run) for key, (case, run) in runs.items()}
    inputs = {key: value for key, value in reused["inputs"].items() if key.partition("/")[0] in CASES}
    for name, case in CASES.items():
        if not all(f"{name}/{kind}" in inputs for kind in INPUTS):
            inputs |= {f"{name}/{kind}": value for kind, value in input_hashes(case).items()}
    RECORDED.write_text(json.dumps({"environment": environment(), "hashes": hashes, "inputs": inputs}, indent=1) + "\n")
    old_hashes, new_hashes = previous["hashes"] | previous["inputs"], hashes | inputs
    changed = sorted(key for key in old_hashes.keys() | new_hashes.keys() if old_hashes.get(key) != new_hashes.get(key))
    print(f"{len(new_hashes)} recorded, {len(changed)} of them new, changed or removed", *changed, sep="\n  ")


if __name__ == "__main__":
    main()
