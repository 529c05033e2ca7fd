"""The scope of one model: an index of active facts, and the threshold above which an input is about one of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from factpatch.data.holdout import hash_shuffled
from factpatch.data.revisions import Revision
from factpatch.errors import FileError, InputError, reason
from factpatch.facts import FactEdit, normalize
from factpatch.files import read_safetensors, write_safetensors
from factpatch.fingerprints import check_base
from factpatch.models import TaskModel
from factpatch.scope.comparer import Comparer
from factpatch.scope.features import States, spread_layers, text_features, text_states
from factpatch.scope.learning import Report, learn
from factpatch.scope.matching import Calibration, KnownFacts, Matcher, threshold_for
from factpatch.scope.reading import Reading, collect
from factpatch.scope.same_subject import made_up_questions
from factpatch.scope.training import FALSE_MATCHES, ScopeConfig

FORMAT = "factpatch-scope-2"
COSINE_FORMAT = "factpatch-scope-1"  # of a scope without a comparer
ACTIVE_FACTS = 1024  # maximum number of facts that are active when a threshold is chosen
SAME_SUBJECT_INPUTS = 0.1  # share of made-up questions among the inputs that a threshold is chosen on
Fact = FactEdit | str | Sequence[str]  # an edit, its input, or its input followed by known paraphrases


class Scope:
    """Decides which active fact, if any, an input is about.

    An input is represented by z = P (h − μ) / σ, where h holds the mean hidden states of its tokens at `layers`. The
    facts whose z has the highest cosine with its own are candidates. The comparer scores each of them by comparing the
    texts token by token, and the input is about the best one if its score reaches the threshold. An input equal to a
    known wording of a fact, after normalising, is always about that fact.

    `train` learns P and the comparer. `plain` makes a scope without either, in which the cosine itself is the score.
    """

    def __init__(
        self,
        model: TaskModel,
        layers: Sequence[int],
        mean: Tensor,
        scale: Tensor,
        projection: Tensor | None = None,
        matcher: Matcher | None = None,
        calibration: Calibration | None = None,
    ):
        self.model = model
        self.layers = tuple(layers)
        self.mean, self.scale = mean.to(model.device), scale.to(model.device)  # (features,)
        self.projection = None if projection is None else projection.to(model.device)  # (dimensions, features)
        self.matcher = matcher or Matcher()
        self.calibration = calibration
        self.wordings: list[list[str]] | None = None  # of the active facts, in the order of the index
        self.index([])

    # Creating a scope

    @classmethod
    def train(
        cls,
        model: TaskModel,
        revisions: Sequence[Revision],
        config: ScopeConfig | None = None,
        report: Report = lambda stage, share: None,
    ) -> Self:
        """Learns projection and comparer from revisions with paraphrases, and the threshold on held-out ones.

        The comparer is kept only if it recognises more of the held-out paraphrases than the cosine alone does. If the
        revisions name their subjects and relations, other questions about the same subjects are made up, both for
        training and as at most a tenth of the inputs that the threshold is chosen on.
        """
        config = config or ScopeConfig()
        order = hash_shuffled([r for r in revisions if _paraphrases(r)], config.seed)[: config.facts + config.held_out]
        held_out = min(config.held_out, len(order) // 5)
        if held_out < 2:
            raise InputError(f"expected at least 10 facts with paraphrases to train a scope, found {len(order)}")
        texts = [[r.input, *_paraphrases(r, config.paraphrases)] for r in order[held_out:]]
        layers = spread_layers(model)
        texts += made_up_questions(order[held_out:], texts, round(config.same_subject * len(texts)), config.seed)
        learned = learn(model, texts, layers, config, report)
        scope = cls(model, layers, learned.mean, learned.scale, learned.projection, learned.matcher)
        known = scope._known_facts(order[:held_out], others=_same_subject_inputs(order[:held_out], config))
        choices = [(m, m.calibrate(known, config.false_matches)) for m in (Matcher(), learned.matcher)]
        scope.matcher, scope.calibration = max(choices, key=lambda choice: choice[1].recall or 0)  # the first of equals
        return scope

    @classmethod
    def plain(cls, model: TaskModel, revisions: Sequence[Revision], false_matches: float = FALSE_MATCHES) -> Self:
        """Creates a scope without training: the centred cosine at the layer that matches most of the paraphrases."""
        best: Self | None = None
        for layer in range(1, spread_layers(model)[-1] + 1):
            features = text_features(model, [r.input for r in revisions], [layer])
            scope = cls(model, [layer], features.mean(0), torch.ones_like(features[0]))
            calibration = scope.calibrate(revisions, false_matches)
            if best is None or (calibration.recall or 0) > (best.calibrated.recall or 0):
                best = scope
        assert best is not None
        return best

    @property
    def calibrated(self) -> Calibration:
        if self.calibration is None:
            raise InputError("this scope has no threshold yet; call its calibrate method first")
        return self.calibration

    def calibrate(
        self, revisions: Sequence[Revision], false_matches: float = FALSE_MATCHES, facts: int = ACTIVE_FACTS
    ) -> Calibration:
        """Chooses the lowest threshold at which at most this share of inputs matches a fact that is not their own.

        Up to `facts` of the revisions are active together. Each input of a revision is compared with all active facts
        but its own, and each paraphrase with all of them. The more facts are active, the higher the threshold must be.
        """
        self.calibration = self.matcher.calibrate(self._known_facts(revisions, facts), false_matches)
        return self.calibration

    def _known_facts(
        self, revisions: Sequence[Revision], active: int = ACTIVE_FACTS, others: Sequence[str] = ()
    ) -> KnownFacts:
        """Reads revisions to calibrate on; up to `active` of them are active. `others` are about none of them."""
        different = list({normalize(r.input): r for r in revisions}.values())  # one fact for each input
        if len(different) < 2:
            raise InputError(f"expected at least two different facts to calibrate a scope, found {len(different)}")
        texts = [(number, text) for number, r in enumerate(different[:active]) for text in _paraphrases(r)]
        return KnownFacts(
            inputs=self.read([*(r.input for r in different), *others]),
            active=min(active, len(different)),
            paraphrases=self.read([text for _, text in texts]),
            owners=torch.tensor([number for number, _ in texts], dtype=torch.long, device=self.model.device),
        )

    def calibrate_index(self, others: Sequence[str], false_matches: float = FALSE_MATCHES) -> Calibration:
        """Chooses the threshold for the active facts: at most this share of `others` may match one of them.

        `others` is a sample of inputs that are about none of the active facts. The threshold then
        fits the number of active facts and their similarity to ordinary inputs, which `calibrate` can only estimate.
        """
        unknown = [text for text in dict.fromkeys(others) if normalize(text) not in self.known]
        if not self.facts or not unknown:
            raise InputError("expected active facts and at least one other input to calibrate on; index facts first")
        nearest, _ = self.matcher.best(self.read(unknown), self.anchors)
        threshold = threshold_for(nearest, false_matches)
        wrong = float((nearest >= threshold).float().mean())
        self.calibration = Calibration(threshold, None, wrong, self.facts)
        return self.calibration

    # Using it

    def index(self, facts: Sequence[Fact]) -> Self:
        """Replaces the active facts with these. Paraphrases listed after an input help to recognise the fact."""
        wordings = [_wordings(fact) for fact in facts]
        if wordings == self.wordings:
            return self
        self.wordings = None  # an error below leaves the index incomplete
        self.known: dict[str, int] = {}
        for number, (x, *_) in enumerate(wordings):
            if self.known.setdefault(normalize(x), number) != number:
                raise InputError(f"two active facts have the same input, {x!r}; replace one of them")
        for number, texts in enumerate(wordings):
            for text in texts[1:]:
                self.known.setdefault(normalize(text), number)
        self.facts = len(wordings)
        self.owners = torch.tensor([n for n, texts in enumerate(wordings) for _ in texts], dtype=torch.long)
        self.owners = self.owners.to(self.model.device)  # (wordings,) the fact of each wording
        self.anchors = self.read([text for texts in wordings for text in texts])
        self.wordings = wordings
        return self

    def read(self, texts: Sequence[str]) -> Reading:
        """Reads texts with the unedited model. Texts too long for it are truncated."""
        if self.model.patches:
            raise InputError("a scope reads inputs with the unedited model; revert the patches on the model first")
        return self.reading_of(text_states(self.model, texts, self.layers))

    def reading_of(self, batches: Iterable[States]) -> Reading:
        """Keeps of the model's hidden states what the scope needs to match the texts."""
        return collect(batches, self._represent)

    def _represent(self, states: States) -> tuple[Tensor, Tensor]:
        """Turns a batch into unit vectors, (rows, dimensions), and projected tokens, (tokens, width)."""
        z = (states.pooled() - self.mean) / self.scale
        vectors = F.normalize(z if self.projection is None else z @ self.projection.T, dim=-1)
        comparer = self.matcher.comparer
        return vectors, vectors.new_zeros(int(states.mask.sum()), 0) if comparer is None else comparer.tokens(
            states.tokens()
        )

    def match(self, inputs: Sequence[str]) -> list[int | None]:
        """Returns the index of the active fact that each input is about, or None."""
        return self.match_reading(inputs, self.read(inputs)) if self.facts else [None] * len(inputs)

    def match_reading(self, inputs: Sequence[str], reading: Reading) -> list[int | None]:
        """Matches inputs that were already read."""
        if not self.facts or not inputs:
            return [None] * len(inputs)
        scores, found = self.matcher.best(reading, self.anchors)
        owners = self.owners[found].where(scores >= self.calibrated.threshold, -1).tolist()
        nearest = [None if owner < 0 else owner for owner in owners]
        return [self.known.get(normalize(text), owner) for text, owner in zip(inputs, nearest, strict=True)]

    # In a file

    def save(self, path: str | Path) -> None:
        """Writes one safetensors file: what was learned, the threshold and the model's fingerprint, but no facts."""
        tensors = {"mean": self.mean, "scale": self.scale}
        if self.projection is not None:
            tensors["projection"] = self.projection
        metadata = {
            "format": COSINE_FORMAT,
            "base": self.model.fingerprint,
            "layers": json.dumps(self.layers),
            "calibration": json.dumps(astuple(self.calibrated)),
        }
        if self.matcher.comparer is not None:
            tensors.update(self.matcher.comparer.saved())
            metadata |= {"format": FORMAT, "floor": json.dumps(self.matcher.floor)}
        write_safetensors(path, tensors, metadata)

    @classmethod
    def load(cls, path: str | Path, model: TaskModel) -> Self:
        """Loads a scope for the model that it was made for."""
        metadata, tensors = read_safetensors(path, "scope", FORMAT, COSINE_FORMAT)
        advice = "load the model it was made for, or train a scope for this one"
        check_base(f"{path} was made", metadata.get("base", "unknown"), model.fingerprint, advice)
        try:
            calibration = Calibration(*json.loads(metadata["calibration"]))
            if not isinstance(calibration.threshold, float) or not all(t.isfinite().all() for t in tensors.values()):
                raise ValueError("it holds values that are not finite numbers")
            layers = json.loads(metadata["layers"])
            mean, scale, projection = tensors["mean"], tensors["scale"], tensors.get("projection")
            if mean.dim() != 1 or scale.dim() != 1 or (projection is not None and projection.dim() != 2):
                raise ValueError("its shapes do not fit the model")
            matcher = None
            if metadata["format"] == FORMAT:
                matcher = Matcher(Comparer.from_saved(tensors).to(model.device), json.loads(metadata["floor"]))
                if not isinstance(matcher.floor, float) or not math.isfinite(matcher.floor):
                    raise ValueError("its floor is not a finite number")
            scope = cls(model, layers, mean, scale, projection, matcher, calibration)
            probe = scope.read(["?"])
            scope.matcher.best(probe, probe)  # raises an error if the shapes do not fit the model
            return scope
        except (LookupError, TypeError, ValueError, RecursionError, RuntimeError) as error:
            raise FileError(f"{path} is not a complete scope ({reason(error)}); train it again") from error


def _paraphrases(revision: Revision, most: int | None = None) -> list[str]:
    return [*revision.rephrases[:most], *revision.human_rephrases[:most]]


def _same_subject_inputs(held_out: Sequence[Revision], config: ScopeConfig) -> list[str]:
    """Makes up other questions about the subjects of held-out facts, as many as `SAME_SUBJECT_INPUTS` says."""
    count = round(len(held_out) * SAME_SUBJECT_INPUTS / (1 - SAME_SUBJECT_INPUTS)) if config.same_subject else 0
    texts = [[r.input, *_paraphrases(r)] for r in held_out]
    return [wordings[0] for wordings in made_up_questions(held_out, texts, count, config.seed)]


def _wordings(fact: Fact) -> list[str]:
    if isinstance(fact, FactEdit):
        return [fact.x]
    return [fact] if isinstance(fact, str) else list(fact)
