"""Check that a path is a model folder; otherwise say what it is and what to do."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import ConfigFileError

__all__ = ["check_model_folder"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NOT_GGUF = "GGUF is not read here: get the model as EXL2, GPTQ or float safetensors, in a folder with its config.json"


def check_model_folder(given: str | os.PathLike[str]) -> Path:
    """Return `given` as a path if it is a folder with a config.json.

    Nothing is downloaded; the message for the name of a model on the Hugging Face hub has the command that downloads
    it.

    Raises:
        ConfigFileError: the path is something else; the message says what.
    """
    folder = Path(given)
    try:
        problem = _problem(folder, os.fspath(given))
    except (OSError, ValueError) as e:  # the name is too long or has a null character, or access is denied
        reason = e.strerror if isinstance(e, OSError) else e
        raise ConfigFileError(f"Can't read the model folder {str(folder)!r:.200}: {reason}") from e
    if problem is not None:
        raise ConfigFileError(problem)
    return folder


def _problem(folder: Path, given: str) -> str | None:
    if (folder / "config.json").exists():
        return None
    if folder.is_dir():
        return f"Can't find {folder / 'config.json'}: {_without_config(folder)}"
    if folder.exists():
        return f"{str(folder)!r} is a file, not a model folder: {_of_file(folder)}"
    return f"Can't find model directory: {folder}{_of_name(given)}"


def _of_file(file: Path) -> str:
    if file.suffix.lower() == ".gguf":
        return _NOT_GGUF
    around = str(file.parent.resolve())  # of a bare name the parent is ".", which tells nobody where to look
    if (file.parent / "config.json").exists():
        return f"give the folder that holds it, {around!r}"
    return f"give the folder that holds the weights, the tokenizer and config.json; {around!r} holds no config.json"


def _of_name(name: str) -> str:
    """Return the remedy for a path that does not exist."""
    if name.lower().endswith(".gguf"):
        return f"; {_NOT_GGUF}"
    if _HUB_NAME.fullmatch(name) is None or Path(name).parent.exists():
        return ""
    target = name.partition("/")[2]
    return (
        f"; if it is a model on the Hugging Face hub, download it first, since nothing is downloaded here: "
        f"hf download {name} --local-dir {target}, then name the folder {target}"
    )


def _without_config(folder: Path) -> str:
    """Describe a folder without config.json."""
    names = sorted(os.listdir(folder))
    inner = sorted(file.parent for pattern in ("*", "snapshots/*") for file in folder.glob(f"{pattern}/config.json"))
    gguf = [name for name in names if name.lower().endswith(".gguf")]
    if gguf:
        return f"the folder holds {gguf[0]}, and {_NOT_GGUF}"
    if inner:
        return f"the folder is no model folder, but {inner[0]} is one"
    if any(name.endswith((".safetensors", ".bin")) for name in names):
        return "the folder holds weights without their config.json: download the model again, with all its files"
    return "the folder holds no model" + ("" if names else ", it is empty")
