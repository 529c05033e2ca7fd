"""What all commands share: help, seeds, progress, interruptions and how numbers are shown."""

from __future__ import annotations

import pytest

from factpatch.cli import common


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(run, seed: int) -> None:
    refused = run("train", "--model", "m", "--train", "t", "--output", "o", "--seed", seed)
    assert refused.code == 2
    assert "from 0 to 2^63 - 1" in " ".join(refused.err.replace("│", " ").split())
    assert run("ask", "--model", "m", "who ?", "--seed", seed).code == 2


def test_help_has_a_runnable_example(run) -> None:
    data = "demo,split,fit,paraphrase,revise,train,evaluate,report,edit,ask"
    for command in f"{data},patch show,patch apply,bench edit,bench train,bench evaluate".split(","):
        shown = run(*command.split(), "--help")
        assert shown.code == 0
        assert f"Example: factpatch {command}" in " ".join(shown.out.replace("│", " ").split())


def test_version(run) -> None:
    from factpatch import __version__

    assert run("--version").out.strip() == __version__


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("edits_per_second", 0.4213, "0.42"),
        ("edits_per_second", 4213.7, "4,214"),
        ("edits_per_second", 0.0, "0"),
        ("seconds", 3.21, "3.2"),
        ("seconds", 1234.5, "1,234"),
        ("steps", 12345, "12,345"),
        ("success", 0.9955, "99.6%"),
        ("kl_mean", 0.000123, "1.23e-04"),
        ("recorded", True, "yes"),
    ],
)
def test_numbers_are_shown_by_what_they_are(name: str, value: float, shown: str) -> None:
    assert common.format_number(name, value) == shown


def test_counts_that_need_it_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    common.show_counts({"records": 3, "bad": 1, "left_out": 0}, "out.jsonl")
    shown = capsys.readouterr().out
    assert "bad: records that could not be used" in shown
    assert "left out:" not in shown


def test_a_log_gets_an_estimate_with_the_first_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 10))  # seconds, ten from look to look
    monkeypatch.setattr("factpatch.cli.common.time.monotonic", lambda: next(clock))
    with common.status_bar("editing") as update:
        update(0.5, "5 of 10")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("editing 50%, ")
    assert line.endswith(" s left  5 of 10")


@pytest.mark.parametrize(("command", "resumes"), [("revise", True), ("evaluate", True), ("edit", False)])
def test_an_interrupted_command_says_how_to_resume_only_if_it_can(
    run, monkeypatch: pytest.MonkeyPatch, command: str, resumes: bool
) -> None:
    def interrupted(args: list[str]) -> None:
        raise SystemExit(130)

    monkeypatch.setattr("factpatch.cli.app", interrupted)
    stopped = run(command)
    assert stopped.code == 130
    assert stopped.err == ("stopped; rerun the same command to resume\n" if resumes else "stopped\n")


def test_an_interrupt_before_a_command_starts_is_one_line(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("factpatch.cli.app", interrupted)
    stopped = run("evaluate")
    assert (stopped.code, stopped.err) == (130, "stopped; rerun the same command to resume\n")


def test_only_the_main_process_shows_what_it_is_working_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(common.stderr, "status", lambda message: pytest.fail(message))
    with common.working("loading"):
        pass
