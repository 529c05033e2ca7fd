"""The tools of `make results`, and a toy experiment whose commands only write what they were asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from factpatch.errors import FileError

ROOT = Path(__file__).parent.parent
TOOLS = ROOT / "tools"


def load_tools(*names: str) -> list[Any]:
    """Imports tools, which are scripts and no package, also if the tests have a module of the same name."""
    ours = {name: sys.modules.pop(name, None) for name in names}
    sys.path.insert(0, str(TOOLS))
    try:
        return [import_module(name) for name in names]
    finally:
        sys.path.remove(str(TOOLS))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update({name: module for name, module in ours.items() if module is not None})


experiment, result_pages, results = load_tools("experiment", "result_pages", "results")

TOY = """
[variables]
measure = "evaluate --model $model --data $data/dev.jsonl --output $out"

[[steps]]
name = "model"
run = "fit --model $models/base --train $data/train.jsonl --output $out"

[[steps]]
name = "tune"
each = { floor = ["1e-3", "1e-4"] }
run = "train --model $model --train $data/train.jsonl --output $out --set margin_floor=$floor"

[[steps]]
name = "editor"
each = { seed = [0, 1, 2] }
best = "tune"
run = "train --model $model --train $data/train.jsonl --output $out --set margin_floor=$floor --seed $seed"

[[steps]]
name = "dev-editor"
each = { seed = [0, 1, 2] }
run = "$measure --editor $editor"

[[steps]]
name = "dev-finetune"
run = "$measure --method finetune"

[[steps]]
name = "report"
run = "report ${dev-editor} ${dev-finetune} --output $out"

[[tables]]
name = "toy"
columns = ["success", "retain"]
rows = [
    { label = "Editor", step = "dev-editor", paper = [98.8, 98.14] },
    { label = "Fine-tune", step = "dev-finetune", paper = [100, 86.95] },
]
"""
PAGE = """# Toy

<!-- table toy -->
<!-- end -->

Prose stays, with `<!-- table toy -->` in it.

<!-- commands toy -->
<!-- end -->

<!-- settings toy -->
<!-- end -->
"""
SUMMARY = {"fingerprint": "f", "precision": "float32", "products": "highest", "revisions": "r", "model_kind": "bert"}


class Bench:
    """A folder with a toy experiment, and commands that only write what they were asked."""

    def __init__(self, folder: Path, toml: str = TOY):
        self.folder = folder
        self.commands: list[list[str]] = []
        self.failing: str | None = None  # commands with this word fail
        self.summary = dict(SUMMARY)
        for name, text in {"data/train.jsonl": "1", "data/dev.jsonl": "2", "models/base/weights": "3"}.items():
            self.write(name, text)
        self.write("experiments/toy.toml", toml)
        self.write("docs/results/toy.md", PAGE)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def call(self, words: Sequence[str], log: Path) -> str:
        self.commands.append(list(words))
        output = Path(words[words.index("--output") + 1])
        (output / "checkpoint").mkdir(parents=True, exist_ok=True)
        if self.failing in words:
            raise FileError("out of memory")
        (output / "checkpoint").rmdir()
        seed = int(words[words.index("--seed") + 1]) if "--seed" in words else 0
        (output / "content").write_text(f"{words[0]} {seed}", encoding="utf-8")
        if words[0] == "evaluate":
            seed = int(output.name[-1]) if output.name[-1].isdigit() else 0
            (output / "summary.json").write_text(json.dumps({**self.summary, "model": words[2]}), encoding="utf-8")
        success = 0.9 + seed / 100 + (0.05 if "margin_floor=1e-4" in words else 0)
        intervals = {"success": [0.8, 1.0], "retain": [0.9, 1.0]}
        sizes = {"edits": 10, "retain_inputs": 20, "seconds": 120.0}
        return json.dumps({"success": success, "retain": 0.95, "intervals": intervals, **sizes}) + "\n"

    def run(self, *options: str) -> int:
        self.commands.clear()
        places = {"data": "data", "models": "models", "work": "runs", "experiments": "experiments", "docs": "docs"}
        folders = [word for name, path in places.items() for word in (f"--{name}", str(self.folder / path))]
        return results.main([*folders, *options], self.call)

    @property
    def outputs(self) -> list[str]:
        """The names of what the last run wrote, in order."""
        return [Path(words[words.index("--output") + 1]).name for words in self.commands]

    @property
    def page(self) -> str:
        return (self.folder / "docs/results/toy.md").read_text(encoding="utf-8")

    def record(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / f"docs/results/runs/toy/{name}.json").read_text(encoding="utf-8"))
