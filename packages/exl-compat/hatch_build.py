"""Install the distribution metadata of exllamav2 next to exl-compat's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class InterfaceMetadata(BuildHookInterface):
    """Put `src/exllamav2-<version>.dist-info` into the wheel, so that `importlib.metadata.version("exllamav2")` works.

    Installers refuse a wheel with two .dist-info folders at its top. The wheel's folder for files of site-packages
    (`<name>-<version>.data/purelib`) may hold one. An editable install needs nothing: `src` is on sys.path.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the folder to a regular wheel; `version` is the kind of the wheel ("standard" or "editable")."""
        if version == "editable":
            return
        (folder,) = Path(self.root, "src").glob("exllamav2-*.dist-info")
        project = f"{self.metadata.core.name.replace('-', '_')}-{self.metadata.version}"
        build_data["force_include"][str(folder)] = f"{project}.data/purelib/{folder.name}"
