"""Models stored as a GGUF file, the format of llama.cpp. They are read with their weights dequantised."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from factpatch.errors import ModelError


def find_gguf(path: Path) -> Path | None:
    """Finds the GGUF file at a path: the file itself, or the only one in a folder without another model."""
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ModelError(f"{path} holds {len(files)} GGUF files; name one of them, such as {files[0]}")
    return files[0] if files else None


def check_gguf(path: Path) -> None:
    """Raises a ModelError if a GGUF file cannot be read here, is damaged or has an unknown architecture."""
    if find_spec("gguf") is None:
        raise ModelError("reading a GGUF file needs the package gguf; run: pip install 'factpatch[gguf]'")
    import numpy as np
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    try:
        reader = GGUFReader(path)
        field = reader.get_field("general.architecture")
        architecture = str(field.contents()) if field else "none"
    except (ValueError, OSError, IndexError, KeyError, np.exceptions.AxisError) as error:
        raise ModelError(f"{path} is not a readable GGUF file; it may be truncated ({error})") from error
    if architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"{path} holds a model of the architecture {architecture}, which transformers cannot read from GGUF; "
            "use the model's Hugging Face folder"
        )


def dequantized() -> dict[str, Any]:
    """Returns the option of `from_pretrained` that dequantises all weights. Older transformers always do so."""
    config_class = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": config_class(dequantize=True)} if config_class else {}


def make_plain(model: PreTrainedModel) -> None:
    """Removes the quantisation attributes of a model with dequantised weights, so that it can be cast and saved."""
    for name in ("hf_quantizer", "quantization_method"):
        if name in vars(model):
            delattr(model, name)
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
