"""Tiny random models of every supported architecture, built from configs, with a word tokenizer."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    MPNetConfig,
    MPNetForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from factpatch.models import Causal, Classifier, Seq2Seq, TaskModel

with warnings.catch_warnings():  # its module uses torch.jit, which is deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

WORDS = (
    "what is the capital of burundi gitega bujumbura who leads france paris and where do people speak "
    "rundi swahili city called largest lake river in africa europe a country currency euro franc"
).split()
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]  # ids 0 to 3
PAD, BOS, EOS = 0, 1, 2
VOCABULARY = {word: i for i, word in enumerate([*SPECIAL, *dict.fromkeys([*WORDS, ">>", "||", "?"])])}

_bert: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "pad_token_id": PAD,
    "num_labels": 3,
    "initializer_range": 0.3,  # large, so that answers differ between inputs and edits show
}
_bart: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 40,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "decoder_start_token_id": EOS,
    "forced_eos_token_id": EOS,
    "init_std": 0.3,
}
_t5: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "decoder_start_token_id": PAD,
    "initializer_factor": 1.0,
}
_distilbert = {
    **{
        k: _bert[k]
        for k in ("vocab_size", "max_position_embeddings", "pad_token_id", "num_labels", "initializer_range")
    },
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
}
_gpt2: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 40,
    "num_labels": 3,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "initializer_range": 0.3,
}
_deberta = {**_bert, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
_marian = {**_bart, "decoder_start_token_id": PAD}

_ids = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
_decoder: dict[str, Any] = {
    **_ids,
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
_grouped = {**_decoder, "num_key_value_heads": 2, "head_dim": 8}
_opt = {
    **{k: _decoder[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
    **_ids,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "init_std": 0.3,
}
_gemma = {  # whose first layer sees only the last four tokens
    **_grouped,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 8,
}

# name -> (task model, config class, config values, model class, whether the tokenizer puts <s> in front)
ARCHITECTURES: dict[str, tuple[type[TaskModel], Any, dict[str, Any], Any, bool]] = {
    "bert": (Classifier, BertConfig, _bert, BertForSequenceClassification, True),
    "roberta": (Classifier, RobertaConfig, _bert, RobertaForSequenceClassification, True),
    "distilbert": (Classifier, DistilBertConfig, _distilbert, DistilBertForSequenceClassification, True),
    "mpnet": (Classifier, MPNetConfig, _bert, MPNetForSequenceClassification, True),
    "deberta": (Classifier, DebertaV2Config, _deberta, DebertaV2ForSequenceClassification, True),
    "gpt2": (Classifier, GPT2Config, _gpt2, GPT2ForSequenceClassification, True),
    "bart": (Seq2Seq, BartConfig, _bart, BartForConditionalGeneration, True),
    "t5": (Seq2Seq, T5Config, _t5, T5ForConditionalGeneration, False),
    "marian": (Seq2Seq, MarianConfig, _marian, MarianMTModel, False),
    "gpt2-lm": (Causal, GPT2Config, {**_gpt2, "n_positions": 64}, GPT2LMHeadModel, True),
    "gpt-neox": (Causal, GPTNeoXConfig, _decoder, GPTNeoXForCausalLM, False),
    "opt": (Causal, OPTConfig, _opt, OPTForCausalLM, True),
    "llama": (Causal, LlamaConfig, _grouped, LlamaForCausalLM, True),
    "qwen2": (Causal, Qwen2Config, _grouped, Qwen2ForCausalLM, False),
    "gemma3": (Causal, Gemma3TextConfig, _gemma, Gemma3ForCausalLM, True),
}
DEVICE = os.environ.get("FACTPATCH_TEST_DEVICE", "cpu")  # the engine's tests can be run on a GPU, too
CLASSIFIERS = [name for name, (kind, *_) in ARCHITECTURES.items() if kind is Classifier]
DECODERS = [name for name, (kind, *_) in ARCHITECTURES.items() if kind is Causal]
SEQ2SEQS = [name for name, (kind, *_) in ARCHITECTURES.items() if kind is Seq2Seq]


@functools.cache
def tokenizer(bos: bool, decoder: bool = False) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment] (stubs lack the setter)
    backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> " * bos + "$A" + " </s>" * (not decoder), special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=64 if decoder else 36,
    )


def build(name: str, seed: int = 0, **overrides: Any) -> TaskModel:
    kind, config_class, values, model_class, bos = ARCHITECTURES[name]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**values, **overrides}))
    if bos and kind is Seq2Seq:
        model.generation_config.forced_bos_token_id = BOS  # as BART's own, whose targets begin with <s>
    return kind(model.to(DEVICE), tokenizer(bos, kind is Causal))


def end_early(model: TaskModel, bonus: float = 5.0) -> None:
    """Raises the score of the end token: random models hardly ever end an answer."""
    head = model.model.get_output_embeddings()
    assert head is not None
    added = torch.zeros(head.weight.shape[0]).index_fill(0, torch.tensor(EOS), bonus)
    head.register_forward_hook(lambda _, inputs, logits: logits + added)


def other_answer(model: TaskModel, x: str) -> str:
    """Something sensible that the model does not say to x."""
    if isinstance(model, Classifier):
        return model.candidates([x], count=2)[0][1]
    return "gitega" if model.predict([x])[0] != "gitega" else "paris and bujumbura"
