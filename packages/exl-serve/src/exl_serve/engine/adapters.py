"""The LoRA adapters of an engine, loaded at run time from folders that the operator allows."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exl_serve.config.model import ModelConfig
from exl_serve.errors import ServeError

__all__ = ["Adapters"]


class Adapters:
    """Adapters by name. Those of the configuration are loaded at once."""

    def __init__(self, model: Any, config: ModelConfig) -> None:
        self._model = model
        self._roots = [Path(os.path.realpath(root)) for root in config.adapter_roots]
        self._loaded: dict[str, Any] = {}
        for name, folder in config.adapters.items():
            self._loaded[name] = self._read(Path(folder))
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
        one, 400 for one that does not fit, 409 for a name or an adapter in use.
        """
        if not name or len(name) > 128 or ":" in name:
            raise ServeError.invalid(
                f"lora_name is {name[:128]!r}; 1 to 128 characters, none of them a colon", "lora_name"
            )
        if name in self._loaded and used is None:
            raise ServeError(
                409, "conflict", "conflict", f"an adapter {name!r} is loaded: unload it first, or set load_inplace"
            )
        if used:
            raise _in_use(name, used)
        place = self._allowed(self._named(name) if path is None else path)
        if not (place / "adapter_config.json").is_file():
            raise ServeError(404, "not_found_error", "adapter_not_found", "there is no adapter in that folder")
        made, before = self._read(place, scaling), self._loaded.get(name)
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

    def _named(self, name: str) -> str:
        """Return the folder of this name: the first that has an adapter. Raises ServeError 404."""
        if "\0" not in name:
            for root in self._roots:
                if (root / name / "adapter_config.json").is_file():
                    return str(root / name)
        raise ServeError(
            404,
            "not_found_error",
            "adapter_not_found",
            f"no folder of adapter_roots in the server's configuration has an adapter {name!r}",
        )

    def _allowed(self, path: str) -> Path:
        if "\0" in path:
            raise ServeError.invalid("lora_path holds a null character", "lora_path")
        place = Path(os.path.realpath(path))
        if not any(place.is_relative_to(root) for root in self._roots):
            raise ServeError(
                403,
                "permission_error",
                "adapter_root",
                "lora_path is outside of the folders that adapter_roots in the server's configuration allows",
            )
        return place

    def _read(self, folder: Path, scaling: float = 1.0) -> Any:
        from exl_core import ExLlamaV2Lora

        return ExLlamaV2Lora.from_directory(self._model, str(folder), scaling)


def _in_use(name: str, used: int) -> ServeError:
    return ServeError(409, "conflict", "conflict", f"{used} requests use the adapter {name!r}: wait for them")
