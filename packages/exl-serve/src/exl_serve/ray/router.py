"""Ray Serve's hook for choosing replicas, over `cost.Index`. The only module that uses Ray's alpha routing API."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

from exl_serve.ray.cost import Index

__all__ = ["PageHashRouter"]


class PageHashRouter(RequestRouter):  # type: ignore[misc]
    """Send a request to the replica where its prompt costs least.

    That is a replica that has its pages, unless that replica is too busy. The router reads keyword arguments of a call:
    `labels` [(pages, label)] and `tokens` of the prompt, `ingress` and `tag` of the request, and `to`, the replica's
    name for a message.
    """

    def initialize_state(self, page_size: int = 256, **_: Any) -> None:
        """Set up the index; called by Ray Serve."""
        self._index = Index(page_size)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return ranks of replicas."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        index = self._index
        index.keep(list(by_name))
        for name, replica in by_name.items():
            index.report(name, replica.routing_stats or {})
        given: Any = {}
        if pending_request is not None:
            given = pending_request.kwargs
            # Otherwise Serve asks again at once, without yielding to its event loop.
            pending_request.routing_context.should_backoff = True
        if given.get("to") in by_name:
            return [[by_name[given["to"]]]]
        ranks = index.order(given.get("labels") or [], given.get("tokens") or 0)
        avoided = given.get("avoid") or ()
        kept = [[by_name[name]] for (name,) in ranks if name not in avoided]
        return kept or [[by_name[name]] for (name,) in ranks]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Count the sent request until the replica reports it."""
        given = pending_request.kwargs
        if "labels" in given:
            name, tokens = replica_id.unique_id, given.get("tokens") or 0
            self._index.sent(name, given["labels"], tokens, given.get("ingress", ""), given.get("tag", 0))
