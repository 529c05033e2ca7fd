"""The parts of the page that show results, as HTML. Every text that comes from a user or a model is escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from factpatch.facts import same
from factpatch.ledger_store import Fact
from factpatch.models.answers import Answer
from factpatch.serve.answering import Answered
from factpatch.serve.proposals import Control, Proposal, WeightChange
from factpatch.serve.service import Check

SHOWN_FACTS = 50
DOWNLOADS = """<p class="fp-downloads">Download all facts: <a href="/api/download/patch" download>merged patch</a> ·
<a href="/api/download/adapter" download>LoRA adapter</a> · <a href="/api/download/ledger" download>ledger</a></p>"""
NEW, OLD = '<span class="fp-yes">✓ new answer</span>', '<span class="fp-no">✗ not the new answer</span>'
KEPT, LOST = '<span class="fp-yes">✓ kept</span>', '<span class="fp-no">✗ changes</span>'
BLOCK = re.compile(r"(.*?)(\d+)\.(.+?)(?:\.weight)?$")  # weight name: stack of blocks, number, weight in the block
SHORT = {"self_attn": "self", "encoder_attn": "cross", "attention": "att", "layers": "", "model": ""}


def section(number: str, title: str, text: str) -> str:
    mark = f'<span class="fp-number" aria-hidden="true">{number}</span>' if number else ""
    return f'<div class="fp-section"><h2>{mark}{escape(title)}</h2><p>{escape(text)}</p></div>'


def message(text: str, kind: str = "note") -> str:
    """Shows a note, a success or an error, which screen readers announce."""
    role = "alert" if kind == "error" else "status"
    return f'<div class="fp-message fp-{kind}" role="{role}">{escape(text)}</div>'


def answered(found: Answered) -> str:
    """Shows the best answers to a question, and where they come from."""
    fact = found.fact
    source = f"From fact {fact.id}: {fact.x}" if fact else "From the unedited model"
    asked = f'<p class="fp-asked">{escape(found.question)}</p>'
    return f'<div class="fp-card">{asked}{_bars(found.answers)}<p class="fp-source">{escape(source)}</p></div>'


def _bars(answers: Sequence[Answer], wanted: str | None = None) -> str:
    rows = []
    best, *others = answers
    for answer in (best, *sorted(others, key=lambda one: -one.probability)):
        share = f"{answer.probability:.1%}"
        shown = "under 0.1%" if share == "0.0%" else share
        classes = "fp-best" * (answer is best) + " fp-wanted" * (wanted is not None and same(answer.text, wanted))
        rows.append(
            f'<li class="{classes}"><span class="fp-text">{_text(answer.text)}</span>'
            f'<span class="fp-share">{shown}</span>'
            f'<span class="fp-track" aria-hidden="true"><span style="width:{share}"></span></span></li>'
        )
    return f'<ol class="fp-bars">{"".join(rows)}</ol>'


def _text(answer: str) -> str:
    return escape(answer) or "(empty)"


def proposal(found: Proposal) -> str:
    """Shows everything that was measured about a correction."""
    own = found.question
    if found.success:
        verdict = message(f"It works: the model would say “{own.after[0].text}”.", "success")
    else:
        verdict = message(
            f"It does not work: the model would say “{own.after[0].text}”, not “{found.edit.a}”. "
            "Try another wording of the question or of the answer.",
            "error",
        )
    return (
        f'{verdict}<p class="fp-asked">{escape(own.question)}</p><div class="fp-pair">'
        f'<div class="fp-card"><h3>Before</h3>{_bars(own.before, found.edit.a)}</div>'
        f'<div class="fp-card"><h3>After</h3>{_bars(own.after, found.edit.a)}</div></div>'
        f'<div class="fp-more"><div>{_paraphrases(found)}{_controls(found.controls)}</div>'
        f"<div>{_heat_map(found.weights)}</div></div>"
    )


def _paraphrases(found: Proposal) -> str:
    if not found.paraphrases:
        return ""
    answers = [(one.question, one.before[0].text, one.after[0].text) for one in found.paraphrases]
    good = [same(after, found.edit.a) for _, _, after in answers]
    title = f"Other wordings: {sum(good)} of {len(good)} get the new answer"
    rows = [(*texts, NEW if new else OLD) for texts, new in zip(answers, good, strict=True)]
    return f'<div class="fp-card"><h3>{title}</h3>{_table(rows, "After")}</div>'


def _controls(controls: Sequence[Control]) -> str:
    """Shows the sample of other questions: changed answers first, then the rest in a folded list."""
    flipped = sorted((one for one in controls if one.flipped), key=lambda one: not one.in_scope)
    kept = [one for one in controls if not one.flipped]
    lost = sum(one.in_scope for one in flipped)
    title = f"Other questions: {len(controls) - lost} of {len(controls)} keep their answers"
    if flipped:
        text = f"The patch by itself would change {len(flipped)}, but it is used only for questions about this fact."
        rows = [(one.question, one.before, one.after, LOST if one.in_scope else KEPT) for one in flipped]
        table, rest = _table(rows, "Patch alone"), f"the other {len(kept)}"
    else:
        text = "The patch would change none of them even if it were used for every question."
        table, rest = "", f"all {len(kept)}"
    unchanged = "".join(f"<li>{escape(one.question)} <b>{_text(one.before)}</b></li>" for one in kept)
    return (
        f'<div class="fp-card"><h3>{title}</h3><p>{text}</p>{table}'
        f'<details><summary>Show {rest}</summary><ul class="fp-kept">{unchanged}</ul></details></div>'
    )


def _table(rows: Sequence[tuple[str, str, str, str]], after: str) -> str:
    """Shows questions with their answers before and after, each with a mark. `after` is the heading of the latter."""
    names = ("Question", "Before", after)
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "".join(
        "<tr>"
        + "".join(f'<td data-label="{name}">{_text(text)}</td>' for name, text in zip(names, texts, strict=True))
        + f"<td>{mark}</td></tr>"
        for *texts, mark in rows
    )
    return (
        f'<table class="fp-table"><thead><tr>{head}<th scope="col"><span class="fp-hidden">Result</span></th>'
        f"</tr></thead><tbody>{body}</tbody></table>"
    )


def _heat_map(weights: Sequence[WeightChange]) -> str:
    """Shows a grid of blocks by weights. Darker cells change more; hovering over one shows the size of its change."""
    cells: dict[tuple[str, str], float] = {}
    for one in weights:
        found = BLOCK.match(one.name)
        block, column = (f"{found[1]}{found[2]}", found[3]) if found else ("other", one.name.removesuffix(".weight"))
        cells[_short(block), _short(column)] = one.size
    blocks, columns = list(dict.fromkeys(b for b, _ in cells)), list(dict.fromkeys(c for _, c in cells))
    most = max(cells.values(), default=0.0) or 1.0
    head = "".join(f'<th scope="col"><span>{escape(column)}</span></th>' for column in columns)
    rows = "".join(
        f'<tr><th scope="row">{escape(block)}</th>'
        + "".join(_heat_cell(cells.get((block, column)), most) for column in columns)
        + "</tr>"
        for block in blocks
    )
    return (
        '<div class="fp-card"><h3>Where the weights change</h3><p>Each cell is one weight of the model; '
        "the stronger its colour, the larger its change.</p>"
        f'<div class="fp-scroll"><table class="fp-heat"><thead><tr><td></td>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></div>"
    )


def _heat_cell(size: float | None, most: float) -> str:
    if size is None:
        return "<td></td>"
    return f'<td class="fp-cell" style="--heat:{size / most:.3f}" title="{size:.1e}" aria-label="{size:.1e}"></td>'


def _short(name: str) -> str:
    parts = (SHORT.get(part, part) for part in name.split("."))
    return " ".join(part.removesuffix("_proj") for part in parts if part)


def facts(found: Sequence[Fact], search: str) -> str:
    """Shows the accepted facts with a button to remove each, and download links."""
    if not found:
        return message("No accepted fact contains these words." if search.strip() else "There are no accepted facts.")
    rows = "".join(_fact(fact) for fact in found[:SHOWN_FACTS])
    count = f"{len(found)} fact{'s' * (len(found) != 1)}"
    more = f", the newest {SHOWN_FACTS} shown; search to find others" if len(found) > SHOWN_FACTS else ""
    return f'<p class="fp-count" role="status">{count}{more}</p><ul class="fp-facts">{rows}</ul>{DOWNLOADS}'


def _fact(fact: Fact) -> str:
    details = [f"fact {fact.id}", fact.added[:10], *([fact.note] if fact.note else [])]
    return (
        f'<li class="fp-card"><div><p class="fp-asked">{escape(fact.x)}</p>'
        f"<p><del>{escape(fact.before)}</del> → <b>{escape(fact.target)}</b></p>"
        f'<p class="fp-source">{escape(" · ".join(details))} · '
        f'<a href="/api/facts/{fact.id}/patch" download>patch</a></p></div>'
        f'<button type="button" class="fp-remove" data-fact="{fact.id}" '
        f'aria-label="Remove fact {fact.id}: {escape(fact.x)}">Remove</button></li>'
    )


def check(found: Check) -> str:
    """Shows the result of verifying the ledger."""
    total = len(found.holding) + len(found.lost)
    text = (
        f"{len(found.holding)} of {total} facts hold in all their wordings; "
        f"{found.controls_unchanged} of {found.controls} other answers are unchanged."
    )
    lost = "".join(f"<li>{escape(fact.x)} should be <b>{escape(fact.target)}</b></li>" for fact in found.lost)
    kind = "error" if found.lost else "success"
    return message(text, kind) + (f"<ul>{lost}</ul>" if lost else "")
