"""Threads for filters that compute in the background."""

from concurrent.futures import ThreadPoolExecutor

import pytest


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2, thread_name_prefix="pool") as pool:
        yield pool
