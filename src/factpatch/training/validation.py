"""Chooses held-out revisions and measures editors on them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from factpatch.backends import tensor_core_products
from factpatch.covariance import Covariance
from factpatch.data.holdout import hash_shuffled, hold_out
from factpatch.data.revisions import Revision, edit_of
from factpatch.data.targets import with_targets
from factpatch.editors import EditMethod
from factpatch.errors import InputError
from factpatch.evaluation import measure, predicted_now
from factpatch.evaluation.measure import Examiner
from factpatch.evaluation.merges import examine_merged
from factpatch.merging import merge
from factpatch.metrics import summary
from factpatch.models import TaskModel
from factpatch.processes import broadcast_from_first
from factpatch.training.config import TrainConfig

SMALLEST_FINAL = 8  # edits

Sample = tuple[list[Revision], list[Revision]]  # edits, control inputs


def split_revisions(
    revisions: Sequence[Revision], model: TaskModel, config: TrainConfig, warn: Callable[[str], object]
) -> tuple[list[Revision], list[Revision]]:
    """Splits revisions into a held-out set and the rest.

    The held-out set consists of facts that were held out when the model was fitted, if its folder names them.
    """
    size = min(config.holdout, len(revisions) // 10)
    if size < 2:
        raise InputError(
            f"expected at least 20 revisions to hold out a tenth, found {len(revisions)}; add revisions or give --valid"
        )
    unseen = [r for r in hash_shuffled(revisions, config.seed) if r.id in (model.held_out or ())][:size]
    if len(unseen) >= 2:
        ids = {revision.id for revision in unseen}
        return unseen, [revision for revision in revisions if revision.id not in ids]
    reason = "the model's folder does not name" if model.held_out is None else "the revision file has none of"
    warn(f"{reason} the facts that fit held out, so validation may use facts that the model was fitted on")
    return hold_out(revisions, size, config.seed)


class Validator:
    """Measures editors on held-out revisions."""

    def __init__(self, model: TaskModel, revisions: Sequence[Revision], config: TrainConfig, accelerator: Accelerator):
        """Recomputes predictions: in another precision or on another machine, near ties may be decided differently."""
        self.model = model
        self.config = config
        self.accelerator = accelerator
        with tensor_core_products():  # as in `measure`
            self.revisions = broadcast_from_first(predicted_now(model, revisions))
        self.edits = with_targets(model, self.revisions, config.targets, config.seed)
        self.covariance: Covariance | None = None  # if edits are merged

    def sample(self, number: int) -> Sample:
        """Draws the edits and control inputs of one validation; each validation draws its own."""
        config = self.config
        rng = random.Random(f"{config.seed}/{number}")
        edits = rng.sample(self.edits, min(self._group_size() or config.validation_edits, len(self.edits)))
        few = [self._with_few_paraphrases(revision, rng) for revision in edits]
        return few, rng.sample(self.revisions, min(config.validation_inputs, len(self.revisions)))

    def final_sample(self, share: float = 1.0) -> Sample:
        """Returns the edits and control inputs of the measurement at the end, or a share of the edits."""
        edits = self.edits[: self._group_size() or self.config.final_edits]
        kept = min(len(edits), max(SMALLEST_FINAL, int(share * len(edits))))
        return edits[:kept], self.revisions[: self.config.final_inputs]

    def _group_size(self) -> int | None:
        """Returns how many edits a validation merges.

        These are at most half of the held-out set, because the rest are control inputs.
        """
        return min(self.config.together, len(self.edits) // 2) if self.config.together > 1 else None

    def relative_cost(self) -> float:
        """Estimates how many times longer the final measurement takes than a validation."""
        return _texts(*self.final_sample()) / _texts(*self.sample(0))

    def _with_few_paraphrases(self, revision: Revision, rng: random.Random) -> Revision:
        few = {
            kind: tuple(rng.sample(texts, min(self.config.validation_paraphrases, len(texts))))
            for kind in ("rephrases", "human_rephrases", "neighbours")
            for texts in (getattr(revision, kind),)
        }
        return replace(revision, **few)

    def measure(
        self, method: EditMethod, sample: Sample, on_share: Callable[[float], object] = lambda share: None
    ) -> dict[str, Any]:
        """Computes the metrics of a method.

        Each process measures a share of the edits; all return the metrics of all edits.
        """
        edits, controls = sample
        if self.covariance is not None:
            return self._measure_merged(method, sample, self.covariance)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        mine = edits[rank::world]
        done = 0

        def on_done(more: int) -> None:
            nonlocal done
            done += more
            on_share(done / len(mine))

        with tensor_core_products():
            outcomes = measure(method, self.model, mine, controls, on_done)
        return summary(gather_object(outcomes) if world > 1 else outcomes)

    def _measure_merged(self, method: EditMethod, sample: Sample, covariance: Covariance) -> dict[str, Any]:
        """Computes the metrics of all edits, merged into one patch."""
        edits, controls = sample
        with tensor_core_products():
            patches = method.propose(self.model, [edit_of(revision) for revision in edits])
            patch = merge(self.model, patches, covariance=covariance)
            group = examine_merged(Examiner(self.model, controls, 1), patch, edits)
        return summary([examined.outcome for examined in group])


def score_of(found: dict[str, Any]) -> float:
    """Returns the score by which the best editor is chosen: the mean of success and retain."""
    return (found["success"] + (found["retain"] or 0.0)) / 2


def _texts(edits: Sequence[Revision], controls: Sequence[Revision]) -> int:
    """Returns how many texts are run to measure edits."""
    return sum(1 + len(r.rephrases) + len(r.human_rephrases) + len(controls) for r in edits)
