"""Fine-tuning: runs that are stopped, killed, resumed and shared between processes."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import (
    HANG,
    Stopped,
    forked,
    last_step,
    run_aside,
    run_in_two_processes,
    stop_at,
    stopped_by_sigterm,
    wait_for,
)
from safetensors.torch import load_file
from samples import answerer, claims, fact_checker, read_lines, texts, write_lines
from training_runs import QUICK_FIT

from factpatch.errors import FileError, InputError, ModelError
from factpatch.models import load_model
from factpatch.training import Fit, FitConfig
from factpatch.training.checkpoint import RunFolder
from factpatch.training.run import STOPPING

SURE = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DRIVER = """
import json, sys
from factpatch.training import Fit, FitConfig

for argument in sys.argv[1:]:
    settings, model, output, train = json.loads(argument)
    Fit(FitConfig(**settings), model, output, device="cpu").run(train, None)
"""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(first: Path, second: Path) -> None:
    a, b = weights(first), weights(second)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def losses_of(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_lines(folder / "metrics.jsonl")]


# Stopped and resumed


def test_a_damaged_checkpoint_is_named(base: Path, tmp_path: Path) -> None:
    train = write_lines(tmp_path / "train.jsonl", claims(20))
    (tmp_path / "run" / "checkpoint" / "step-000000003").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint" / "step-000000003" / "state.json").write_text("{")
    with pytest.raises(FileError, match=r"cannot read the checkpoint .*checkpoint.*start a new run"):
        Fit(FitConfig(**QUICK_FIT), str(base), tmp_path / "run", resume=True, device="cpu").run(train, None)


def lock_for_good(folder: Path) -> None:
    locked = RunFolder(folder, resume=False)
    locked.lock()
    (folder.parent / "locked").touch()
    time.sleep(HANG)


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    """The second run is refused while the first one runs, also before the first has written anything."""
    process = forked(lock_for_good, tmp_path / "run")
    try:
        wait_for(process, (tmp_path / "locked").exists)
        with pytest.raises(FileError, match="another run is writing"):
            RunFolder(tmp_path / "run", resume=False).lock()
    finally:
        process.kill()
        process.join()
    first, second = RunFolder(tmp_path / "run", resume=False), RunFolder(tmp_path / "run", resume=False)
    first.lock()  # a killed process holds no lock
    second.lock()  # in the same process, the newer object counts
    (first.path / "config.json").touch()
    first.release()
    second.release()
    with pytest.raises(FileError, match="is in use"):  # the other run has finished in the meantime
        first.lock()


def test_settings_of_a_resumed_run(base: Path, tmp_path: Path) -> None:
    train = write_lines(tmp_path / "train.jsonl", claims(40))
    settings = {**QUICK_FIT, "steps": 30, "checkpoint_seconds": 0.0}
    with pytest.raises(Stopped):
        Fit(FitConfig(**settings), str(base), tmp_path / "run", device="cpu").run(train, None, watch=stop_at(10))

    def resume(model: Path = base, data: Path = train, **changes: Any) -> dict[str, Any]:
        config = FitConfig(**{**settings, **changes})
        return Fit(config, str(model), tmp_path / "run", resume=True, device="cpu").run(data, None)

    with pytest.raises(InputError, match=r"had other settings: batch was 16, now 8, dropout was None, now 0.1; resume"):
        resume(dropout=0.1, batch=8, lr=1e-3)
    with pytest.raises(InputError, match="valid was None"):
        Fit(FitConfig(**settings), str(base), tmp_path / "run", resume=True, device="cpu").run(train, None, valid=train)
    with pytest.raises(InputError, match="model_name was"):
        resume(model=fact_checker(tmp_path / "other"))
    with pytest.raises(InputError, match="train"):
        resume(data=write_lines(tmp_path / "other.jsonl", claims(40, seed=3)))
    assert resume()["steps"] == 30
    with pytest.raises(FileError, match="nothing to resume"):
        resume()


class Dead(BaseException):
    pass


def test_a_kill_while_a_checkpoint_is_put_in_place(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that dies just before or just after a checkpoint appears has a complete one to resume from."""
    train = write_lines(tmp_path / "train.jsonl", claims(40))
    settings = {**QUICK_FIT, "steps": 30, "checkpoint_seconds": 0.0}
    rename = os.rename

    def rename_and_die(old: Path, new: Path) -> None:
        rename(old, new)
        if new.name == "step-000000007":
            raise Dead

    with monkeypatch.context() as patched, pytest.raises((Dead, Stopped)):
        patched.setattr(os, "rename", rename_and_die)
        Fit(FitConfig(**settings), str(base), tmp_path / "run", device="cpu").run(train, None, watch=stop_at(10))
    resumed = Fit(FitConfig(**settings), str(base), tmp_path / "run", resume=True, device="cpu").run(train, None)
    assert resumed["steps"] == 30


def test_a_killed_run_ends_with_the_same_weights(base: Path, tmp_path: Path) -> None:
    train = write_lines(tmp_path / "train.jsonl", claims(60))
    settings = {**QUICK_FIT, "steps": 150, "checkpoint_seconds": 0.0}
    (tmp_path / "driver.py").write_text(DRIVER)
    killed = tmp_path / "killed"
    run = json.dumps([settings, str(base), str(killed), str(train)])
    with run_aside([str(tmp_path / "driver.py"), run]) as process:
        try:
            step = random.randint(1, 60)
            wait_for(process, lambda: last_step(killed / "checkpoint") >= step)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL, "the run must not have ended by itself"

    resumed = Fit(FitConfig(**settings), str(base), killed, resume=True, device="cpu").run(train, None)
    config = FitConfig(**{**settings, "checkpoint_seconds": 60.0})
    whole = Fit(config, str(base), tmp_path / "whole", device="cpu").run(train, None)
    assert_same_weights(killed, tmp_path / "whole")
    for key in ("best_step", "steps", "held_out_accuracy", "examples"):
        assert resumed[key] == whole[key]
    assert losses_of(killed) == losses_of(tmp_path / "whole")
    assert not (killed / "checkpoint").exists()
    assert [path.name for path in killed.iterdir() if path.name.startswith(".")] == []


def test_a_run_that_is_asked_to_stop_can_be_resumed(base: Path, tmp_path: Path) -> None:
    train = write_lines(tmp_path / "train.jsonl", claims(60))
    output = tmp_path / "run"
    options = ["--model", base, "--train", train, "--output", output, "--device", "cpu", "--batch", 8]
    command = ["fit", *options, "--minutes", 600, "--checkpoint-seconds", 0]
    err = stopped_by_sigterm(command, output / "checkpoint")
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert err.splitlines()[-1] == errors[0]
    assert "--resume" in errors[0]
    (checkpoint,) = (output / "checkpoint").glob("step-*")
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["step"] > 0
    assert STOPPING in err


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    """Batches have an odd size, and the last one has fewer examples than there are processes."""
    questions = [{"input": text, "output": " ".join(text.split()[:2])} for text in texts(48)]
    starts = {
        "classify": fact_checker(tmp_path / "checker", initializer_range=0.05, **SURE),
        "answer": answerer(tmp_path / "answerer", init_std=0.1, dropout=0.0),
    }
    data = {
        "classify": write_lines(tmp_path / "claims.jsonl", claims(48)),
        "answer": write_lines(tmp_path / "questions.jsonl", questions),
    }
    runs: list[tuple[dict[str, Any], str, str, str]] = []
    for task, start in starts.items():
        settings = {"task": task, "lr": 1e-3, "batch": 7, "steps": 14, "warmup": 2, "validations": 1}
        runs.append((settings, str(start), str(tmp_path / f"{task}-2"), str(data[task])))
    (tmp_path / "driver.py").write_text(DRIVER)
    run_in_two_processes(tmp_path / "driver.py", *map(json.dumps, runs))

    for settings, start, two, train in runs:
        one = tmp_path / settings["task"]
        result = Fit(FitConfig(**settings), start, one, device="cpu").run(train, None)
        assert result["examples"] == 44
        of_two = json.loads((Path(two) / "fit.json").read_text())["result"]
        for key in ("steps", "best_step", "examples"):
            assert of_two[key] == result[key]
        losses = [read_lines(folder / "metrics.jsonl")[-1]["loss"] for folder in (one, Path(two))]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        before, after = weights(Path(start)), weights(Path(two))
        for name, tensor in weights(one).items():
            if name.endswith(("key.bias", "k_proj.bias")):
                continue  # attention does not depend on it: its gradient is rounding noise, which AdamW blows up
            torch.testing.assert_close(after[name], tensor, rtol=1e-4, atol=1e-5)
        assert any((after[name] - tensor).abs().max() > 1e-3 for name, tensor in before.items()), "it has learnt"


@pytest.mark.parametrize("last", ["nothing", "config.json", "tokenizer.json"])
def test_a_kill_in_the_final_save(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """Whatever file was put in place last, the run can be resumed, and until then no command accepts the model."""
    train = write_lines(tmp_path / "train.jsonl", claims(40))
    config = FitConfig(**{**QUICK_FIT, "steps": 5})
    replace = os.replace

    def replace_and_die(old: Path, new: Path) -> None:
        if last == "nothing":
            raise Dead
        replace(old, new)
        if Path(new).name == last:
            raise Dead

    with monkeypatch.context() as patched, pytest.raises(Dead):
        patched.setattr(os, "replace", replace_and_die)
        Fit(config, str(base), tmp_path / "run", device="cpu").run(train, None)
    with pytest.raises(ModelError, match="is not finished; resume it with --resume"):
        load_model(tmp_path / "run", "cpu")
    with pytest.raises(FileError, match="resume its run with --resume"):
        Fit(config, str(base), tmp_path / "run", device="cpu")
    Fit(config, str(base), tmp_path / "run", resume=True, device="cpu").run(train, None)
    Fit(config, str(base), tmp_path / "whole", device="cpu").run(train, None)
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    assert sorted(os.listdir(tmp_path / "run")) == sorted(os.listdir(tmp_path / "whole"))
    assert load_model(tmp_path / "run", "cpu").predict(texts(3)) == load_model(tmp_path / "whole", "cpu").predict(
        texts(3)
    )
