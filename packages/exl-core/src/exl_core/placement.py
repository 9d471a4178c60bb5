"""The device of each module of a model, and moving a chunk between devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from exl_kernels.kv import KVPages

from .device import activation_dtype, torch_device
from .transfer import send

if TYPE_CHECKING:
    from .execution.batch import Step

__all__ = ["Placement"]

Tensors = Tensor | tuple[Tensor, ...]
"""A field of a step that a device holds."""


@dataclass
class Placement:
    """Devices of the modules.

    Attributes:
        names: device of every module, in the order of the modules.
        float_residual: the hidden state stays float32 on a GPU.
    """

    names: list[str]
    float_residual: bool = False
    _constants: dict[tuple[str, torch.device], tuple[Tensors, Tensors]] = field(default_factory=dict, repr=False)

    @property
    def several(self) -> bool:
        """Whether a pass uses more than one device."""
        return len(set(self.names)) > 1

    def device(self, index: int) -> torch.device:
        """Return torch's device of a module."""
        return torch_device(self.names[index])

    def crosses(self, index: int) -> bool:
        """Return whether module `index` is on another device than the preceding module."""
        return index > 0 and self.names[index] != self.names[index - 1]

    def carry(self, x: Tensor, index: int) -> Tensor:
        """Return the state before module `index` on the module's device, in separate memory."""
        device = self.device(index)
        dtype = x.dtype
        if x.device.type != device.type and dtype in (torch.float16, torch.float32):
            dtype = torch.float32 if self.float_residual else activation_dtype(device)
        moved = send(x, device, dtype)
        return moved.clone() if moved is x else moved

    def step_on(self, step: Step, device: torch.device) -> Step:
        """Return the step with its tensors on `device`. Constant tables are cached there."""
        if step.rows.device == device:
            return step
        changes: dict[str, Tensors] = {}
        for f in fields(step):
            value = getattr(step, f.name)
            if _is_tensors(value):
                constant = f.name in ("cos", "sin", "alt")
                changes[f.name] = self._kept(f.name, value, device) if constant else _moved(value, device)
        pages = _pages_on(step.pages, device)
        return replace(step, **changes, pages=pages, _tokens={}, elsewhere={})  # type: ignore[arg-type]  # by name

    def _kept(self, name: str, value: Tensors, device: torch.device) -> Tensors:
        held = self._constants.get((name, device))
        if held is None or held[0] is not value:
            with torch.inference_mode(False):  # kept for passes of every mode
                held = self._constants[name, device] = (value, _moved(value, device))
        return held[1]


def _pages_on(pages: Callable[[int], KVPages], device: torch.device) -> Callable[[int], KVPages]:
    """Return a function layer -> pages on the layer's device.

    A pass without a cache has one scratch layer that each layer overwrites; this function allocates one on this device.
    """
    scratch: list[KVPages] = []

    def on_device(layer: int) -> KVPages:
        found = pages(layer)
        if found.device == device:
            return found
        if not scratch:
            sizes = (found.num_pages, found.page_size, found.heads, found.head_dim)
            scratch.append(KVPages.allocate(found.kind, *sizes, device))
        return scratch[0]

    return on_device


def _is_tensors(value: object) -> TypeGuard[Tensors]:
    return isinstance(value, Tensor) or (
        isinstance(value, tuple) and bool(value) and all(isinstance(v, Tensor) for v in value)
    )


def _moved(value: Tensors, device: torch.device) -> Tensors:
    return send(value, device) if isinstance(value, Tensor) else tuple(send(v, device) for v in value)
