"""Answers a prompt with PEFT, without an adapter and with each of the given ones, which are swapped at run time.

python tools/serve_peft.py MODEL ADAPTER... --prompt "The capital of Burundi is"
"""

from __future__ import annotations

import argparse

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a decoder or an encoder-decoder, as a Hugging Face folder or hub name")
    parser.add_argument("adapters", nargs="+", metavar="adapter", help="folders that factpatch patch export wrote")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--tokens", type=int, default=8, help="maximum number of tokens to generate")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    decodes_only = not AutoConfig.from_pretrained(options.model).is_encoder_decoder
    kind = AutoModelForCausalLM if decodes_only else AutoModelForSeq2SeqLM
    model = PeftModel.from_pretrained(
        kind.from_pretrained(options.model, dtype=torch.float32), options.adapters[0], adapter_name=options.adapters[0]
    )
    for adapter in options.adapters[1:]:
        model.load_adapter(adapter, adapter_name=adapter)
    inputs = tokenizer(options.prompt, return_tensors="pt")
    skipped = inputs["input_ids"].shape[1] if decodes_only else 0  # a decoder repeats its prompt

    def answer() -> str:
        found = model.generate(**inputs, max_new_tokens=options.tokens, do_sample=False)
        return tokenizer.decode(found[0, skipped:], skip_special_tokens=True).strip().split("\n")[0]

    with model.disable_adapter():
        print(f"without an adapter: {answer()}")
    for adapter in options.adapters:
        model.set_adapter(adapter)
        print(f"{adapter}: {answer()}")


if __name__ == "__main__":
    main()
