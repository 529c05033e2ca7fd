"""Files that clients can download: patches, adapters and the ledger."""

from __future__ import annotations

import io
import zipfile
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from factpatch.evaluation.patches import measure_patches
from factpatch.export import Adapter
from factpatch.ledger import Ledger
from factpatch.models import TaskModel
from factpatch.patch import Patch
from factpatch.sharing import copy_ledger


def patch_file(patch: Patch) -> bytes:
    """Returns a patch as the content of a .safetensors file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "patch.safetensors"
        patch.save(path)
        return path.read_bytes()


def adapter_file(patch: Patch, model: TaskModel, rank: int | None = None) -> bytes:
    """Returns a patch as a zipped PEFT adapter folder, whose README.md says what a lower rank costs.

    By default the adapter is exact, unless servers accept no adapter of its rank: then it is truncated.
    """
    adapter = Adapter.of(patch.deltas, rank, truncate=True)
    packed = io.BytesIO()
    with TemporaryDirectory() as folder, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        adapter.save(Path(folder) / "adapter", model.model)
        (Path(folder) / "adapter" / "README.md").write_text(_about(adapter, patch, model), encoding="utf-8")
        for path in sorted((Path(folder) / "adapter").rglob("*")):
            archive.write(path, path.relative_to(folder))
    return packed.getvalue()


def _about(adapter: Adapter, patch: Patch, model: TaskModel) -> str:
    count = f"{len(patch.edits)} fact{'s' * (len(patch.edits) != 1)}"
    text = f"# {count} as a LoRA adapter\n\nPEFT, vLLM and llama.cpp load it beside the unedited model. "
    text += f"Its rank is {adapter.rank}.\n\n"
    if adapter.kept == 1:
        return text + "It changes the weights exactly as the merged patch does.\n"
    measured = [patch, replace(patch, deltas=adapter.deltas)]
    before, after = (found["success"] or 0.0 for found in measure_patches(model, measured, {}, ()))
    return text + (
        "The merged patch has a higher rank, so its change was truncated: "
        f"{adapter.kept:.2%} of the squared norm is left. "
        f"{before:.1%} of the facts hold with the patch, {after:.1%} with this adapter. "
        "If these are too few, remove facts, or let factpatch serve the model.\n"
    )


def ledger_file(ledger: Ledger) -> bytes:
    """Returns a consistent copy of the ledger's file, even while other processes write to it."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "facts.db"
        copy_ledger(ledger.store.path, path)
        return path.read_bytes()
