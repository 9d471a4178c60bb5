"""The Pixtral image encoder and the projectors of Llava and Mistral 3, in float32 (spec core.md 3.5, 12.4)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import FormatError, ModelStateError
from ..loading.checkpoint import TensorSource
from ..loading.linears import require_finite_float
from .settings import PixtralSettings

__all__ = ["PixtralEncoder"]

EPS = 1e-5  # of every norm in the tower
TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": functional.gelu, "silu": functional.silu}


class PixtralEncoder:
    """pixels [3, H, W] -> rows [H / step * W / step, hidden size of the language model], step = patch * merge size.

    Every patch sees every other; positions are rotations by row (even frequencies) and column (odd ones).
    """

    def __init__(self, settings: PixtralSettings, text_hidden_size: int) -> None:
        self.settings = settings
        self.text_hidden_size = text_hidden_size
        self._weights: dict[str, Tensor] | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor and its shape."""
        s, text = self.settings, self.text_hidden_size
        h, inner = s.hidden_size, s.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            f"{TOWER}.patch_conv.weight": (h, 3, s.patch_size, s.patch_size),
            f"{TOWER}.ln_pre.weight": (h,),
            f"{PROJECTOR}.linear_1.weight": (text, h),
            f"{PROJECTOR}.linear_2.weight": (text, text),
        }
        if s.projector_bias:
            shapes |= {f"{PROJECTOR}.linear_{i}.bias": (text,) for i in (1, 2)}
        if s.projector_norm:
            shapes[f"{PROJECTOR}.norm.weight"] = (h,)
            shapes[f"{PROJECTOR}.patch_merger.merging_layer.weight"] = (h, h * s.merge_size**2)
        for i in range(s.layers_used):
            p = f"{TOWER}.transformer.layers.{i}."
            shapes |= {f"{p}attention.{m}_proj.weight": (h, h) for m in "qkvo"}
            shapes |= {f"{p}feed_forward.{m}_proj.weight": (inner, h) for m in ("gate", "up")}
            shapes[f"{p}feed_forward.down_proj.weight"] = (h, inner)
            shapes |= {f"{p}{m}_norm.weight": (h,) for m in ("attention", "ffn")}
        return shapes

    def load(self, source: TensorSource, device: torch.device) -> None:
        """Raises MissingTensorError, FormatError."""
        weights = {}
        for name, shape in self.shapes().items():
            tensor = source.read(name)
            if tuple(tensor.shape) != shape:
                raise FormatError(f"{source.describe(name)}: shape {list(tensor.shape)}, expected {list(shape)}")
            require_finite_float(tensor, source.describe(name))
            weights[name] = tensor.to(device, torch.float32)
        self._weights = weights

    def unload(self) -> None:
        self._weights = None

    @property
    def loaded(self) -> bool:
        return self._weights is not None

    def weight_bytes(self) -> int:
        return sum(t.nbytes for t in (self._weights or {}).values())

    def _w(self, name: str) -> Tensor:
        if self._weights is None:
            raise ModelStateError("the vision tower is not loaded: call load() first")
        return self._weights[name]

    @torch.no_grad()
    def forward(self, pixels: Tensor) -> Tensor:
        """float32 [rows, hidden size of the language model]; pixels on any device."""
        s = self.settings
        weight = self._w(f"{TOWER}.patch_conv.weight")
        patches = functional.conv2d(pixels.to(weight.device)[None], weight, stride=s.patch_size)[0]
        grid = (patches.shape[1], patches.shape[2])
        x = _rms(patches.flatten(1).T, self._w(f"{TOWER}.ln_pre.weight"), EPS)
        cos, sin = self._rotation(grid, x.device)
        for i in range(s.layers_used):
            p = f"{TOWER}.transformer.layers.{i}."
            x = x + self._attention(_rms(x, self._w(f"{p}attention_norm.weight"), EPS), p + "attention.", cos, sin)
            x = x + self._feed_forward(_rms(x, self._w(f"{p}ffn_norm.weight"), EPS), p + "feed_forward.")
        return self._project(x, grid)

    def _rotation(self, grid: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
        d = self.settings.head_dim
        frequencies = 1.0 / self.settings.rope_theta ** (torch.arange(0, d, 2, dtype=torch.float32) / d)
        rows = torch.arange(grid[0]).repeat_interleave(grid[1])[:, None] * frequencies[0::2]
        columns = torch.arange(grid[1]).repeat(grid[0])[:, None] * frequencies[1::2]
        angles = torch.cat([rows, columns], dim=1)
        return angles.cos().to(device), angles.sin().to(device)

    def _attention(self, h: Tensor, p: str, cos: Tensor, sin: Tensor) -> Tensor:
        heads, d = self.settings.num_heads, self.settings.head_dim
        q, k, v = ((h @ self._w(f"{p}{m}_proj.weight").T).view(-1, heads, d).transpose(0, 1) for m in "qkv")
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        mixed = functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        return mixed.transpose(0, 1).reshape(h.shape) @ self._w(f"{p}o_proj.weight").T

    def _feed_forward(self, h: Tensor, p: str) -> Tensor:
        gate = ACTIVATIONS[self.settings.activation](h @ self._w(f"{p}gate_proj.weight").T)
        return (gate * (h @ self._w(f"{p}up_proj.weight").T)) @ self._w(f"{p}down_proj.weight").T

    def _project(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        s = self.settings
        if s.projector_norm:
            x = _rms(x, self._w(f"{PROJECTOR}.norm.weight"), s.norm_eps)
            m, (rows, columns) = s.merge_size, grid
            # [channel, row in block, column in block] of each block, as unfold lays them out
            blocks = x.view(rows // m, m, columns // m, m, -1).permute(0, 2, 4, 1, 3)
            merge = self._w(f"{PROJECTOR}.patch_merger.merging_layer.weight")
            x = blocks.reshape(rows // m * (columns // m), -1) @ merge.T
        for i, act in ((1, ACTIVATIONS[s.projector_activation]), (2, None)):
            bias = self._w(f"{PROJECTOR}.linear_{i}.bias") if s.projector_bias else None
            x = functional.linear(x, self._w(f"{PROJECTOR}.linear_{i}.weight"), bias)
            x = x if act is None else act(x)
        return x


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
