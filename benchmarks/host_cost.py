"""Cost of an engine process's thread in CPU time, on a scripted model and without HTTP."""

from __future__ import annotations

import gc
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CPU = time.thread_time
"""Seconds of CPU time of this thread, which other work on the machine hardly changes."""


def timed(call: Any, took: list[float], clock: Any = time.perf_counter) -> Any:
    """`call`, with the seconds of each call appended to `took`."""

    def timing(*given: Any) -> Any:
        began = clock()
        try:
            return call(*given)
        finally:
            took.append(clock() - began)

    return timing


def host_cost(folder: str, streams: int, new: int) -> dict[str, Any]:
    """The host's turns, called one by one here, with a client that reads between them."""
    import zmq

    from exl_serve.config.model import Limits, ModelConfig
    from exl_serve.engine import wire
    from exl_serve.engine.host import Host
    from exl_serve.engine.load import load as load_engine
    from exl_serve.engine.status import StatusWriter

    config = ModelConfig(id="bench", path=folder, max_batch_size=streams, engine="free", device="cpu")
    loaded = load_engine(config)
    generator, card = loaded.generator, loaded.card
    in_generator: list[float] = []
    for name in ("iterate", "iterate_columns"):
        setattr(generator, name, timed(getattr(generator, name), in_generator, CPU))
    with tempfile.TemporaryDirectory() as place:
        address = f"ipc://{place}/engine"
        status = StatusWriter(Path(place) / "status", os.urandom(16))
        host = Host(generator, card, address, status, config=config, limits=Limits(max_queued_requests=4 * streams))
        client: Any = zmq.Context.instance().socket(zmq.DEALER)
        client.connect(address)
        client.send(wire.encode(wire.Hello(wire.VERSION, "bench")))
        for asked in host_work(streams, new):
            client.send(wire.encode(wire.Submit(*asked)))
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        heard = Heard()
        rows: list[dict[str, float]] = []
        while heard.open or not heard.tags:
            in_generator.clear()
            began = CPU()
            host._run_once()
            took = CPU() - began
            tokens, decoded, encoded = heard.read(client)
            if tokens >= 0.9 * streams and len(in_generator) == 1:  # the others begin, end or hold text back
                seconds = {"host": took - in_generator[0], "generator": in_generator[0], "turn": took}
                seconds |= {"encode": encoded, "decode": decoded}
                rows.append({name: value / tokens * 1e6 for name, value in seconds.items()})
        client.close(0)
        host._close()
    middle = {f"{name}_us": round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}
    return {"rounds": len(rows), **middle, "events": heard.digest()}


def host_work(streams: int, new: int) -> Iterator[tuple[int, Any]]:
    """(tag, request): all of the same length, so that they decode together, with a stop string to be looked for."""
    import numpy as np

    from exl_serve.request.internal import EngineRequest, Sampling

    for number in range(1, streams + 1):
        prompt = (np.arange(20, 52, dtype="<i4") + number).tobytes()
        yield (
            number,
            EngineRequest(
                id=f"r{number}",
                prompt=prompt,
                sampling=Sampling(temperature=0.0),
                seeds=(number,),
                max_tokens=new,
                ignore_eos=True,
                stop_strings=("\n\nuser:",),
            ),
        )


class Heard:
    """Collect the events that the clients of `host_cost` received, by tag."""

    def __init__(self) -> None:
        self.tags: dict[int, list[Any]] = {}
        self.open = 0

    def read(self, client: Any) -> tuple[int, float, float]:
        """Everything that is there after a turn: tokens, and the seconds that their messages take to decode and encode.

        The messages are encoded again here: each look at the clock of CPU time is a system call, which the engine's
        turn would be charged for.
        """
        import zmq

        from exl_serve.engine import wire
        from exl_serve.engine.events import Failed, Finished, Tokens

        tokens, seconds, encoding = 0, 0.0, 0.0
        while client.poll(2 if not tokens else 0):
            data = client.recv(zmq.NOBLOCK)
            began = CPU()
            message = wire.decode_to_worker(data)
            events = list(message.all()) if isinstance(message, wire.StepEvents) else []
            took = CPU() - began
            if isinstance(message, wire.Accepted):
                self.tags[message.tag] = []
                self.open += 1
            elif isinstance(message, wire.Rejected):
                raise RuntimeError(f"the engine refused a request: {message.message}")
            elif isinstance(message, wire.StepEvents):
                for tag, event in events:
                    self.tags[tag].append(event)
                    self.open -= isinstance(event, Finished | Failed)
                    tokens += len(event.ids) if isinstance(event, Tokens) else 0
                seconds += took
                began = CPU()
                wire.encode(message)
                encoding += CPU() - began
        return tokens, seconds, encoding

    def digest(self) -> str:
        """Return a digest of all events without the seconds in them."""
        import msgspec

        def plain(event: Any) -> Any:
            usage = getattr(event, "usage", None)
            if usage is None:
                return event
            none = {name: 0.0 for name in usage.__struct_fields__ if name.endswith("_seconds")}
            return msgspec.structs.replace(event, usage=msgspec.structs.replace(usage, **none))

        told = [(tag, [plain(event) for event in events]) for tag, events in sorted(self.tags.items())]
        return hashlib.blake2b(msgspec.msgpack.encode(told), digest_size=8).hexdigest()
