"""The plan of the house: who may import whom, and what importing costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "factpatch"

# Rooms from the ground floor up. A module imports from its own room and from rooms below.
FLOORS = [
    {"errors"},
    {"kernels"},
    {"files", "fingerprints", "device", "processes", "backends", "grouping", "world", "jsonl", "hub"},
    {"facts", "resumable"},
    {"deltas"},
    {"export"},
    {"patch", "constraints"},
    {"engine"},
    {"models"},
    {"data"},
    {"covariance"},
    {"solving"},
    {"editors"},
    {"scope"},
    {"merging"},
    {"protecting"},
    {"refining"},
    {"ledger_store"},
    {"ledger_sums"},
    {"ledger_settings"},
    {"ledger"},
    {"metrics"},
    {"evaluation"},
    {"sharing"},
    {"training"},
    {"report"},
    {"bench", "demo"},
    {"serve"},
    {"cli"},
    {"__main__"},
]


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imported_rooms(path: Path) -> set[str]:
    """Rooms of factpatch that a file imports anywhere, also inside functions."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "factpatch":
            modules = [f"factpatch.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            continue
        rooms |= {room(module) for module in modules if module.startswith("factpatch.")}
    return rooms - {"__version__"}


def test_imports_go_down_only() -> None:
    floor = {name: height for height, names in enumerate(FLOORS) for name in names}
    for path in SOURCE.rglob("*.py"):
        here = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if here == "__init__":
            continue
        assert here in floor, f"{here} has no place in the plan"
        for there in imported_rooms(path) - {here}:
            assert floor[there] < floor[here], f"{path.name} in {here} imports {there}, which is not below it"


def test_importing_does_not_wait_for_torch() -> None:
    """The package, the command line and its help come up without the heavy libraries."""
    code = "import sys, factpatch, factpatch.cli; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_the_public_names_are_there() -> None:
    import factpatch

    assert all(getattr(factpatch, name) is not None for name in dir(factpatch))
    assert not hasattr(factpatch, "nothing")
