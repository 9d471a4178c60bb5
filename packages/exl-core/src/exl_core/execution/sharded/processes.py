"""An exchange between processes, one for each device, over torch.distributed."""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...device import devices
from ...errors import DeviceError, InputError, PeerError
from .exchange import Exchange, Parts, joined_flat, split_flat

__all__ = ["ProcessExchange"]

T = TypeVar("T")


class ProcessExchange(Exchange):
    """One process for each device; all run the same program with the same arguments and seeds.

    Every process holds hidden states, norms, embedding and routers, and computes the same tokens. Results are gathered
    by torch.distributed: gloo between CPUs, NCCL between GPUs.

    The processes find each other as torchrun's do: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment.
    Process number RANK runs device number RANK of EXL_DEVICE.

    A process that dies, or is not heard of for `limit` seconds, ends every pass with PeerError. So does a process that
    runs another pass than the others. In a process group over NCCL that the program itself has made, a lost process may
    end this one instead, unless TORCH_NCCL_BLOCKING_WAIT=1 was set before.

    Args:
        limit: seconds to wait for another process.

    Raises:
        InputError: `limit` is no number of seconds above 0.
        DeviceError: RANK and WORLD_SIZE are not those of a process for each device.
    """

    def __init__(self, limit: float = 60.0) -> None:
        if not (math.isfinite(limit) and limit > 0):
            raise InputError(f"ProcessExchange: limit is {limit}, must be a number of seconds above 0")
        self.limit = limit
        places = devices()
        rank, size = _number("RANK"), _number("WORLD_SIZE")
        if size != len(places) or not 0 <= rank < size:
            raise DeviceError(
                f"ProcessExchange: RANK {rank} of WORLD_SIZE {size} for the devices "
                f"{', '.join(d.name for d in places)}: start one process for each device"
            )
        super().__init__(size, rank, [rank])
        self._lost: str | None = None
        place = places[rank]
        if place.is_cuda:
            torch.cuda.set_device(place.torch_device)
        self._owns = not dist.is_initialized()
        if self._owns:
            if place.is_cuda:
                # An operation then ends with an error after the limit. Otherwise a thread of NCCL's ends the process.
                os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
            wait = timedelta(seconds=limit)
            self._run(lambda: dist.init_process_group("nccl" if place.is_cuda else "gloo", timeout=wait))
            # gloo's threads abort a process that ends while they run.
            atexit.register(self.close)
        # Plans and digests are on the CPU whatever the devices are.
        self._control = self._run(lambda: dist.new_group(backend="gloo", timeout=timedelta(seconds=limit)))

    def _collect(self, parts: Parts, made: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        sizes = [0] * self.shards
        for shard, shape in parts:
            sizes[shard] += math.prod(shape)
        most = max(sizes)
        own = joined_flat(made, most, like)
        flat = [torch.empty_like(own) for _ in range(self.shards)]
        self._run(lambda: dist.all_gather(flat, own))
        return split_flat(parts, self.shards, flat)

    def agree(self, value: T) -> T:
        """Return the value of process 0. Raises PeerError."""
        held = [value]
        self._run(lambda: dist.broadcast_object_list(held, src=0, group=self._control))
        return held[0]

    def check_same(self, what: str, digest: bytes) -> None:
        """Raise PeerError unless all processes call this with equal digests.

        `digest` has at least 8 bytes. `what` names the operation in the message.
        """
        own = torch.frombuffer(bytearray(digest[:8]), dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self.shards)]
        self._run(lambda: dist.all_gather(found, own, group=self._control))
        others = [rank for rank, theirs in enumerate(found) if not torch.equal(theirs, own)]
        if others:
            self._lost = (
                f"tensor parallel: process {self.home} and processes {others} run {what} with different arguments: "
                "give every process the same prompts, settings and seeds"
            )
            raise PeerError(self._lost)

    def close(self) -> None:
        """Leave the group of processes; a process that ends does so by itself."""
        atexit.unregister(self.close)
        self._lost = self._lost or "tensor parallel: the exchange between the processes is closed"
        if self._owns and dist.is_initialized():
            dist.destroy_process_group()

    def _run(self, work: Callable[[], T]) -> T:
        """Run a collective operation. After a failure the group is unusable, so later calls fail at once."""
        if self._lost is not None:
            raise PeerError(self._lost)
        try:
            return work()
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._lost = (
                f"tensor parallel: process {self.home} of {self.shards} lost another process or waited for it for "
                f"{self.limit:g} s: start all processes again ({reason})"
            )
            raise PeerError(self._lost) from error


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise DeviceError(
            f"ProcessExchange: {name} is {text!r}, must be a number: start one process for each device with RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, as torchrun does"
        )
    return int(text)
