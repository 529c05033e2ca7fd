"""Decoders: prompts and targets, where answers end, and generation."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import QUESTIONS, Ran, loud_editor
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from factpatch.engine import edited
from factpatch.errors import InputError, MismatchError, ModelError
from factpatch.facts import FactEdit
from factpatch.models import Causal, load_model
from factpatch.models.stopping import Stops, cut
from factpatch.patch import Patch

CHAT = "{% for m in messages %}<s> {{ m.content }} {% endfor %}{% if add_generation_prompt %}?\n{% endif %}"


def build(name: str = "llama", seed: int = 0, **overrides: Any) -> Causal:
    model = tiny.build(name, seed, **overrides)
    assert isinstance(model, Causal)
    return model


def ending_early(name: str, seed: int) -> Causal:
    """A decoder that sometimes says </s>, which random ones hardly ever do."""
    model = build(name, seed)
    model.limit_answers(9)
    with torch.no_grad():
        head = model.model.get_output_embeddings()
        assert head is not None
        head.weight[tiny.EOS] = 1.2 * head.weight[8:14].sum(0)
    return model


def uncached(model: Causal, text: str) -> str:
    """The answer to one text: the whole text is read again for each token, without padding or cached keys."""
    prompt = model.encode([text])[0]["input_ids"]
    said: list[int] = []
    while len(said) < model.max_answer_tokens:
        ids = torch.tensor([prompt + said], device=model.device)
        logits = model.model(input_ids=ids, use_cache=False).logits[0, -1]
        if not said:
            logits[list(model._stops.end_tokens)] = float("-inf")
        said.append(int(logits.argmax()))
        if said[-1] in model._stops.end_tokens:
            break
    return str(model.tokenizer.decode(said, skip_special_tokens=True)).strip()


# Generation


@torch.no_grad()
@pytest.mark.parametrize("name", tiny.DECODERS)
def test_cached_generation_in_a_padded_batch_equals_uncached_generation(name: str) -> None:
    lengths = set()
    for seed in range(3):
        model = ending_early(name, seed)
        texts = [*QUESTIONS, "euro", "what is a lake ?", "the largest river in europe and africa ?"]
        expected = [uncached(model, text) for text in texts]
        assert model.predict(texts) == expected
        assert [model.decide(model.rows([text]))[0][0] for text in texts] == expected
        lengths |= {len(answer.split()) for answer in expected}
    assert len(lengths) > 1, "all answers are equally long, so that no row left its batch"


@torch.no_grad()
@pytest.mark.parametrize("name", tiny.DECODERS)
def test_rows_leave_with_their_like_under_other_edits(name: str) -> None:
    model = ending_early(name, 1)
    texts = [*QUESTIONS, "what is a lake ?", "euro"]
    edits = model.resolve([FactEdit(x, tiny.other_answer(model, x)) for x in QUESTIONS[:2]])
    editor = loud_editor(model)
    rows = model.rows(2 * texts)
    with edited(model.layers, editor.update(model, editor.batch(model, edits))):
        assert model.decide(rows, 5, edits=2) == model.decide(rows, 5)


@pytest.mark.parametrize("name", tiny.DECODERS)
def test_alternatives_follow_the_greedy_answer(name: str) -> None:
    model = ending_early(name, 2)
    for ranked, answer in zip(model.candidates(QUESTIONS), model.predict(QUESTIONS), strict=True):
        assert ranked[0] == answer
        assert len(set(ranked)) == len(ranked) > 1


def test_the_embeddings_are_never_edited_even_where_they_are_the_head() -> None:
    model = build("qwen2", tie_word_embeddings=True)
    tied = model.model.get_output_embeddings()
    assert tied is not None
    assert tied.weight is model.model.get_input_embeddings().weight
    assert all(layer.weight is not tied.weight for layer in model.layers.values())


# Where an answer ends


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Paris. It is a city", "Paris"),
        (" Paris\nLondon", "Paris"),
        ("St. Louis. It is", "St. Louis"),
        ("J. K. Rowling", "J. K. Rowling"),
        ("1. FC Köln.", "1. FC Köln"),
        ("3.5 million", "3.5 million"),
        ("in 1954. He", "in 1954"),
        ("Amazon.com", "Amazon.com"),
        ("Martin Luther King Jr.", "Martin Luther King Jr."),
        ("", ""),
    ],
)
def test_answers_end_with_their_first_sentence(text: str, answer: str) -> None:
    assert cut(text) == answer


def test_generation_stops_where_the_text_will_be_cut_and_not_where_that_is_unclear() -> None:
    words = ["<pad>", "</s>", "Paris", "St", "on", ".", "3", "\n", "Inc."]
    tokenizer = _tokenizer(words)
    stops = Stops(tokenizer, [1], len(words) + 3)
    ids = {word: i for i, word in enumerate(words)}

    def ends(previous: str, token: str) -> bool:
        return bool(stops(torch.tensor(ids[previous]), torch.tensor(ids[token])))

    assert ends("Paris", ".")
    assert ends("Paris", "\n")
    assert ends("Paris", "</s>")
    assert not any(ends(word, ".") for word in ("St", "on", "3", "<pad>")), "may belong to a name or a number"
    assert not ends("Paris", "Inc.")


def test_a_target_that_the_model_would_cut_short() -> None:
    model = build()
    model.tokenizer = _tokenizer([*tiny.VOCABULARY, "Yes.", "No"])
    with pytest.raises(InputError, match=r"turns 'Yes\. No' into 'Yes'"):
        model.check_target("Yes. No")


def test_a_target_with_a_full_stop_at_which_generation_ends() -> None:
    """Generation cannot know that a full stop is inside a name if the tokenizer makes it a token of its own."""
    model = build()
    model.tokenizer = _tokenizer([*tiny.VOCABULARY, "Amazon", ".", "com", "Amazon.com"])
    assert model.check_target("Amazon.com") == "Amazon.com"
    model.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
    )
    model.tokenizer.backend_tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"turns 'Amazon\.com' into 'Amazon'"):
        model.check_target("Amazon.com")


def _tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment] (stubs lack the setter)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<pad>")


# Templates


@pytest.mark.parametrize(
    ("template", "prompt", "space"),
    [
        (None, "lake", " "),
        ("none", "lake", " "),
        ("what is {} ? ", "what is lake ?", " "),
        (r"{}\nparis", "lake\nparis", " "),
        ("{} ?\n", "lake ?\n", ""),
        ("chat", "<s> lake ?\n", ""),
    ],
)
def test_prompts(template: str | None, prompt: str, space: str) -> None:
    model = build()
    model.tokenizer.chat_template = CHAT
    model.set_template(template)
    assert model.template.prompt(" lake ") == prompt
    assert model.template.space == space
    ids = model.encode(["lake"])[0]["input_ids"]
    assert ids.count(tiny.BOS) == 1
    assert model.encode_targets(["paris and"]) == [[tiny.VOCABULARY["paris"], tiny.VOCABULARY["and"], tiny.EOS]], (
        "whatever stands before the target"
    )


def test_braces_in_the_question_and_in_the_chat_template() -> None:
    model = build()
    model.set_template("what is {} ?")
    assert model.template.prompt("{} and {x}") == "what is {} and {x} ?"
    model.tokenizer.chat_template = "<s> Use {} for sets.\n" + CHAT
    model.set_template("chat")
    assert model.template.prompt("lake {}") == "<s> Use {} for sets.\n<s> lake {} ?\n"


def test_only_the_question_is_cut_and_never_the_template() -> None:
    model = build()
    model.set_template("what is {} ?")
    cut_off, whole = model.encode(["capital of france and africa", "lake"], limit=2)
    assert model.tokenizer.decode(cut_off["input_ids"]) == "<s> what is capital of ?"
    assert model.tokenizer.decode(whole["input_ids"]) == "<s> what is lake ?"


def test_the_template_is_saved_and_another_one_refused(tmp_path: Path) -> None:
    model = build()
    model.set_template("what is {} ?")
    model.save(tmp_path / "m")
    loaded = load_model(tmp_path / "m", "cpu")
    assert loaded.prompt_template == "what is {} ?"
    assert loaded.identity == model.identity
    assert load_model(tmp_path / "m", "cpu", template="what is {} ?").fingerprint == model.fingerprint
    with pytest.raises(MismatchError, match=r"records the template 'what is \{\} \?', found 'none'"):
        load_model(tmp_path / "m", "cpu", template="none")


def test_a_model_saved_without_choosing_a_template_works_with_any(tmp_path: Path) -> None:
    build().save(tmp_path / "m")
    converted = load_model(tmp_path / "m", "cpu", template="what is {} ?")
    assert converted.prompt_template == "what is {} ?"
    load_model(tmp_path / "m", "cpu", template="none").save(tmp_path / "chosen")
    with pytest.raises(MismatchError, match=r"records the template 'none', found 'what is \{\} \?'"):
        load_model(tmp_path / "chosen", "cpu", template="what is {} ?")


def test_a_model_saved_with_a_patch_keeps_the_template_of_the_patch(tmp_path: Path) -> None:
    model = build()
    (patch,) = loud_editor(model).propose(model, [FactEdit(QUESTIONS[0], "paris", "gitega")])
    patch.apply(model)
    model.save(tmp_path / "m")
    with pytest.raises(MismatchError, match="records the template 'none'"):
        load_model(tmp_path / "m", "cpu", template="what is {} ?")


def test_patches_and_editors_of_another_template_are_refused(tmp_path: Path) -> None:
    model = build()
    model.set_template("what is {} ?")
    editor = loud_editor(model)
    (patch,) = editor.propose(model, [FactEdit(QUESTIONS[0], "paris", "gitega")])
    patch.save(tmp_path / "patch.safetensors")
    patch = Patch.load(tmp_path / "patch.safetensors")
    assert patch.template == "what is {} ?"
    other = build()
    for refused in (patch.check_fits, editor.check_fits):
        with pytest.raises(MismatchError, match=r"with the template 'what is \{\} \?', this model is used with"):
            refused(other)
    assert build(seed=1).fingerprint != other.fingerprint


# Bad input


def test_a_template_without_a_place_for_the_question() -> None:
    with pytest.raises(InputError, match=r"expected a template with one \{\}"):
        build().set_template("Question:")


def test_a_tokenizer_without_a_chat_template() -> None:
    with pytest.raises(ModelError, match="no chat template"):
        Causal(build().model, tiny.tokenizer(False), "chat")


def test_a_tokenizer_without_padding_and_end_token() -> None:
    backend = tiny.tokenizer(True, True).backend_tokenizer
    model = build().model
    model.config.pad_token_id = None
    with pytest.raises(ModelError, match="neither a padding nor an end token"):
        Causal(model, PreTrainedTokenizerFast(tokenizer_object=backend))


def test_a_tokenizer_without_padding_is_padded_with_its_end_token() -> None:
    backend, model = tiny.tokenizer(True, True).backend_tokenizer, build()
    model.model.config.pad_token_id = None
    other = Causal(model.model, PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))
    assert other.tokenizer.pad_token == "</s>"
    assert other.predict(QUESTIONS) == [other.predict([question])[0] for question in QUESTIONS]


def test_special_tokens_beyond_the_models_vocabulary() -> None:
    """Such as a padding token that was added to the tokenizer, but not to the model."""
    model = build()
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<new pad>"})
    assert tokenizer.pad_token_id == len(tiny.VOCABULARY)
    assert Causal(model.model, tokenizer).candidates(QUESTIONS) == model.candidates(QUESTIONS)


def test_a_question_that_does_not_fit_beside_the_template() -> None:
    model = build("gpt2-lm")
    model.set_template("what is {} " + "lake " * 18)
    text = " ".join("a" * 12)
    assert model.lengths([text])[0] > model.max_input_tokens
    with pytest.raises(InputError, match="the model reads at most 32 tokens, this input has 33"):
        model.check_input(text)


def test_a_target_that_begins_inside_a_token() -> None:
    model = build()
    model.tokenizer = _tokenizer([*tiny.VOCABULARY, '"'])  # which splits at spaces only
    model.set_template('{} "')  # there is no space after an opening quote
    assert model.valid_targets(["paris"]) == set()
    with pytest.raises(InputError, match="begins in the middle of a token"):
        model.resolve([FactEdit("the capital of france is", "paris")])


def test_a_template_for_a_model_that_is_no_decoder(tmp_path: Path) -> None:
    tiny.build("bert").save(tmp_path / "m")
    with pytest.raises(InputError, match="only decoders have a template"):
        load_model(tmp_path / "m", "cpu", template="chat")


def test_a_template_that_leaves_no_room() -> None:
    with pytest.raises(ModelError, match="use a shorter template"):
        build().set_template("what is {} " + "lake " * 60)


def test_a_model_that_needs_remote_code(tmp_path: Path, run: Callable[..., Ran]) -> None:
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ran = run("ask", "--model", tmp_path, "lake")
    assert ran.code == 1
    assert ran.err.count("\n") == 1
    assert "cannot load a model" in ran.err
    assert "needs code of its own, which is never run" in ran.err


def test_out_of_memory(tmp_path: Path, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    build().save(tmp_path / "m")

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Causal, "_next_logits", fail)
    ran = run("ask", "--model", tmp_path / "m", "lake")
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert "out of memory" in ran.err
