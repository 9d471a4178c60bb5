"""The engine process: `python -m exl_serve.engine`, started by the supervisor with its configuration on standard input.

Writes one line of JSON to standard output for each change of its state; ends with its parent.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from exl_serve.config.model import Limits, ModelConfig, Qos

__all__ = ["EngineStart", "main"]

SWITCH_SECONDS = 0.0001


class EngineStart(msgspec.Struct, frozen=True, kw_only=True):
    """The start message of an engine process."""

    model: ModelConfig
    #: the runtime directory, mode 0700
    folder: str
    address: str
    parent: int
    limits: Limits = Limits()
    qos: Qos = Qos()
    log_level: str = "info"


def main() -> None:
    """Run an engine process until the supervisor stops it. The start message is one line of JSON on standard input."""
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineStart)
    _die_with(start.parent)
    logging.basicConfig(level=start.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        _serve(start)
    except Exception as error:
        logging.getLogger(__name__).exception("the engine of %s ends", start.model.id)
        _say(state="failed", reason=f"{getattr(error, 'code', type(error).__name__)}: {error}")
        sys.exit(1)


def _serve(start: EngineStart) -> None:
    from exl_serve.engine.host import Host
    from exl_serve.engine.load import load
    from exl_serve.engine.status import StatusWriter, status_path

    _say(state="loading")
    status = StatusWriter(status_path(Path(start.folder), start.model.id), os.urandom(16))
    loaded = load(start.model, lambda done, total: _say(state="loading", done=done, total=total))
    host = Host(
        loaded.generator,
        loaded.card,
        start.address,
        status,
        config=start.model,
        limits=start.limits,
        qos=start.qos,
        step_floor=loaded.floor,
        vision=loaded.vision,
    )
    signal.signal(signal.SIGTERM, lambda *_: host.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides what Ctrl-C means
    # A step releases the interpreter dozens of times, and each time waits so long for a thread that compiles a
    # grammar or reads an adapter.
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    _say(state="ready", card=json.loads(msgspec.json.encode(loaded.card)))
    host.run()
    if host.broken:
        sys.exit(1)


def _say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def _die_with(parent: int) -> None:
    """End when the parent ends, for any reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before
        sys.exit(1)


if __name__ == "__main__":
    main()
