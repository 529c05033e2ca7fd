"""Groups the columns of a training batch by length, so that less of each forward pass is padding.

A column has one control input of each edit. The sampler draws an edit's control inputs in order of length, so the
inputs of one column are about equally long, and a few long inputs do not determine the width of all rows.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from factpatch.training.sampler import Indices

# Fixed cost of a forward pass, expressed as a number of tokens: on a GPU, each kernel takes time to start.
TOKENS_PER_PASS = {"cpu": 64, "cuda": 4096}


def group_columns(edit_widths: Indices, control_widths: Indices, groups: int, pass_cost: float) -> list[Indices]:
    """Chooses the groups of control columns that need the fewest tokens, padding included.

    The first group has the longest control inputs, perhaps none, and runs in one pass with the edits' own rows. Widths
    are the lengths of each column's longest text and of its longest target: (2, columns). A pass is as wide as both
    maxima together. `pass_cost` is the fixed cost of a pass, in tokens per edit.
    """
    order = np.argsort(-control_widths.sum(0), kind="stable")  # longest first
    widths = control_widths[:, order]

    def tokens(cuts: tuple[int, ...]) -> float:
        first, *others = np.split(widths, cuts, axis=1)
        passes = [np.concatenate([edit_widths, first], 1), *others]
        return sum(one.shape[1] * one.max(1).sum() + pass_cost for one in passes)

    # A cut helps only before a column that is shorter than the one before it, or before the first one.
    total = widths.sum(0)
    useful = [i for i in range(len(order)) if i == 0 or total[i] < total[i - 1]]
    choices = [cuts for count in range(groups) for cuts in combinations(useful, count)]
    return [np.sort(group) for group in np.split(order, min(choices, key=tokens))]
