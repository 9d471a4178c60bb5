"""Build exl-kernels with maturin; editable builds keep the choice of EXL_CUDA_ARCHS.

A checkout built once with `EXL_CUDA_ARCHS=89 uv sync` remains a build for sm_89. The value is stored in
`rust/.cuda-archs`, where cargo's build script finds it when a later command runs without the variable.
`EXL_CUDA_ARCHS=auto` goes back to the GPUs present.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import maturin
from maturin import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

VARIABLE = "EXL_CUDA_ARCHS"


def build_editable(
    wheel_directory: str, config_settings: Mapping[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build for the architectures requested now or earlier. A failed build keeps the earlier choice."""
    with kept_choice(Path(__file__).resolve().parents[3] / "rust" / ".cuda-archs"):
        return maturin.build_editable(wheel_directory, config_settings, metadata_directory)


def build_wheel(
    wheel_directory: str, config_settings: Mapping[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build for the architectures requested now, else for the GPUs present.

    The stored choice of editable builds does not decide the contents of a wheel.
    """
    os.environ.setdefault(VARIABLE, "auto")
    return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


@contextmanager
def kept_choice(file: Path) -> Iterator[None]:
    """Move the variable's value into `file`, so that cargo sees no difference between a set and a stored value."""
    if not file.parent.is_dir():  # not a checkout
        yield
        return
    before = file.read_text(encoding="utf-8") if file.exists() else "auto\n"
    asked = os.environ.pop(VARIABLE, "").strip()
    # cargo cannot watch a file that does not exist. A requested value is written even if it is the same: `auto` looks
    # for GPUs again.
    if asked or not file.exists():
        file.write_text(f"{asked}\n" if asked else before, encoding="utf-8")
    try:
        yield
    except BaseException:
        file.write_text(before, encoding="utf-8")
        raise
