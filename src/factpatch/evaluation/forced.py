"""Teacher-forced token accuracy of the targets, to compare with published tables.

Users see freely generated answers. Under teacher forcing, the model reads the target's earlier tokens instead of its
own, so these figures are higher.
"""

from __future__ import annotations

from collections.abc import Sequence

from factpatch.data.revisions import Revision, edit_of
from factpatch.evaluation.batches import edit_major_batches, encode_lists, padded_lists
from factpatch.models import TaskModel
from factpatch.models.forced import token_accuracy

Accuracies = dict[str, dict[str, float]]  # by revision id, then by text


def forced_accuracies(model: TaskModel, groups: Sequence[Sequence[Revision]], parts: int = 1) -> list[Accuracies]:
    """Returns the token accuracy of each revision's target, after its input and after each of its paraphrases.

    There is one group of revisions per edit. The model runs under the edits that are active, edit-major. Classifiers
    have no tokens to force, so nothing is measured for them. `parts` divides batches that do not fit into memory.
    """
    accuracies: list[Accuracies] = [{} for _ in groups]
    if model.kind == "classifier":
        return accuracies
    asked = padded_lists(
        [[(r, text) for r in group for text in (r.input, *r.rephrases, *r.human_rephrases)] for group in groups]
    )
    texts = encode_lists(model, [[text for _, text in pairs] for pairs in asked])
    for places, encoded in edit_major_batches(model, texts, parts):
        targets = model.encode_targets([edit_of(asked[edit][index][0]).a for edit, index in places])
        shares = token_accuracy(model, model.collate(encoded, targets)).tolist()
        for (edit, index), share in zip(places, shares, strict=True):
            revision, text = asked[edit][index]
            accuracies[edit].setdefault(revision.id, {})[text] = share
    return accuracies
