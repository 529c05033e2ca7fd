"""Training an editor: runs that are split, shared between processes, stopped, killed and resumed."""

from __future__ import annotations

import json
import math
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import HANG, Stopped, run_aside, run_in_two_processes, stop_at, stopped_by_sigterm, wait_for
from safetensors.torch import load_file
from samples import answerer, fact_checker, read_lines, write_revisions
from training_runs import QUICK, editor_weights, start

from factpatch.errors import FileError, InputError, TrainingError
from factpatch.models import load_model
from factpatch.training.objective import Objective
from factpatch.training.run import STOPPING, stop_signals

DRIVER = """
import json, sys
from factpatch.models import load_model
from factpatch.training import Train
from factpatch.training.config import resolve_config

for argument in sys.argv[1:]:
    settings, model, output, train = json.loads(argument)
    Train(resolve_config(None, None, [], settings), load_model(model, "cpu"), output).run(train)
"""


def assert_same_editors(first: Path, second: Path) -> None:
    one, other = editor_weights(first), editor_weights(second)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], tensor) for name, tensor in other.items())


def figures(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if "second" not in k} for line in read_lines(run / "metrics.jsonl")]


# Steps in parts, and among processes


def test_a_step_in_parts_is_the_same_step(checker: Path, claims: Path, tmp_path: Path) -> None:
    runs = {}
    for split in (1, 4):
        run = start(replace(QUICK, split=split, optimizer="adam", steps=6), checker, tmp_path / f"run-{split}")
        run.run(claims)
        runs[split] = editor_weights(tmp_path / f"run-{split}" / "last")
    for name, tensor in runs[1].items():
        torch.testing.assert_close(runs[4][name], tensor, rtol=1e-3, atol=1e-5)


def test_gradients_of_a_step_in_parts(checker: Path, claims: Path, tmp_path: Path) -> None:
    gradients = {}
    for split in (1, 4):
        run = start(replace(QUICK, split=split, steps=1, constraint="both"), checker, tmp_path / f"run-{split}")
        run.run(claims)
        gradients[split] = {n: p.grad.clone() for n, p in run.editor.named_parameters() if p.grad is not None}
    assert len(gradients[1]) > 10
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[4][name], gradient, rtol=1e-4, atol=1e-7)


def test_a_step_that_does_not_fit_is_split(
    checker: Path, claims: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each split is reported once and changes no result. If not even one edit fits, the error says so."""
    call = Objective.__call__
    room = 2

    def narrow(self: Objective, editor: Any, batch: Any) -> Any:
        if len(batch.edit_batch.rows) > room:
            raise torch.cuda.OutOfMemoryError
        return call(self, editor, batch)

    config = replace(QUICK, optimizer="adam")
    start(config, checker, tmp_path / "whole").run(claims)
    said: list[str] = []
    monkeypatch.setattr(Objective, "__call__", narrow)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    start(config, checker, tmp_path / "split").run(
        claims, warn=lambda message: said.append(message) if "memory" in message else None
    )
    assert len(said) == 2, "halved, and halved again: 6, 3, 2 edits at a time"
    assert "from now on each step is run in 4 parts" in said[-1]
    whole, split = (editor_weights(tmp_path / name / "last") for name in ("whole", "split"))
    for name, tensor in whole.items():
        torch.testing.assert_close(split[name], tensor, rtol=1e-3, atol=1e-5)
    room = 0
    with pytest.raises(TrainingError, match="not even one edit fits"):
        start(config, checker, tmp_path / "none").run(claims)


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    """An odd number of edits gives unequal shares; a single edit leaves one process without any."""
    from factpatch.training.config import config_to_json

    config = replace(QUICK, edits=5, steps=5, validations=2, optimizer="adam")
    runs = {
        "checker": (fact_checker(tmp_path / "checker"), config),
        "answerer": (answerer(tmp_path / "answerer"), replace(config, others=("unsure", "near"))),
        "single": (tmp_path / "checker", replace(config, edits=1)),
    }
    arguments = {}
    for name, (folder, settings) in runs.items():
        data = write_revisions(tmp_path / f"{name}.jsonl", load_model(folder, "cpu"), 40)
        arguments[name] = (config_to_json(settings), str(folder), str(tmp_path / f"{name}-2"), str(data))
    (tmp_path / "driver.py").write_text(DRIVER)
    run_in_two_processes(tmp_path / "driver.py", *map(json.dumps, arguments.values()))
    for name, (folder, settings) in runs.items():
        one, two = tmp_path / f"{name}-1", tmp_path / f"{name}-2"
        start(settings, folder, one).run(arguments[name][3])
        of_one, of_two = editor_weights(one / "last"), editor_weights(two / "last")
        for key, tensor in of_one.items():
            torch.testing.assert_close(of_two[key], tensor, rtol=1e-3, atol=2e-5)
        for ours, theirs in zip(figures(one), figures(two), strict=True):
            for key in ("loss", "kl", "gradient_norm", "kl_multiplier"):
                assert theirs[key] == pytest.approx(ours[key], rel=1e-3)
            assert theirs["success"] == pytest.approx(ours["success"])


# Stopped and resumed


def test_a_loss_that_is_not_finite_stops_the_run(
    checker: Path, claims: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last good checkpoint is kept, and the run can be resumed from it."""
    call = Objective.__call__
    steps = 0

    def broken(self: Objective, *arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        measured = call(self, *arguments)
        return replace(measured, loss=measured.loss * (math.nan if steps >= 6 else 1))

    config = replace(QUICK, checkpoint_seconds=0.0)
    with monkeypatch.context() as patched:
        patched.setattr(Objective, "__call__", broken)
        with pytest.raises(TrainingError, match=r"diverged near step 6: .* with --resume and a lower lr"):
            start(config, checker, tmp_path / "run").run(claims)
    (checkpoint,) = (tmp_path / "run" / "checkpoint").glob("step-*")
    assert checkpoint.name == "step-000000005"
    assert all(tensor.isfinite().all() for tensor in load_file(checkpoint / "editor.safetensors").values())
    result = start(replace(config, lr=1e-5, clip=1.0), checker, tmp_path / "run", resume=True).run(claims)
    assert result["steps"] == 12


def test_settings_of_a_resumed_run(checker: Path, claims: Path, tmp_path: Path) -> None:
    config = replace(QUICK, checkpoint_seconds=0.0)
    with pytest.raises(Stopped):
        start(config, checker, tmp_path / "run").run(claims, watch=stop_at(4))
    with pytest.raises(InputError, match="had other settings: edits was 6, now 5; resume it with the same ones"):
        start(replace(config, edits=5), checker, tmp_path / "run", resume=True).run(claims)
    other = write_revisions(tmp_path / "other.jsonl", load_model(checker, "cpu"), 60, seed=3)
    with pytest.raises(InputError, match="train was"):
        start(config, checker, tmp_path / "run", resume=True).run(other)
    with pytest.raises(InputError, match="valid was None"):
        start(config, checker, tmp_path / "run", resume=True).run(claims, other)
    (tmp_path / "run" / ".editorconfig").mkdir()
    assert start(config, checker, tmp_path / "run", resume=True).run(claims)["steps"] == 12
    assert (tmp_path / "run" / ".editorconfig").is_dir(), "what is not the run's stays"


def test_a_checkpoint_of_another_version(checker: Path, claims: Path, tmp_path: Path) -> None:
    config = replace(QUICK, checkpoint_seconds=0.0)
    with pytest.raises(Stopped):
        start(config, checker, tmp_path / "run").run(claims, watch=stop_at(4))
    (state,) = (tmp_path / "run" / "checkpoint").glob("step-*/state.json")
    saved = json.loads(state.read_text())
    del saved["format"]  # as in version 0.1
    state.write_text(json.dumps(saved))
    with pytest.raises(FileError, match="written by another version of factpatch and cannot be resumed; start a new"):
        start(config, checker, tmp_path / "run", resume=True).run(claims)


def test_ten_kills_and_the_same_weights(checker: Path, claims: Path, tmp_path: Path) -> None:
    from factpatch.training.config import config_to_json

    config = replace(QUICK, steps=120, others=("unsure", "near"), ema=0.9, ridge=1.0, checkpoint_seconds=0.0)
    start(replace(config, checkpoint_seconds=60.0), checker, tmp_path / "whole").run(claims)
    killed = tmp_path / "killed"
    driver = tmp_path / "driver.py"
    driver.write_text(KILLER)
    arguments = [str(driver), json.dumps(config_to_json(config)), str(checker), str(killed), str(claims)]
    with run_aside(arguments, stdout=subprocess.PIPE) as process:
        try:
            out, _ = process.communicate(timeout=HANG)
        finally:
            process.kill()
    assert process.returncode == 0
    assert out == "10 kills\n"
    for folder in ("editor", "last"):
        assert_same_editors(killed / folder, tmp_path / "whole" / folder)
    assert figures(killed) == figures(tmp_path / "whole")
    assert [path.name for path in killed.iterdir() if path.name.startswith(".")] == []


# Each run is a process of its own, forked from one that has done the imports, and killed at an arbitrary moment. A run
# waits for its end four steps after the one at which it is to be killed, so that ten kills take at most 100 steps.
KILLER = """
import json, math, os, random, signal, sys, time
from pathlib import Path
from factpatch.models import load_model
from factpatch.training import Train
from factpatch.training.config import resolve_config

settings, model, output, train = sys.argv[1:]
checkpoints = Path(output) / "checkpoint"

def last_step():
    return max((int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*")), default=0)

class Waiting(Train):
    def _update(self, share):
        while self.step >= goal + 4:
            time.sleep(1)
        super()._update(share)

def run():
    resume = any(checkpoints.glob("step-*"))
    Waiting(resolve_config(None, None, [], json.loads(settings)), load_model(model, "cpu"), output, resume).run(train)

kills = 0
while True:
    goal = last_step() + random.randint(1, 6) if kills < 10 else math.inf
    child = os.fork()
    if child == 0:
        run()
        os._exit(0)
    if kills < 10:
        while last_step() < goal and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.002)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    kills += 1
print(kills, "kills")
"""


def test_a_run_that_is_asked_to_stop_can_be_resumed(checker: Path, claims: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    options = ["--model", checker, "--train", claims, "--output", output, "--device", "cpu", "--minutes", 600]
    settings = ("edits=6", "rows=6", "editor.width=32", "checkpoint_seconds=0")
    small = [part for key in settings for part in ("--set", key)]
    err = stopped_by_sigterm(["train", *options, *small], output / "checkpoint")
    assert STOPPING in err
    assert err.splitlines()[-1].startswith("error: stopped on request; resume with --resume")
    (checkpoint,) = (output / "checkpoint").glob("step-*")
    assert json.loads((checkpoint / "state.json").read_text())["step"] > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_at_once(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    """The first one lets the step end; then whatever handled signals before handles them again."""
    seen: list[int] = []
    before = signal.signal(number, lambda signum, frame: seen.append(signum))
    try:
        with stop_signals(announce=True) as asked:
            assert not asked.is_set()
            signal.raise_signal(number)
            assert asked.is_set()
            assert not seen
            assert "press Ctrl-C again to stop immediately" in capfd.readouterr().err
            signal.raise_signal(number)
            assert seen == [number]
    finally:
        signal.signal(number, before)


def test_a_second_ctrl_c_ends_a_step_that_hangs(checker: Path, claims: Path, tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(HANGS)
    output = tmp_path / "run"
    with run_aside([str(driver), str(checker), str(output), str(claims)], stderr=subprocess.PIPE) as process:
        try:
            wait_for(process, (tmp_path / "hangs").exists)
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            while STOPPING not in (line := process.stderr.readline()):
                assert line, "the process has ended"
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=HANG)
        finally:
            process.kill()
    assert process.returncode != 0


HANGS = """
import signal, sys, time
from pathlib import Path
from training_runs import QUICK
from factpatch.models import load_model
from factpatch.training import Train

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests with it ignored

def hang(self, *arguments):
    (Path(output).parent / "hangs").touch()
    while True:
        time.sleep(0.01)

model, output, train = sys.argv[1:]
Train._validate = hang
Train(QUICK, load_model(model, "cpu"), output).run(train)
"""
