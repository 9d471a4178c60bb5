"""Settings shared by all tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Two shared cores: a slow example is the machine's doing. CI prints what reproduces a failure.
settings.register_profile("default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out `cuda` tests without a usable GPU; asking for them there (`-m cuda`) is an error that says why."""
    needs_gpu = [item for item in items if item.get_closest_marker("cuda")]
    if not needs_gpu or str(config.getoption("markexpr")).strip() != "cuda":
        return
    from exl_kernels.device import cuda_status

    if (reason := cuda_status().reason) is not None:
        raise pytest.UsageError(f"-m cuda: {reason}")
