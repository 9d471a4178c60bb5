"""The models that come with the package: Fable, a 10 M-parameter Llama as EXL2, and its 2.4 M-parameter draft sibling.

The folder bundled-model of the repository holds the scripts that trained them and the corpus; `fable-10m/README.md` is
the model card.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from exl_kernels.errors import ExlError

__all__ = ["default_model_dir", "draft_model_dir"]


def _folder(name: str) -> Path:
    folder = Path(str(files(__name__) / name))
    if not (folder / "config.json").is_file():
        raise ExlError(
            f"the bundled model {name} is not at {folder}: the package is incomplete (installed without its data, "
            "or imported from a zip archive). Reinstall exl-generate, or name a model folder of your own."
        )
    return folder


def default_model_dir() -> Path:
    """Return the folder of the bundled model (EXL2, 4.5 bits per weight, about 8 MB)."""
    return _folder("fable-10m")


def draft_model_dir() -> Path:
    """Return the folder of the bundled model's draft model (EXL2, 6 bits per weight, same tokenizer)."""
    return _folder("fable-2m-draft")
