"""Compute the number of engine replicas. `wanted` is a pure function; Ray Serve calls `policy`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["policy", "record", "wanted"]

BATCH_SHARE, PAGE_SHARE = 0.75, 0.85
"""Target load of batches and caches."""
PREFILL_RATE = 2000.0
CALM_SHARE = 0.5
"""A replica is removed when the load of all has been below this share for `RayConfig.calm_seconds`."""
CALM_SECONDS = 600.0
"""The value of `RayConfig.calm_seconds` that counts while no replica has reported its own."""
BUSY_PERIODS = 2
"""Calls in which more replicas are wanted before they are added."""


def record(status: Any, batch: int, pages: int, target_ttft: float, calm_seconds: float) -> dict[str, float]:
    """Return a replica's report for `policy`: its share of the load, and the setting that the policy needs.

    `status` is its `EngineStatus`. Ray imports a policy by its name, so that no argument reaches it.
    """
    rate = status.prefill_rate or PREFILL_RATE
    return {
        "exl_prompt_load": status.queued_prompt_tokens / rate / target_ttft,
        "exl_batch_load": (status.decoding + status.prefilling + status.queued) / (BATCH_SHARE * batch),
        "exl_page_load": status.pages_pinned / (PAGE_SHARE * max(1, pages)),
        "exl_calm_seconds": calm_seconds,
    }


def wanted(loads: Sequence[Mapping[str, float]]) -> float:
    """Return the number of replicas that suffice for this load, not rounded: the largest of the sums over all
    replicas.
    """
    names = ("exl_prompt_load", "exl_batch_load", "exl_page_load")
    return max(sum(load.get(name, 0.0) for load in loads) for name in names)


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Return (target number of replicas, state for the next call).

    The number rises when more are wanted in two consecutive calls. It falls by one when half of them would have been
    enough for the time that the replicas report as `exl_calm_seconds`.
    """
    by_metric: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    replicas = {replica for values in by_metric.values() for replica in values}
    loads = [{name: values.get(replica, 0.0) for name, values in by_metric.items()} for replica in replicas]
    state: dict[str, Any] = dict(context.policy_state or {})
    now, current = float(context.current_time or 0.0), max(1, context.target_num_replicas)
    calm = max((one.get("exl_calm_seconds", CALM_SECONDS) for one in loads), default=CALM_SECONDS)
    load = wanted(loads) if loads else 0.0
    idle = load == 0 and not context.total_queued_requests
    if context.target_num_replicas == 0 and context.capacity_adjusted_min_replicas == 0 and idle:
        return 0, state
    if current < context.capacity_adjusted_min_replicas:
        current = context.capacity_adjusted_min_replicas
    # Requests that no replica has accepted yet are in no report.
    if load == 0 and (context.total_queued_requests or 0) > 0:
        load = current + 1.0
    target = current
    if load > current:
        state["busy"] = state.get("busy", 0) + 1
        state["calm_since"] = None
        if state["busy"] >= BUSY_PERIODS:
            target = math.ceil(load)
            state["busy"] = 0
    else:
        state["busy"] = 0
        if load > CALM_SHARE * current:
            state["calm_since"] = None
        elif state.get("calm_since") is None:
            state["calm_since"] = now
        elif now - state["calm_since"] >= calm:
            target, state["calm_since"] = current - 1, now
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(least, min(most, target)), state
