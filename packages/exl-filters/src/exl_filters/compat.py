"""Import paths of exllamav2's filters, for third-party filters, where exllamav2 itself is not installed.

```python
with exl_filters.compat.namespace(tokenizer_class, model_class):
    from lmformatenforcer.integrations.exllamav2 import ExLlamaV2TokenEnforcerFilter
```
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from exl_filters.base import ExLlamaV2Filter
from exl_filters.errors import FilterUsageError
from exl_filters.prefix import ExLlamaV2PrefixFilter
from exl_filters.select import ExLlamaV2SelectFilter

__all__ = ["install", "namespace", "restore_pydantic_names", "uninstall"]

VERSION = "0.3.2"
_FILTERS = {
    "ExLlamaV2Filter": ExLlamaV2Filter,
    "ExLlamaV2PrefixFilter": ExLlamaV2PrefixFilter,
    "ExLlamaV2SelectFilter": ExLlamaV2SelectFilter,
}
_installed: list[str] = []


def install(tokenizer_class: type | None = None, model_class: type | None = None) -> None:
    """Register `exllamav2` and its submodules that hold filters, until `uninstall`.

    Args:
        tokenizer_class: Class that `exllamav2.ExLlamaV2Tokenizer` names. Third parties use it in `isinstance` and
            annotations. Default: an empty class.
        model_class: Class that `exllamav2.ExLlamaV2` names. Default: an empty class.

    Raises:
        FilterUsageError: a real exllamav2 can be imported.
    """
    if _installed:
        return
    if "exllamav2" in sys.modules or importlib.util.find_spec("exllamav2") is not None:
        raise FilterUsageError("exllamav2 is installed: its own import paths are used")
    only_base = {"ExLlamaV2Filter": ExLlamaV2Filter}
    contents: dict[str, dict[str, Any]] = {
        "exllamav2": {
            "ExLlamaV2Tokenizer": tokenizer_class or type("ExLlamaV2Tokenizer", (), {}),
            "ExLlamaV2": model_class or type("ExLlamaV2", (), {}),
            "__version__": VERSION,
        },
        "exllamav2.version": {"__version__": VERSION},
        "exllamav2.generator": dict(_FILTERS),
        "exllamav2.generator.base": only_base,
        "exllamav2.generator.filters": dict(_FILTERS),
        "exllamav2.generator.filters.base": only_base,
        "exllamav2.generator.filters.prefix": {"ExLlamaV2PrefixFilter": ExLlamaV2PrefixFilter},
        "exllamav2.generator.filters.select": {"ExLlamaV2SelectFilter": ExLlamaV2SelectFilter},
    }
    for name, attributes in contents.items():
        module = types.ModuleType(name, "Registered by exl_filters.compat.")
        module.__dict__.update(attributes)
        module.__path__ = []
        sys.modules[name] = module
        _installed.append(name)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


def uninstall() -> None:
    """Remove the modules that `install` registered."""
    while _installed:
        sys.modules.pop(_installed.pop(), None)


def restore_pydantic_names() -> None:
    """Give `pydantic.typing` back the names that formatron 0.5.0 imports and pydantic 2.12 removed.

    Call it before importing formatron. It does nothing where pydantic is not installed or has the names.
    """
    try:
        module = importlib.import_module("pydantic.typing")
    except ImportError:
        return
    for name in ("Any", "Literal", "Mapping", "Type", "Union", "get_args", "get_origin"):
        if name not in vars(module):
            setattr(module, name, getattr(typing, name))


@contextmanager
def namespace(tokenizer_class: type | None = None, model_class: type | None = None) -> Iterator[None]:
    """Call `install` for the duration of a `with` block."""
    install(tokenizer_class, model_class)
    try:
        yield
    finally:
        uninstall()
