"""The commands that tools/faults.py disturbs, with their inputs and with what they must write."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_world import unfinished, write_facts
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

TRAIN = ["edits=6", "rows=6", "validations=3", "validation_edits=4", "validation_inputs=4", "checkpoint_seconds=0"]
TRAIN += ["editor.width=32", "editor.bottleneck=8", "editor.lstm=8"]


@dataclass(frozen=True)
class Task:
    """Commands that write into a folder. After a fault, all of them are run again, from the first."""

    name: str
    commands: Callable[[Path], list[list[object]]]  # given the folder to write to
    inputs: tuple[str, ...] = ()  # names of the files and folders that it reads
    resumes: bool = False  # whether an interrupted run continues with --resume
    distributed: bool = False  # whether several processes can share it


def tasks(given: Path) -> list[Task]:
    """Returns all tasks. `given` is the folder that `prepare` filled."""
    on_world: list[object] = ["--model", "world", "--device", "cpu"]
    edited: list[object] = [*on_world, "--editor", "world"]
    fit: list[object] = ["fit", "--model", given / "base", "--train", given / "claims.jsonl", "--steps", 40]
    fit += ["--lr", 3e-3, "--batch", 16, "--checkpoint-seconds", 0, "--device", "cpu"]
    train: list[object] = ["train", "--model", given / "checker", "--train", given / "revisions.jsonl", "--steps", 12]
    train += [*(part for setting in TRAIN for part in ("--set", setting)), "--device", "cpu"]
    revise: list[object] = ["revise", *on_world, "--data", given / "questions.jsonl"]
    translators: list[object] = ["--forward", given / "there", "--backward", given / "back", "--device", "cpu"]
    evaluate: list[object] = ["evaluate", *edited, "--data", given / "world.jsonl", "--retain", 8]
    alone, joint = [*evaluate, "--edits", 40], [*evaluate, "--edits", 6, "--together", "1,3"]
    patches = sorted((given / "patches").glob("*.safetensors"))
    merge: list[object] = ["patch", "merge", *patches, *on_world, "--max-others", 50]
    apply: list[object] = ["patch", "apply", given / "merged.safetensors", *on_world, "--force"]
    adapter: list[object] = ["patch", "export", given / "merged.safetensors", *on_world, "--max-others", 20]
    edit: list[object] = ["edit", *edited, "--input", "What is the capital of Burundi?", "--target", "Gitega"]
    scope: list[object] = ["scope", "train", "--model", given / "checker", "--data", given / "revisions.jsonl"]
    return [
        Task("fit", lambda out: [[*fit, "--output", out / "run"]], ("base", "claims.jsonl"), True, True),
        Task("train", lambda out: [[*train, "--output", out / "run"]], ("checker", "revisions.jsonl"), True, True),
        Task("revise", lambda out: [[*revise, "--output", out / "out.jsonl"]], ("questions.jsonl",)),
        Task(
            "paraphrase",
            lambda out: [["paraphrase", "--data", given / "claims.jsonl", *translators, "--output", out / "out.jsonl"]],
            ("claims.jsonl", "there", "back"),
        ),
        Task("evaluate", lambda out: [[*alone, "--output", out / "results"]], ("world.jsonl",), distributed=True),
        Task("together", lambda out: [[*joint, "--output", out / "results"]], ("world.jsonl",)),
        Task("merge", lambda out: [[*merge, "--output", out / "merged.safetensors"]], ("patches",)),
        Task("apply", lambda out: [[*apply, "--output", out / "model"]], ("merged.safetensors",)),
        Task("adapter", lambda out: [[*adapter, "--output", out / "lora"]], ("merged.safetensors",)),
        Task("edit", lambda out: [[*edit, "--save", out / "patch.safetensors"]]),
        Task("ledger", lambda out: ledger(out, on_world, edited, given), ("facts.jsonl",)),
        Task("scope", lambda out: [[*scope, "--steps", 30, "--output", out / "scope"]], ("checker", "revisions.jsonl")),
        Task("split", lambda out: [split(given, out)], ("claims.jsonl",)),
        Task("world", lambda out: [["make_world", given / "world", out, stage] for stage in unfinished(out)]),
        Task("report", lambda out: [["report", given / "results", "--output", out / "report"]], ("results",)),
    ]


def ledger(out: Path, on_world: list[object], edited: list[object], given: Path) -> list[list[object]]:
    """Returns commands that create a ledger and add facts. All can be repeated: existing facts are kept."""
    name: list[object] = ["--ledger", out / "facts.db"]
    init = ["ledger", "init", *name, *on_world, "--max-others", 50]
    add = [["ledger", "add", *name, *edited, "--facts", given / file] for file in ("facts.jsonl", "more.jsonl")]
    export = ["ledger", "export", *name, *on_world, "--output", out / "merged.safetensors"]
    return [*([] if (out / "facts.db").exists() else [init]), *add, export]


def split(given: Path, out: Path) -> list[object]:
    return ["split", given / "claims.jsonl", "--train", out / "train.jsonl", "--dev", out / "dev.jsonl"]


def prepare(given: Path, patches: bool = True) -> None:
    """Writes the inputs of all tasks: tiny random models, data and, if wanted, patches of the embedded world."""
    import tiny  # pyright: ignore[reportMissingImports] (in tests, as the next two)
    from results import write_evaluation  # pyright: ignore[reportMissingImports]
    from samples import claims, fact_checker, write_lines, write_revisions  # pyright: ignore[reportMissingImports]
    from transformers.utils import logging

    from factpatch import load_editor, load_model, merge, world
    from factpatch.data.revisions import edit_of
    from factpatch.demo import outdated, question_of

    logging.disable_progress_bar()
    tiny.build("bert", initializer_range=0.05).save(given / "base")
    fact_checker(given / "checker")
    write_revisions(given / "revisions.jsonl", load_model(given / "checker", "cpu"), 60)
    for seed, name in enumerate(("there", "back")):
        tiny.build("marian", seed).save(given / name)
    write_lines(given / "claims.jsonl", claims(120))
    questions = [question_of(fact) for fact in world.facts()[:150]]
    write_lines(given / "questions.jsonl", [{"input": question} for question in questions])
    write_evaluation(given / "results")
    write_facts(given / "world")
    (given / "world.jsonl").write_bytes(gzip.decompress(world.REVISIONS.read_bytes()))
    if not patches:
        return
    model = load_model("world", "cpu")
    edits = [edit_of(revision) for revision in outdated(model)[:16]]
    facts = [{"input": edit.x, "target": edit.a} for edit in edits]
    write_lines(given / "facts.jsonl", facts[:8])
    write_lines(given / "more.jsonl", facts[8:])
    made = load_editor("world", "cpu").propose(model, edits[:4])
    for number, patch in enumerate(made):
        patch.save(given / "patches" / f"{number}.safetensors")
    merge(model, made, others=questions[:100]).save(given / "merged.safetensors")


def written(folder: Path) -> dict[str, Any]:
    """Reads what a task has written, without scratch files, times and names of folders: faults must not change it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and not any(part.startswith(".") for part in Path(name).parts):
            if path.suffix in (".json", ".jsonl"):
                lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
                found[name] = [plain(json.loads(line), folder) for line in lines]
            elif path.suffix == ".safetensors":
                found[name] = tensors_in(path)
            elif ".db" in path.name:
                found["facts.db"] = facts_in(folder / "facts.db")
            else:
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def plain(value: Any, folder: Path) -> Any:
    """Drops durations, rates and the folder's own name from JSON."""
    if isinstance(value, dict):
        return {key: plain(one, folder) for key, one in value.items() if "second" not in key}
    if isinstance(value, list):
        return [plain(one, folder) for one in value]
    return value.replace(str(folder), "") if isinstance(value, str) else value


def tensors_in(path: Path) -> str:
    digest = hashlib.sha256()
    with safe_open(path, "pt") as file:
        for key in sorted(file.keys()):
            tensor = file.get_tensor(key).contiguous()
            digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(_bytes()).numpy())
    return digest.hexdigest()


def _bytes() -> Any:
    import torch

    return torch.uint8


def facts_in(path: Path) -> list[tuple[Any, ...]]:
    from factpatch import Ledger

    with Ledger(path) as ledger:
        return [(fact.id, fact.x, fact.target, fact.status) for fact in ledger.facts(None)]


def named(names: Iterable[str], all_tasks: list[Task]) -> list[Task]:
    """Returns the tasks with these names, or all if no names are given."""
    wanted = set(names)
    if unknown := wanted - {task.name for task in all_tasks}:
        raise SystemExit(f"unknown tasks: {', '.join(sorted(unknown))}")
    return [task for task in all_tasks if not wanted or task.name in wanted]
