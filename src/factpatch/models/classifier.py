"""Classifiers, such as fact-checkers: the answer is one of a few labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification

from factpatch.device import to_device
from factpatch.errors import InputError, ModelError
from factpatch.facts import normalize
from factpatch.models.base import TaskModel
from factpatch.models.rows import Encoded, Rows, selected


class Classifier(TaskModel):
    """Answers with the label of the highest score. The labels are those of the model's config."""

    kind = "classifier"
    near_ties = False
    auto_class = AutoModelForSequenceClassification

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        names = self.model.config.id2label or {}
        self.labels = [str(names[i]) for i in sorted(names)]
        if len({normalize(label) for label in self.labels}) < len(self.labels):
            raise ModelError(f"labels must differ by more than case and punctuation, found {', '.join(self.labels)}")

    def decision_settings(self) -> dict[str, Any]:
        return {"labels": self.labels}

    def encode_targets(self, targets: Sequence[str]) -> list[int]:
        return [self.labels.index(self.check_target(target)) for target in targets]

    def collate(self, encoded: Sequence[Encoded], targets: Sequence[int] | None = None) -> Rows:
        labels = None if targets is None else to_device(self.device, targets)
        return Rows(self.padded_inputs(encoded), labels)

    def logits(self, rows: Rows) -> Tensor:
        return self.model(**rows.inputs).logits.float()

    def features(self, rows: Rows) -> Tensor:
        return selected(self.model(**rows.inputs).logits, rows)

    def head(self, features: Tensor) -> Tensor:
        return features

    def answers_from(self, features: Tensor) -> list[str] | None:
        return [self.labels[i] for i in self.scores(features).argmax(-1).tolist()]

    def losses(self, rows: Rows) -> Tensor:
        assert rows.labels is not None
        return F.cross_entropy(self.logits(rows), rows.labels, reduction="none")

    def decide(self, rows: Rows, count: int = 1, edits: int | None = None) -> list[list[str]]:
        ranked = self.logits(rows).argsort(dim=-1, descending=True)[:, :count]
        return [[self.labels[i] for i in row] for row in ranked.tolist()]

    def check_target(self, target: str) -> str:
        if target in self.labels:
            return target
        for label in self.labels:
            if normalize(label) == normalize(target):
                return label
        raise InputError(f"the classifier has no label {target!r}; choose one of {', '.join(self.labels)}")

    def valid_targets(self, texts: Sequence[str]) -> set[str]:
        known = {normalize(label) for label in self.labels}
        return {text for text in texts if normalize(text) in known}
