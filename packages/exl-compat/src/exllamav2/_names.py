"""Names of exllamav2's modules that are not classes of this project, and preparation for third parties' imports.

A name whose object is built differently here can be imported and used in `isinstance`. A name without any counterpart
can be imported, too. Every other use raises `MissingNameError`, which names the page with the alternative.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NoReturn

from exl_filters.compat import restore_pydantic_names
from exl_kernels.errors import UnsupportedError

__all__ = ["GUIDE", "MissingNameError", "prepare_third_parties", "stand_in", "without_counterpart"]

GUIDE = "docs/guides/compat.md"


class MissingNameError(UnsupportedError, AttributeError):
    """A name of exllamav2 that this project does not have was used.

    It is also an AttributeError, so that `hasattr` and `getattr` with a default see a missing attribute.
    """


class _StandIn(type):
    """Class of the stand-ins: instances of `counterparts` are their instances; any use but `isinstance` raises."""

    counterparts: tuple[type, ...]
    label: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        made = ", which only ExLlamaV2(config) builds here" if cls.counterparts else ""
        raise MissingNameError(f"{cls.label}{made}: not available in exl-compat; {GUIDE} says what to use instead")

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):  # what inspection asks for
            raise AttributeError(name)
        raise MissingNameError(f"{cls.label}.{name}: not available in exl-compat; {GUIDE} says what to use instead")

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.counterparts)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return cls in subclass.__mro__ or issubclass(subclass, cls.counterparts)


def stand_in(label: str, *counterparts: type, **attributes: Any) -> Any:
    """Return a class for the name `label`, such as "exllamav2.linear.ExLlamaV2Linear".

    Args:
        label: The full name, for messages.
        *counterparts: Classes of this project whose objects count as its instances.
        **attributes: Attributes that the class has.
    """
    module, _, name = label.rpartition(".")
    fields = {"__module__": module, "label": label, "counterparts": counterparts}
    return _StandIn(name, (), {**fields, **attributes})


def without_counterpart(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module of exllamav2's internals: every further name is a stand-in."""

    def get(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return stand_in(f"{module}.{name}")

    return get


def prepare_third_parties() -> None:
    """Give pydantic back the names that formatron imports and that newer versions have removed.

    formatron imports exllamav2, or is imported after it.
    """
    if importlib.util.find_spec("formatron") is not None:
        restore_pydantic_names()
