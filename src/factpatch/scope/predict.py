"""Answers each input under the patch of the fact that it is about, or with the unedited model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from factpatch.errors import InputError, MismatchError
from factpatch.models import TaskModel
from factpatch.patch import Patch
from factpatch.scope.features import States, predicted_states
from factpatch.scope.scope import Scope


def predict_scoped(model: TaskModel, scope: Scope, patches: Sequence[Patch], inputs: Sequence[str]) -> list[str]:
    """Answers each input under the patch of its own fact. `patches` are in the order of the scope's index.

    The forward passes that answer the inputs unpatched also supply the hidden states that the scope reads, so the cost
    is that of plain prediction plus a second prediction for the matched inputs.
    """
    if scope.model.fingerprint != model.fingerprint:
        raise MismatchError("the scope was made for another model; load the one that belongs to this model")
    if len(patches) != scope.facts:
        raise InputError(f"expected one patch per indexed fact, found {len(patches)} patches and {scope.facts} facts")
    if model.patches:
        raise InputError("a scope reads inputs with the unedited model; revert the patches on the model first")
    for text in inputs:
        model.check_input(text)
    answers = [""] * len(inputs)

    def answered() -> Iterator[States]:
        for states in predicted_states(model, model.encode(inputs), scope.layers):
            for i, answer in zip(states.numbers, states.answers, strict=True):
                answers[i] = answer
            yield states

    matches = scope.match_reading(inputs, scope.reading_of(answered()))
    # Rows that share a patched batch are padded to the longest, so inputs of similar length go together.
    matched = sorted((i for i, fact in enumerate(matches) if fact is not None), key=lambda i: len(inputs[i]))
    under = [patches[fact] for i in matched if (fact := matches[i]) is not None]
    for i, answer in zip(matched, model.predict_patched(under, [inputs[i] for i in matched]), strict=True):
        answers[i] = answer
    return answers
