"""Hooks on the hidden states between modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..errors import InputError
from ..execution.batch import Step
from ..loading.checkpoint import TensorSource
from .linear import Linear
from .module import Module

__all__ = ["Hook", "Intervention"]

Hook = Callable[[Tensor, Step], Tensor]


class Intervention(Module):
    """A module with hooks: `model.modules[i] = Intervention(model.modules[i], pre_forward, post_forward)`.

    A hook gets the hidden state [batch, q_len, hidden] (before the embedding: the ids; after the head: the logits) and
    the `Step`. It returns the state to continue with, of the same shape, on any device. Its argument is a copy.
    Its key, layer, weights and linears are those of the inner module; other members are at `inner`. While a model holds
    an Intervention, no step runs as a captured graph; graphs captured before are used again after its removal.

    The rows of a batch are sequences. A pass sees only the tokens of each row that are not in the cache yet. A row may
    be several prompts only where the caller joined them (`PagedParams.q_lens`). The generators do not join prompts
    while a model, or a draft model, holds an Intervention. A dynamic generator reuses no results from before an
    Intervention was inserted or removed. It cannot detect that a hook changes its behaviour: insert a new one, or call
    the generator's `reset_page_table`.

    Args:
        inner: a module of the model.
        pre_forward: hook before the module, called as (hidden_state, step), or None.
        post_forward: hook after the module, or None.

    Raises:
        InputError: a hook is not callable, returns another shape, or `inner` is no module.
    """

    def __init__(self, inner: Module, pre_forward: Hook | None = None, post_forward: Hook | None = None) -> None:
        for name, hook in (("pre_forward", pre_forward), ("post_forward", post_forward)):
            if hook is not None and not callable(hook):
                raise InputError(f"{name} is a {type(hook).__name__}, must be callable as (hidden_state, step)")
        if not isinstance(inner, Module):
            raise InputError(f"an Intervention wraps a module of the model, not a {type(inner).__name__}")
        self.inner = inner
        self.pre_forward = pre_forward
        self.post_forward = post_forward
        self.key = inner.key
        self.name = inner.name
        self.layer_idx = inner.layer_idx

    def load(self, source: TensorSource, device: torch.device) -> None:
        """Load the inner module from the tensors of `source` to `device`."""
        self.inner.load(source, device)

    def unload(self) -> None:
        """Unload the inner module."""
        self.inner.unload()

    @property
    def loaded(self) -> bool:
        """Whether the inner module is loaded."""
        return self.inner.loaded

    def weight_bytes(self) -> int:
        """Return the bytes of the inner module's weights."""
        return self.inner.weight_bytes()

    def submodules(self) -> Iterator[Linear]:
        """Yield the linears of the inner module."""
        return self.inner.submodules()

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Run the hooks and the inner module. Raises InputError for a hook's wrong result."""
        x = _apply("pre_forward", self.pre_forward, x, step)
        x = self.inner.forward(x, step)
        return _apply("post_forward", self.post_forward, x, step)


def _apply(name: str, hook: Hook | None, x: Tensor, step: Step) -> Tensor:
    if hook is None:
        return x
    shape = (step.batch_size, -1) if x.dim() == 1 else (step.batch_size, -1, x.shape[-1])
    found = hook(x.view(shape).clone(), step)
    if not isinstance(found, Tensor) or found.numel() != x.numel() or found.shape != x.view(shape).shape:
        got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InputError(f"{name} returned {got}; it must return a hidden state {list(x.view(shape).shape)}")
    return x.copy_(found.reshape(x.shape)) if x.dim() > 1 else found.reshape(x.shape).to(x.device, x.dtype)
