"""Detect the original exllamav2 next to exl-compat: both install a package named `exllamav2`."""

from __future__ import annotations

import warnings
from importlib.metadata import distributions

__all__ = ["warn_of_original"]

LABEL = "+exl"  # of the version in exl-compat's entry for exllamav2, `exllamav2-<version>.dist-info`


def warn_of_original() -> None:
    """Issue a RuntimeWarning if the environment also holds a distribution of exllamav2 that is not exl-compat's."""
    found = sorted({d.version for d in distributions(name="exllamav2") if not d.version.endswith(LABEL)})
    if found:
        warnings.warn(
            f"exllamav2 {', '.join(found)} and exl-compat are both installed and share the package `exllamav2`: this "
            "import is exl-compat's, but either may lack files that the other replaced or removed. Uninstall "
            "exl-compat and exllamav2, then install the one you want.",
            RuntimeWarning,
            stacklevel=3,
        )
