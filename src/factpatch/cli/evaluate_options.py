"""Checks and parses the options of `factpatch evaluate` before anything is loaded; `factpatch edit` shares some."""

from __future__ import annotations

from typing import Annotated, Any, get_type_hints

import typer

from factpatch.errors import InputError

MethodOptions = Annotated[
    list[str] | None,
    typer.Option("--set", help="An option of --method: KEY=VALUE, such as lr=1e-4. May be repeated."),
]
SELECTABLE = ("finetune", "zhu")  # methods with settings that --select can choose


def check_options(
    method: str | None,
    editor: str | None,
    layers: str | None,
    bound: float | None,
    select: bool,
    valid: str | None,
    updates: int,
    ridge: float | None = None,
) -> None:
    """Refuses combinations of options that do not make sense."""
    _check_method(method, editor)
    if editor is not None and layers is not None:
        raise typer.BadParameter("a trained editor changes the layers it was trained for; leave --layers out")
    if editor is None and updates > 1:
        raise typer.BadParameter("--loop and --max-updates need a trained --editor")
    if method == "prompt" and ridge is not None:
        raise typer.BadParameter("--ridge converts updates of weights, and prompt makes none; leave it out")
    if method == "zhu" and (bound is None) != select:
        raise typer.BadParameter("zhu needs either --bound or --select")
    if method != "zhu" and bound is not None:
        raise typer.BadParameter("--bound is an option of the method zhu only; leave it out")
    if bound is not None and not 0 < bound <= 1e15:  # a float32 holds no more than 3e38
        raise typer.BadParameter(f"expected a bound above 0 and at most 1e15, found {bound}", param_hint="--bound")
    if layers == "block" and not select:
        raise typer.BadParameter("--layers block needs --select; add it, or name a block")
    if select and method not in SELECTABLE:
        raise typer.BadParameter(f"--select works with {' and '.join(SELECTABLE)} only")
    if select and method == "finetune" and layers != "block":
        raise typer.BadParameter("for finetune, --select chooses a block: add --layers block")
    if valid and not select:
        raise typer.BadParameter("--valid is only used by --select; add --select, or leave --valid out")


def check_joint_options(
    together: bool,
    merge: str,
    others: str | None,
    is_fitted: bool,
    ridge: float | None,
    scope: str | None,
    false_matches: float | None,
    mode: str,
    refine: int,
) -> None:
    """Refuses options that have no effect. If the method `is_fitted` to inputs, --others has one without --together."""
    if not together and (scope or (others and not is_fitted)):
        raise typer.BadParameter("--others and --scope are only used by --together; add it, or leave them out")
    if ridge is not None and merge == "own":
        raise typer.BadParameter("--merge own makes the method's own joint update, which has no ridge; leave one out")
    if false_matches is not None and not (together and merge == "scope"):
        raise typer.BadParameter("--false-matches is only used by --together with --merge scope; add these")
    if scope and merge != "scope":
        raise typer.BadParameter("--scope is only used by --merge scope; add it, or leave --scope out")
    if (refine or mode != "unedited") and not (together and merge == "solve"):
        raise typer.BadParameter(
            "--mode and --refine are only used by --together with --merge solve; add these, or leave them out"
        )


def _check_method(method: str | None, editor: str | None) -> None:
    if method is None:
        if editor is None:
            raise typer.BadParameter("give a trained --editor, or a --method that needs no training")
        return
    from factpatch.editors import find_method

    try:
        trainable = find_method(method).trainable
    except InputError as error:
        raise typer.BadParameter(str(error), param_hint="--method") from None
    if trainable and editor is None:
        raise typer.BadParameter(f"the method {method} is a trained editor; give its folder with --editor")
    if not trainable and editor is not None:
        raise typer.BadParameter(f"the method {method} needs no training; leave --editor out")


def needs_sample(method: str | None) -> bool:
    from factpatch.editors import find_method

    return method is not None and find_method(method).load_class().needs_sample


def parse_options(settings: list[str] | None, method: str | None, editor: str | None, select: bool) -> dict[str, Any]:
    """Parses the method's options from --set, with the types that the method declares."""
    if not settings:
        return {}
    if editor is not None or select:
        raise typer.BadParameter("--set gives options to a --method; leave out --editor and --select")
    from factpatch.editors import find_method
    from factpatch.training.settings import read_settings, typed

    problems: list[str] = []
    options = read_settings(settings, problems)
    kind = find_method(str(method)).load_class()
    known = {key: value for key, value in options.items() if key in get_type_hints(kind)}
    options |= typed(kind, known, problems, {})  # create_method refuses the others
    if problems:
        raise typer.BadParameter("; ".join(problems), param_hint="--set")
    return options


def parse_sizes(text: str | None) -> tuple[int, ...]:
    try:
        sizes = tuple(int(number) for number in text.split(",")) if text else ()
    except ValueError:
        sizes = (0,)
    if sizes and (min(sizes) < 1 or len(set(sizes)) < len(sizes)):
        raise typer.BadParameter(f"expected numbers such as 1,16,64, found {text!r}", param_hint="--together")
    return sizes
