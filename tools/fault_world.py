"""A tiny build of the embedded world for tools/faults.py: few facts, a small model, few steps."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import make_world
import world_data
import world_model

from factpatch import world

SOURCE = world.FOLDER
CHANGES, FACTS = 6, 60  # the first changes, with their facts and with others of the same relations
PLACES = ("MODEL", "EDITOR", "MERGED", "SCOPE", "REVISIONS")
SMALL = {
    make_world: {"CONTROLS": 10, "MERGE_SAMPLE": 20, "REFINE_STEPS": 2},
    world_data: {
        "TYPED": 1,
        "MADE_UP": 20,
        "VALID": 20,
        "NEW_SUBJECTS": 5,
        "EDITS_PER_FACT": {True: 1, False: 1},
        "PARAPHRASES": 2,
        "CHOOSING": 10,
    },
    world_model: {"VOCABULARY": 3000, "WIDTH": 16, "MADE_UP": 20, "TYPED": 1},
}
TRAIN = {"control_pool": 20, "edits": 4, "rows": 5, "validations": 1, "validation_edits": 4, "validation_inputs": 4}


def build(given: Path, out: Path, stage: str, run: Callable[[list[object]], object]) -> None:
    """Makes one stage of a tiny world in `out`, from the facts that `write_facts` has written to `given`.

    `run` runs factpatch's commands in this process.
    """
    world.FOLDER = make_world.FOLDER = given
    for name in PLACES:
        place = out / "world" / getattr(world, name).name
        setattr(world, name, place)
        setattr(make_world, name, place)
    for known in (world.facts, world.facts_by_topic, world.changes, world.changed, world.spare):
        known.cache_clear()
    for module, constants in SMALL.items():
        for name, value in constants.items():
            setattr(module, name, value)
    make_world.FIT = ["--lr", "2e-3", "--batch", "32", "--checkpoint-seconds", "0"]
    small = {**TRAIN, "checkpoint_seconds": 0, "editor.width": 16, "editor.bottleneck": 8, "editor.lstm": 8}
    make_world.TRAIN |= small
    make_world.TUNE |= small
    make_world.SCOPE_CONFIG = make_world.ScopeConfig(dimensions=8, paraphrases=2, held_out=20, steps=5)
    make_world.run = lambda command, *options, device: run([command, *options, "--device", device, "--seed", 0])
    steps = ["--fit-steps", "6", "--train-steps", "2", "--tune-steps", "2"]
    arguments = ["--work", str(out / "work"), *steps, "--stage", stage]
    with mock.patch.object(sys, "argv", ["make_world.py", *arguments]):
        make_world.main()
    (out / f".finished-{stage}").touch()


def unfinished(out: Path) -> list[str]:
    """Returns the stages that are still to be made: a killed build is repeated from the stage that was killed."""
    return [stage for stage in make_world.STAGES if not (out / f".finished-{stage}").exists()]


def write_facts(folder: Path) -> None:
    """Writes the facts and changes that the tiny world is made from."""
    folder.mkdir()
    changes = (SOURCE / "changes.jsonl").read_text(encoding="utf-8").splitlines()[:CHANGES]
    about = [(line["relation"], line["subject"]) for line in map(json.loads, changes)]
    alike: list[str] = []  # facts of the same relations, whose answers can replace each other
    for fact in (SOURCE / "facts.jsonl").read_text(encoding="utf-8").splitlines():
        found = json.loads(fact)
        if (found["relation"], found["subject"]) in about:
            alike.insert(0, fact)
        elif found["relation"] in dict(about):
            alike.append(fact)
    (folder / "changes.jsonl").write_text("\n".join(changes) + "\n", encoding="utf-8")
    (folder / "facts.jsonl").write_text("\n".join(alike[:FACTS]) + "\n", encoding="utf-8")
    shutil.copyfile(SOURCE / "relations.json", folder / "relations.json")
