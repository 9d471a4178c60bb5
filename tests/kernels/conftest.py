"""Fixtures of the kernel tests: every instruction set and thread count, put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from exl_kernels import threads


@pytest.fixture
def restore_threads() -> Iterator[None]:
    """For tests that set threads or the instruction set themselves."""
    before = threads.num_threads(), threads.isa()
    yield
    threads.set_num_threads(before[0])
    threads.set_isa(before[1])


@pytest.fixture(params=["scalar", "avx2", "avx512"])
def each_isa(request: pytest.FixtureRequest, restore_threads: None) -> str:
    """Runs the test once for each instruction set; one that the processor lacks falls back to the best below."""
    return threads.set_isa(request.param)
