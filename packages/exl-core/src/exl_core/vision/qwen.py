"""The image encoders of Qwen2-VL and Qwen2.5-VL with their mergers, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import InputError
from .encoder import Encoder, Framed, Grid, Picture, rms_norm, rotate
from .qwen_images import preprocess, preprocess_video
from .qwen_settings import QwenSettings
from .reading import ACTIVATIONS, MAX_EDGE

__all__ = ["QwenEncoder"]

EPS = 1e-6  # of every norm in the tower and the merger
VISUAL = "visual"


class QwenEncoder(Encoder):
    """patches [T * H * W, numbers of a patch] -> rows [T * H * W / merge^2, hidden size of the language model].

    Patches attend to those of their frame, or in Qwen2.5-VL on most layers to those of their window; positions are
    rotations by row and column.
    """

    settings: QwenSettings
    pieces = ("<|vision_start|>", "<|vision_end|>")

    def __init__(self, settings: QwenSettings, text_hidden_size: int) -> None:
        super().__init__(text_hidden_size)
        self.settings = settings
        self.merge = settings.merge_size

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, by name."""
        s = self.settings
        h, inner = s.hidden_size, s.intermediate_size
        merged = h * s.merge_size**2
        shapes: dict[str, tuple[int, ...]] = {
            f"{VISUAL}.patch_embed.proj.weight": (h, 3, s.temporal_patch, s.patch_size, s.patch_size),
            f"{VISUAL}.merger.mlp.0.weight": (merged, merged),
            f"{VISUAL}.merger.mlp.0.bias": (merged,),
            f"{VISUAL}.merger.mlp.2.weight": (self.text_hidden_size, merged),
            f"{VISUAL}.merger.mlp.2.bias": (self.text_hidden_size,),
        }
        linears = {"attn.qkv": (3 * h, h), "attn.proj": (h, h)}
        if s.gated:
            linears |= {"mlp.gate_proj": (inner, h), "mlp.up_proj": (inner, h), "mlp.down_proj": (h, inner)}
        else:
            linears |= {"mlp.fc1": (inner, h), "mlp.fc2": (h, inner)}
        norms = [f"{VISUAL}.merger.ln_q"]
        for i in range(s.num_layers):
            p = f"{VISUAL}.blocks.{i}."
            norms += [f"{p}norm1", f"{p}norm2"]
            for name, shape in linears.items():
                shapes |= {f"{p}{name}.weight": shape, f"{p}{name}.bias": shape[:1]}
        shapes |= {f"{norm}.weight": (h,) for norm in norms}
        if not s.gated:
            shapes |= {f"{norm}.bias": (h,) for norm in norms}
        return shapes

    def preprocess(self, image: Any) -> Picture:
        """Preprocess a PIL image. Raises InputError."""
        return preprocess(image, self.settings)

    def preprocess_video(self, frames: Sequence[Any]) -> Picture:
        """Preprocess PIL images of one size, in order. Raises InputError."""
        return preprocess_video(frames, self.settings)

    def time_step(self, fps: float) -> float:
        """Return the positions from one patch of time to the next: by time in Qwen2.5-VL, else 1."""
        s = self.settings
        return s.tokens_per_second * s.temporal_patch / fps if s.gated else 1.0

    def reported_grid(self, grid: Grid) -> Grid:
        """Return the grid itself."""
        return grid

    def check(self, pixels: Tensor, grid: Grid | None) -> Grid:
        """Check patches and grid, and return the grid. Raises InputError."""
        m, wanted = self.merge, self.settings.patch_numbers
        if grid is None or len(grid) != 3 or not all(isinstance(n, int) and 1 <= n <= MAX_EDGE for n in grid):
            raise InputError(f"thw_grid is {grid}, must be the patches in time, height and width")
        t, rows, columns = grid
        if rows % m or columns % m:
            raise InputError(f"thw_grid is {grid}: height and width must be multiples of {m}")
        if tuple(pixels.shape) != (t * rows * columns, wanted):
            raise InputError(
                f"patches are {list(pixels.shape)}, thw_grid {grid} asks for [{t * rows * columns}, {wanted}]"
            )
        return t, rows, columns

    def frame(self, rows: Tensor, grid: Grid, ends: Tensor) -> Framed:
        """Add one framing row before and one after the image."""
        return Framed(torch.cat([ends[:1], rows, ends[1:]]), 1, 1)

    @torch.no_grad()
    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """Encode checked patches to float32 [rows, hidden size of the language model]."""
        s = self.settings
        weight = self._w(f"{VISUAL}.patch_embed.proj.weight")
        x = pixels.to(weight.device, torch.float32) @ weight.flatten(1).T
        cos, sin = self._rotation(grid, x.device)
        frame = grid[1] * grid[2]
        whole = [torch.arange(len(x), device=x.device).view(grid[0], frame)]
        windows = self._windows(grid, x.device) if s.window else whole
        for i in range(s.num_layers):
            p = f"{VISUAL}.blocks.{i}."
            parts = whole if i in s.full_layers else windows
            x = x + self._attention(self._norm(x, f"{p}norm1"), f"{p}attn.", cos, sin, parts)
            x = x + self._feed_forward(self._norm(x, f"{p}norm2"), f"{p}mlp.")
        x = self._norm(x, f"{VISUAL}.merger.ln_q").view(len(x) // s.merge_size**2, -1)
        return self._linear(functional.gelu(self._linear(x, f"{VISUAL}.merger.mlp.0")), f"{VISUAL}.merger.mlp.2")

    def _norm(self, x: Tensor, key: str) -> Tensor:
        return rms_norm(x, self._w(f"{key}.weight"), EPS) if self.settings.gated else self._layer_norm(x, key, EPS)

    def _blocks(self, grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (row, column) of every patch of one frame, in the order of the patches: block by block."""
        m, (_, rows, columns) = self.merge, grid
        row = torch.arange(rows, device=device)[:, None].expand(rows, columns)
        column = torch.arange(columns, device=device)[None].expand(rows, columns)
        cut = (rows // m, m, columns // m, m)
        return tuple(t.reshape(cut).transpose(1, 2).flatten() for t in (row, column))  # type: ignore[return-value]

    def _rotation(self, grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cos and sin float32 [T * H * W, head_dim / 2]: the first half by row, the second by column."""
        half = self.settings.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32) / half
        frequencies = (1.0 / self.settings.rope_theta**exponents).to(device)
        angles = torch.cat([place[:, None] * frequencies for place in self._blocks(grid, device)], dim=1)
        angles = angles.repeat(grid[0], 1)
        return angles.cos(), angles.sin()

    def _windows(self, grid: Grid, device: torch.device) -> list[Tensor]:
        """Return index matrices [windows, patches of a window]; the patches of a window attend to each other.

        Windows of equal size share a matrix.
        """
        row, column = self._blocks(grid, device)
        side = self.settings.window * self.merge
        across = -(-grid[2] // side)
        of_patch = (row // side) * across + column // side
        order = torch.argsort(of_patch, stable=True)
        counts = torch.bincount(of_patch).tolist()
        by_size: dict[int, list[Tensor]] = {}
        for part in torch.split(order, counts):
            by_size.setdefault(len(part), []).append(part)
        frame = grid[1] * grid[2]
        starts = torch.arange(grid[0], device=device)[:, None, None] * frame
        return [(torch.stack(parts)[None] + starts).flatten(0, 1) for parts in by_size.values()]

    def _attention(self, h: Tensor, p: str, cos: Tensor, sin: Tensor, parts: list[Tensor]) -> Tensor:
        heads, d = self.settings.num_heads, self.settings.head_dim
        q, k, v = self._linear(h, f"{p}qkv").view(len(h), 3, heads, d).unbind(1)
        q, k = rotate(q, cos[:, None], sin[:, None]), rotate(k, cos[:, None], sin[:, None])
        mixed = torch.empty_like(v)
        for part in parts:
            one, other, third = (t[part].transpose(1, 2) for t in (q, k, v))
            mixed[part] = functional.scaled_dot_product_attention(one, other, third).transpose(1, 2)
        return self._linear(mixed.reshape(h.shape), f"{p}proj")

    def _feed_forward(self, h: Tensor, p: str) -> Tensor:
        act = ACTIVATIONS[self.settings.activation]
        if self.settings.gated:
            return self._linear(act(self._linear(h, f"{p}gate_proj")) * self._linear(h, f"{p}up_proj"), f"{p}down_proj")
        return self._linear(act(self._linear(h, f"{p}fc1")), f"{p}fc2")
