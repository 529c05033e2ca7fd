"""A method on a revision set, at scale: results a line an edit, so that a killed run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from factpatch.backends import tensor_core_products
from factpatch.data.revisions import Revision, edit_of, editable
from factpatch.device import find_dtype, surroundings
from factpatch.editors import BOUNDS, EditMethod, FineTune, Zhu
from factpatch.errors import FileError, InputError
from factpatch.evaluation.details import write_details
from factpatch.evaluation.measure import Examined, Examiner, measure, predicted_now
from factpatch.files import ResumableLines, atomic_file
from factpatch.metrics import Outcome, intervals, summary
from factpatch.models import Classifier, TaskModel
from factpatch.models.layers import block_names
from factpatch.patch import stack_patches
from factpatch.processes import from_first, join_processes

SELECT_EDITS, SELECT_INPUTS = 50, 200  # that a baseline's block and bound are chosen on


@contextmanager
def precise(model: TaskModel, precision: str | None, baseline: bool) -> Iterator[None]:
    """The model in the precision asked for, or in the one that its edits are measured in.

    Answers are searched for among near ties, and fine-tuning, the baseline, stops at one: bf16's rounding would decide
    some of them anew, so they are float32; an editor's on a GPU with TF32 products, whose fractions have ten bits.
    """
    near_ties = baseline or model.near_ties
    model.cast(find_dtype(precision or ("fp32" if near_ties else None), model.device.type))
    with tensor_core_products() if precision is None and not baseline else nullcontext():
        yield


def sampled(
    model: TaskModel, revisions: Sequence[Revision], edits: int | None, retain: int | None, seed: int
) -> tuple[list[Revision], list[Revision]]:
    """Revisions to edit, and other inputs to try each edit on; all of them, where no number is given."""
    chance = random.Random(seed)
    candidates = editable(model, revisions)
    if not candidates:
        raise InputError("expected revisions with alternatives, found none; make them with factpatch revise")
    order = chance.sample(candidates, len(candidates))
    others = chance.sample(list(revisions), len(revisions))
    return order[:edits], others[:retain]


def evaluate(
    method: EditMethod,
    model: TaskModel,
    edits: Sequence[Revision],
    others: Sequence[Revision],
    folder: Path,
    settings: dict[str, Any],
    on_done: Callable[[int], object] = lambda edits: None,
) -> dict[str, Any]:
    """Writes edits.jsonl, details.safetensors, examples.json and, at last, summary.json; returns the result.

    What `settings` say is told in summary.json. A folder in which the same was finished before is left as it is. Edits
    and other inputs are taken with what the model says to them now, not when their file was made. Several processes
    share the batches of edits; the first writes.
    """
    state = join_processes(model.device)
    about = _about(method, model, edits, others, settings)
    if finished := from_first(_finished(folder, about)):
        on_done(finished["edits"])
        return finished if state.is_main_process else {}
    edits, others = from_first((editable(model, predicted_now(model, edits)), predicted_now(model, others)))
    if not edits:
        raise InputError("nothing to edit: the model says every alternative already, or cannot say it")
    size = method.at_once(model)
    batches = [edits[start : start + size] for start in range(0, len(edits), size)]
    # The last batch may be short: chunks of one line keep what is whole, and batches start anew from there.
    lines = (
        ResumableLines(folder / "edits.jsonl", {**_identity(about), "ids": [revision.id for revision in edits]}, 1)
        if state.is_main_process
        else None
    )
    done = from_first(lines.done // size * size if lines else 0)
    if lines:
        lines.keep(done)
    on_done(done)
    examiner = Examiner(model, others, size, scores=True)
    for first in range(done // size, len(batches), state.num_processes):
        mine = first + state.process_index
        found: list[tuple[Revision, Examined]] = []
        if mine < len(batches):
            asked = [edit_of(revision) for revision in batches[mine]]
            # Only the first edits are drawn one by one; the others need not be cut into patches.
            patches = method.propose(model, asked) if mine == 0 else []
            changes = stack_patches(patches, model.layers) if patches else method.changes(model, asked)
            found = list(zip(batches[mine], examiner.examine(changes, batches[mine]), strict=True))
            if patches:
                write_details(folder, examiner, patches, batches[0], [examined for _, examined in found])
        rows = [_line(revision, examined) for revision, examined in found]
        rows = gather_object(rows) if state.num_processes > 1 else rows
        if lines:
            lines.write(rows)
        on_done(len(rows))
    if lines is None:
        return {}
    result = _result(lines.lines(), len(others), lines.seconds())
    with atomic_file(folder / "summary.json") as scratch:
        scratch.write_text(json.dumps({**about, **surroundings(model.device), "result": result}, indent=2) + "\n")
        lines.finish()  # with the summary safe, of which only the name is missing
    return result


def _about(
    method: EditMethod,
    model: TaskModel,
    edits: Sequence[Revision],
    others: Sequence[Revision],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """What is measured, and how."""
    lines = [[revision.to_json() for revision in part] for part in (edits, others)]
    return {
        "task": "classify" if isinstance(model, Classifier) else "answer",
        "fingerprint": model.fingerprint,
        "method": method.name,
        "layers": "all",
        "bound": None,
        "loop": 1,
        "editor_hash": None,
        **method.describe(model),
        **settings,
        "revisions": hashlib.sha256(json.dumps(lines).encode()).hexdigest(),
        "precision": str(model.model.dtype).removeprefix("torch."),
        "products": torch.get_float32_matmul_precision(),
    }


def _identity(about: dict[str, Any]) -> dict[str, Any]:
    """What a run must share with the one that it goes on with."""
    return {key: value for key, value in about.items() if key != "tried"}


def _finished(folder: Path, about: dict[str, Any]) -> dict[str, Any] | None:
    """The result, if the same was measured there before; a folder with another one is refused."""
    if not (path := folder / "summary.json").exists():
        return None
    try:
        found = json.loads(path.read_text())
        if all(found.get(key) == value for key, value in json.loads(json.dumps(_identity(about))).items()):
            return found["result"]
    except (OSError, ValueError, AttributeError, KeyError):
        pass
    raise FileError(f"{folder} holds the results of something else; choose another --output")


def _line(revision: Revision, examined: Examined) -> str:
    about = {
        "id": revision.id,
        "input": revision.input,
        "prediction": revision.prediction,
        "target": revision.alternatives[0],
        "says": examined.says[revision.input],
    }
    return json.dumps({**about, **asdict(examined.outcome)}, ensure_ascii=False)


def _result(lines: Iterator[str], inputs: int, seconds: float) -> dict[str, Any]:
    names = [field.name for field in fields(Outcome)]
    outcomes = [Outcome(**{name: record[name] for name in names}) for record in map(json.loads, lines)]
    return {
        **summary(outcomes),
        "intervals": intervals(outcomes),
        "edits": len(outcomes),
        "retain_inputs": inputs,
        "seconds": seconds,
    }


def select(
    model: TaskModel,
    layers: str,
    bounded: bool,
    edits: Sequence[Revision],
    others: Sequence[Revision],
    on_done: Callable[[int], object] = lambda tried: None,
) -> tuple[FineTune, list[dict[str, Any]]]:
    """The block (where layers is "block"), then the bound, with the most success + retain; and all that was tried."""
    tried: list[dict[str, Any]] = []
    edits = editable(model, predicted_now(model, edits[:SELECT_EDITS]))
    others = predicted_now(model, others[:SELECT_INPUTS])

    def best_of(choices: Sequence[tuple[str, float | None]]) -> tuple[str, float | None]:
        for block, bound in choices:
            found = summary(measure(_baseline(block, bound), model, edits, others))
            tried.append({"layers": block, "bound": bound, "success": found["success"], "retain": found["retain"]})
            on_done(1)
        here = tried[-len(choices) :]
        return choices[max(range(len(here)), key=lambda i: (here[i]["success"] or 0) + (here[i]["retain"] or 0))]

    block = best_of([(name, None) for name in block_names(model.layers)])[0] if layers == "block" else layers
    bound = best_of([(block, bound) for bound in BOUNDS])[1] if bounded else None
    block, bound, tried = from_first((block, bound, tried))
    return _baseline(block, bound), tried


def _baseline(layers: str, bound: float | None) -> FineTune:
    return FineTune(layers) if bound is None else Zhu(layers, bound=bound)


def tries(model: TaskModel, layers: str, bounded: bool) -> int:
    """How many settings `select` tries."""
    return (len(block_names(model.layers)) if layers == "block" else 0) + (len(BOUNDS) if bounded else 0)
