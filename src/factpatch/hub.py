"""Editors and patches on the Hugging Face hub, under names such as hub:ada/facts.

The prefix is required: without it, a mistyped path such as runs/editor would be looked up on the hub.
"""

import re
from pathlib import Path

from factpatch.errors import FileError, reason

PREFIX = "hub:"
PATCH = "patch.safetensors"  # name of the file in a shared patch's folder
EDITOR = ("config.json", "editor.safetensors")


def locate(name: str | Path, *files: str) -> Path:
    """Returns a local path unchanged. For a name on the hub, downloads these files and returns their local folder."""
    if str(name).startswith(PREFIX):
        return _download(str(name), files)
    path = Path(name)
    if re.fullmatch(r"[\w.-]+/[\w-]+", str(name)) and not path.parent.exists():
        raise FileError(f"there is no file or folder {name}; for a name on the hub, write {PREFIX}{name}")
    return path


def _download(name: str, files: tuple[str, ...]) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repository, _, revision = name.removeprefix(PREFIX).partition("@")
    if revision and not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", revision):
        raise FileError(f"{name} names no revision on the hub; write {PREFIX}OWNER/NAME@REVISION")
    try:
        paths = [Path(hf_hub_download(repository, file, revision=revision or None)) for file in files]
    except HFValidationError:
        raise FileError(f"{name} is not a name on the hub; write {PREFIX}OWNER/NAME") from None
    except LocalEntryNotFoundError as error:
        raise FileError(f"{name} was never downloaded, and the hub cannot be reached; go online and retry") from error
    except (HfHubHTTPError, OSError) as error:
        raise FileError(f"cannot download {', '.join(files)} of {name}: {reason(error)}") from error
    return paths[0].parent
