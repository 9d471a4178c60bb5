"""How many examples a property is tried on: fewer in the default run, where the whole suite has minutes."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import HealthCheck, settings

__all__ = ["examples", "trials"]


def examples(full: int, quick: int, suppress: Collection[HealthCheck] = (HealthCheck.too_slow,)) -> settings:
    """Return settings with `quick` examples in the default run, and `full` in `make test-full` (tests/conftest.py)."""
    return settings(max_examples=trials(full, quick), deadline=None, suppress_health_check=suppress)


def trials(full: int, quick: int) -> int:
    """Return how often a test that draws its own cases draws one; arguments as for `examples`."""
    return {"quick": quick, "thorough": 10 * full}.get(settings.get_current_profile_name(), full)
