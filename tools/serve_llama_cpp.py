"""Converts an adapter to GGUF, llama.cpp's format, and answers a prompt with llama.cpp, without and with the adapter.

python tools/serve_llama_cpp.py MODEL.gguf ADAPTER --output ADAPTER.gguf --prompt "The capital of Burundi is"

Needs the packages llama-cpp-python, gguf and safetensors, but neither torch nor factpatch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from llama_cpp import Llama  # pyright: ignore[reportMissingImports] (no extra has it: pip compiles it, for minutes)
from safetensors.numpy import load_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="the unedited model as a GGUF file")
    parser.add_argument("adapter", type=Path, help="a folder that factpatch patch export wrote")
    parser.add_argument("--output", type=Path, required=True, help="the GGUF file to write the adapter to")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--tokens", type=int, default=8, help="maximum number of tokens to generate")
    options = parser.parse_args()

    convert(options.adapter, options.model, options.output)
    for title, path in (("without an adapter", None), (options.output, str(options.output))):
        model = Llama(options.model, lora_path=path, n_ctx=512, verbose=False)
        found: Any = model(options.prompt, max_tokens=options.tokens, temperature=0)
        answer = found["choices"][0]["text"].strip()
        print(f"{title}: {answer.splitlines()[0]}")
        model.close()


def convert(adapter: Path, model: str, output: Path) -> None:
    """Writes an adapter as GGUF. The architecture and the weights' names come from the base model's GGUF file."""
    base = gguf.GGUFReader(model)

    def field(key: str) -> Any:
        return base.fields[key].contents()

    architecture = field("general.architecture")
    heads = field(f"{architecture}.attention.head_count")
    key_heads = field(f"{architecture}.attention.head_count_kv")
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[architecture], field(f"{architecture}.block_count"))
    writer = gguf.GGUFWriter(output, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(config["lora_alpha"]))
    for key, tensor in load_file(adapter / "adapter_model.safetensors").items():
        module, factor = key.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".", 1)
        name = names.get_name(module)
        if name is None:
            raise SystemExit(f"cannot convert {module}: llama.cpp has no such weight in {architecture} models")
        if architecture == "llama" and factor == "lora_B" and module.endswith(("q_proj", "k_proj")):
            tensor = interleaved(tensor, heads if module.endswith("q_proj") else key_heads)
        writer.add_tensor(f"{name}.weight.{factor.lower()}", np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Orders the outputs of q and k as llama.cpp does in models of the Llama family.

    Rotary embeddings rotate pairs of outputs. transformers pairs an output of a head's first half with one of its
    second half; llama.cpp pairs adjacent outputs. A permutation of W's outputs permutes the rows of B in W + B A.
    """
    pairs = rows.reshape(heads, 2, len(rows) // heads // 2, -1)  # (heads, halves, pairs, rank)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


if __name__ == "__main__":
    main()
