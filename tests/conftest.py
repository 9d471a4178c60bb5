"""Settings shared by all tests."""

from __future__ import annotations

import os

# The suite is written for the CPU, also where there is a GPU; a test of the GPU names its device. Programs that tests
# start inherit the variable.
os.environ.setdefault("EXL_DEVICE", "cpu")

# Processes side by side (pytest-xdist) share the cores; each would have a thread a core, and torch as many again.
if (_processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
    for _threads in ("EXL_CPU_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(_threads, str(max(1, (os.cpu_count() or 1) // _processes)))

import pytest
from hypothesis import HealthCheck, settings

# Two shared cores: a slow example is the machine's doing. CI prints what reproduces a failure.
settings.register_profile("default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out `cuda` tests without a usable GPU; asking for them there (`-m cuda`) is an error that says why."""
    needs_gpu = [item for item in items if item.get_closest_marker("cuda")]
    if not needs_gpu or "not cuda" in str(config.getoption("markexpr")):
        return
    from exl_kernels.device import cuda_status
    from exl_kernels.errors import DeviceError
    from exl_kernels.selection import Card

    reason = cuda_status().reason
    if reason is not None and str(config.getoption("markexpr")).strip() != "cuda":
        return
    if reason is not None:
        raise pytest.UsageError(f"-m cuda: {reason}")
    try:
        features = Card.device(0).features
    except DeviceError as error:
        raise pytest.UsageError(f"-m cuda: {error}") from error
    lacking = [item for item in items if not features.issuperset(_needs(item))]
    if lacking:
        config.hook.pytest_deselected(items=lacking)
        items[:] = [item for item in items if item not in set(lacking)]


def _needs(item: pytest.Item) -> set[str]:
    """Features of the GPU's code that a test's kernels use."""
    return {name for marker in item.iter_markers("needs") for name in marker.args}
