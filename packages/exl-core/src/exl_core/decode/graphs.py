"""Captured decode steps of one model: which there are, when one applies, what to do when it does not.

A captured step is recorded once with static inputs and replayed as one launch: the plan's launches where a plan covers
the model, else the modules' own forward pass; to the bits of the eager pass either way. Grids and workspaces depend
on the bucket only, lengths and tables are read on the device.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attn_params import PagedParams
from ..modules import Head, Intervention, Step
from ..step import build_step
from .inputs import Bucket, StepInputs
from .plan import DecodePlan, plan_of

if TYPE_CHECKING:
    from ..cache import ExLlamaV2CacheBase
    from ..model import ExLlamaV2

__all__ = ["GRAPHS_VARIABLE", "DecodeGraphs"]

GRAPHS_VARIABLE = "EXL_CUDA_GRAPHS"  # "0": always launch operator by operator

BATCHES = (1, 2, 4, 8, 16, 32, 64)
MAX_Q_LEN = 8
MAX_TOKENS = 64
"""Rows up to which a row's result does not depend on their number (exl_kernels.linear_cuda)."""

Number = TypeVar("Number", np.int32, np.int64)

_STATIC = {"rows", "positions", "slots", "block_table", "rope_positions"}
_CONSTANT = {
    "batch_size",
    "q_len",
    "cos",
    "sin",
    "pages",
    "key_mask",
    "max_keys",
    "abort_event",
    "loras",
    "embeddings",
    "alt",
}


@dataclass
class _Graph:
    """A captured step with everything its addresses point to."""

    graph: torch.cuda.CUDAGraph
    inputs: StepInputs
    logits: Tensor  # float32 [tokens, padded vocabulary]
    kept: tuple[Tensor, ...]  # rope tables


class DecodeGraphs:
    """The captured steps of one model, made as buckets are met.

    `reason` says why the last paged step of few tokens was launched eagerly, None when it was not; `plan_reason` why
    steps are captured as the modules' own passes rather than by the plan (`plan.py`), None when they are not.
    """

    def __init__(self, model: ExLlamaV2) -> None:
        self._model = weakref.ref(model)
        self._graphs: dict[tuple[int, ...], dict[Bucket, _Graph]] = {}
        self._logits: dict[int, Tensor] = {}
        self._pool: Any = None
        self._refused: str | None = None
        self._exact_batch = False
        self._checked = False
        self._interventions = 0
        self.reason: str | None = None
        self.plan_reason: str | None = None

    # ------------------------------------------------------------------------------------------------------- the step

    def step(self, ids: Tensor, cache: ExLlamaV2CacheBase | None, params: PagedParams) -> Tensor | None:
        """Logits float32 [B, q, padded vocabulary] of a step over pages, or None: the caller takes the eager way.

        The logits lie in memory that the next call overwrites. None for whatever is not covered or not right: the eager
        way has the checks that say what is wrong.
        """
        batch, q_len = ids.shape
        if q_len > MAX_Q_LEN or batch * q_len > MAX_TOKENS or cache is None:
            return None
        model = self._model()
        if model is None or not self._usable(model):
            return None
        table, past = _array(params.block_index, np.int32), _array(params.cache_seqlens, np.int64)
        tokens = _array(ids, np.int64)
        if table is None or past is None or tokens is None or not _fits(model, cache, params, tokens, past, table):
            return None
        bucket = self._bucket(batch, q_len, params.page_size, int(past.max()) + q_len, cache)
        key = _place(cache, params.page_size)
        held = self._graphs.get(key)
        captured = None if held is None else held.get(bucket)
        if captured is None:
            captured = self._capture(model, cache, bucket, key)
            if captured is None:
                return None
        captured.inputs.fill(tokens, past, table)
        captured.graph.replay()
        return captured.logits[: batch * q_len].view(batch, q_len, -1)

    def clear(self) -> None:
        """Forget every captured step and give its memory back."""
        self._drop(list(self._graphs))
        self._logits.clear()
        self._checked = False
        self._refused = self.reason = None

    @property
    def count(self) -> int:
        """How many steps are captured."""
        return sum(len(held) for held in self._graphs.values())

    # ------------------------------------------------------------------------------------------------------- internals

    def _drop(self, keys: list[tuple[int, ...]]) -> None:
        for key in keys:
            del self._graphs[key]
        if not self.count:
            self._pool = None  # torch forgets a pool with its last graph; its number must not be used again

    def _usable(self, model: ExLlamaV2) -> bool:
        if not self._checked or self._interventions != Intervention.made:
            self._checked, self._interventions = True, Intervention.made
            self._refused = _refusal(model)
            # torch's products of float matrices may change with the number of rows: no padding there.
            self._exact_batch = any(linear.quant.format == "float" for linear in model._linears())
        self.reason = self._refused
        return self._refused is None

    def _bucket(self, batch: int, q_len: int, page_size: int, length: int, cache: ExLlamaV2CacheBase) -> Bucket:
        rows = batch if self._exact_batch else next(b for b in BATCHES if b >= batch)
        if rows * q_len > MAX_TOKENS:
            rows = batch
        pages, most = 1, max(1, cache.max_seq_len // page_size)
        while pages * page_size < length:
            pages *= 2
        return Bucket(rows, q_len, min(pages, most), page_size)

    def _capture(
        self, model: ExLlamaV2, cache: ExLlamaV2CacheBase, bucket: Bucket, key: tuple[int, ...]
    ) -> _Graph | None:
        if key not in self._graphs:
            known = any(k[0] == key[0] for k in self._graphs)
            stale = [k for k in self._graphs if k[0] == key[0] and k[1] == key[1]]  # the cache's tensors moved
            self._drop(stale)
            self._graphs[key] = {}
            if not known:
                weakref.finalize(cache, _forget, weakref.ref(self), key[0])
        try:
            with torch.inference_mode(False), torch.no_grad():
                made = self._record(model, cache, bucket)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            self._refused = self.reason = f"the step could not be captured: {error}"
            return None
        self._graphs[key][bucket] = made
        return made

    def _record(self, model: ExLlamaV2, cache: ExLlamaV2CacheBase, bucket: Bucket) -> _Graph:
        device = model.device
        assert device is not None
        inputs = StepInputs(bucket, device)
        step = _static_step(model, cache, bucket, inputs, device)
        head = model.modules[-1]
        assert isinstance(head, Head)
        logits = self._logits_of(bucket.tokens, model.config.padded_vocab_size, device)

        plan = plan_of(model)
        self.plan_reason = plan if isinstance(plan, str) else None

        def body() -> None:
            if isinstance(plan, DecodePlan):
                plan.run(inputs.ids, step, logits)
                return
            x = inputs.ids
            for module in model.modules[:-1]:
                x = module.forward(x, step)
            head.forward(x, step, out=logits)

        current = torch.cuda.current_stream(device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream):
            body()  # every row is padding: it is stored nowhere
            stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                body()
            except BaseException:
                _abandon(graph)
                raise
            graph.capture_end()
        current.wait_stream(stream)
        return _Graph(graph, inputs, logits, (step.cos, step.sin, *(step.alt or ())))

    def _logits_of(self, tokens: int, columns: int, device: torch.device) -> Tensor:
        """One buffer for all steps of a size: a step's logits hold until the next step."""
        if tokens not in self._logits:
            self._logits[tokens] = torch.empty((tokens, columns), dtype=torch.float32, device=device)
        return self._logits[tokens]


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """Ends a capture that failed, so that the stream can be used again; the failure itself is being raised."""
    with contextlib.suppress(RuntimeError):
        graph.capture_end()


def _forget(graphs: weakref.ref[DecodeGraphs], cache: int) -> None:
    owner = graphs()
    if owner is not None:
        owner._drop([key for key in owner._graphs if key[0] == cache])


def _refusal(model: ExLlamaV2) -> str | None:
    """Why no step of this model can be captured."""
    if model.device is None or model.device.type != "cuda":
        return "the model is not on a GPU"
    if os.environ.get(GRAPHS_VARIABLE, "1").strip() == "0":
        return f"{GRAPHS_VARIABLE}=0 asks for eager launches"
    if model.placement.several:
        return "the model lies on several devices"
    if any(isinstance(module, Intervention) for module in model.modules):
        return "a module is wrapped in an Intervention"
    known = _STATIC | _CONSTANT
    unknown = [f.name for f in fields(Step) if f.name not in known and f.init and not f.name.startswith("_")]
    if not isinstance(model.modules[-1], Head):
        return "the last module is not a head"
    host = next((m for m in model.modules if not m.capturable), None)
    if host is not None:
        return f"{host.key} ({host.name}) decides on the host what to launch"
    if unknown:
        return f"the step carries {', '.join(unknown)}, which captured steps do not know"
    return None


def _array(tensor: Tensor, dtype: type[Number]) -> NDArray[Number] | None:
    """The numbers of a CPU tensor as `dtype`; None for tensors elsewhere."""
    if tensor.device.type != "cpu":
        return None
    return tensor.numpy().astype(dtype, copy=False)


def _fits(
    model: ExLlamaV2,
    cache: ExLlamaV2CacheBase,
    params: PagedParams,
    ids: NDArray[np.int64],
    past: NDArray[np.int64],
    table: NDArray[np.int32],
) -> bool:
    """Everything the eager way would refuse, in one look."""
    batch, q_len = ids.shape
    size = params.page_size
    longest = int(past.max()) + q_len
    right = (
        params.batch_size == batch
        and params.q_len in (0, q_len)
        and cache.batch_size == 1
        and cache.max_seq_len % size == 0
        and int(past.min()) >= 0
        and longest <= min(table.shape[1] * size, model.config.max_seq_len)
        and int(ids.min()) >= -1
        and int(ids.max()) < model.config.vocab_size
    )
    if not right:
        return False
    used = np.arange(table.shape[1])[None, :] * size < (past + q_len)[:, None]
    return not bool((used & ((table < 0) | (table >= cache.max_seq_len // size))).any())


def _place(cache: ExLlamaV2CacheBase, page_size: int) -> tuple[int, ...]:
    """Which cache, and where its tensors are (they are made together): a captured step is bound to these addresses."""
    ends = (cache.pages(layer, page_size).value.data_ptr() for layer in (0, cache.num_hidden_layers - 1))
    return (id(cache), page_size, *ends)


def _static_step(
    model: ExLlamaV2, cache: ExLlamaV2CacheBase, bucket: Bucket, inputs: StepInputs, device: torch.device
) -> Step:
    """A step over `inputs` that is right for every length the bucket's pages can hold."""
    longest = min(bucket.pages * bucket.page_size, model.config.max_seq_len)
    params = PagedParams(
        batch_size=bucket.batch,
        block_index=torch.zeros((bucket.batch, bucket.pages), dtype=torch.int32),
        cache_seqlens=torch.full((bucket.batch,), longest - bucket.q_len, dtype=torch.int32),
        max_cache_seqlen=longest - bucket.q_len,
        page_size=bucket.page_size,
        q_len=bucket.q_len,
    )
    step = build_step(
        model.config, model.rope, cache, params, bucket.batch, bucket.q_len, None, device, rope_alt=model.rope_alt
    )
    return replace(
        step,
        rows=inputs.rows,
        positions=inputs.positions,
        slots=inputs.slots,
        block_table=inputs.block_table,
        rope_positions=inputs.rope_positions,
        _tokens={},
    )
