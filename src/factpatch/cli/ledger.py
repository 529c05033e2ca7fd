"""The commands `factpatch ledger`: record facts over time and merge them into one patch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from factpatch.cli import common
from factpatch.cli.common import Device, Json, Model, Seed, SkipBad, Template, escape
from factpatch.cli.edit import Facts, Input, Target, check_asked
from factpatch.cli.evaluate_options import MethodOptions
from factpatch.cli.export import Rank, export_adapter, show_export
from factpatch.cli.merge import MAX_OTHERS as MAX_OTHERS_TO_MERGE
from factpatch.cli.merge import CovarianceFile, Mode, Refine, Ridge, find_covariance
from factpatch.cli.methods import Editor, Method, ProtectedInputs, check_method, fit_method, load_method
from factpatch.cli.others import MAX_OTHERS, ComparedInputs, MaxOthers, Others, read_others, read_wordings
from factpatch.errors import FileError, InputError
from factpatch.facts import FactEdit, normalize, read_edits

if TYPE_CHECKING:
    from factpatch.ledger import Ledger
    from factpatch.ledger_store import Fact
    from factpatch.models import TaskModel
    from factpatch.patch import Patch

app = typer.Typer(help="Record facts over time and merge them into one patch.", no_args_is_help=True)

LedgerFile = Annotated[Path, typer.Option("--ledger", help="Ledger file.")]
FactId = Annotated[
    int,
    # SQLite has no larger numbers.
    typer.Argument(max=2**63 - 1, metavar="ID", help="The number of a fact, as factpatch ledger list shows it."),
]


@app.command()
def init(
    ledger: LedgerFile,
    model: Model,
    others: Others = None,
    max_others: MaxOthers = MAX_OTHERS_TO_MERGE,
    covariance: CovarianceFile = None,
    ridge: Ridge = None,
    mode: Mode = "unedited",
    refine: Refine = 0,
    template: Template = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Create an empty ledger for a model.

    Example: factpatch ledger init --ledger facts.db --model world
    """
    if ledger.exists():
        raise FileError(f"{ledger} exists already; name a new file")
    with common.working("creating"):
        from factpatch.ledger import Ledger

        task_model = common.load(model, device, seed, template)
        usual = find_covariance(task_model, covariance, others, model, max_others)
        texts = read_others(others, model, max_others) if refine else None
        Ledger(ledger, task_model, texts, covariance=usual, ridge=ridge, mode=mode, refine=refine).close()
    if as_json:
        common.print_json({"ledger": str(ledger), "model": model, "others": usual.count})
    else:
        common.stdout.print(f"Created {escape(str(ledger))} for {escape(model)}.")


@app.command()
def add(
    ledger: LedgerFile,
    model: Model,
    editor: Editor = None,
    method: Method = None,
    setting: MethodOptions = None,
    input: Input = None,
    target: Target = None,
    paraphrase: Annotated[
        list[str] | None, typer.Option(help="Another wording of --input, checked by verify. May be repeated.")
    ] = None,
    facts: Facts = None,
    note: Annotated[str, typer.Option(help="A remark to keep with the facts, such as their source.")] = "",
    others: ProtectedInputs = None,
    max_others: MaxOthers = MAX_OTHERS,
    skip_bad: SkipBad = False,
    template: Template = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Make a patch for each fact, check it, and record all facts. If one fails, none is recorded.

    A warning says if facts do not hold in the merged patch, where they disturb each other.

    Example: factpatch ledger add --ledger facts.db --model world --editor world --facts facts.jsonl
    """
    check_asked(input, target, facts)
    options = check_method(editor, method, setting)
    if facts and paraphrase:
        raise typer.BadParameter("--paraphrase belongs to --input; leave it out with --facts")
    edits, bad = read_edits(facts, skip_bad) if facts else ([FactEdit(str(input), str(target))], 0)
    if bad:
        common.warn(f"{bad:,} bad lines of {facts} were skipped")
    with common.working("adding"):
        from factpatch.ledger import Ledger

        task_model = common.load(model, device, seed, template)
        with Ledger(ledger, task_model) as opened:
            chosen = load_method(task_model, editor, method, options, sure=False)  # small patches merge better
            chosen = fit_method(chosen, task_model, others, max_others)
            added = opened.add(chosen, edits, {str(input): paraphrase or []}, note)
            lost = [verdict.fact.id for verdict in opened.verify(facts=added).verdicts if not verdict.holds]
    _print_facts(added, as_json, lost_facts=lost)
    if lost:
        common.warn(
            f"In the merged patch, {len(lost)} of {common.counted(len(added), 'new fact')} did not hold, although "
            "each one's own patch works. Use a scope, or make a ledger with --mode sequence or --refine."
        )


@app.command()
def remove(ledger: LedgerFile, fact: FactId, device: Device = None, seed: Seed = 0, as_json: Json = False) -> None:
    """Remove a fact. Its history stays, but the merged patch is as if it had never been added.

    Example: factpatch ledger remove --ledger facts.db 3
    """
    with _opened(ledger, device) as opened:
        opened.remove(fact)
        _print_facts([opened.fact(fact)], as_json)


@app.command("list")
def list_facts(
    ledger: LedgerFile,
    status: Annotated[
        Literal["active", "removed", "replaced", "all"],
        typer.Option("--status", metavar="STATUS", help="Facts to list: active, removed, replaced or all."),
    ] = "active",
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """List the facts.

    Example: factpatch ledger list --ledger facts.db
    """
    with _opened(ledger, device) as opened:
        _print_facts(opened.facts(None if status == "all" else status), as_json)


@app.command()
def show(ledger: LedgerFile, fact: FactId, device: Device = None, seed: Seed = 0, as_json: Json = False) -> None:
    """Show everything that is recorded about a fact.

    Example: factpatch ledger show --ledger facts.db 3
    """
    with _opened(ledger, device) as opened:
        recorded, history = asdict(opened.fact(fact)), opened.history(fact)
    if as_json:
        common.print_json({**recorded, "history": [asdict(event) for event in history]})
        return
    for key, value in recorded.items():
        text = ", ".join(value) if isinstance(value, tuple) else str(value)
        common.stdout.print(f"{key}: {escape(text)}")
    for event in history:
        common.stdout.print(f"  {event.time}  {escape(event.event)}")


@app.command()
def verify(
    ledger: LedgerFile,
    model: Model,
    others: Others = None,
    max_others: MaxOthers = MAX_OTHERS,
    template: Template = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Check that every fact holds in the merged model, and count the other answers that are unchanged.

    A fact holds if its input and paraphrases get its target. Exits with 1 if a fact does not hold.

    Example: factpatch ledger verify --ledger facts.db --model world
    """
    with common.working("verifying"):
        from factpatch.ledger import Ledger

        task_model = common.load(model, device, seed, template)
        with Ledger(ledger, task_model) as opened:
            edited = {fact.x for fact in opened.facts()}
            texts = read_others(others, model, max_others) if others or model == "world" else []
            checked = opened.verify([text for text in texts if text not in edited])
    lost = [verdict for verdict in checked.verdicts if not verdict.holds]
    counts = {"facts": len(checked.verdicts), "lost": len(lost)}
    counts |= {"others": checked.others, "others_unchanged": checked.others_unchanged}
    if as_json:
        common.print_json({**counts, "lost_facts": [verdict.fact.id for verdict in lost]})
    else:
        for verdict in lost:
            answers = "; ".join([verdict.answer, *verdict.paraphrase_answers])
            fact = verdict.fact
            common.stdout.print(
                f"[red]does not hold:[/] {fact.id} {escape(fact.x)}: {escape(answers)}, not {escape(fact.target)}"
            )
        common.stdout.print(f"{counts['facts'] - len(lost)} of {counts['facts']} facts hold.")
        common.stdout.print(f"{checked.others_unchanged} of {checked.others} other answers are unchanged.")
    if lost:
        raise typer.Exit(1)


@app.command()
def export(
    ledger: LedgerFile,
    model: Model,
    output: Annotated[Path, typer.Option(help="The file to write the merged patch to, or with --peft a new folder.")],
    peft: Annotated[
        bool, typer.Option("--peft", help="Write a LoRA adapter instead, which PEFT, vLLM and llama.cpp can load.")
    ] = False,
    rank: Rank = None,
    others: ComparedInputs = None,
    max_others: MaxOthers = MAX_OTHERS,
    template: Template = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Write the merged patch of all active facts to a file, or as a LoRA adapter to a folder.

    Example: factpatch ledger export --ledger facts.db --model world --output merged.safetensors
    """
    if not peft and (rank is not None or others):
        raise typer.BadParameter("--rank and --others belong to --peft; add it, or leave them out")
    if peft:
        common.refuse_used_folder(output, "--output")
    else:
        common.refuse_existing_file(output, "--output")
    with common.working("exporting"):
        task_model = common.load(model, device, seed, template)
        patch, facts = _merged(ledger, task_model)
        exported = None
        if peft:
            known, texts = read_wordings(others, model)
            paraphrases = {**known, **{normalize(fact.x): fact.paraphrases for fact in facts if fact.paraphrases}}
            exported = export_adapter(patch, task_model, output, rank, paraphrases, texts, max_others)
        else:
            patch.save(output)
    if exported:
        show_export(exported, as_json)
    else:
        _show_written(output, patch, as_json)


@app.command()
def apply(
    ledger: LedgerFile,
    model: Model,
    output: Annotated[Path, typer.Option(help="A new folder for the patched model.")],
    template: Template = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Write the model with all active facts as an ordinary Hugging Face folder.

    Example: factpatch ledger apply --ledger facts.db --model world --output runs/patched
    """
    common.refuse_used_folder(output, "--output")
    with common.working("merging"):
        task_model = common.load(model, device, seed, template)
        patch, _ = _merged(ledger, task_model)
        patch.apply(task_model)
        task_model.save(output)
    _show_written(output, patch, as_json)


def _opened(ledger: Path, device: str | None) -> Ledger:
    """Opens a ledger without its model. The device is not used, but a wrong one is refused as in other commands."""
    from factpatch.device import find_device
    from factpatch.ledger import Ledger

    find_device(device)
    return Ledger(ledger)


def _merged(ledger: Path, model: TaskModel) -> tuple[Patch, list[Fact]]:
    """Returns the merged patch of the active facts, and the facts."""
    from factpatch.ledger import Ledger

    with Ledger(ledger, model) as opened:
        facts = opened.facts()
        if not facts:
            raise InputError(f"{ledger} has no active facts; add some with factpatch ledger add")
        return opened.patch(), facts


def _show_written(output: Path, patch: Patch, as_json: bool) -> None:
    if as_json:
        common.print_json({"output": str(output), "facts": len(patch.edits), "bytes": patch.nbytes})
    else:
        common.stdout.print(f"Wrote {escape(str(output))}: {common.counted(len(patch.edits), 'fact')}.")


def _print_facts(facts: list[Fact], as_json: bool, **counts: object) -> None:
    if as_json:
        keys = ("id", "x", "before", "target", "status", "added", "note")
        common.print_json({"facts": [{key: getattr(fact, key) for key in keys} for fact in facts], **counts})
        return
    table = Table("id", "input", "before", "target", "status", "added")
    for fact in facts:
        table.add_row(str(fact.id), escape(fact.x), escape(fact.before), escape(fact.target), fact.status, fact.added)
    common.stdout.print(table)
