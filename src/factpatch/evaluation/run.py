"""Evaluates a method on a revision set. Results are written line by line, so that an interrupted run can resume."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from factpatch.backends import tensor_core_products
from factpatch.data.revisions import Revision, edit_of, editable, hash_revisions
from factpatch.data.targets import target_chooser
from factpatch.device import environment, find_dtype
from factpatch.editors import EditMethod
from factpatch.editors.prompt import FactInPrompt
from factpatch.errors import FactpatchError, FileError, InputError
from factpatch.evaluation.details import write_details
from factpatch.evaluation.lines import EDITS, edit_line, outcome_of, refuse_other_files, write_groups
from factpatch.evaluation.measure import Examined, Examiner, predicted_now
from factpatch.evaluation.prompted import PromptExaminer
from factpatch.evaluation.summary import FILE, Conditions, Result, Summary
from factpatch.evaluation.together import (
    COVERED,
    Together,
    about_different_facts,
    count_joint_edits,
    measure_together,
)
from factpatch.models import Classifier, TaskModel
from factpatch.models.rows import in_batches
from factpatch.patch import stack_patches
from factpatch.processes import broadcast_from_first, join_processes
from factpatch.resumable import ResumableLines

Progress = Callable[[int], object]

CHUNK = 10_000  # revisions that are in memory at a time while some are sampled


@contextmanager
def measuring_precision(model: TaskModel, precision: str | None, baseline: bool) -> Iterator[None]:
    """Runs a block in the given precision, or in the default precision for measuring edits.

    In bf16, rounding can decide which of two nearly equal answers wins. That affects beam search, and fine-tuning
    (`baseline`), which stops as soon as the target wins. By default both use float32, with TF32 products for trained
    editors on a GPU.
    """
    near_ties = baseline or model.near_ties
    dtype = find_dtype(precision or ("fp32" if near_ties else None), model.device.type)
    with model.in_precision(dtype), tensor_core_products() if precision is None and not baseline else nullcontext():
        yield


def sample_edits(
    model: TaskModel,
    revisions: Iterable[Revision],
    edits: int | None,
    retain: int | None,
    seed: int,
    targets: str = "beam",
) -> tuple[list[Revision], list[Revision]]:
    """Samples `edits` revisions with a target of the kind `targets`, and `retain` control inputs; None means all.

    The revisions are read several times, but only the sampled ones are kept in memory.
    """
    choose = target_chooser(model, revisions, [targets], seed)
    candidates = array("Q")  # positions of the revisions that have a target
    count = 0
    unread = iter(revisions)
    while chunk := list(islice(unread, CHUNK)):
        candidates.extend(count + i for i, revision in enumerate(choose(chunk)) if revision.alternatives)
        count += len(chunk)
    if not candidates:
        what = "an alternative answer" if targets == "beam" else f"a target of the kind {targets}"
        raise InputError(f"no revision has {what} to edit to; make revisions with factpatch revise")
    rng = random.Random(seed)
    edited = [candidates[i] for i in rng.sample(range(len(candidates)), len(candidates))[:edits]]
    others = rng.sample(range(count), count)[:retain]
    sampled = {*edited, *others}
    kept = {position: revision for position, revision in enumerate(revisions) if position in sampled}
    if len(kept) < len(sampled):
        raise InputError("the revision file became shorter while it was read; run the command again")
    return choose([kept[position] for position in edited]), [kept[position] for position in others]


def evaluate(
    method: EditMethod,
    model: TaskModel,
    edits: Sequence[Revision],
    others: Sequence[Revision],
    folder: Path,
    settings: dict[str, Any],
    on_done: Progress = lambda edits: None,
    together: Together | None = None,
    tried: Sequence[dict[str, Any]] = (),
) -> Result | None:
    """Measures a method and writes edits.jsonl, details.safetensors, examples.json and, at the end, summary.json.

    `others` are the control inputs. summary.json records `settings` and the settings that `select` `tried`. With
    `together`, edits are also measured in groups, and written to together.jsonl. A folder that already holds the
    finished results of the same run is left as it is. Predictions are recomputed, not taken from the revision file.
    Several processes share the work; only the main one writes, and the others return None.
    """
    state = join_processes(model.device)
    conditions = _conditions(method, model, edits, others, settings, together)
    if finished := broadcast_from_first(_finished(folder, conditions)):
        on_done(finished.edits + sum(point.result.edits for point in finished.curve))
        return finished if state.is_main_process else None
    refuse_other_files(folder)
    edits, others = broadcast_from_first((editable(model, predicted_now(model, edits)), predicted_now(model, others)))
    if not edits:
        raise InputError(
            "nothing to edit: the model already gives every alternative, or cannot give it; use other revisions"
        )
    if together:
        edits = about_different_facts(edits)
        count_joint_edits(len(edits), together.sizes)  # fails now rather than after hours of single edits
    identity = {**conditions.identity(), "ids": [revision.id for revision in edits]}
    alone = edits[:COVERED] if together else edits
    lines, result = _measure_each(method, model, alone, others, folder, identity, on_done)
    joint: ResumableLines | None = None
    if together:
        joint, curve = measure_together(method, model, edits, others, together, folder, identity, on_done)
        result = replace(result, curve=curve) if result else None
    if lines is None or result is None:
        return None

    def finish() -> None:
        for file in (lines, joint):
            if file:
                file.finish()

    Summary(conditions, result, list(tried), environment(model.device)).write(folder, finish)
    return result


def _measure_each(
    method: EditMethod,
    model: TaskModel,
    edits: Sequence[Revision],
    others: Sequence[Revision],
    folder: Path,
    identity: dict[str, Any],
    on_done: Progress,
) -> tuple[ResumableLines | None, Result | None]:
    """Measures each edit on its own and writes one line per edit; the caller finishes the file."""
    size = method.edits_per_batch(model)
    batches = list(in_batches(edits, size))
    examiner = cache(partial(_examine_with, method, model, others, folder))  # not needed if all batches are finished

    def make_lines(number: int) -> list[str]:
        examined = examiner()(number, batches[number])
        return [edit_line(revision, one) for revision, one in zip(batches[number], examined, strict=True)]

    lines = write_groups(folder / EDITS, identity, batches, make_lines, on_done)
    if lines is None:
        return None, None
    outcomes = [outcome_of(json.loads(line)) for line in lines.lines()]
    return lines, Result.of(outcomes, len(others), lines.seconds())


def _examine_with(
    method: EditMethod, model: TaskModel, others: Sequence[Revision], folder: Path
) -> Callable[[int, Sequence[Revision]], list[Examined]]:
    """Returns a function that measures a numbered batch; with the first one, it writes the details for figures."""
    if isinstance(method, FactInPrompt):
        prompted = PromptExaminer(method, model, others)
        return lambda number, batch: prompted.examine(batch)
    examiner = Examiner(model, others, method.edits_per_batch(model), scores=True)

    def examine(number: int, batch: Sequence[Revision]) -> list[Examined]:
        asked = [edit_of(revision) for revision in batch]
        # Only the first batch is split into patches, because figures show its edits one by one.
        patches = method.propose(model, asked) if number == 0 else []
        changes = stack_patches(patches, model.layers) if patches else method.changes(model, asked)
        examined = examiner.examine(changes, batch)
        if patches:
            write_details(folder, examiner, patches, batch, examined)
        return examined

    return examine


def _conditions(
    method: EditMethod,
    model: TaskModel,
    edits: Sequence[Revision],
    others: Sequence[Revision],
    settings: dict[str, Any],
    together: Together | None,
) -> Conditions:
    known = {
        "task": "classify" if isinstance(model, Classifier) else "answer",
        "method": method.name,
        "model_kind": f"{model.model.config.model_type}, {_rounded(model.model.num_parameters())} parameters",
        "fingerprint": model.fingerprint,
        "identity": model.identity,
        **method.describe(model),
        **settings,
        "revisions": hash_revisions(edits, others),
        "precision": str(model.model.dtype).removeprefix("torch."),
        "products": torch.get_float32_matmul_precision(),
        "together": list(together.sizes) if together else [],
        "merge": together.merge if together else None,
        **({"merged_with": hash_revisions(together.others)} if together else {}),
    }
    return Conditions.collect(json.loads(json.dumps(known)))


def _rounded(count: int) -> str:
    """Formats a count with three significant digits: 4.42M."""
    power = min(3, (len(str(count)) - 1) // 3)
    return f"{count / 1000**power:.3g}{['', 'K', 'M', 'B'][power]}"


def _finished(folder: Path, conditions: Conditions) -> Result | None:
    """Returns the result of an earlier run under the same conditions; refuses a folder with other results."""
    if not (folder / FILE).exists():
        return None
    try:
        earlier = Summary.read(folder)
    except FactpatchError:
        raise FileError(f"{folder} holds a damaged {FILE}; choose another --output") from None
    before, now = earlier.conditions.identity(), conditions.identity()
    if differing := [key for key in now if before[key] != now[key]]:
        raise FileError(f"{folder} holds other results (different {', '.join(differing)}); choose another --output")
    return earlier.result
