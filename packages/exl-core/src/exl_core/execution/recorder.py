"""Record launches as CUDA graphs, in memory and on streams that all captured steps of a model share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exl_kernels.attention.cuda import counters
from exl_kernels.linear.workspace import workspaces_in

from .step_inputs import passed

__all__ = ["Body", "Recorded", "Recorder"]

Body = Callable[[Tensor | None], Tensor]
"""Launches; takes the tensor for the logits, or None, and returns the result."""


class Recorded(NamedTuple):
    """A graph of one device."""

    graph: torch.cuda.CUDAGraph
    result: Tensor
    held: Tensor
    """Counters of attention, which the graph uses."""


class Recorder:
    """Records the graphs of one model.

    Attributes:
        workspaces: memory of matmuls, which all captured steps use and must keep.
    """

    def __init__(self) -> None:
        self.workspaces: list[Tensor] = []
        self._logits: dict[int, Tensor] = {}
        # Of each device. One stream for all captures: torch reuses memory freed on a stream for that stream only.
        self._pools: dict[torch.device, Any] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def clear(self) -> None:
        """Drop memory that only captured steps use, after all of them were dropped."""
        self._logits.clear()
        self.workspaces.clear()

    def drop_pools(self) -> None:
        """Forget the pools, after the last graph was dropped: torch drops a pool with its last graph.

        The number of a dropped pool must not be used again.
        """
        self._pools.clear()

    def capture(self, body: Body, logits: Tensor | None, memory: Tensor) -> Recorded:
        """Record the launches of `body` on the device of `memory`, after one run that is not recorded.

        body: gets `logits`, or in the first run another tensor of the size.
        """
        device = memory.device
        # A step may be captured while another reader still needs the logits of the previous step.
        scratch = None if logits is None else torch.empty_like(logits)
        current = torch.cuda.current_stream(device)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        graph = torch.cuda.CUDAGraph()
        if device not in self._pools:
            self._pools[device] = torch.cuda.graph_pool_handle()
        with passed(memory) as all_read:
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream), counters(device) as held, workspaces_in(self.workspaces):
                    body(scratch)  # no row is stored
                    stream.synchronize()
                    all_read()
                    graph.capture_begin(pool=self._pools[device], capture_error_mode="thread_local")
                    try:
                        result = body(logits)
                    except BaseException:
                        _abandon(graph)
                        raise
                    graph.capture_end()
            finally:
                # Also after a partial failure: queued launches still read memory that others may reuse from here on.
                current.wait_stream(stream)
        return Recorded(graph, result, held)

    def logits_of(self, tokens: int, columns: int, device: torch.device) -> Tensor:
        """Return one buffer for all steps of a size: a step's logits are valid until the next step."""
        most = 1 << (tokens - 1).bit_length()
        if most not in self._logits:
            self._logits[most] = torch.empty((most, columns), dtype=torch.float32, device=device)
        return self._logits[most][:tokens]


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a failed capture, so that the stream can be used again; the caller raises the failure itself."""
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
