"""Loading a model module by module: order, callbacks, progress, and unloading after a failure."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from exl_kernels.linear.upload import Uploads

from ..errors import InputError
from ..execution.own_pass import choose_own_pass
from .ahead import ReadAhead
from .checkpoint import Checkpoint, TensorReader

if TYPE_CHECKING:
    from ..layers import Module

__all__ = ["Callback", "CallbackGen", "check_callbacks", "load_modules", "progress_bar"]

log = logging.getLogger(__name__)

Callback = Callable[[int, int], object]
CallbackGen = Callable[[int, int], Iterable[object]]
"""Its items are the caller's: a load yields them unread."""


def check_callbacks(callback: Callback | None, progress: bool) -> None:
    """Raise InputError if both a console bar and a callback are requested."""
    if progress and callback is not None:
        raise InputError("progress=True draws its own bar: pass either progress or callback")


def load_modules(
    modules: list[Module],
    checkpoint: Checkpoint,
    devices: Sequence[torch.device],
    callback: Callback | None = None,
    callback_gen: CallbackGen | None = None,
    shared: Collection[str] = (),
) -> Iterator[object]:
    """Load `modules` in order, each on its device; yields the items of `callback_gen`.

    If an error is raised, or the generator is closed early, every module is unloaded again.

    Args:
        modules: the modules.
        checkpoint: the files.
        devices: device of each module.
        callback: called as callback(index, total) before each module and once with (total, total) at the end.
        callback_gen: generator function called likewise.
        shared: names of tensors that two modules read.
    """
    total = len(modules)

    def report(index: int) -> Iterator[object]:
        if callback is not None:
            callback(index, total)
        if callback_gen is not None:
            yield from callback_gen(index, total)

    ahead, uploads = ReadAhead(modules, checkpoint), Uploads()
    try:
        checkpoint.check_unchanged()
        reader = TensorReader(checkpoint, shared)
        for index, (module, device) in enumerate(zip(modules, devices, strict=True)):
            yield from report(index)
            ahead.advance(index)
            with uploads, torch.inference_mode(False):  # weights outlive the mode that they are loaded in
                module.load(reader, device)
                choose_own_pass(module)
        checkpoint.check_unchanged()
        uploads.finish()
        yield from report(total)
    except BaseException:
        uploads.finish()
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
            "%s: %d tensors are not part of this model and are ignored (%s); is config.json of the same model?",
            reader.checkpoint.folder,
            len(names),
            shown,
        )


def progress_bar(width: int = 40) -> Callback:
    """Return a callback that draws a bar on standard error when that is a terminal."""

    def draw(index: int, total: int) -> None:
        if sys.stderr.isatty():
            filled = width * index // max(total, 1)
            end = "\n" if index == total else ""
            sys.stderr.write(f"\rloading [{'#' * filled}{'.' * (width - filled)}] {index}/{total}{end}")
            sys.stderr.flush()

    return draw
