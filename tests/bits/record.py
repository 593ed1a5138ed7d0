"""Records the bits of all batches again: ``python tests/bits/record.py``.

Use it only on purpose: if bits are meant to change, or if versions of other libraries have changed. It writes
``recorded.json`` and prints which hashes changed. With ``--new``, only cases that have no hashes yet are run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
sys.path.insert(0, str(Path(__file__).parents[1]))

from bits.cases import CASES
from bits.running import INPUTS, RECORDED, environment, hash_of, input_hashes


def main() -> None:
    nothing = {"environment": environment(), "hashes": {}, "inputs": {}}
    before = json.loads(RECORDED.read_text()) if RECORDED.exists() else nothing
    only_new = "--new" in sys.argv[1:]
    if only_new and before["environment"] != environment():
        sys.exit(f"recorded with {before['environment']}, not {environment()}: record all cases, without --new")
    known = before if only_new else nothing
    runs = {f"{name}/{run}": (case, run) for name, case in CASES.items() for run in case.runs}
    hashes = {key: known["hashes"].get(key) or hash_of(case, run) for key, (case, run) in runs.items()}
    inputs = {key: value for key, value in known["inputs"].items() if key.partition("/")[0] in CASES}
    for name, case in CASES.items():
        if not all(f"{name}/{kind}" in inputs for kind in INPUTS):
            inputs |= {f"{name}/{kind}": value for kind, value in input_hashes(case).items()}
    RECORDED.write_text(json.dumps({"environment": environment(), "hashes": hashes, "inputs": inputs}, indent=1) + "\n")
    old, new = before["hashes"] | before["inputs"], hashes | inputs
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    print(f"{len(new)} recorded, {len(changed)} of them new, changed or removed", *changed, sep="\n  ")


if __name__ == "__main__":
    main()
