"""What every test folder shares: tests marked `cuda` run where a GPU can be used and are left out elsewhere."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out `cuda` tests without a usable GPU; asking for them there (`-m cuda`) is an error that says why."""
    needs_gpu = [item for item in items if item.get_closest_marker("cuda")]
    if not needs_gpu:
        return
    from exl_kernels.device import cuda_status

    reason = cuda_status().reason
    if reason is None:
        return
    if str(config.getoption("markexpr")).strip() == "cuda":
        raise pytest.UsageError(f"-m cuda: {reason}")
    config.hook.pytest_deselected(items=needs_gpu)
    items[:] = [item for item in items if item not in needs_gpu]
