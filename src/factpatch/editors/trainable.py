"""TrainableEditor: an edit method with parameters that `factpatch train` can optimise."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from factpatch.covariance import Covariance
from factpatch.deltas import Delta
from factpatch.editors.base import EditMethod, split_stacks
from factpatch.editors.layer_choice import chosen_layers
from factpatch.editors.least_squares import SHRINKAGE, LeastSquares, real_tokens, with_distinct_widths
from factpatch.engine import Trace, capture, edited
from factpatch.errors import FileError, InputError, MismatchError, reason
from factpatch.facts import FactEdit
from factpatch.files import atomic_folder, read_text, refuse_device
from factpatch.fingerprints import check_base, hash_tensors
from factpatch.grouping import keys_by_value
from factpatch.models import Rows, TaskModel
from factpatch.models.rows import in_batches, padded
from factpatch.patch import Patch, weight_shape

EDITS_PER_BATCH = 32  # on a CPU; 32 edits of BERT-base with 32 tokens need 0.7 GB in float32


@dataclass(frozen=True)
class Condition:
    """The text that an editor reads about each edit, tokenised by the edited model's tokenizer."""

    ids: Tensor  # (edits, tokens)
    lengths: Tensor  # (edits,)


@dataclass(frozen=True)
class EditBatch:
    """Everything an editor needs to know about a batch of edits."""

    rows: Rows  # each edit's x with target a
    condition: Condition

    def part(self, chosen: slice) -> EditBatch:
        """Returns the batch of some of the edits."""
        return EditBatch(self.rows.part(chosen), Condition(self.condition.ids[chosen], self.condition.lengths[chosen]))


class TrainableEditor(nn.Module, EditMethod, ABC):
    """An editor for one model. Subclasses define `forward` and `condition_text`, and keep the constructor's arguments.

    `name` is saved as the editor's `kind`, from which `load_editor` finds the class that can read the folder.
    """

    config_class: ClassVar[type[Any]]  # a dataclass with defaults for every field

    def __init__(self, shapes: Mapping[str, tuple[int, int]], embeddings: Tensor, base: str, config: Any):
        """`shapes` lists the weights to edit; `base` is the fingerprint of the model they belong to.

        `embeddings` is a copy of the model's word embeddings, for subclasses that train them.
        """
        super().__init__()
        self.shapes = dict(shapes)
        # Names of the weights by shape, written as in "768x3072".
        self.weights_of = keys_by_value({name: f"{out}x{in_}" for name, (out, in_) in shapes.items()})
        self.base = base
        self.config = config
        self.log_ridge: nn.Parameter | None
        self.register_parameter("log_ridge", None)
        self.least_squares: LeastSquares | None = None

    @classmethod
    def for_model(cls, model: TaskModel, config: Any = None, layers: Sequence[str] = ("*",)) -> Self:
        """Creates an untrained editor for the weights whose names match one of the patterns in `layers`."""
        shapes = matching_shapes(model, layers)
        # A copy: training the editor must not change the model's own embeddings.
        embeddings = model.word_embeddings.detach().float().clone()
        return cls(shapes, embeddings, model.fingerprint, config or cls.config_class()).to(model.device)

    @abstractmethod
    def condition_text(self, edit: FactEdit) -> str:
        """Returns the text that the editor reads about an edit; empty if it reads none."""

    @abstractmethod
    def forward(self, condition: Condition, traces: Mapping[str, Trace]) -> dict[str, Delta]:
        """Computes one update per edit from the edits' texts and the layers' traces. Returns one stack per weight."""

    def trace(self, model: TaskModel, batch: EditBatch, under: Mapping[str, Delta] | None = None) -> dict[str, Trace]:
        """Captures the traces of the edits in each layer, on the model as it is or `under` earlier updates."""
        layers = {name: model.layers[name] for name in self.shapes}
        with edited(layers, under or {}):
            return capture(layers, lambda: model.losses(batch.rows))

    def update(self, model: TaskModel, batch: EditBatch, under: Mapping[str, Delta] | None = None) -> dict[str, Delta]:
        """Computes one update per edit, differentiable in the editor's parameters. Returns one stack per weight."""
        if self.least_squares is None:
            return self(batch.condition, self.trace(model, batch, under))
        rows = with_distinct_widths(batch.rows)
        traces = self.trace(model, EditBatch(rows, batch.condition), under)
        return self.least_squares(self(batch.condition, traces), traces, real_tokens(model, rows))

    def solve_against(self, covariance: Covariance, ridge: float = 1.0, shrinkage: float = SHRINKAGE) -> None:
        """Switches the editor to updates in least-squares form, which change other answers less.

        `covariance` is that of ordinary inputs. A larger `ridge` changes their answers less, and a smaller one makes
        more edits succeed. With a larger `shrinkage`, edits generalise better to paraphrases. All of this is saved with
        the editor.
        """
        device = next(self.parameters()).device
        self.least_squares = LeastSquares.fitted(covariance, self.shapes, ridge, shrinkage, device)

    def learn_ridge(self) -> nn.Parameter:
        """Adds log λ of each weight to the parameters; in a merge, λ is the weight of control inputs against edits."""
        if self.log_ridge is None:
            device = next(self.parameters()).device
            self.log_ridge = nn.Parameter(torch.zeros(len(self.shapes), device=device))
        return self.log_ridge

    def ridges(self) -> dict[str, float]:
        """Returns λ of each weight, or nothing if it was not learned."""
        return {} if self.log_ridge is None else dict(zip(self.shapes, self.log_ridge.exp().tolist(), strict=True))

    def batch(self, model: TaskModel, edits: Sequence[FactEdit]) -> EditBatch:
        """Converts edits to tensors on the model's device. Their `y` must be known."""
        ids = model.tokenizer([self.condition_text(edit) for edit in edits], verbose=False)["input_ids"]
        lengths = torch.tensor([len(row) for row in ids]).to(model.device)
        rows = model.rows([edit.x for edit in edits], [edit.a for edit in edits])
        return EditBatch(rows, Condition(padded(ids, 0, model.device), lengths))

    # EditMethod

    def edits_per_batch(self, model: TaskModel) -> int:
        return EDITS_PER_BATCH if model.device.type == "cpu" else 4 * EDITS_PER_BATCH

    def describe(self, model: TaskModel) -> dict[str, Any]:
        edited, all_layers = len(self.shapes), len(model.layers)
        layers = "all" if edited == all_layers else f"{edited} of {all_layers} weights"
        return {"layers": layers, "editor_hash": hash_tensors(self.state_dict())}

    def changes(self, model: TaskModel, edits: Sequence[FactEdit]) -> dict[str, Delta]:
        self.prepare(model)
        deltas = self.update(model, self.batch(model, model.resolve(edits)))
        _check_finite(deltas)
        return deltas

    def propose(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[Patch]:
        self.prepare(model)
        edits = model.resolve(edits)
        patches: dict[int, Patch] = {}
        by_length = sorted(range(len(edits)), key=lambda i: len(edits[i].x))  # less padding
        for numbers in in_batches(by_length, self.edits_per_batch(model)):
            batch = [edits[i] for i in numbers]
            deltas = self.update(model, self.batch(model, batch))
            patches |= zip(numbers, self.patches(batch, deltas), strict=True)
        return [patches[i] for i in range(len(edits))]

    def patches(self, edits: Sequence[FactEdit], deltas: Mapping[str, Delta]) -> list[Patch]:
        """Splits the stacks that `update` returns into one patch per edit, after checking that they are finite."""
        _check_finite(deltas)
        return split_stacks(deltas, edits, self.base, self.name, self.ridges())

    def prepare(self, model: TaskModel) -> None:
        """Checks that the editor fits the model and moves it to the model's device."""
        self.check_fits(model)
        # Only if needed: moving an LSTM, even to the device it is on, gives its weights a new address in GPU memory,
        # but training steps recorded as CUDA graphs would still read the old one.
        if next(self.parameters()).device != model.device:
            self.to(model.device)

    def check_fits(self, model: TaskModel) -> None:
        advice = "load the model it was trained for, or train an editor for this one"
        check_base("the editor was trained", self.base, model.fingerprint, advice)
        for name, shape in self.shapes.items():
            if name not in model.layers or weight_shape(model.layers[name]) != shape:
                raise MismatchError(
                    f"the editor changes {name} of shape {shape}, which this model does not have; "
                    "train an editor for this model"
                )

    # In a folder

    def save(self, folder: str | Path) -> None:
        with atomic_folder(folder) as scratch:
            self.write_to(scratch)

    def write_to(self, folder: Path) -> None:
        """Writes the editor's files into an existing folder."""
        from factpatch import __version__

        config = {
            "factpatch": __version__,
            "kind": self.name,
            "base": self.base,
            "editor": asdict(self.config),
            "weights": self.shapes,
        }
        if self.least_squares is not None:
            config["least_squares"] = {"ridge": self.least_squares.ridge, "readers": self.least_squares.readers}
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        config["checksum"] = _checksum(config, state)
        save_file(state, folder / "editor.safetensors")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path, device: str | torch.device = "cpu") -> Self:
        """Loads an editor that `save` wrote."""
        try:
            saved = json.loads(read_text(folder / "config.json"))
            refuse_device(folder / "editor.safetensors")
            stored = load_file(folder / "editor.safetensors", device=str(device))
            if "checksum" in saved and saved["checksum"] != _checksum(saved, stored):  # the first editors have none
                raise ValueError("its checksum does not match its content")
            if not isinstance(saved["base"], str):
                raise ValueError("its base is not a fingerprint")
            state = {name: tensor.float() for name, tensor in stored.items()}
            config = cls.config_class(**saved["editor"])
            shapes = {name: (out, in_) for name, (out, in_) in saved["weights"].items()}
            with torch.device("meta"):
                embeddings = next((t for name, t in state.items() if name.endswith("embedding.weight")), torch.empty(0))
                editor = cls(shapes, torch.empty_like(embeddings, device="meta"), saved["base"], config)
                if "least_squares" in saved:
                    editor.least_squares = LeastSquares(**saved["least_squares"], shapes=shapes)
            if "log_ridge" in state:
                editor.log_ridge = nn.Parameter(torch.zeros(len(shapes), device="meta"))
            editor.load_state_dict(state, assign=True)
        except Exception as error:  # torch raises many types for sizes and settings that make no sense
            raise FileError(
                f"no readable editor in {folder} ({reason(error)}); expected config.json and editor.safetensors"
            ) from error
        return editor


def _checksum(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> str:
    """Returns the sha256 of an editor's settings and weights."""
    settings = json.dumps({key: value for key, value in config.items() if key != "checksum"}, sort_keys=True)
    return hashlib.sha256(f"{settings} {hash_tensors(state)}".encode()).hexdigest()


def matching_shapes(model: TaskModel, choices: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Returns the shapes of the editable weights that any of the choices names; see `chosen_layers`."""
    chosen = {name for choice in choices for name in chosen_layers(model, choice)}
    return {name: weight_shape(layer) for name, layer in model.layers.items() if name in chosen}


def _check_finite(deltas: Mapping[str, Delta]) -> None:
    finite = [
        torch.stack([tensor.isfinite().all() for tensor in delta.tensors.values()]).all() for delta in deltas.values()
    ]
    for name, is_finite in zip(deltas, torch.stack(finite).tolist(), strict=True):
        if not is_finite:
            raise InputError(f"the update of {name} is not finite; load the model in float32 or bfloat16")
