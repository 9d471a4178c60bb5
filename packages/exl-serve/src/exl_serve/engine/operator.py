"""Answer the routes of administration: adapters, the cache, the list of requests, cancelling them, draining."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from exl_serve.engine.adapters import Adapters
from exl_serve.engine.groups import Group
from exl_serve.errors import ServeError
from exl_serve.request.labels import joined_labels

__all__ = ["Operator"]


class Operator:
    """Answers the calls of operators to one engine.

    Args:
        generator: the engine's.
        adapters: the engine's.
        groups: all requests that the engine holds; the engine changes the mapping.
        end: ends a request, whose client gets an error.
        drain: lets the engine end once all its requests are done.
    """

    def __init__(
        self,
        generator: Any,
        adapters: Adapters,
        groups: Mapping[tuple[bytes, int], Group],
        end: Callable[[Group], None],
        drain: Callable[[], None],
    ) -> None:
        self._generator = generator
        self._adapters = adapters
        self._groups = groups
        self._end = end
        self._drain = drain

    def answer(self, name: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """Do what a call asks for and return its answer. Raises ServeError, of status 400 for an unknown call."""
        if name == "load_adapter":
            used = self._using(parameters["name"]) if parameters.get("inplace") else None
            path, scaling = parameters.get("path"), float(parameters.get("scaling", 1.0))
            return self._adapters.load(str(parameters["name"]), path, used, scaling=scaling)
        if name == "unload_adapter":
            return self._adapters.unload(str(parameters["name"]), self._using(parameters["name"]))
        if name == "unload_adapters":
            return self._adapters.unload_all(self._using)
        if name == "adapters":
            return {"adapters": dict(self._adapters.scalings)}
        if name == "reset_cache":
            if running := sum(len(group.running) for group in self._groups.values()):
                raise ServeError(409, "conflict", "conflict", f"{running} jobs are running: try when idle")
            self._generator.reset_page_table()
            return {}
        if name == "requests":
            return {"requests": self.requests()}
        if name == "cancel":
            return {"cancelled": self._cancel(str(parameters["id"]), parameters.get("key"))}
        if name == "labels":
            return {"labels": joined_labels(page.label for page in self._generator.page_table.pages)}
        if name == "drain":
            self._drain()
            return {}
        raise ServeError.invalid(f"the engine knows no call {name!r}", "name")

    def requests(self) -> list[dict[str, Any]]:
        """Return id, key, numbers of tokens and state of every request that the engine holds; from any thread."""
        return [group.summary() for group in list(self._groups.values())]

    def _using(self, adapter: str) -> int:
        """Return the number of requests that use an adapter."""
        return sum(group.request.adapter == adapter for group in self._groups.values())

    def _cancel(self, id: str, key: str | None) -> bool:
        """End the request of this id, with all its prompts and completions; with a key, only if the request is its."""
        groups = [g for g in self._groups.values() if g.request.id.partition("/")[0] == id]
        groups = [g for g in groups if key in (None, g.request.key)]
        for group in groups:
            self._end(group)
        return bool(groups)
