"""Names that exl_core may not have yet, and what third parties need before they are imported."""

from __future__ import annotations

import importlib.util
from typing import Any, NoReturn

import exl_core
from exl_filters.compat import restore_pydantic_names
from exl_kernels.errors import UnsupportedError

__all__ = ["core_name", "prepare_third_parties"]


class _NotBuilt(type):
    """Class of the stand-ins: `isinstance` is False, any use raises `UnsupportedError`."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{cls.__name__} is not built in this version")

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):  # what inspection asks for
            raise AttributeError(name)
        raise UnsupportedError(f"{cls.__name__}.{name} is not built in this version")


def core_name(name: str) -> Any:
    """exl_core's class of this name, or a stand-in, so that scripts which only import it still run."""
    found = getattr(exl_core, name, None)
    return _NotBuilt(name, (), {"__doc__": "Not built in this version."}) if found is None else found


def prepare_third_parties() -> None:
    """formatron imports names from pydantic that newer versions have dropped; it imports exllamav2 or is imported
    after it."""
    if importlib.util.find_spec("formatron") is not None:
        restore_pydantic_names()
