"""Peak memory of commands on very large inputs.

python tools/large_inputs.py edit --lines 20000
python tools/large_inputs.py revise --lines 1000000
python tools/large_inputs.py evaluate --lines 1000000

Each command runs twice, with a tenth of the lines and with all of them. Memory is flat if the two peaks are similar.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from samples import fact_checker, texts  # pyright: ignore[reportMissingImports] (in tests)
from transformers.utils import logging

from factpatch import load_model, world
from factpatch.data.revisions import Provenance, Revision


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["edit", "revise", "evaluate"])
    parser.add_argument("--lines", type=int, default=1_000_000)
    options = parser.parse_args()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
        model = fact_checker(Path(folder) / "model", **small)
        for lines in (options.lines // 10, options.lines):
            data, output = Path(folder) / f"{lines}.jsonl", Path(folder) / f"out-{lines}"
            with data.open("w") as file:
                file.writelines(globals()[f"{options.command}_lines"](model, lines))
            commands = {
                "edit": ["edit", "--model", "world", "--editor", "world", "--facts", data, "--skip-bad"],
                "revise": ["revise", "--model", model, "--data", data, "--output", output],
                "evaluate": ["evaluate", "--model", model, "--method", "finetune", "--data", data, "--output", output],
            }
            more = {"evaluate": ["--edits", 20, "--retain", 50]}.get(options.command, [])
            measure([*commands[options.command], *more, "--device", "cpu", "--json"], lines)


def edit_lines(model: Path, lines: int) -> Iterator[str]:
    """Facts of the embedded world with other answers of the same relation."""
    rng = random.Random(0)
    answers: dict[str, list[str]] = {}
    for fact in world.facts():
        answers.setdefault(fact.relation, []).append(fact.answer)
    for _ in range(lines):
        fact = rng.choice(world.facts())
        yield json.dumps({"input": rng.choice(fact.questions), "target": rng.choice(answers[fact.relation])}) + "\n"


def revise_lines(model: Path, lines: int) -> Iterator[str]:
    for number, text in zip(range(lines), itertools.cycle(texts(1000)), strict=False):
        yield json.dumps({"id": str(number), "input": text, "output": "SUPPORTS"}) + "\n"


def evaluate_lines(model: Path, lines: int) -> Iterator[str]:
    loaded = load_model(model, "cpu")
    yield Provenance(loaded.identity, "random texts", {}).to_json() + "\n"
    known = texts(1000)
    predicted = dict(zip(known, loaded.predict(known), strict=True))
    for number, text in zip(range(lines), itertools.cycle(known), strict=False):
        other = next(label for label in ("REFUTES", "SUPPORTS") if label != predicted[text])
        revision = Revision(str(number), text, predicted[text], (other,), (f"the {text}",), (), (other,))
        yield revision.to_json() + "\n"


def measure(command: list[object], lines: int) -> None:
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "factpatch", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    out, _ = process.communicate()
    found = json.loads(out) if process.returncode == 0 else {}
    result = {key: value for key, value in found.items() if isinstance(value, int | float)}
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6  # of the largest process so far
    about = {"lines": lines, "exit": process.returncode, "peak_mb": round(peak), "seconds": time.monotonic() - start}
    print(json.dumps({**result, **about}), flush=True)


if __name__ == "__main__":
    main()
