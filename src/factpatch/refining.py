"""Refining: gradient steps on a merged patch, which correct the facts and the other answers that the merge lost.

The merge makes single layers do what each edit's own patch does there. Refining looks at the answers instead. Starting
from the merged change S, it minimises

    mean over edits of max(L(x, a), ENOUGH) + KL_WEIGHT · mean over control inputs of KL(unedited model ‖ patched model)

with Adam. The first term stops pushing an edit that succeeds safely, which spares other answers. The result depends
only on the facts and the control inputs, not on their order: both are sorted, and batches come from a fixed seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from factpatch.backends import no_cudnn_attention, tensor_core_products
from factpatch.constraints import kl
from factpatch.deltas import Delta, Dense
from factpatch.engine import edited
from factpatch.errors import InputError
from factpatch.facts import normalize
from factpatch.merging import edit_key
from factpatch.models import Rows, TaskModel
from factpatch.models.rows import Encoded
from factpatch.patch import Patch, unpatched

REFINED = ", refined"  # suffix of a refined patch's method name
ENOUGH = 0.05  # loss at which an edit counts as safe: the target's tokens have a probability of about 0.95
KL_WEIGHT = 10.0
RATE = 0.01  # Adam's learning rate, as a share of the root mean square of each weight, in models up to WIDTH
WIDTH = 128  # in wider models the rate falls with the square of the width, because there are as many times more weights
EDITS_PER_STEP = 256
CONTROLS_PER_STEP = 256
TOKENS_PER_PASS = {"cpu": 4096, "cuda": 32_768}  # bounds the activations that a backward pass keeps


@torch.inference_mode(False)
@no_cudnn_attention()
@tensor_core_products()
def refine(
    model: TaskModel,
    patch: Patch,
    others: Iterable[str] | Mapping[str, str],
    steps: int = 100,
    on_step: Callable[[], object] = lambda: None,
) -> Patch:
    """Improves a patch with many facts, such as `merge` returns, by gradient steps on its facts.

    `others` are ordinary inputs whose answers should stay as they are. If the model's answers are known, a mapping from
    inputs to answers saves their generation.
    """
    patch.check_fits(model)
    if not patch.edits:
        raise InputError("expected a patch that names its edits, found one without; make it again")
    if steps < 1:
        raise InputError(f"expected at least one step, found {steps}")
    with unpatched(model):
        controls = _controls(model, others, {normalize(edit.x) for edit in patch.edits})
        edits = _texts(model, [(edit.x, edit.a) for edit in sorted(patch.edits, key=edit_key)])
        merged = {name: delta.dense().to(model.device, torch.float32) for name, delta in patch.deltas.items()}
        sizes = {name: model.layers[name].weight.float().square().mean().sqrt() for name in merged}
        moves = {name: torch.zeros_like(S, requires_grad=True) for name, S in merged.items()}
        optimizer = torch.optim.Adam(moves.values(), lr=RATE * min(1.0, WIDTH / model.model.config.hidden_size) ** 2)
        decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
        rng = random.Random(0)
        for _ in range(steps):
            now = {name: (S + sizes[name] * moves[name]).detach().requires_grad_() for name, S in merged.items()}
            samples = (_sample(edits, EDITS_PER_STEP, rng), _sample(controls, CONTROLS_PER_STEP, rng))
            for name, gradient in _gradients(model, now, samples).items():
                moves[name].grad = sizes[name] * gradient
            optimizer.step()
            decay.step()
            on_step()
        deltas = {name: Dense((S + sizes[name] * moves[name]).detach()) for name, S in merged.items()}
    return replace(patch, deltas=deltas, method=patch.method.removesuffix(REFINED) + REFINED)


@dataclass(frozen=True)
class _Text:
    """An input with its target and, for a control input, the unedited model's features at the target positions."""

    encoded: Encoded
    target: Any  # a class id, or token ids
    features: Tensor | None = None  # (positions, width)


def _texts(model: TaskModel, pairs: Sequence[tuple[str, str]]) -> list[_Text]:
    """Tokenises pairs of an input and its target."""
    encoded, targets = model.encode([text for text, _ in pairs]), model.encode_targets([target for _, target in pairs])
    return list(map(_Text, encoded, targets))


@torch.no_grad()
def _controls(model: TaskModel, others: Iterable[str] | Mapping[str, str], edited_forms: set[str]) -> list[_Text]:
    """Returns the control inputs, sorted, with the unedited model's features. Edited inputs are left out."""
    known = dict(others) if isinstance(others, Mapping) else {}
    texts = sorted(text for text in model.encode_readable(list(others)) if normalize(text) not in edited_forms)
    missing = [text for text in texts if text not in known]
    known.update(zip(missing, model.predict(missing), strict=True))
    usable = model.valid_targets([known[text] for text in texts])  # an unfinished answer, for example, is no target
    controls = _texts(model, [(text, known[text]) for text in texts if known[text] in usable])
    if not controls:
        raise InputError("expected a sample of ordinary inputs, found no usable text; give some control inputs")
    for batch in _batches(model, controls):
        rows = _rows(model, [controls[i] for i in batch])
        positions = torch.bincount(rows.row_of_position, minlength=len(batch)).tolist()  # of each text
        for i, features in zip(batch, model.features(rows).split(positions), strict=True):
            controls[i] = replace(controls[i], features=features)
    return controls


def _sample(texts: Sequence[_Text], count: int, rng: random.Random) -> list[_Text]:
    return list(texts) if len(texts) <= count else rng.sample(texts, count)


def _batches(model: TaskModel, texts: Sequence[_Text]) -> Iterator[list[int]]:
    return model.batches([len(text.encoded["input_ids"]) for text in texts], 1, TOKENS_PER_PASS)


def _rows(model: TaskModel, texts: Sequence[_Text]) -> Rows:
    return model.collate([text.encoded for text in texts], [text.target for text in texts]).at_targets()


def _gradients(model: TaskModel, changes: dict[str, Tensor], samples: Iterable[list[_Text]]) -> dict[str, Tensor]:
    """Computes the gradient of the summed losses of all samples with respect to each weight's change."""
    gradients = {name: torch.zeros_like(S) for name, S in changes.items()}
    stack: dict[str, Delta] = {name: Dense(S[None]) for name, S in changes.items()}
    for texts in samples:
        for batch in _batches(model, texts):
            with torch.enable_grad(), edited(model.layers, stack):
                loss = _loss(model, [texts[i] for i in batch]) * (len(batch) / len(texts))
            of_batch = torch.autograd.grad(loss, list(changes.values()), materialize_grads=True)
            for name, gradient in zip(changes, of_batch, strict=True):
                gradients[name] += gradient
    return gradients


def _loss(model: TaskModel, texts: Sequence[_Text]) -> Tensor:
    """Returns the mean loss of edits, or the weighted mean KL of control inputs, under the current changes."""
    rows = _rows(model, texts)
    features = model.features(rows)
    before = [text.features for text in texts if text.features is not None]
    if before:
        return KL_WEIGHT * rows.means(kl(model.head(torch.cat(before)), model.head(features))).mean()
    losses = F.cross_entropy(model.scores(features), rows.target_labels, reduction="none")
    return rows.means(losses).clamp(min=ENOUGH).mean()
