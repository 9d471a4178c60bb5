"""Loading a model module by module: order, callbacks, progress, and giving everything back when something fails."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError
from .checkpoint import Checkpoint, ReadAhead, TensorReader
from .sizes import module_tensors

if TYPE_CHECKING:
    from ..modules import Module

__all__ = ["Callback", "CallbackGen", "check_callbacks", "load_modules", "progress_bar"]

log = logging.getLogger(__name__)

AHEAD = 256 << 20

Callback = Callable[[int, int], Any]
CallbackGen = Callable[[int, int], Generator[Any, Any, Any]]


def check_callbacks(callback: Callback | None, progress: bool) -> None:
    """A console bar and a callback exclude each other (spec core.md 9.3)."""
    if progress and callback is not None:
        raise InputError("progress=True draws its own bar: pass either progress or callback")


def load_modules(
    modules: list[Module],
    checkpoint: Checkpoint,
    devices: Sequence[torch.device],
    callback: Callback | None = None,
    callback_gen: CallbackGen | None = None,
    shared: Collection[str] = (),
) -> Iterator[Any]:
    """Load `modules` in order, each on its device; yields what `callback_gen` yields.

    `shared` names tensors that two modules read.

    callback(index, total) is called before each module and once with (total, total) at the end. If anything raises,
    or the generator is closed half way, every module is unloaded again before the error goes on.
    """
    total = len(modules)

    def report(index: int) -> Iterator[Any]:
        if callback is not None:
            callback(index, total)
        if callback_gen is not None:
            yield from callback_gen(index, total)

    ahead = _Ahead(modules, checkpoint)
    try:
        checkpoint.check_unchanged()
        reader = TensorReader(checkpoint, shared)
        for index, (module, device) in enumerate(zip(modules, devices, strict=True)):
            yield from report(index)
            ahead.advance(index)
            module.load(reader, device)
        checkpoint.check_unchanged()
        yield from report(total)
    except BaseException:
        for module in modules:
            module.unload()
        raise
    finally:
        ahead.close()
    _warn_of_unused(reader)


def _warn_of_unused(reader: TensorReader) -> None:
    names = reader.unused()
    if names:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        log.warning(
            "%s: %d tensors are not part of this model and were left alone (%s); is config.json of the same model?",
            reader.checkpoint.folder,
            len(names),
            shown,
        )


class _Ahead:
    """Keeps the system reading AHEAD bytes in front of the module that is being loaded."""

    def __init__(self, modules: Sequence[Module], checkpoint: Checkpoint) -> None:
        self._names = module_tensors(modules, checkpoint)
        self._sizes = [sum(checkpoint.tensors[n].nbytes for n in names) for names in self._names]
        self._asked = 0  # modules asked for
        self._system = ReadAhead(checkpoint)

    def advance(self, index: int) -> None:
        """Module `index` is about to be read."""
        self._asked = max(self._asked, index)
        while self._asked < len(self._names):
            waiting = sum(self._sizes[index : self._asked])
            if self._asked > index and waiting > AHEAD:
                return
            self._system.ask(self._names[self._asked])
            self._asked += 1

    def close(self) -> None:
        self._system.close()


def progress_bar(width: int = 40) -> Callback:
    """A callback that draws a bar on standard error when that is a terminal."""

    def draw(index: int, total: int) -> None:
        if sys.stderr.isatty():
            filled = width * index // max(total, 1)
            end = "\n" if index == total else ""
            sys.stderr.write(f"\rloading [{'#' * filled}{'.' * (width - filled)}] {index}/{total}{end}")
            sys.stderr.flush()

    return draw
