"""How many examples a property is tried on: fewer in the default run, where the whole suite has minutes."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import HealthCheck, settings

__all__ = ["examples"]


def examples(full: int, quick: int, suppress: Collection[HealthCheck] = (HealthCheck.too_slow,)) -> settings:
    """Return settings with `quick` examples in the default run, and `full` in `make test-full` (tests/conftest.py)."""
    loaded = settings.get_current_profile_name()
    count = {"quick": quick, "thorough": 10 * full}.get(loaded, full)
    return settings(max_examples=count, deadline=None, suppress_health_check=suppress)
