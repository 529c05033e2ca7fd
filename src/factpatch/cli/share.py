"""The command `factpatch share`: write a folder for the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factpatch.cli import common
from factpatch.cli.common import Device, Json, Model, Seed, Template, escape
from factpatch.cli.export import control_inputs
from factpatch.cli.others import MAX_OTHERS, ComparedInputs, MaxOthers, read_wordings
from factpatch.errors import InputError, MismatchError
from factpatch.facts import normalize

if TYPE_CHECKING:
    from factpatch.editors import TrainableEditor
    from factpatch.models import TaskModel
    from factpatch.patch import Patch

SQLITE = b"SQLite format 3\x00"  # first bytes of a ledger


def share(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help='A patch file, a ledger, the folder of an editor, or "world".')
    ],
    model: Model,
    name: Annotated[str, typer.Option(metavar="OWNER/NAME", help="Name on the hub.")],
    output: Annotated[Path, typer.Option(help="A new folder to write.")],
    base: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="The model's name on the hub, if --model is a folder.")
    ] = None,
    data: Annotated[str, typer.Option(help="A sentence for the model card about the data that was used.")] = "",
    evaluation: Annotated[
        Path | None, typer.Option(help="For an editor: output folder of factpatch evaluate, for the card's metrics.")
    ] = None,
    others: ComparedInputs = None,
    max_others: MaxOthers = MAX_OTHERS,
    template: Template = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Write an editor, a patch or a ledger as a folder for the Hugging Face hub, with a model card.

    Nothing is uploaded. For a patch or a ledger, this command measures the
    metrics on the card. A ledger is shared with its history, which includes
    removed facts and notes.

    Example: factpatch share gitega.safetensors --model world --name ada/gitega --output runs/shared
    """
    common.refuse_used_folder(output, "--output")
    for option, given in (("--name", name), ("--base", base)):
        if given is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", given):
            raise typer.BadParameter(f"expected OWNER/NAME, found {given!r}", param_hint=option)
    if base is None and model != "world" and Path(model).expanduser().exists():
        raise InputError(f"{model} is a folder on this machine; give the model's name on the hub with --base")
    with common.working("sharing"):
        from factpatch import sharing

        task_model = common.load(model, device, seed, template)
        about = {"name": name, "model": base or model, "fingerprint": task_model.fingerprint}
        if source == "world" or Path(source).is_dir():
            editor, content = _editor(source, task_model, data, evaluation)
            sharing.share(editor, sharing.Card(kind="editor", **about, **content), output)
        else:
            patch, paraphrases, is_ledger = _patch(Path(source), task_model)
            known, texts = read_wordings(others, model)
            sample = control_inputs(patch, texts, max_others)
            content = _measured(task_model, patch, {**known, **paraphrases}, sample, data)
            card = sharing.Card(kind="ledger" if is_ledger else "patch", **about, **content)
            sharing.share(Path(source) if is_ledger else patch, card, output)
    if as_json:
        common.print_json({"output": str(output), "name": name, **content["figures"]})
        return
    common.stdout.print(f"Wrote {escape(str(output))}. Read its README.md, then upload it:")
    common.stdout.print(f"hf upload {name} {escape(str(output))}", soft_wrap=True)


def _editor(
    source: str, model: TaskModel, data: str, evaluation: Path | None
) -> tuple[TrainableEditor, dict[str, Any]]:
    """Loads an editor, and returns it with what its card says about data and figures."""
    from factpatch.editors import load_editor

    editor = load_editor(source)
    editor.check_fits(model)
    if evaluation is None:
        return editor, {"data": data or "not stated.", "figures": {}}
    from factpatch.evaluation.summary import Summary

    summary = Summary.read(evaluation)
    if summary.conditions.editor_hash != editor.describe(model)["editor_hash"]:
        raise MismatchError(f"{evaluation} evaluates another editor; run factpatch evaluate with this one")
    result = summary.result
    measured = f"Figures: {result.edits:,} edits, {result.retain_inputs:,} other inputs each."
    return editor, {"data": f"{data} {measured}".strip(), "figures": result.metrics}


def _patch(source: Path, model: TaskModel) -> tuple[Patch, dict[str, tuple[str, ...]], bool]:
    """Returns the patch of a patch file or a ledger, the paraphrases of its edits, and whether it is a ledger."""
    from factpatch.ledger import Ledger
    from factpatch.patch import Patch

    if _is_ledger(source):
        with Ledger(source, model) as ledger:
            return ledger.patch(), {normalize(f.x): f.paraphrases for f in ledger.facts() if f.paraphrases}, True
    patch = Patch.load(source)
    patch.check_fits(model)
    return patch, {}, False


def _is_ledger(source: Path) -> bool:
    if not source.is_file():
        return False
    with source.open("rb") as file:
        return file.read(len(SQLITE)) == SQLITE


def _measured(
    model: TaskModel, patch: Patch, paraphrases: dict[str, Any], others: list[str], data: str
) -> dict[str, Any]:
    from factpatch.evaluation.patches import measure_patches

    (figures,) = measure_patches(model, [patch], paraphrases, others)
    facts = common.counted(len(patch.edits), "fact")
    measured = f"{facts}. Figures: these facts, {common.counted(len(others), 'other input')}."
    return {"data": f"{data} {measured}".strip(), "figures": figures, "facts": patch.edits}
