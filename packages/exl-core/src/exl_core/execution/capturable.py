"""Conditions of a captured step: its models, adapters, tensors and number of rows."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl_kernels.selection import MIDDLE_ROWS, PACKED_ROWS, STEP_ROWS

from ..layers import Head, Intervention, Module
from .attn_params import PagedParams
from .batch import Step
from .build_step import Chunk, build_step
from .environment import GRAPHS_VARIABLE, captures_steps
from .step_inputs import Bucket, StepTensors

if TYPE_CHECKING:
    from ..config import ExLlamaV2Config
    from ..contracts import Cache
    from ..language_model import LanguageModel

__all__ = [
    "NotCapturableError",
    "padded_rows",
    "refusal_of_model",
    "refusal_of_settings",
    "refusal_of_tokens",
    "static_step",
    "without_hooks",
]

# Fields of a step that change from replay to replay, and constant fields. All others must be empty.
_STATIC = {"rows", "positions", "slots", "block_table", "rope_positions"}
_CONSTANT = {"batch_size", "q_len", "cos", "sin", "pages", "max_keys", "alt", "invariant"}


class NotCapturableError(Exception):
    """The reason why a step cannot be captured; `captured.py` falls back."""


def padded_rows(batch: int, q_len: int) -> int:
    """Return the rows of the bucket that holds `batch` rows of `q_len` tokens.

    Up to PACKED_ROWS tokens there is one bucket an octave, and one of MIDDLE_ROWS tokens. Beyond that, where a row
    costs more, there are four an octave.
    """
    if batch * q_len <= PACKED_ROWS:
        most = MIDDLE_ROWS if batch * q_len <= MIDDLE_ROWS else PACKED_ROWS
        return min(1 << (batch - 1).bit_length(), most // q_len)
    grain = 1 << max(0, (batch - 1).bit_length() - 3)
    return min(-(-batch // grain) * grain, max(batch, STEP_ROWS // q_len))


def refusal_of_tokens(batch: int, q_len: int) -> str | None:
    """Return why a step of `batch` rows of `q_len` tokens has too many tokens to be captured, or None."""
    if batch * q_len <= STEP_ROWS:
        return None
    return f"the step has {batch} x {q_len} tokens; captured steps have at most {STEP_ROWS}"


def without_hooks(module: Module) -> Module:
    """Return the module inside the `Intervention`s that wrap it."""
    while isinstance(module, Intervention):
        module = module.inner
    return module


def refusal_of_model(model: LanguageModel) -> str | None:
    """Return why no step of this model can be captured, whatever its settings, or None."""
    if model.device is None or model.device.type != "cuda":
        return "the model is not on a GPU"
    context = model.tp_context
    if context is not None and not context.exchange.whole:
        return "each device has a process of its own"
    names = model.placement.names if context is None else context.names
    if any(not name.startswith("cuda") for name in names):
        return "a part of the model is on the CPU"
    if any(isinstance(module, Intervention) for module in model.modules):
        return "a module is wrapped in an Intervention"
    if not isinstance(model.modules[-1], Head):
        return "the last module is not a head"
    host = next((m for m in model.modules if not m.capturable), None)
    if host is not None:
        return f"{host.key} ({host.name}) decides on the host what to launch"
    return None


def refusal_of_settings(config: ExLlamaV2Config) -> str | None:
    """Return why no step of any model of this config is captured, or None."""
    if not captures_steps():
        return f"{GRAPHS_VARIABLE}=0 asks for eager launches"
    return "config.no_graphs asks for eager launches" if config.no_graphs else None


def static_step(
    model: LanguageModel,
    cache: Cache,
    bucket: Bucket,
    inputs: StepTensors,
    device: torch.device,
    *,
    invariant: bool = True,
) -> Step:
    """Build a step over `inputs` that is valid for every length that the bucket's pages can hold.

    Its rows are batch-invariant, except those of prompts that are captured without `invariant`.
    """
    longest = min(bucket.pages * bucket.page_size, model.config.max_seq_len)
    params = PagedParams(
        batch_size=bucket.batch,
        block_index=torch.zeros((bucket.batch, bucket.pages), dtype=torch.int32),
        cache_seqlens=torch.full((bucket.batch,), longest - bucket.q_len, dtype=torch.int32),
        max_cache_seqlen=longest - bucket.q_len,
        page_size=bucket.page_size,
        q_len=bucket.q_len,
    )
    chunk = Chunk(cache=cache, params=params, batch=bucket.batch, q_len=bucket.q_len)
    step = build_step(model, chunk, device, invariant=invariant)
    for name in (f.name for f in fields(Step)):
        if name not in _STATIC | _CONSTANT and not name.startswith("_") and not _at_rest(getattr(step, name)):
            raise NotCapturableError(f"the step has {name}, which captured steps do not support")
    return replace(
        step,
        rows=inputs.rows,
        positions=inputs.positions,
        slots=inputs.slots,
        block_table=inputs.block_table,
        rope_positions=inputs.rope_positions,
        windows=not bucket.decodes,
        _tokens={},
    )


def _at_rest(value: object) -> bool:
    return value is None or (not isinstance(value, Tensor) and not value)
