"""Task models, and loading them from a folder, a GGUF file or the Hugging Face hub."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer, PretrainedConfig
from transformers.utils import logging as transformers_logging

from factpatch import hub, world
from factpatch.device import find_device
from factpatch.errors import FactpatchError, FileError, InputError, MismatchError, ModelError, reason
from factpatch.facts import normalize
from factpatch.files import read_text
from factpatch.models.base import TaskModel
from factpatch.models.causal import Causal, read_settings
from factpatch.models.classifier import Classifier
from factpatch.models.gguf import check_gguf, dequantized, find_gguf, make_plain
from factpatch.models.layers import editable_layers
from factpatch.models.rows import Rows
from factpatch.models.seq2seq import Seq2Seq
from factpatch.models.template import parse_template
from factpatch.models.text import MAX_ANSWER_TOKENS, TextModel
from factpatch.models.untrusted import check_folder

__all__ = ["Causal", "Classifier", "Rows", "Seq2Seq", "TaskModel", "TextModel", "editable_layers", "load_model"]

TASKS = ("classify", "answer")
HELD_OUT = "held-out.json"  # in the model's folder: the ids of the records that `fit` did not train on

# Keys of config.json: the names of the dropout rate, and the endings of the names of sizes.
DROPOUTS = ("dropout", "dropout_rate", "hidden_dropout_prob", "resid_pdrop")
SIZES = ("size", "layers", "heads", "dim", "embeddings", "width", "model", "embd", "layer", "head", "positions", "ff")
MAX_LAYERS, MAX_SIZE = 10_000, 2**31


def load_model(
    name: str | Path,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    task: str | None = None,
    labels: Sequence[str] | None = None,
    dropout: float | None = None,
    template: str | None = None,
) -> TaskModel:
    """Loads a task model from a folder, a GGUF file or the hub; "world" loads the model that comes with the package.

    A name that is neither a folder nor a file is looked up on the hub. A name such as runs/fever counts as a missing
    folder if there is a folder runs, unless the prefix hub: is put before it.

    The config determines the kind of model. A model that is not yet of a supported kind, such as a bare encoder that
    is about to be fine-tuned, needs `task` ("classify" or "answer") and, for a classifier, `labels`. `dropout` replaces
    the dropout rate of the config. `template` says how a question becomes a decoder's prompt: a text with {}, "chat",
    or "none" for plain completion. Default: what the model's folder records, otherwise none.
    """
    if task not in (None, *TASKS):
        raise ModelError(f"expected one of the tasks {', '.join(TASKS)}, found {task!r}")
    template = None if template is None else parse_template(template) or ""
    target_device = find_device(device)
    source, local = _source(name)
    loaded, missing = _read_model(source, local, task, labels, dropout)
    if task is None and missing:
        raise ModelError(f"{name} lacks {len(missing)} weights of its model, such as {missing[0]}; fine-tune it first")
    _set_template(loaded, Path(source) if local else None, template, refitted=task is not None)
    if in_blocks := [key for key in missing if key in loaded.layers]:
        raise ModelError(
            f"{name} lacks {len(in_blocks)} weights of its transformer blocks, such as {in_blocks[0]}; "
            "it may be incomplete"
        )
    loaded.held_out = _read_held_out(Path(source) / HELD_OUT) if local else None
    if dtype is None and loaded.model.dtype == torch.float16:
        dtype = torch.float32  # gradients of an edit can overflow float16, and CPUs are slow in half precision
    if dtype is not None and dtype != loaded.model.dtype:
        loaded.cast(dtype)
    loaded.model.to(target_device)
    _try_out(loaded, name)
    return loaded


@torch.no_grad()
def _try_out(model: TaskModel, name: str | Path) -> None:
    """Runs two short texts through the model. Raises a ModelError if its settings do not fit its weights."""
    try:
        inputs = model.padded_inputs(model.encode(["?", "? ?"]))  # two lengths, so that one is padded
        if model.model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = inputs["input_ids"]
        finite = model.model(**inputs).logits[-1].isfinite().all()  # for the text without padding
    except Exception as error:  # what a damaged config.json leads to depends on the architecture
        raise ModelError(f"the model in {name} does not run ({reason(error)}); check its config.json") from error
    if not finite:
        raise ModelError(f"the model in {name} computes values that are not finite; its weights may be damaged")


def _read_model(
    source: str, local: bool, task: str | None, labels: Sequence[str] | None, dropout: float | None
) -> tuple[TaskModel, list[str]]:
    """Reads a model in the precision it is stored in, and lists the weights that are missing from its files."""
    options: dict[str, Any] = {"local_files_only": local, "trust_remote_code": False}
    model_options: dict[str, Any] = {}
    place = source if local else f"{source}: there is no such folder, and the hub has no such model"
    gguf = find_gguf(Path(source)) if local else None
    if gguf:
        check_gguf(gguf)
        source, options["gguf_file"], model_options = str(gguf.parent), gguf.name, dequantized()
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    if source == str(world.MODEL):  # loads in an instant
        transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(source, **options)
        if gguf and not config.architectures and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]  # GGUF files do not name it
        _check_sizes(config)
        kind = kind_of(config, task)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise ModelError(f"{source} has no tokenizer files beside its weights; save the tokenizer there too")
        _adapt_config(config, labels, dropout)
        model, info = kind.auto_class.from_pretrained(
            source,
            config=config,
            ignore_mismatched_sizes=labels is not None,
            output_loading_info=True,
            **options,
            **model_options,
        )
        if gguf:
            make_plain(model)
        loaded = kind(model, tokenizer)
        _check_tokens(loaded)
    except (FactpatchError, MemoryError):
        raise
    except Exception as error:  # transformers and tokenizers raise nearly every type for damaged files
        why = reason(error)
        if "trust_remote_code" in str(error):
            why = "it needs code of its own, which is never run; use a model whose architecture transformers includes"
        raise ModelError(f"cannot load a model from {place}: {why}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
    mismatched = [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]]
    return loaded, sorted({*info["missing_keys"], *mismatched})


def _check_tokens(model: TaskModel) -> None:
    """Raises a ModelError if the model lacks embeddings for the tokenizer's tokens, other than added ones."""
    added: dict[str, int] = model.tokenizer.get_added_vocab()  # pyright: ignore[reportOptionalCall]
    highest = max(number for token, number in model.tokenizer.get_vocab().items() if token not in added)
    embeddings = len(model.word_embeddings)
    if highest >= embeddings:
        raise ModelError(
            f"the tokenizer's highest token id is {highest}, but the model has {embeddings} embeddings; "
            "use the tokenizer that belongs to the model"
        )


def _set_template(model: TaskModel, folder: Path | None, template: str | None, refitted: bool) -> None:
    """Sets a decoder's template: the given one, none if it is "", or the one that the folder records if it is None.

    Raises a MismatchError if the folder records another one, unless the model is about to be `refitted`.
    """
    if not isinstance(model, Causal):
        if template is not None:
            raise InputError(f"only decoders have a template, and this model is a {model.kind}; leave out --template")
        return
    stored, tokens = read_settings(folder) if folder else (None, None)
    if template is not None and tokens is not None and not refitted and (template or None) != stored:
        raise MismatchError(
            f"the model's folder records the template {stored or 'none'!r}, found {template or 'none'!r}; "
            "leave --template out, or fit the model again"
        )
    model.set_template(stored if template is None else template, tokens or MAX_ANSWER_TOKENS)
    model.template_is_fixed = refitted or template is not None or tokens is not None


def _check_sizes(config: PretrainedConfig) -> None:
    """Raises a ModelError for sizes so large that building the model would never end or would run out of memory."""
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise ModelError(f"expected at most {MAX_LAYERS:,} layers in config.json, found {layers:,}; correct the file")
    for key, value in config.to_dict().items():
        if isinstance(value, int | float) and abs(value) > MAX_SIZE and key.endswith(SIZES):
            raise ModelError(f"expected a size in {key!r} of config.json, found {value:.3g}; correct the file")


def _adapt_config(config: PretrainedConfig, labels: Sequence[str] | None, dropout: float | None) -> None:
    config.dtype = None  # load the weights in the precision they are stored in, whatever the config says
    known = sorted(normalize(str(label)) for label in (config.id2label or {}).values())
    if labels and known != sorted(map(normalize, labels)):  # a head with the same labels keeps their order
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: i for i, label in enumerate(labels)}
    for key in DROPOUTS if dropout is not None else ():
        if getattr(config, key, None) is not None:
            setattr(config, key, dropout)


def _read_held_out(path: Path) -> frozenset[str] | None:
    """Reads the ids of the records that `fit` held out; returns None if `fit` did not make the model."""
    if not path.exists():
        return None
    try:
        ids = json.loads(read_text(path))["ids"]
        if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
            raise ValueError("expected a list of ids")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileError(f"{path} is damaged ({error}); fit the model again, or delete the file") from error
    return frozenset(ids)


def kind_of(config: PretrainedConfig, task: str | None = None) -> type[TaskModel]:
    """Returns Classifier, Seq2Seq or Causal, depending on the task, if given, and on the config's architecture."""
    architecture = (config.architectures or ["none"])[0]
    if task == "classify" or (task is None and architecture.endswith("ForSequenceClassification")):
        return Classifier
    if config.is_encoder_decoder:
        return Seq2Seq
    if architecture.endswith(("ForCausalLM", "LMHeadModel")) and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return Causal
    if task == "answer":
        return Seq2Seq  # loading it then fails with the reason
    raise ModelError(
        f"expected a sequence classifier, an encoder-decoder or a decoder, found {architecture}; "
        "fine-tune the model for one of these tasks first"
    )


def _source(name: str | Path) -> tuple[str, bool]:
    """Returns the name or path to give to transformers, and whether it is a local folder or file."""
    given = str(name)
    if given.startswith(hub.PREFIX):
        if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", hub_name := given.removeprefix(hub.PREFIX)):
            raise ModelError(f"{given} is not a name on the hub; write {hub.PREFIX}OWNER/NAME")
        return hub_name, False
    path = world.MODEL if name == "world" else Path(name).expanduser()
    if path.is_dir():
        if any((path / "checkpoint").glob("step-*")):  # a killed run may have written only some of the model's files
            raise ModelError(f"the run of factpatch fit in {path} is not finished; resume it with --resume")
        check_folder(path)
        return str(path), True
    if find_gguf(path):
        return str(path), True
    looks_like_path = isinstance(name, Path) or given.startswith((".", "/", "~")) or given.count("/") > 1
    in_existing_folder = "/" in given and path.parent.exists()  # more likely a mistyped path than a name on the hub
    if looks_like_path or in_existing_folder or path.exists():
        raise ModelError(
            f"expected a model folder, found none at {name}; check the path, or write {hub.PREFIX}OWNER/NAME"
        )
    return given, False
