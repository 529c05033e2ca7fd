"""Export: writes a patch as a LoRA adapter, which PEFT, vLLM and llama.cpp load beside the unedited model.

LoRA adds (α / r) B A to a weight, with A (r × in) and B (out × r). Servers disagree about adapters with mixed ranks or
scales, so all weights get the same rank r, padded with zeros, and α = r: the change is exactly B A. A change of a
higher rank is truncated to its r largest singular values, which gives the closest matrix of rank r.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from factpatch.deltas import Delta, Dense, LowRank
from factpatch.errors import InputError
from factpatch.files import atomic_folder

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the values of vLLM's max_lora_rank, apart from 1
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, eq=False)
class Adapter:
    """A patch's changes as factors of at most `rank`."""

    deltas: dict[str, LowRank]  # by weight name
    rank: int  # r, one of RANKS
    kept: float  # share of the whole change's squared norm that these factors keep; 1 if nothing was truncated

    @classmethod
    def of(cls, deltas: Mapping[str, Delta], rank: int | None = None, truncate: bool = False) -> Adapter:
        """Factorises changes to the given rank, or to the lowest of RANKS that keeps them whole.

        If none does, raises an InputError or, with `truncate`, uses the highest.
        """
        check_rank(rank)
        if not deltas:
            raise InputError("the patch changes no weights, so there is nothing to export; make the patch again")
        truncated = {name: _truncated(delta, rank or min(delta.shape)) for name, delta in deltas.items()}
        total = sum(float(delta.norm()) ** 2 for delta in deltas.values())
        kept = 1 - sum(lost for _, lost in truncated.values()) / total if total else 1.0
        factors = {name: low for name, (low, _) in truncated.items()}
        needed = max(low.rank for low in factors.values())
        if truncate and rank is None and needed > RANKS[-1]:
            return cls.of(factors, RANKS[-1])
        return cls(factors, rank or _lowest_rank(needed), kept)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the adapter's tensors by PEFT's names, padded with zeros to the rank."""
        tensors: dict[str, Tensor] = {}
        for name, delta in self.deltas.items():
            key = f"base_model.model.{module_name(name)}"
            tensors[f"{key}.lora_A.weight"] = _padded(delta.A, self.rank)  # (r, in)
            tensors[f"{key}.lora_B.weight"] = _padded(delta.B, self.rank).T.contiguous()  # (out, r)
        return tensors

    def config(self, model: nn.Module | None = None) -> dict[str, Any]:
        """Returns the content of adapter_config.json. `model` supplies its name, its task and how it stores weights."""
        modules = [module_name(name) for name in self.deltas]
        return {
            "peft_type": "LORA",
            "task_type": _task_type(model),
            "base_model_name_or_path": getattr(model, "name_or_path", None) or None,
            "r": self.rank,
            "lora_alpha": self.rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "use_dora": False,
            "use_rslora": False,
            "fan_in_fan_out": model is not None
            and any(not isinstance(model.get_submodule(name), nn.Linear) for name in modules),  # GPT-2's Conv1D
            "init_lora_weights": True,
            "inference_mode": True,
            "modules_to_save": None,
            "target_modules": modules,  # full names: PEFT would also match modules that end in a shorter one
        }

    def save(self, folder: str | Path, model: nn.Module | None = None) -> None:
        """Writes the adapter's folder. An existing folder is replaced only if it holds nothing but an adapter."""
        with atomic_folder(folder) as scratch:
            save_file(self.tensors(), scratch / WEIGHTS, metadata={"format": "pt"})
            (scratch / CONFIG).write_text(json.dumps(self.config(model), indent=2) + "\n", encoding="utf-8")


def check_rank(rank: int | None) -> None:
    """Raises an InputError for a rank that servers do not accept."""
    if rank is not None and rank not in RANKS:
        raise InputError(f"expected a rank among {', '.join(map(str, RANKS))}, found {rank}; choose one of these")


def module_name(weight: str) -> str:
    return weight.removesuffix(".weight")


def singular_values(delta: Delta) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the singular value decomposition ΔW = U diag(S) Vᵀ in float64, as U (out, k), S (k,) and Vᵀ (k, in).

    For factors it is computed from the QR decompositions Bᵀ = Q R and Aᵀ = Q′ R′: the singular values of ΔW are those
    of R R′ᵀ, which is only as large as the rank, and Q and Q′ take its singular vectors to those of ΔW.
    """
    if isinstance(delta, Dense):
        return torch.linalg.svd(delta.delta.double(), full_matrices=False)
    Q_out, R_out = torch.linalg.qr(delta.B.double().mT)  # (out, k), (k, rank)
    Q_in, R_in = torch.linalg.qr(delta.A.double().mT)  # (in, k), (k, rank)
    U, S, Vt = torch.linalg.svd(R_out @ R_in.mT, full_matrices=False)
    return Q_out @ U, S, Vt @ Q_in.mT


def _truncated(delta: Delta, rank: int) -> tuple[LowRank, float]:
    """Truncates a change to a rank; also returns the squared norm that is lost."""
    if isinstance(delta, LowRank) and delta.rank <= rank:
        return delta, 0.0
    U, S, Vt = singular_values(delta)
    S = S[S.gt(torch.finfo(torch.float32).eps * S[0])]  # the rest are rounding errors of float32
    kept = min(rank, len(S))
    return LowRank(Vt[:kept], (U[:, :kept] * S[:kept]).mT), float(S[kept:].square().sum())


def _padded(factor: Tensor, rank: int) -> Tensor:
    padded = torch.zeros(rank, factor.shape[1])
    padded[: len(factor)] = factor.detach()
    return padded


def _lowest_rank(needed: int) -> int:
    if needed > RANKS[-1]:
        raise InputError(
            f"the patch has rank {needed}, but servers accept at most {RANKS[-1]}; truncate it with rank {RANKS[-1]}"
        )
    return next(rank for rank in RANKS if rank >= needed)


def _task_type(model: nn.Module | None) -> str | None:
    """Returns PEFT's name of the task; None for a classifier, for which PEFT would expect a trained head."""
    if model is None or not model.can_generate():
        return None
    return "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
