"""Trials: what a patch would change, on its own questions and on the control questions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from factpatch.engine import edited
from factpatch.models import TaskModel
from factpatch.models.answers import best_answers
from factpatch.patch import Patch, stack_patches
from factpatch.scope import Scope
from factpatch.serve.answering import Answering, Ask
from factpatch.serve.proposals import Comparison, Control, Proposal
from factpatch.serve.questions import Questions


@dataclass(frozen=True)
class Correction:
    """A correction that a client would like to try."""

    question: str
    target: str
    paraphrases: tuple[str, ...]


class Trials:
    """Tries patches. The unedited model's answers to the control questions are computed once."""

    def __init__(self, model: TaskModel, scope: Scope, questions: Questions, answering: Answering):
        self.model, self.scope, self.questions, self.answering = model, scope, questions, answering
        texts = list(questions.controls)
        self._encoded = dict(zip(texts, model.encode(texts, model.max_input_tokens), strict=True))
        self.control_answers = dict(zip(texts, self._predict(texts), strict=True))
        self._reading, self._number = scope.read(texts), {text: number for number, text in enumerate(texts)}

    def run(self, correction: Correction, patch: Patch) -> Proposal:
        wordings = [correction.question, *correction.paraphrases]
        controls = self.questions.controls_besides(wordings)
        before = self.answering.answer([Ask(text, with_facts=True) for text in wordings])
        with self.model.lock, edited(self.model.layers, stack_patches([patch], self.model.layers)):
            after = best_answers(self.model, wordings)
            control_answers = self._predict(controls)
        own, *others = [Comparison(now.question, now.answers, new) for now, new in zip(before, after, strict=True)]
        sample = [
            Control(text, self.control_answers[text], answer, inside)
            for text, answer, inside in zip(controls, control_answers, self._in_scope(wordings, controls), strict=True)
        ]
        return Proposal(patch.edits[0], patch, own, others, sample)

    def _predict(self, controls: Sequence[str]) -> list[str]:
        encoded = [self._encoded[text] for text in controls]
        return [ranked[0] for ranked in self.model.candidates_encoded(encoded, count=1)]

    def _in_scope(self, wordings: list[str], controls: Sequence[str]) -> list[bool]:
        """Decides for each control question whether the scope takes it to be about the corrected fact."""
        if not controls:
            return []
        index = copy.copy(self.scope).index([wordings])
        reading = self._reading.part([self._number[text] for text in controls])
        return [number is not None for number in index.match_reading(controls, reading)]
