"""Files and outputs of the reference, for the tests of models on a CPU and on a GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
from golden_models import DATA
from torch import Tensor

from exl_kernels.safetensors_file import read_safetensors_header, read_tensor


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return {n: read_tensor(e) for n, e in read_safetensors_header(DATA / "golden.safetensors").entries.items()}


@pytest.fixture(scope="module")
def texts() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DATA / "golden.json").read_text())
    return loaded
