"""Filters by name: the built-ins, and plugins found by the entry-point group `exl_filters.filters`.

Discovery reads names only. A plugin is imported when it is first requested. A failure is kept and raised for requests
of that name; nothing else is affected. Importing runs the plugin's code, so a server should allow names, not `all`:
`EXL_FILTERS_PLUGINS=all|none|name,name` or the `allow` argument.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from exl_filters.base import ExLlamaV2Filter, unpickle_by
from exl_filters.errors import (
    AmbiguousPlugin,
    FilterCompileError,
    FilterError,
    FilterUsageError,
    MissingExtra,
    PluginError,
    UnknownFilter,
)
from exl_filters.foreign import as_filter
from exl_filters.signatures import params_schema

__all__ = [
    "API",
    "GROUP",
    "PluginInfo",
    "create",
    "from_spec",
    "get",
    "info",
    "names",
    "names_of",
    "refresh",
    "register",
    "takes_model",
    "unregister",
]

GROUP = "exl_filters.filters"
API = (1, 0)
"""Version of the plugin contract. A plugin that states another major version in `__exl_filters_api__` is rejected."""

_BUILT_IN = {
    "prefix": "exl_filters.prefix:ExLlamaV2PrefixFilter",
    "ban": "exl_filters.token_filters:BanFilter",
    "length": "exl_filters.token_filters:LengthFilter",
    "token-set": "exl_filters.token_filters:TokenSetFilter",
    "grammar": "exl_filters.grammar:ExLlamaV2GrammarFilter",
    "token-enforcer": "exl_filters.token_enforcer:ExLlamaV2TokenEnforcerFilter",
    "select": "exl_filters.select:ExLlamaV2SelectFilter",
    "all-of": "exl_filters.composed:all_of",
    "any-of": "exl_filters.composed:any_of",
    "sequence": "exl_filters.composed:sequence",
    "triggered": "exl_filters.composed:triggered",
    "logged": "exl_filters.composed:logged",
}
# The parameters `filters` and `inner` of these are specs themselves.
_COMPOSED = ("all-of", "any-of", "sequence", "triggered", "logged")
# Nesting limit of these in a spec, which may come from a client: the time to build them grows fast with the depth.
MOST_NESTED = 16

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class PluginInfo:
    """Facts of a registered name. `params` is a JSON schema of its keyword parameters (empty until loaded)."""

    name: str
    dist: str
    version: str
    value: str
    loaded: bool = False
    error: str = ""
    doc: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class _Entry:
    name: str
    dist: str
    version: str
    value: str
    load: Callable[[], Any]
    object: Any = None
    error: FilterError | None = None

    @property
    def loaded(self) -> bool:
        return self.object is not None


class _Registry:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._own: dict[str, _Entry] = {}
        self._found: list[_Entry] | None = None
        for name, value in _BUILT_IN.items():
            self._own[name] = _Entry(name, "exl-filters", "", value, _loader(value))

    def found(self) -> list[_Entry]:
        with self._lock:
            if self._found is None:
                self._found = [_from_entry_point(point) for point in importlib.metadata.entry_points(group=GROUP)]
            return self._found

    def refresh(self) -> None:
        with self._lock:
            self._found = None

    def add(self, name: str, obj: Any, replace: bool) -> None:
        with self._lock:
            if name in self._own and not replace:
                raise PluginError(f"{name!r} is registered already; pass replace=True to take its place")
            value = f"{getattr(obj, '__module__', '?')}:{getattr(obj, '__qualname__', type(obj).__name__)}"
            self._own[name] = _Entry(name, "", "", value, lambda: obj, object=obj)

    def remove(self, name: str) -> None:
        with self._lock:
            if self._own.pop(name, None) is None:
                raise UnknownFilter(f"{name!r} is not registered")
            if name in _BUILT_IN:
                self._own[name] = _Entry(name, "exl-filters", "", _BUILT_IN[name], _loader(_BUILT_IN[name]))

    def entry(self, name: str, allow: Collection[str] | None = None) -> _Entry:
        """Return the one entry of a name: this process's registrations first, then plugins; `dist:name` picks one of
        several.
        """
        if name in self._own:
            return self._own[name]
        plugins = [e for e in self.found() if name in (e.name, f"{e.dist}:{e.name}")]
        if not plugins:
            raise UnknownFilter(f"no filter is called {name!r}; there are {', '.join(self.names()) or 'none'}")
        if len(plugins) > 1:
            ways = ", ".join(f"{e.dist}:{e.name}" for e in plugins)
            raise AmbiguousPlugin(f"{name!r} is registered by several distributions: ask for one of {ways}")
        if not _allowed(plugins[0], name, allow):
            raise UnknownFilter(f"plugin {name!r} of {plugins[0].dist} is not on the allow-list (EXL_FILTERS_PLUGINS)")
        return plugins[0]

    def names(self) -> list[str]:
        own = list(self._own)
        counts: dict[str, int] = {}
        for entry in self.found():
            counts[entry.name] = counts.get(entry.name, 0) + 1
        plugins = [
            e.name if counts[e.name] == 1 and e.name not in self._own else f"{e.dist}:{e.name}" for e in self.found()
        ]
        return sorted({*own, *plugins})

    def names_of(self, value: str) -> list[str]:
        return [entry.name for entry in [*self._own.values(), *self.found()] if entry.value == value]

    def load(self, entry: _Entry) -> Any:
        with self._lock:
            if entry.error is not None:
                raise entry.error
            if entry.object is None:
                entry.object = self._import(entry)
            return entry.object

    def _import(self, entry: _Entry) -> Any:
        whose = f"filter {entry.name!r} of {entry.dist} {entry.version}".rstrip()
        try:
            obj = entry.load()
        except MissingExtra:
            raise
        # A plugin that calls sys.exit() at import must not take the host with it.
        except (Exception, SystemExit) as error:
            entry.error = PluginError(f"{whose} ({entry.value}) cannot be loaded: {type(error).__name__}: {error}")
            entry.error.__cause__ = error
            raise entry.error from error
        stated = getattr(obj, "__exl_filters_api__", API)
        if not callable(obj) or not isinstance(stated, tuple) or not stated or stated[0] != API[0]:
            what = (
                f"is for plugin contract {stated}, this is {API}" if callable(obj) else "is neither class nor function"
            )
            entry.error = PluginError(f"{whose} ({entry.value}) {what}")
            raise entry.error
        return obj


@overload
def register(name: str, obj: _F, *, replace: bool = False) -> _F: ...
@overload
def register(name: str, obj: None = None, *, replace: bool = False) -> Callable[[_F], _F]: ...
def register(name: str, obj: Any = None, *, replace: bool = False) -> Any:
    """Register `obj`, a filter class or a factory `f(vocab, **params)`, in this process; also as a decorator.

    Returns the object. Raises `PluginError` when the name is taken (by a built-in, for example), unless `replace`.
    """

    def add(target: Any) -> Any:
        if not callable(target):
            raise FilterUsageError(f"{name!r}: register a filter class or a factory, not {target!r:.60}")
        _registry.add(name, target, replace)
        return target

    return add if obj is None else add(obj)


def unregister(name: str) -> None:
    """Undo a `register`; a replaced built-in returns. Raises `UnknownFilter` for a name that is not registered."""
    _registry.remove(name)


def get(name: str, *, allow: Collection[str] | None = None) -> Any:
    """Return the class or factory of a name, imported on first use. `allow` overrides EXL_FILTERS_PLUGINS.

    Raises `UnknownFilter`, `AmbiguousPlugin`, or `PluginError` for a plugin that cannot be loaded.
    """
    return _registry.load(_registry.entry(name, allow))


def create(name: str, vocab: Any, *, allow: Collection[str] | None = None, **params: Any) -> ExLlamaV2Filter:
    """Build a filter by name.

    Args:
        name: A registered name, or `dist:name`.
        vocab: A `Vocabulary` or any tokenizer that `vocabulary_of` takes.
        allow: Names of plugins that may be loaded; default: EXL_FILTERS_PLUGINS.
        **params: Parameters of the class or factory.

    Raises:
        FilterUsageError: `params` do not fit the signature.
        FilterCompileError: the class or factory rejects them.
        PluginError: the filter is unknown, ambiguous, or cannot be loaded.
    """
    return build(get(name, allow=allow), vocab, name, params)


def build(factory: Any, vocab: Any, name: str, params: Mapping[str, Any]) -> ExLlamaV2Filter:
    """Call a class (model, tokenizer, ...) or factory (vocab, ...) with `params`."""
    args = (None, vocab) if takes_model(factory) else (vocab,)
    try:
        inspect.signature(factory).bind(*args, **params)
    except TypeError as error:
        raise FilterUsageError(f"filter {name!r}: {error}") from error
    try:
        made = factory(*args, **params)
    except FilterError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        # Parameters may come from a client; a class may raise anything for a wrong type.
        raise FilterCompileError(f"filter {name!r} cannot be made of these parameters: {error}") from error
    return as_filter(made)


def from_spec(spec: Mapping[str, Any], vocab: Any, *, allow: Collection[str] | None = None) -> ExLlamaV2Filter:
    """Build the filter that a `spec()` describes.

    Args:
        spec: `{"type": name, **params}`. Filters made of filters hold specs, nested up to MOST_NESTED deep.
        vocab: A `Vocabulary` or any tokenizer that `vocabulary_of` takes.
        allow: Names of plugins that may be loaded; default: EXL_FILTERS_PLUGINS.

    Raises:
        FilterError: as `create`.
    """
    return _from_spec(spec, vocab, allow, 1)


def _from_spec(spec: Any, vocab: Any, allow: Collection[str] | None, depth: int) -> ExLlamaV2Filter:
    if not isinstance(spec, Mapping) or not isinstance(spec.get("type"), str):
        raise FilterUsageError(f'a filter spec is a mapping with "type"; got {spec!r:.80}')
    params = {str(k): v for k, v in spec.items() if k != "type"}
    if spec["type"] in _COMPOSED:
        if depth > MOST_NESTED:
            raise FilterCompileError(
                f"a filter spec nests more than {MOST_NESTED} filters, the innermost {spec['type']!r}: "
                "put parts side by side, or write them as one grammar"
            )

        def made(value: Any) -> Any:
            return _from_spec(value, vocab, allow, depth + 1) if isinstance(value, Mapping) else value

        if "inner" in params:
            params["inner"] = made(params["inner"])
        if isinstance(params.get("filters"), list | tuple):
            params["filters"] = [made(value) for value in params["filters"]]
    return create(spec["type"], vocab, allow=allow, **params)


def names() -> list[str]:
    """Return all names that `get` takes, allowed or not; imports nothing."""
    return _registry.names()


def names_of(kind: type) -> list[str]:
    """Return the names under which a class is registered; imports nothing."""
    return _registry.names_of(f"{kind.__module__}:{kind.__qualname__}")


def info(name: str, *, load: bool = False) -> PluginInfo:
    """Return the facts of a name; with `load`, after importing it (an error is reported, not raised)."""
    entry = _registry.entry(name, allow=(name,))
    error: FilterError | None = entry.error
    if load:
        try:
            _registry.load(entry)
        except FilterError as caught:
            error = caught
    doc, params = "", {}
    if entry.loaded:
        doc = (inspect.getdoc(entry.object) or "").split("\n\n")[0]
        params = params_schema(entry.object, skip=2 if takes_model(entry.object) else 1)
    return PluginInfo(name, entry.dist, entry.version, entry.value, entry.loaded, str(error or ""), doc, params)


def refresh() -> None:
    """Search for installed plugins again."""
    importlib.invalidate_caches()
    _registry.refresh()


def takes_model(factory: Any) -> bool:
    """Whether a factory is called with (model, tokenizer, ...), as exllamav2's filters are."""
    try:
        first = next(iter(inspect.signature(factory).parameters), "")
    except (TypeError, ValueError):
        return False
    return first == "model"


def _allowed(entry: _Entry, name: str, allow: Collection[str] | None) -> bool:
    if allow is None:
        setting = os.environ.get("EXL_FILTERS_PLUGINS", "all").strip()
        if setting in ("all", "none"):
            return setting == "all"
        allow = [part.strip() for part in setting.split(",")]
    return not {name, entry.name, f"{entry.dist}:{entry.name}"}.isdisjoint(allow)


def _loader(value: str) -> Callable[[], Any]:
    def load() -> Any:
        module, _, attribute = value.partition(":")
        return getattr(importlib.import_module(module), attribute)

    return load


def _from_entry_point(point: importlib.metadata.EntryPoint) -> _Entry:
    dist = getattr(point, "dist", None)
    return _Entry(point.name, dist.name if dist else "?", dist.version if dist else "", point.value, point.load)


_registry = _Registry()
unpickle_by(from_spec)
