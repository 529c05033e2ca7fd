"""The scope of one model: an index of active facts, and the threshold above which an input is about one of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
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
from factpatch.scope.features import spread_layers, text_features
from factpatch.scope.training import ScopeConfig, learn_projection

FORMAT = "factpatch-scope-1"
QUERIES_PER_BATCH = 4096  # number of inputs that are compared with all facts at a time
Fact = FactEdit | str | Sequence[str]  # an edit, its input, or its input followed by known paraphrases
Report = Callable[[str, float], object]  # called with the stage of training and its progress from 0 to 1


@dataclass(frozen=True)
class Calibration:
    """A threshold, and the error rates on the data that it was chosen on."""

    threshold: float  # smallest cosine at which an input counts as being about a fact
    recall: float | None  # share of paraphrases matched to their own fact; None without paraphrases
    false_matches: float  # share of inputs matched to a fact that is not their own
    facts: int  # number of facts that were active


class Scope:
    """Decides which active fact, if any, an input is about.

    An input is represented by z = P (h − μ) / σ, where h holds the mean hidden states of its tokens at `layers`. It is
    about the fact whose z has the highest cosine with its own, if that cosine reaches the threshold. An input equal to
    a known wording of a fact, after normalising, is always about that fact. P is learned by `train`; `plain` makes a
    scope without it.
    """

    def __init__(
        self,
        model: TaskModel,
        layers: Sequence[int],
        mean: Tensor,
        scale: Tensor,
        projection: Tensor | None = None,
        calibration: Calibration | None = None,
    ):
        self.model = model
        self.layers = tuple(layers)
        self.mean, self.scale = mean.to(model.device), scale.to(model.device)  # (features,)
        self.projection = None if projection is None else projection.to(model.device)  # (dimensions, features)
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
        """Learns the projection from revisions with paraphrases, and chooses the threshold on held-out ones."""
        config = config or ScopeConfig()
        order = hash_shuffled([r for r in revisions if _paraphrases(r)], config.seed)[: config.facts + config.held_out]
        held_out = min(config.held_out, len(order) // 5)
        if held_out < 2:
            raise InputError(f"expected at least 10 facts with paraphrases to train a scope, found {len(order)}")
        texts = [[r.input, *_paraphrases(r, config.paraphrases)] for r in order[held_out:]]
        flat = [text for group in texts for text in group]
        layers = spread_layers(model)
        done = 0

        def on_texts(count: int) -> None:
            nonlocal done
            done += count
            report("reading texts", done / len(flat))

        features = text_features(model, flat, layers, on_texts)
        mean, scale = features.mean(0), features.std(0).clamp_min(1e-6)
        features = features.sub_(mean).div_(scale)
        ends = torch.tensor([len(group) for group in texts]).cumsum(0).tolist()
        wordings = [range(end - len(group), end) for end, group in zip(ends, texts, strict=True)]
        projection = learn_projection(
            features, wordings, config, lambda step: report("training", (step + 1) / config.steps)
        )
        scope = cls(model, layers, mean, scale, projection)
        scope.calibrate(order[:held_out], config.false_matches)
        return scope

    @classmethod
    def plain(cls, model: TaskModel, revisions: Sequence[Revision], false_matches: float = 0.005) -> Self:
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

    def calibrate(self, revisions: Sequence[Revision], false_matches: float = 0.005, facts: int = 1024) -> Calibration:
        """Chooses the lowest threshold at which at most this share of inputs matches a fact that is not their own.

        Up to `facts` of the revisions are active together. Each input of a revision is compared with all active facts
        but its own, and each paraphrase with all of them. The more facts are active, the higher the threshold must be.
        """
        active = list({normalize(r.input): r for r in revisions}.values())  # one fact for each input
        if len(active) < 2:
            raise InputError(f"expected at least two different facts to calibrate a scope, found {len(active)}")
        inputs = self.embed([r.input for r in active])
        anchors = inputs[:facts]
        cosines = inputs @ anchors.T  # (inputs, facts)
        cosines.diagonal().fill_(-1)
        nearest = cosines.amax(1)
        threshold = _threshold(nearest, false_matches)
        owners = [n for n, r in enumerate(active[:facts]) for _ in _paraphrases(r)]
        recall = None
        if owners:
            paraphrases = self.embed([text for r in active[:facts] for text in _paraphrases(r)])
            best = (paraphrases @ anchors.T).max(1)
            right = best.indices == torch.tensor(owners, device=best.indices.device)
            recall = float((right & (best.values >= threshold)).float().mean())
        wrong = float((nearest >= threshold).float().mean())
        self.calibration = Calibration(threshold, recall, wrong, len(anchors))
        return self.calibration

    def calibrate_index(self, others: Sequence[str], false_matches: float = 0.005) -> Calibration:
        """Chooses the threshold for the active facts: at most this share of `others` may match one of them.

        `others` is a sample of inputs that are about none of the active facts. The threshold then
        fits the number of active facts and their similarity to ordinary inputs, which `calibrate` can only estimate.
        """
        unknown = [text for text in dict.fromkeys(others) if normalize(text) not in self.known]
        if not self.facts or not unknown:
            raise InputError("expected active facts and at least one other input to calibrate on; index facts first")
        nearest = (self.embed(unknown) @ self.anchors.T).amax(1)
        threshold = _threshold(nearest, false_matches)
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
        self.anchors = self.embed([text for texts in wordings for text in texts])  # (wordings, dimensions)
        self.wordings = wordings
        return self

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Embeds texts as unit vectors, whose cosines are compared: (texts, dimensions)."""
        if self.model.patches:
            raise InputError("a scope reads inputs with the unedited model; revert the patches on the model first")
        return self.project(text_features(self.model, texts, self.layers))

    def project(self, features: Tensor) -> Tensor:
        """Turns pooled hidden states into unit vectors."""
        z = (features - self.mean) / self.scale
        return F.normalize(z if self.projection is None else z @ self.projection.T, dim=-1)

    def match(self, inputs: Sequence[str]) -> list[int | None]:
        """Returns the index of the active fact that each input is about, or None."""
        return self.match_vectors(inputs, self.embed(inputs)) if self.facts else [None] * len(inputs)

    def match_vectors(self, inputs: Sequence[str], vectors: Tensor) -> list[int | None]:
        """Matches inputs whose unit vectors are already known."""
        if not self.facts:
            return [None] * len(inputs)
        threshold = self.calibrated.threshold
        nearest: list[int | None] = []
        for part in vectors.split(QUERIES_PER_BATCH):
            best = (part @ self.anchors.T).max(1)
            owners = self.owners[best.indices].where(best.values >= threshold, -1)
            nearest += [None if owner < 0 else owner for owner in owners.tolist()]
        return [self.known.get(normalize(text), owner) for text, owner in zip(inputs, nearest, strict=True)]

    # In a file

    def save(self, path: str | Path) -> None:
        """Writes one safetensors file: projection, threshold and the model's fingerprint. Facts are not saved."""
        tensors = {"mean": self.mean, "scale": self.scale}
        if self.projection is not None:
            tensors["projection"] = self.projection
        metadata = {
            "format": FORMAT,
            "base": self.model.fingerprint,
            "layers": json.dumps(self.layers),
            "calibration": json.dumps(astuple(self.calibrated)),
        }
        write_safetensors(path, tensors, metadata)

    @classmethod
    def load(cls, path: str | Path, model: TaskModel) -> Self:
        """Loads a scope for the model that it was made for."""
        metadata, tensors = read_safetensors(path, "scope", FORMAT)
        advice = "load the model it was made for, or train a scope for this one"
        check_base(f"{path} was made", metadata.get("base", "unknown"), model.fingerprint, advice)
        try:
            calibration = Calibration(*json.loads(metadata["calibration"]))
            if not isinstance(calibration.threshold, float) or not all(t.isfinite().all() for t in tensors.values()):
                raise ValueError("it holds values that are not finite numbers")
            layers = json.loads(metadata["layers"])
            scope = cls(model, layers, tensors["mean"], tensors["scale"], tensors.get("projection"), calibration)
            if tensors["mean"].dim() != 1 or tensors["scale"].dim() != 1 or scope.embed(["?"]).dim() != 2:
                raise ValueError("its shapes do not fit the model")
            return scope
        except (LookupError, TypeError, ValueError, RecursionError, RuntimeError) as error:
            raise FileError(f"{path} is not a complete scope ({reason(error)}); train it again") from error


def _threshold(nearest: Tensor, false_matches: float) -> float:
    """Returns the lowest threshold that at most the given share of these cosines reaches."""
    if not 0 <= false_matches < 1:
        raise InputError(f"expected a share of false matches from 0 to below 1, found {false_matches}")
    allowed = int(false_matches * len(nearest))
    return float(nearest.sort(descending=True).values[allowed]) + 1e-4  # just above the first cosine beyond that share


def _paraphrases(revision: Revision, most: int | None = None) -> list[str]:
    return [*revision.rephrases[:most], *revision.human_rephrases[:most]]


def _wordings(fact: Fact) -> list[str]:
    if isinstance(fact, FactEdit):
        return [fact.x]
    return [fact] if isinstance(fact, str) else list(fact)
