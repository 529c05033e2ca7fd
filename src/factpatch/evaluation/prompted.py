"""Measures the fact in the prompt: the unedited model, with the new fact before each input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from factpatch.data.revisions import Revision, edit_of, measured_texts
from factpatch.editors.prompt import FactInPrompt
from factpatch.evaluation.forced import forced_accuracies
from factpatch.evaluation.measure import Examined
from factpatch.evaluation.outcomes import ControlInputs, outcome
from factpatch.models import TaskModel


class PromptExaminer:
    """Asks the model everything that an edited model is asked, with each revision's fact in the prompt."""

    def __init__(self, method: FactInPrompt, model: TaskModel, others: Sequence[Revision]):
        self.method = method
        self.model = model
        self.others = others
        self.controls = ControlInputs(others)

    def examine(self, revisions: Sequence[Revision]) -> list[Examined]:
        """Measures each revision. KL is not measured, because the model reads other texts than before the edit."""
        asked = [[*measured_texts(r), *(other.input for other in self.others)] for r in revisions]
        prompts = [self.method.prompts(edit_of(r), texts) for r, texts in zip(revisions, asked, strict=True)]
        answers = iter(self.model.predict([prompt for group in prompts for prompt in group], cut=True))
        examined: list[Examined] = []
        for revision, texts in zip(revisions, asked, strict=True):
            said = [next(answers) for _ in texts]
            count = len(texts) - len(self.others)  # texts about the edit; the control inputs follow
            says, says_others = dict(zip(texts[:count], said[:count], strict=True)), said[count:]
            target, forced = edit_of(revision).a, self._forced(revision)
            one = outcome(revision, target, says, self.controls, says_others, forced=forced)
            examined.append(Examined(one, says, says_others, None))
        return examined

    def _forced(self, revision: Revision) -> dict[str, float] | None:
        texts = (revision.input, *revision.rephrases, *revision.human_rephrases)
        x, *others = self.method.prompts(edit_of(revision), texts)
        asked = replace(revision, input=x, rephrases=tuple(others), human_rephrases=(), neighbours=())
        (accuracies,) = forced_accuracies(self.model, [[asked]])
        shares = accuracies.get(revision.id)
        return shares and {text: shares[prompt] for text, prompt in zip(texts, (x, *others), strict=True)}
