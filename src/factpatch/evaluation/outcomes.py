"""Turns an edited model's answers into the per-edit values of the metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from factpatch.data.revisions import Revision, own_forms
from factpatch.facts import normalize, same
from factpatch.metrics import Booleans, Observation, Outcome, measure_all


class ControlInputs:
    """Inputs whose predictions should not change, with their predictions before any edit and their gold answers.

    Texts are numbered, so that the answers under many edits can be compared quickly. Texts that are equal after
    normalising share a number.
    """

    def __init__(self, revisions: Sequence[Revision]):
        self._by_form: dict[str, int] = {}
        self._by_text: dict[str, int] = {}
        self.inputs = self.numbers([r.input for r in revisions])  # (inputs,)
        self.predictions = self.numbers([r.prediction for r in revisions])  # (inputs,)
        self.answers = np.full((len(revisions), max((len(r.answers) for r in revisions), default=0)), -1)
        for row, revision in zip(self.answers, revisions, strict=True):
            row[: len(revision.answers)] = self.numbers(revision.answers)
        self.has_answers = (self.answers >= 0).any(1)
        self.correct = self.matches_answers(self.predictions)

    def numbers(self, texts: Sequence[str]) -> NDArray[np.int64]:
        for text in set(texts) - self._by_text.keys():
            self._by_text[text] = self._by_form.setdefault(normalize(text), len(self._by_form))
        return np.fromiter(map(self._by_text.__getitem__, texts), np.int64, len(texts))

    def matches_answers(self, predictions: NDArray[np.int64]) -> Booleans:
        """Returns which predictions are a gold answer of their input: (inputs,)."""
        return (self.answers == predictions[:, None]).any(1)

    def apart_from(self, revisions: Iterable[Revision]) -> Booleans:
        """Returns which inputs are neither an edited input nor a known paraphrase of one: (inputs,)."""
        forms = {form for revision in revisions for form in own_forms(revision)}
        return ~np.isin(self.inputs, [self._by_form[form] for form in forms if form in self._by_form])


def outcome(
    revision: Revision,
    target: str,
    answers: Mapping[str, str],
    controls: ControlInputs,
    control_answers: Sequence[str],
    kl: NDArray[np.float32] | None = None,
    together: Sequence[Revision] = (),
    forced: Mapping[str, float] | None = None,
) -> Outcome:
    """Measures one edit from the edited model's answers.

    `answers` maps x, its paraphrases and its neighbours to their answers; `control_answers` and `kl` are in the order
    of `controls`; `forced` maps x and its paraphrases to the target's token accuracy under teacher forcing. `together`
    lists the revisions that were edited at the same time. None of their inputs or paraphrases counts as a
    control input, and x itself never counts as its own paraphrase.
    """
    edited = [revision, *together]
    kept = controls.apart_from(edited)
    now = controls.numbers(control_answers)
    with_answers = kept & controls.has_answers

    edited_forms = frozenset[str]().union(*map(own_forms, edited))
    neighbours = [one for one in revision.neighbours if normalize(one.input) not in edited_forms]
    paraphrases = [t for t in (*revision.rephrases, *revision.human_rephrases) if not same(t, revision.input)]
    accuracies = forced or {}

    def answers_to(texts: Sequence[str]) -> list[str]:
        return [answers[text] for text in texts if not same(text, revision.input)]

    seen = Observation(
        target=target,
        answer=answers[revision.input],
        paraphrase_answers=answers_to(revision.rephrases),
        human_paraphrase_answers=answers_to(revision.human_rephrases),
        unchanged=(now == controls.predictions)[kept],
        correct_before=controls.correct[with_answers],
        correct_after=controls.matches_answers(now)[with_answers],
        kl=np.empty(0) if kl is None else kl[kept].astype(np.float64),
        neighbours_unchanged=[same(answers[one.input], one.prediction) for one in neighbours],
        forced=accuracies.get(revision.input),
        forced_paraphrases=[accuracies[text] for text in paraphrases if text in accuracies],
    )
    return measure_all(seen)
