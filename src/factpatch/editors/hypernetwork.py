"""KnowledgeEditor (De Cao, Aziz, Titov, 2021, §4): a hyper-network that predicts a weight update from one fact.

For one weight W (out × in), with inputs X and output gradients D of the fact's tokens (engine.capture),

    ΔW = s · ( r cᵀ ⊙ Dᵀ X  +  r' c'ᵀ ),    s = max_scale · sigmoid(η),    r, r' = softmaxes over the out dimension

which is, exactly and without ever making a matrix of that size,

    ΔW = Bᵀ A,    A = [X ⊙ c ; c'],    B = s · [D ⊙ r ; r'].
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from factpatch import world
from factpatch.deltas import Delta, LowRank, add, scaled
from factpatch.editors.base import EditMethod
from factpatch.editors.network import Condition, EditorConfig, FactEncoder, WeightGroup
from factpatch.engine import Trace, capture, edited
from factpatch.errors import FileError, InputError, MismatchError
from factpatch.facts import FactEdit, same
from factpatch.files import atomic_folder
from factpatch.models import Rows, TaskModel
from factpatch.models.base import padded
from factpatch.patch import Patch, hash_tensors, stack_patches, weight_shape

PARTS = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)  # of a repeated update, of which the best is taken
EDITS_PER_BATCH = 32  # of one `propose`, four times that on a GPU: 32 of BERT-base with 32 tokens are 0.7 GB in float32


@dataclass(frozen=True)
class EditBatch:
    """Everything one update needs of its edits."""

    rows: Rows  # each edit's x with target a
    condition: Condition


def condition_text(edit: FactEdit) -> str:
    """Only ever read by the LSTM, never parsed back, and not cut: x's tail matters."""
    return f"{edit.y} >> {edit.a} || {edit.x}"


class HyperNetwork(nn.Module):
    """One editor for one model: an EditMethod."""

    name = "hyper"

    def __init__(self, shapes: Mapping[str, tuple[int, int]], embeddings: Tensor, base: str, config: EditorConfig):
        super().__init__()
        self.shapes = dict(shapes)
        self.base = base
        self.config = config
        self.fact_encoder = FactEncoder(embeddings, config)
        by_shape: dict[tuple[int, int], list[str]] = {}
        for name, shape in shapes.items():
            by_shape.setdefault(shape, []).append(name)
        self.weights_of = {f"{out}x{in_}": names for (out, in_), names in by_shape.items()}
        self.groups = nn.ModuleDict(
            {f"{out}x{in_}": WeightGroup(len(names), out, in_, config) for (out, in_), names in by_shape.items()}
        )

    @classmethod
    def for_model(
        cls, model: TaskModel, config: EditorConfig | None = None, layers: Sequence[str] = ("*",)
    ) -> HyperNetwork:
        """A fresh, untrained editor of the model's editable weights whose names match one of the patterns."""
        for pattern in layers:
            if not any(fnmatchcase(name, pattern) for name in model.layers):
                raise InputError(
                    f"no editable weight is called {pattern}; they are called like {next(iter(model.layers))}"
                )
        shapes = {
            name: weight_shape(layer)
            for name, layer in model.layers.items()
            if any(fnmatchcase(name, pattern) for pattern in layers)
        }
        # A copy: training the editor must not move the model's own embeddings.
        embeddings = model.word_embeddings.detach().float().clone()
        return cls(shapes, embeddings, model.fingerprint, config or EditorConfig()).to(model.device)

    def size(self) -> int:
        """Parameters without the embedding."""
        return sum(p.numel() for p in self.parameters()) - self.fact_encoder.embedding.weight.numel()

    # The update

    def forward(self, condition: Condition, traces: Mapping[str, Trace]) -> dict[str, Delta]:
        """The factors of all edits, a stack for each weight."""
        h = self.fact_encoder(condition)  # (edits, width)
        deltas: dict[str, Delta] = {}
        for key, group in self.groups.items():
            gates = group(h)
            for chosen in _alike(self.weights_of[key], traces):
                names = [self.weights_of[key][i] for i in chosen]
                factors = gates.factors(chosen, [traces[name] for name in names], self.config.gradients)
                deltas |= zip(names, factors, strict=True)
        return deltas

    def batch(self, model: TaskModel, edits: Sequence[FactEdit]) -> EditBatch:
        """The edits as tensors on the model's device. Their `y` must be known."""
        ids = model.tokenizer([condition_text(edit) for edit in edits], verbose=False)["input_ids"]
        lengths = torch.tensor([len(row) for row in ids]).to(model.device)
        rows = model.rows([edit.x for edit in edits], [edit.a for edit in edits])
        return EditBatch(rows, Condition(padded(ids, 0, model.device), lengths))

    def update(self, model: TaskModel, batch: EditBatch, under: Mapping[str, Delta] | None = None) -> dict[str, Delta]:
        """One update for each edit, computed on the model as it is, or as it is `under` earlier changes."""
        layers = {name: model.layers[name] for name in self.shapes}
        with edited(layers, under or {}):
            traces = capture(layers, lambda: model.losses(batch.rows))
        return self(batch.condition, traces)

    # EditMethod

    def at_once(self, model: TaskModel) -> int:
        return EDITS_PER_BATCH if model.device.type == "cpu" else 4 * EDITS_PER_BATCH

    def describe(self, model: TaskModel) -> dict[str, Any]:
        some = f"{len(self.shapes)} of {len(model.layers)} weights"
        return {
            "layers": "all" if len(self.shapes) == len(model.layers) else some,
            "editor_hash": hash_tensors(self.state_dict()),
        }

    @torch.inference_mode(False)
    @torch.no_grad()
    def changes(self, model: TaskModel, edits: Sequence[FactEdit]) -> dict[str, Delta]:
        """One update for each edit, as stacks by weight; all edits in one batch."""
        self._join(model)
        deltas = self.update(model, self.batch(model, model.resolve(edits)))
        _check_finite(deltas)
        return deltas

    @torch.inference_mode(False)
    @torch.no_grad()
    def propose(self, model: TaskModel, edits: Sequence[FactEdit], loop: int = 1) -> list[Patch]:
        """A patch for each edit.

        With `loop` above 1, edits that did not take are updated again, on the updated model, that many times at most,
        by as much of the update as helps; all updates of an edit end in its one patch.
        """
        self._join(model)
        if loop < 1:
            raise InputError(f"expected at least one update, found loop={loop}")
        edits = model.resolve(edits)
        order = sorted(range(len(edits)), key=lambda i: len(edits[i].x))
        patches: dict[int, Patch] = {}
        size = self.at_once(model)
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            patches.update(zip(batch, self._propose_batch(model, [edits[i] for i in batch], loop), strict=True))
        return [patches[i] for i in range(len(edits))]

    def _propose_batch(self, model: TaskModel, edits: list[FactEdit], loop: int) -> list[Patch]:
        patches = self._patches(edits, self.update(model, self.batch(model, edits)))
        pending = list(range(len(edits)))
        for _ in range(loop - 1):
            said = model.predict_patched([patches[i] for i in pending], [edits[i].x for i in pending])
            failed = [(i, answer) for i, answer in zip(pending, said, strict=True) if not same(answer, edits[i].a)]
            if not failed:
                break
            pending = [i for i, _ in failed]
            now = [replace(edits[i], y=answer) for i, answer in failed]
            under = stack_patches([patches[i] for i in pending], model.layers)
            updates = self._patches(now, self.update(model, self.batch(model, now), under))
            grown = _grown(model, now, [patches[i] for i in pending], updates)
            for i, patch in zip(pending, grown, strict=True):
                patches[i] = patch
        return patches

    def _patches(self, edits: list[FactEdit], deltas: Mapping[str, Delta]) -> list[Patch]:
        """The stack cut into one patch an edit, without rows of B that are zero: padding's are, and change nothing."""
        _check_finite(deltas)
        factors = {name: delta for name, delta in deltas.items() if isinstance(delta, LowRank)}
        # What the host must know of all weights comes in one transfer: a GPU would wait at each of thousands.
        used = torch.cat([f.B.ne(0).any(-1) for f in factors.values()], dim=1).cpu()  # (edits, ranks)
        per_weight = zip(factors, used.split([f.rank for f in factors.values()], dim=1), strict=True)
        per_edit: list[dict[str, Delta]] = [{} for _ in edits]
        for name, used_rows in per_weight:
            for e, (changes, rows) in enumerate(zip(per_edit, used_rows, strict=True)):
                A, B = factors[name].A[e], factors[name].B[e]
                changes[name] = LowRank(_used(A, rows), _used(B, rows))
        return [Patch(changes, self.base, self.name, (edit,)) for edit, changes in zip(edits, per_edit, strict=True)]

    def _join(self, model: TaskModel) -> None:
        self.check_fits(model)
        # Only if need be: an LSTM that is moved, be it to where it is, puts its weights elsewhere in a GPU's memory,
        # and recorded steps would go on with what they find where the weights were.
        if self.fact_encoder.out.weight.device != model.device:
            self.to(model.device)

    def check_fits(self, model: TaskModel) -> None:
        if self.base != model.fingerprint:
            raise MismatchError(
                f"the editor was trained for weights {self.base[:12]}, this model has {model.fingerprint[:12]}; "
                "load the model it was trained for, or train an editor for this one"
            )

    # In a folder

    def save(self, folder: str | Path) -> None:
        from factpatch import __version__

        config = {"factpatch": __version__, "base": self.base, "editor": asdict(self.config), "weights": self.shapes}
        with atomic_folder(folder) as scratch:
            save_file(
                {k: v.detach().cpu().contiguous() for k, v in self.state_dict().items()}, scratch / "editor.safetensors"
            )
            (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> HyperNetwork:
        folder = world.EDITOR if folder == "world" else Path(folder)
        if (folder / "editor").is_dir():
            folder = folder / "editor"  # of the run that trained it
        try:
            saved = json.loads((folder / "config.json").read_text())
            stored = load_file(folder / "editor.safetensors", device=str(device))
            state = {name: tensor.float() for name, tensor in stored.items()}
            config = EditorConfig(**{f.name: saved["editor"][f.name] for f in fields(EditorConfig)})
            shapes = {name: (out, in_) for name, (out, in_) in saved["weights"].items()}
            with torch.device("meta"):
                editor = cls(shapes, torch.empty_like(state["fact_encoder.embedding.weight"]), saved["base"], config)
            editor.load_state_dict(state, assign=True)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise FileError(
                f"no readable editor in {folder} ({reason}); expected config.json and editor.safetensors"
            ) from error
        return editor


def _grown(
    model: TaskModel, edits: Sequence[FactEdit], patches: Sequence[Patch], updates: Sequence[Patch]
) -> list[Patch]:
    """Each patch and the part of its update that leaves the least loss: a second whole one often oversteps."""
    rows = model.rows([edit.x for edit in edits], [edit.a for edit in edits])
    tried: list[list[Patch]] = []
    losses: list[Tensor] = []
    for part in PARTS:
        sums = [
            {name: add(delta, scaled(update.deltas[name], part)) for name, delta in patch.deltas.items()}
            for patch, update in zip(patches, updates, strict=True)
        ]
        tried.append([replace(patch, deltas=deltas) for patch, deltas in zip(patches, sums, strict=True)])
        with edited(model.layers, stack_patches(tried[-1], model.layers)):
            losses.append(model.losses(rows))
    best = torch.stack(losses).argmin(0).tolist()  # (edits,)
    return [tried[k][e] for e, k in enumerate(best)]


def _check_finite(deltas: Mapping[str, Delta]) -> None:
    fine = [
        torch.stack([tensor.isfinite().all() for tensor in delta.tensors.values()]).all() for delta in deltas.values()
    ]
    for name, is_fine in zip(deltas, torch.stack(fine).tolist(), strict=True):
        if not is_fine:
            raise InputError(f"the update of {name} is not finite; load the model in float32 or bfloat16")


def _used(factor: Tensor, rows: Tensor) -> Tensor:
    """A copy of the rows that are used; mostly all, or all but the padding between the tokens' and the last."""
    tokens = int(rows[:-1].sum())
    if rows.all():
        return factor.clone()
    if rows[-1] and rows[:tokens].all():
        return torch.cat([factor[:tokens], factor[-1:]])
    return factor[rows.nonzero().squeeze(1).to(factor.device)]


@dataclass(frozen=True)
class Looped(EditMethod):
    """An editor that updates until an edit takes, at most `updates` times."""

    editor: HyperNetwork
    updates: int = 5

    @property
    def name(self) -> str:
        return self.editor.name

    def at_once(self, model: TaskModel) -> int:
        return self.editor.at_once(model)

    def describe(self, model: TaskModel) -> dict[str, Any]:
        return {**self.editor.describe(model), "loop": self.updates}

    def propose(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[Patch]:
        return self.editor.propose(model, edits, loop=self.updates)


def _alike(names: Sequence[str], traces: Mapping[str, Trace]) -> list[list[int]]:
    """Numbers of the weights that were traced; those that saw as many tokens together."""
    alike: dict[torch.Size, list[int]] = {}
    for i, name in enumerate(names):
        if name in traces:
            alike.setdefault(traces[name].X.shape, []).append(i)
    return list(alike.values())


def load_editor(folder: str | Path, device: str | torch.device = "cpu") -> HyperNetwork:
    """A trained editor from its folder."""
    return HyperNetwork.load(folder, device)
