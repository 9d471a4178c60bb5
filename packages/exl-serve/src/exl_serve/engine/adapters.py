"""The LoRA adapters of an engine, loaded at run time from folders that the operator allows."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exl_serve.config.model import ModelConfig
from exl_serve.errors import ServeError

__all__ = ["Adapters", "check_folder_name"]

OF_FILES = ("adapter", "format", "config", "config_file", "config_key", "config_type", "dtype", "shape")
"""Codes of errors whose cause is in an adapter's files."""
MAX_NAME, MAX_NAME_BYTES = 128, 255
"""Most characters and bytes of an adapter's name. File systems take no longer names of folders."""


def check_folder_name(param: str, name: str) -> str:
    """Return a name if it can be the name of a folder. Raises ServeError 400.

    A name that is a path would find folders outside of those that the operator allows, or one adapter under many names.
    """
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ServeError.invalid(f"{param} holds a lone surrogate, which has no UTF-8", param) from None
    if not name or len(name) > MAX_NAME or size > MAX_NAME_BYTES:
        raise ServeError.invalid(
            f"{param} has {len(name)} characters and {size} bytes of UTF-8; it must have 1 to {MAX_NAME} characters "
            f"and at most {MAX_NAME_BYTES} bytes",
            param,
        )
    if name in (".", "..") or not {"/", "\\", "\0", ":"}.isdisjoint(name):
        raise ServeError.invalid(
            f"{param} is {name!r}; it must be the name of a folder in adapter_roots, not a path, without slashes, "
            "backslashes, colons and null characters",
            param,
        )
    return name


class Adapters:
    """Adapters by name. Those of the configuration are loaded at once."""

    def __init__(self, model: Any, config: ModelConfig) -> None:
        self._model = model
        self._roots = [Path(os.path.realpath(root)) for root in config.adapter_roots]
        self._loaded: dict[str, Any] = {}
        for name, folder in config.adapters.items():
            self._loaded[name] = self._read(name, Path(folder))
        #: factors by name
        self.scalings = dict.fromkeys(self._loaded, 1.0)

    def names(self) -> list[str]:
        """Return the names of the loaded adapters."""
        return list(self._loaded)

    def find(self, name: str | None) -> list[Any]:
        """Return the adapters of a request. Raises ServeError 404."""
        if name is None:
            return []
        if name not in self._loaded:
            raise ServeError(404, "not_found_error", "model_not_found", f"no adapter {name!r} is loaded", param="model")
        return [self._loaded[name]]

    def load(self, name: str, path: str | None, used: int | None = None, *, scaling: float = 1.0) -> dict[str, Any]:
        """Load an adapter; without a path from the folder of its name in one of the allowed folders.

        `scaling`: factor of the adapter's own scaling. `used`: the requests that use one of this name, which the new
        one replaces; None: it may not replace any. Raises ServeError 403 outside the allowed folders, 404 for a missing
        one, 400 for one that is damaged or does not fit, 409 for a name or an adapter in use.
        """
        if not name or len(name) > MAX_NAME or ":" in name:
            raise ServeError.invalid(
                f"lora_name is {name[:MAX_NAME]!r}; 1 to {MAX_NAME} characters, none of them a colon", "lora_name"
            )
        if name in self._loaded and used is None:
            raise ServeError(
                409, "conflict", "conflict", f"an adapter {name!r} is loaded: unload it first, or set load_inplace"
            )
        if used:
            raise _in_use(name, used)
        place = self._named(name) if path is None else self._allowed(path, "lora_path")
        if not _has_adapter(place):
            raise ServeError(404, "not_found_error", "adapter_not_found", "there is no adapter in that folder")
        made, before = self._read(name, place, scaling), self._loaded.get(name)
        self._loaded[name], self.scalings[name] = made, scaling
        if before is not None:
            before.unload()
        return {"name": name}

    def unload_all(self, using: Callable[[str], int]) -> dict[str, Any]:
        """Unload all adapters, or none: raises ServeError 409 while requests use one. `using` counts these by name."""
        for name in self._loaded:
            if used := using(name):
                raise _in_use(name, used)
        names = self.names()
        for name in names:
            self.unload(name, 0)
        return {"names": names}

    def unload(self, name: str, used: int) -> dict[str, Any]:
        """Unload an adapter. Raises ServeError 404 and, while requests use it, 409."""
        if name not in self._loaded:
            raise ServeError(404, "not_found_error", "adapter_not_found", f"no adapter {name!r} is loaded")
        if used:
            raise _in_use(name, used)
        del self.scalings[name]
        self._loaded.pop(name).unload()
        return {"name": name}

    def _named(self, name: str) -> Path:
        """Return the folder of this name: the first that has an adapter. Raises ServeError 400, 403 or 404."""
        check_folder_name("loras", name)
        for root in self._roots:
            place = self._allowed(str(root / name), "loras")
            if _has_adapter(place):
                return place
        raise ServeError(
            404,
            "not_found_error",
            "adapter_not_found",
            f"no folder of adapter_roots in the server's configuration has an adapter {name!r}",
            param="loras",
        )

    def _allowed(self, path: str, param: str) -> Path:
        """Return the folder that a path leads to. Raises ServeError 403 outside of the allowed folders."""
        try:
            place = Path(os.path.realpath(path))
        except ValueError:  # a null character, or a lone surrogate
            raise ServeError.invalid(f"{param} holds a character that no path can hold", param) from None
        if not any(place.is_relative_to(root) for root in self._roots):
            raise ServeError(
                403,
                "permission_error",
                "adapter_root",
                f"{param} leads outside of the folders that adapter_roots in the server's configuration allows",
                param=param,
            )
        return place

    def _read(self, name: str, folder: Path, scaling: float = 1.0) -> Any:
        """Read an adapter. Raises ServeError 400 for files that are damaged, cannot be read or do not fit the model."""
        from exl_core import ExLlamaV2Lora

        try:
            return ExLlamaV2Lora.from_directory(self._model, str(folder), scaling)
        except OSError as error:
            reason = f"its files cannot be read: {error.strerror}"
        except Exception as error:
            if getattr(error, "code", None) not in OF_FILES:
                raise  # the engine's
            reason = str(error).replace(f"{folder}{os.sep}", "").replace(str(folder), folder.name)
        raise ServeError.invalid(f"the adapter {name!r} cannot be used: {reason}", code="adapter")


def _has_adapter(folder: Path) -> bool:
    """Whether a folder has an adapter that can be read."""
    try:
        return (folder / "adapter_config.json").is_file()
    except OSError:  # the path is too long, or the folder is closed to this process
        return False


def _in_use(name: str, used: int) -> ServeError:
    return ServeError(409, "conflict", "conflict", f"{used} requests use the adapter {name!r}: wait for them")
