"""Teacher-forced token accuracy of the targets, to compare with published tables.

Users see freely generated answers. Under teacher forcing, the model reads the target's earlier tokens instead of its
own, so these figures are higher.
"""

from __future__ import annotations

from collections.abc import Sequence

from factpatch.data.revisions import Revision, edit_of
from factpatch.models import TaskModel
from factpatch.models.forced import token_accuracy

Accuracies = dict[str, dict[str, float]]  # by revision id, then by text


def forced_accuracies(model: TaskModel, groups: Sequence[Sequence[Revision]], parts: int = 1) -> list[Accuracies]:
    """Returns the token accuracy of each revision's target, after its input and after each of its paraphrases.

    There is one group of revisions per edit. The model runs under the edits that are active, edit-major. Classifiers
    have no tokens to force, so nothing is measured for them. `parts` divides batches that do not fit into memory.
    """
    found: list[Accuracies] = [{} for _ in groups]
    if model.kind == "classifier":
        return found
    asked = [[(r, text) for r in group for text in (r.input, *r.rephrases, *r.human_rephrases)] for group in groups]
    # Shorter lists are padded with their first entry, so that each edit has the same number of rows.
    columns = [[own[k] if k < len(own) else own[0] for own in asked] for k in range(max(map(len, asked)))]
    encoded = [model.encode([text for _, text in column], model.max_input_tokens) for column in columns]
    targets = [model.encode_targets([edit_of(revision).a for revision, _ in column]) for column in columns]
    lengths = [max(len(one["input_ids"]) for one in column) * len(groups) * parts for column in encoded]
    for batch in model.batches(lengths):
        pairs = [(e, k) for e in range(len(groups)) for k in batch]
        rows = model.collate([encoded[k][e] for e, k in pairs], [targets[k][e] for e, k in pairs])
        for (e, k), share in zip(pairs, token_accuracy(model, rows).tolist(), strict=True):
            revision, text = columns[k][e]
            found[e].setdefault(revision.id, {})[text] = share
    return found
