"""The head: from hidden state to logits, padded to a multiple of 32 columns."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from exl_kernels.activation import softcap

from ..execution.batch import Step
from ..loading.checkpoint import TensorSource
from .linear import Linear
from .module import Module

__all__ = ["PADDING_LOGIT", "Head"]

PADDING_LOGIT = -65504.0  # the lowest half; exllamav2 writes it into padding columns


class Head(Module):
    """logits = softcap((x @ W) * logit_scale), float32 [T, padded vocabulary]."""

    name = "Linear"

    def __init__(self, linear: Linear, padded_vocab_size: int, softcap: float | None = None) -> None:
        self.key = linear.key
        self.linear = linear
        self.padded_vocab_size = padded_vocab_size
        self.softcap = softcap

    def submodules(self) -> Iterator[Linear]:
        """Yield the head's linear."""
        yield self.linear

    def load(self, source: TensorSource, device: torch.device) -> None:
        """Load the matrix."""
        self.linear.load(source, device)

    def unload(self) -> None:
        """Drop the matrix."""
        self.linear.unload()

    @property
    def loaded(self) -> bool:
        """Whether the matrix is loaded."""
        return self.linear.matrix is not None

    def weight_bytes(self) -> int:
        """Return the bytes of the loaded matrix."""
        return self.linear.weight_bytes()

    def forward(
        self, x: Tensor, step: Step | None = None, out: Tensor | None = None, *, invariant: bool | None = None
    ) -> Tensor:
        """Multiply x [T, hidden] -> float32 [T, padded vocabulary], in `out` if given.

        `invariant` is as for `QuantMatrix.matmul`; a step brings its own.
        """
        logits = out
        if logits is None:
            logits = torch.empty((x.shape[0], self.padded_vocab_size), dtype=torch.float32, device=x.device)
        loras, invariant = ((), invariant) if step is None else (step.loras, step.invariant)
        self.linear.forward_into(x, logits, loras, invariant=invariant)
        return self.finish(logits)

    def finish(self, logits: Tensor) -> Tensor:
        """Apply softcap and padding to the matmul's result, in place."""
        if self.softcap:
            softcap(logits, self.softcap)
        logits[:, self.linear.out_features :] = PADDING_LOGIT
        return logits
