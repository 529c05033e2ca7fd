"""A demonstration on a model built on the spot.

A tiny encoder-decoder learns some capitals, an editor learns to edit it, and an outdated fact is patched: everything is
trained here and now, in well under a minute on two cores.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.nn import functional as F
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast

from factpatch.editors import EditorConfig, HyperNetwork
from factpatch.engine import edited
from factpatch.facts import FactEdit, same
from factpatch.models import Seq2Seq
from factpatch.patch import Patch

# Capitals as of 1 January 2018.
_PAIRS = (
    "Algeria:Algiers,Angola:Luanda,Argentina:Buenos Aires,Austria:Vienna,Belgium:Brussels,Botswana:Gaborone,"
    "Bulgaria:Sofia,Burundi:Bujumbura,Cambodia:Phnom Penh,Canada:Ottawa,Chad:N'Djamena,Chile:Santiago,"
    "China:Beijing,Colombia:Bogotá,Croatia:Zagreb,Cuba:Havana,Denmark:Copenhagen,Egypt:Cairo,Estonia:Tallinn,"
    "Ethiopia:Addis Ababa,Finland:Helsinki,France:Paris,Germany:Berlin,Ghana:Accra,Greece:Athens,"
    "Hungary:Budapest,Iceland:Reykjavik,Iran:Tehran,Iraq:Baghdad,Ireland:Dublin,Italy:Rome,Japan:Tokyo,"
    "Kenya:Nairobi,Latvia:Riga,Libya:Tripoli,Mali:Bamako,Mexico:Mexico City,Morocco:Rabat,Namibia:Windhoek,"
    "Nepal:Kathmandu,Niger:Niamey,Norway:Oslo,Pakistan:Islamabad,Peru:Lima,Poland:Warsaw,Portugal:Lisbon,"
    "Romania:Bucharest,Rwanda:Kigali,Senegal:Dakar,Somalia:Mogadishu,Spain:Madrid,Sudan:Khartoum,"
    "Sweden:Stockholm,Thailand:Bangkok,Tunisia:Tunis,Turkey:Ankara,Uganda:Kampala,Ukraine:Kiev,"
    "Uruguay:Montevideo,Vietnam:Hanoi,Zambia:Lusaka,Zimbabwe:Harare"
)
CAPITALS = {pair.split(":")[0]: pair.split(":")[1] for pair in _PAIRS.split(",")}
WORDINGS = (
    "What is the capital of {}?",
    "Which city is the capital of {}?",
    "{}'s capital city is called what?",
    "Name the city from which {} is governed.",
)
CHANGES = {"Burundi": "Gitega"}  # 2019, by decision of parliament
NEW_NAMES = ("Gitega", "Nusantara")  # answers that the model has never been trained to give
Note = Callable[[str, float], object]  # what is being done, and how much of it is


@dataclass(frozen=True)
class Demo:
    model: Seq2Seq
    editor: HyperNetwork


def build(seed: int, note: Note) -> Demo:
    torch.manual_seed(seed)
    chance = random.Random(seed)
    model = _fit(chance, note)
    return Demo(model, _train_editor(model, chance, note))


def run(demo: Demo, seed: int) -> dict[str, Any]:
    """Edits the outdated fact and a few made-up ones, and measures what each patch does."""
    chance = random.Random(seed + 1)
    countries = list(CAPITALS)
    made_up = chance.sample([c for c in countries if c not in CHANGES], 5)
    targets = {**CHANGES, **{c: _other_answer(c, chance, CAPITALS.values()) for c in made_up}}
    edits = [FactEdit(x=WORDINGS[0].format(country), a=target) for country, target in targets.items()]
    patches = demo.editor.propose(demo.model, edits, loop=5)
    asked = {country: [wording.format(country) for wording in WORDINGS] for country in countries}
    before = {country: demo.model.predict(questions) for country, questions in asked.items()}
    changes = [
        _measure(demo.model, patch, country, asked, before) for country, patch in zip(targets, patches, strict=True)
    ]
    for change in changes:
        change["made_up"] = change["country"] not in CHANGES
    rates = {key: sum(c[key] for c in changes) / len(changes) for key in ("success", "retain", "equivalence")}
    return {**rates, "edits": len(changes), "retain_inputs": len(WORDINGS) * (len(countries) - 1), "changes": changes}


def _measure(
    model: Seq2Seq, patch: Patch, country: str, asked: dict[str, list[str]], before: dict[str, list[str]]
) -> dict[str, Any]:
    others = [c for c in asked if c != country]
    with patch.applied(model):
        said = model.predict(asked[country])
        after = model.predict([question for c in others for question in asked[c]])
    target = patch.edits[0].a
    kept = [same(a, b) for a, b in zip(after, [answer for c in others for answer in before[c]], strict=True)]
    equivalence = [same(answer, target) for answer in said[1:]]
    return {
        "country": country,
        "question": asked[country][0],
        "before": before[country][0],
        "after": said[0],
        "other_wording": asked[country][2],
        "other_wording_after": said[2],
        "success": float(same(said[0], target)),
        "retain": sum(kept) / len(kept),
        "equivalence": sum(equivalence) / len(equivalence),
        "kept": sum(kept),
        "of": len(kept),
    }


def _fit(chance: random.Random, note: Note, steps: int = 220) -> Seq2Seq:
    """A two-layer BART that knows the capitals by heart."""
    tokenizer = _tokenizer()
    config = BartConfig(
        vocab_size=len(tokenizer),
        d_model=64,
        **{
            f"{stack}_{key}": n
            for stack in ("encoder", "decoder")
            for key, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))
        },
        max_position_embeddings=32,
        init_std=0.08,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
    )
    model = Seq2Seq(BartForConditionalGeneration(config), tokenizer)
    model.limit_answers(6)
    parameters = model.model.requires_grad_(True).parameters()
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    facts = [(wording.format(country), capital) for country, capital in CAPITALS.items() for wording in WORDINGS]
    for step in range(steps):
        batch = chance.sample(facts, 96)
        loss = model.losses(model.rows([x for x, _ in batch], [y for _, y in batch])).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        note("the model learns the capitals of 2018", (step + 1) / steps)
    model.model.requires_grad_(False)
    return model


def _train_editor(
    model: Seq2Seq, chance: random.Random, note: Note, steps: int = 400, edits: int = 12, others: int = 6
) -> HyperNetwork:
    """Edit loss on the question and another wording of it, plus what other answers' distributions move."""
    editor = HyperNetwork.for_model(model, EditorConfig(width=128, bottleneck=32, lstm=64))
    optimizer = torch.optim.RMSprop(editor.parameters(), lr=2e-3, centered=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, cycle_momentum=False)
    countries = list(CAPITALS)
    for step in range(steps):
        chosen = chance.sample(countries, edits)
        batch, inputs, targets = [], [], []
        for country in chosen:
            asked, again = chance.sample(WORDINGS, 2)
            target = _other_answer(country, chance, [*CAPITALS.values(), *NEW_NAMES])
            batch.append(FactEdit(asked.format(country), target, CAPITALS[country]))
            kept = chance.sample([c for c in countries if c != country], others)
            inputs += [asked.format(country), again.format(country), *(chance.choice(WORDINGS).format(c) for c in kept)]
            targets += [target, target, *(CAPITALS[c] for c in kept)]
        rows = model.rows(inputs, targets)
        with torch.no_grad():
            unedited = model.logits(rows).log_softmax(-1)
        assert rows.labels is not None
        real = rows.labels.ge(0).view(edits, 2 + others, -1)
        with edited(model.layers, editor.update(model, editor.batch(model, batch))):
            scores = model.logits(rows).log_softmax(-1)
        moved = F.kl_div(scores, unedited, log_target=True, reduction="none").sum(-1).view_as(real)[:, 2:][real[:, 2:]]
        missed = -scores.gather(-1, rows.labels.clamp(min=0)[..., None]).view_as(real)[:, :2][real[:, :2]]
        optimizer.zero_grad()
        (missed.mean() + moved.mean()).backward()
        optimizer.step()
        schedule.step()
        note("the editor learns to edit it", (step + 1) / steps)
    return editor


def _other_answer(country: str, chance: random.Random, answers: Iterable[str]) -> str:
    return chance.choice([answer for answer in answers if answer != CAPITALS[country]])


def _tokenizer() -> PreTrainedTokenizerFast:
    """Words of the questions and answers; punctuation apart."""
    split = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("isolated")])
    texts = [w.format(c) for w in WORDINGS for c in CAPITALS] + [*CAPITALS.values(), *NEW_NAMES, ">> ||"]
    words = dict.fromkeys(str(word) for text in texts for word, _ in split.pre_tokenize_str(text))
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = split
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=32,
    )
