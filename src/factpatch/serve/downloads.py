"""Files that clients can download: patches, adapters and the ledger."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from factpatch.ledger import Ledger
from factpatch.models import TaskModel
from factpatch.patch import Patch
from factpatch.sharing import copy_ledger


def patch_file(patch: Patch) -> bytes:
    """A patch as the content of a .safetensors file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "patch.safetensors"
        patch.save(path)
        return path.read_bytes()


def adapter_file(patch: Patch, model: TaskModel) -> bytes:
    """A patch as a zipped PEFT adapter folder."""
    packed = io.BytesIO()
    with TemporaryDirectory() as folder, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        patch.export_peft(Path(folder) / "adapter", model=model)
        for path in sorted((Path(folder) / "adapter").rglob("*")):
            archive.write(path, path.relative_to(folder))
    return packed.getvalue()


def ledger_file(ledger: Ledger) -> bytes:
    """A consistent copy of the ledger's file, also while other processes write to it."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "facts.db"
        copy_ledger(ledger.store.path, path)
        return path.read_bytes()
