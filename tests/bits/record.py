"""Records the bits of all batches anew: ``python tests/bits/record.py``.

To be used on purpose only: where bits shall change, or where the versions of other libraries have. It writes
``recorded.json`` and says what became different. With ``--new``, only cases that have no hash yet are run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
sys.path.insert(0, str(Path(__file__).parents[1]))

from bits.cases import CASES
from bits.running import RECORDED, environment, hash_of


def main() -> None:
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {"environment": environment(), "hashes": {}}
    before, only_new = recorded["hashes"], "--new" in sys.argv[1:]
    if only_new and recorded["environment"] != environment():
        sys.exit(
            f"recorded with {recorded['environment']}, and here is {environment()}: record all cases, without --new"
        )
    known = before if only_new else {}
    cases = {f"{name}/{run}": (case, run) for name, case in CASES.items() for run in case.runs}
    hashes = {key: known.get(key) or hash_of(case, run) for key, (case, run) in cases.items()}
    RECORDED.write_text(json.dumps({"environment": environment(), "hashes": hashes}, indent=1) + "\n")
    changed = sorted(name for name in before.keys() | hashes.keys() if before.get(name) != hashes.get(name))
    print(f"{len(hashes)} recorded, {len(changed)} of them new, changed or gone", *changed, sep="\n  ")


if __name__ == "__main__":
    main()
