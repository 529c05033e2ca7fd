"""Task models, and loading them from a folder or the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig
from transformers.utils import logging as transformers_logging

from factpatch import world
from factpatch.device import find_device
from factpatch.errors import ModelError
from factpatch.facts import normalize
from factpatch.models.base import Rows, TaskModel
from factpatch.models.classifier import Classifier
from factpatch.models.layers import editable_layers
from factpatch.models.seq2seq import Seq2Seq

__all__ = ["Classifier", "Rows", "Seq2Seq", "TaskModel", "editable_layers", "load_model"]

DROPOUTS = ("dropout", "dropout_rate", "hidden_dropout_prob", "resid_pdrop")  # as configs call it
TASKS: dict[str, type[TaskModel]] = {"classify": Classifier, "answer": Seq2Seq}


def load_model(
    name: str | Path,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    task: str | None = None,
    labels: Sequence[str] | None = None,
    dropout: float | None = None,
) -> TaskModel:
    """A task model from a folder or, where no such folder exists, from the hub; "world" is the embedded one.

    Its kind is read from the config; `task` ("classify" or "answer") asks for one that the config does not name yet,
    as for a bare encoder that is about to be fine-tuned, and `labels` are then what its classifier chooses from.
    `dropout` replaces what the config says of its layers' dropout.
    """
    if task not in (None, *TASKS):
        raise ModelError(f"expected a task out of {', '.join(TASKS)}, found {task!r}")
    place = find_device(device)
    source, local = _source(name)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=local)
        kind = TASKS[task] if task else kind_of(config)
        config.dtype = None  # the weights' own precision, whatever the config says of it
        own = sorted(normalize(str(label)) for label in (config.id2label or {}).values())
        if labels and own != sorted(map(normalize, labels)):  # or the head knows them, in an order of its own
            config.id2label = dict(enumerate(labels))
            config.label2id = {label: i for i, label in enumerate(labels)}
        for key in DROPOUTS if dropout is not None else ():
            if getattr(config, key, None) is not None:
                setattr(config, key, dropout)
        model, info = kind.auto_class.from_pretrained(
            source,
            config=config,
            local_files_only=local,
            ignore_mismatched_sizes=labels is not None,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = f"the folder {source}" if local else f"{name}: there is no such folder here, and the hub gave none"
        raise ModelError(f"cannot load a model from {where}: {reason}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    if task is None and info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ModelError(f"{name} lacks {len(missing)} weights of its model, such as {missing[0]}; fine-tune it first")
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ModelError(f"{name} has no tokenizer files beside its weights; save the tokenizer there too")
    loaded = kind(model, tokenizer)
    unlike = {key if isinstance(key, str) else key[0] for key in (*info["missing_keys"], *info["mismatched_keys"])}
    if wrong := sorted(unlike & loaded.layers.keys()):
        raise ModelError(f"{name} lacks {len(wrong)} weights of its blocks, such as {wrong[0]}; is it whole?")
    if dtype is None and model.dtype == torch.float16:
        dtype = torch.float32  # whose range the gradients of an edit need; and a CPU is slow in half precision
    if dtype is not None and dtype != model.dtype:
        loaded.cast(dtype)
    loaded.model.to(place)
    return loaded


def kind_of(config: PretrainedConfig) -> type[TaskModel]:
    """Classifier or encoder-decoder, as the config's architecture says."""
    architecture = (config.architectures or ["none"])[0]
    if architecture.endswith("ForSequenceClassification"):
        return Classifier
    if config.is_encoder_decoder:
        return Seq2Seq
    raise ModelError(
        f"expected a sequence classifier or an encoder-decoder, found {architecture}; "
        "fine-tune the model for one of these tasks first"
    )


def _source(name: str | Path) -> tuple[str, bool]:
    """What transformers should read, and whether it must stay off the network."""
    path = world.MODEL if name == "world" else Path(name).expanduser()
    if path.is_dir():
        return str(path), True
    looks_like_path = isinstance(name, Path) or str(name).startswith((".", "/", "~")) or str(name).count("/") > 1
    if looks_like_path or path.exists():
        raise ModelError(f"expected a model folder, found none at {name}; check the path")
    return str(name), False
