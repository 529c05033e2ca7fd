"""A few rounds of `make faults`: commands that are killed, or meet a full disk, give the same result when rerun."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from pathlib import Path

import pytest
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


def test_the_world_is_made_by_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two builds would mix their files. The errors of a build are one line, like those of the commands."""
    monkeypatch.syspath_prepend(TOOL.parent)
    import make_world

    monkeypatch.setattr("sys.argv", ["make_world.py", "--stage", "ship", "--work", str(tmp_path / "none")])
    for name in ("FOLDER", "MODEL", "EDITOR"):
        monkeypatch.setattr(make_world, name, tmp_path / "world" / name)
    make_world.FOLDER.mkdir(parents=True)
    other = os.open(make_world.FOLDER, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(SystemExit, match="another process is making the world"):
        make_world.main()
    os.close(other)
    with pytest.raises(SystemExit, match="No such file or directory"):
        make_world.main()

    def fail(options: object) -> None:
        raise Exception("No space left on device (os error 28)")  # as the tokenizers library does

    monkeypatch.setattr(make_world, "make", fail)
    with pytest.raises(SystemExit, match="No space left"):
        make_world.main()
