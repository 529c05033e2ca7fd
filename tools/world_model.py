"""The embedded world's model before training: a small BART, and a tokenizer that can spell any text."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast
from world_names import Names
from world_typing import Typist

from factpatch.world import facts

VOCABULARY = 10_000  # tokens: each word of the world in both cases, each listed word, and pieces of other words
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]  # tokens 0 to 3
WIDTH = 128
TYPED = 6  # typed questions per fact in the text that the vocabulary is built from
WEIGHT_OF_NAMES = 40  # copies of each name of the world in that text
WEIGHT_OF_WORDS = 12  # copies of each listed word
MADE_UP = 30_000  # made-up names in that text, whose frequent pieces become tokens


def new_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Learns a vocabulary in which the world's words are single tokens and any other word is spelled in pieces.

    Question marks are left out, because they do not change what is asked.
    """
    rng = random.Random(seed)
    typist, names = Typist(), Names()
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(  # type: ignore[assignment]
        [
            normalizers.NFC(),
            normalizers.Replace("’", "'"),
            normalizers.Replace(Regex(r"\s*[?!]+\s*"), " "),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
            normalizers.Prepend(" "),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(r" ?[^\s,':;()]+|."), "isolated"),  # Ramos-Horta and Jr. are single words
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    questions = [text for fact in facts() for text in (*fact.questions, *typist.questions(fact, TYPED, rng))]
    subjects = [text for fact in facts() for text in (fact.subject, fact.subject.lower())]
    known = [*questions, *subjects, *WEIGHT_OF_NAMES * names.known, *WEIGHT_OF_WORDS * names.common]
    tokenizer.train_from_iterator([*known, *(names.made_up(rng) for _ in range(MADE_UP))], trainer)
    special = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **special)


def new_model(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Saves a small BART with random weights, and its tokenizer."""
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = BartConfig(
        vocab_size=len(tokenizer),
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH,
        max_position_embeddings=64,
        init_std=0.08,  # a model this small learns far faster from larger weights than BART's 0.02
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        forced_eos_token_id=2,
    )
    BartForConditionalGeneration(config).save_pretrained(folder)
