"""Ways to hold many facts in one model: patches that are summed, merged, chosen by scope, or made together."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from factpatch.covariance import Covariance
from factpatch.data.revisions import Revision, edit_of, measured_texts
from factpatch.errors import InputError
from factpatch.evaluation.measure import Examined, Examiner
from factpatch.evaluation.outcomes import ControlInputs, outcome
from factpatch.merging import Mode, merge
from factpatch.models import TaskModel
from factpatch.patch import Patch, stack_patches
from factpatch.refining import refine
from factpatch.scope import FALSE_MATCHES, Scope, predict_scoped

Group = Sequence[Revision]
Measure = Callable[[Examiner, Sequence[Patch], Group], list[Examined]]
MAX_OTHERS = 2000  # maximum number of inputs that a merge or a scope is fitted to
MAX_REFINED = 20_000  # maximum number of inputs that refining protects; it protects only what it sees


@dataclass(frozen=True)
class MergeOptions:
    """Options for merging patches."""

    mode: Mode = "unedited"  # see `merge`
    refine: int = 0  # gradient steps after a merge
    scope: str | None = None  # file of a trained scope
    false_matches: float = FALSE_MATCHES  # share of other inputs that may match a fact of the scope


def by_sum(model: TaskModel, others: Group, options: MergeOptions) -> Measure:
    """Adds up the patches of a group."""
    return lambda examiner, patches, group: examine_merged(examiner, reduce(operator.add, patches), group)


def by_solve(model: TaskModel, others: Group, options: MergeOptions) -> Measure:
    """Merges the patches of a group by least squares, with `others` as the ordinary inputs."""
    known = {revision.input: revision.prediction for revision in others[:MAX_REFINED]}
    covariance = Covariance.compute(model, list(known)[:MAX_OTHERS], known)

    def measure(examiner: Examiner, patches: Sequence[Patch], group: Group) -> list[Examined]:
        patch = merge(model, patches, covariance=covariance, mode=options.mode)
        if options.refine:
            patch = refine(model, patch, known, options.refine)
        return examine_merged(examiner, patch, group)

    return measure


def by_scope(model: TaskModel, others: Group, options: MergeOptions) -> Measure:
    """Uses each patch only for inputs about its own fact. The scope is fitted to `others`."""
    others = others[:MAX_OTHERS]
    share = options.false_matches
    fitted = Scope.load(options.scope, model) if options.scope else Scope.plain(model, others, share)
    readable = model.encode_readable([revision.input for revision in others])

    def measure(examiner: Examiner, patches: Sequence[Patch], group: Group) -> list[Examined]:
        fitted.index([revision.input for revision in group])
        fitted.calibrate_index(list(readable), share)
        return examine_answers(
            lambda texts: predict_scoped(model, fitted, patches, texts), group, examiner.others, examiner.controls
        )

    return measure


def examine_answers(
    answer: Callable[[list[str]], list[str]], group: Group, others: Group, controls: ControlInputs | None = None
) -> list[Examined]:
    """Measures a group that is edited together, given a function that answers texts.

    `controls` are those of `others`, if they are already known.
    """
    controls = controls or ControlInputs(others)
    texts = list(dict.fromkeys(text for revision in group for text in measured_texts(revision)))
    answers = answer([*texts, *(other.input for other in others)])
    says, says_others = dict(zip(texts, answers, strict=False)), answers[len(texts) :]
    outcomes = [outcome(r, edit_of(r).a, says, controls, says_others, together=group) for r in group]
    return [Examined(one, says, says_others, None) for one in outcomes]


def examine_merged(examiner: Examiner, patch: Patch, group: Group) -> list[Examined]:
    """Measures a group under one patch."""
    (examined,) = examiner.examine_groups(stack_patches([patch], examiner.model.layers), [group])
    return examined


Merge = Callable[[TaskModel, Group, MergeOptions], Measure]
MERGES: dict[str, Merge] = {
    "sum": by_sum,
    "solve": by_solve,
    "scope": by_scope,
    "own": by_sum,  # of the one patch that the method itself makes for the whole group
}


def find_merge(name: str) -> Merge:
    if name not in MERGES:
        raise InputError(f"there is no merge called {name!r}; choose one of {', '.join(MERGES)}")
    return MERGES[name]
