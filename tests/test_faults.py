"""A few rounds of `make faults`: commands that are killed, or meet a full disk, give the same result when rerun."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from processes import HANG, run_aside

TOOL = Path(__file__).parents[1] / "tools" / "faults.py"


def test_a_few_faults() -> None:
    given = ["--rounds", "1", "--tasks", "split", "--faults", "kill", "full", "refused"]
    with run_aside([str(TOOL), *given], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            out, err = process.communicate(timeout=HANG)
        finally:
            process.kill()
    assert process.returncode == 0, err
    assert sum(json.loads(out)["counts"].values()) == 3
