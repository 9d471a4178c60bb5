"""The Pixtral image encoder and the projectors of Llava and Mistral 3, in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import InputError
from .encoder import Encoder, Framed, Grid, Picture, cut_patches, rms_norm, rotate
from .preprocess import preprocess
from .reading import ACTIVATIONS
from .settings import PixtralSettings

__all__ = ["PixtralEncoder"]

EPS = 1e-5  # of every norm in the tower
TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"


class PixtralEncoder(Encoder):
    """pixels [3, H, W] -> rows [H / step * W / step, hidden size of the language model], step = patch * merge size.

    Every patch attends to every other; positions are rotations by row (even frequencies) and column (odd frequencies).
    """

    settings: PixtralSettings
    pieces = ("[IMG_BREAK]", "[IMG_END]")

    def __init__(self, settings: PixtralSettings, text_hidden_size: int) -> None:
        super().__init__(text_hidden_size)
        self.settings = settings
        self.merge = settings.merge_size

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, by name."""
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

    def preprocess(self, image: Any) -> Picture:
        """Preprocess a PIL image. Raises InputError."""
        pixels = preprocess(image, self.settings)
        return Picture(pixels, self._grid(pixels), (pixels.shape[2], pixels.shape[1]))

    def check(self, pixels: Tensor, grid: Grid | None) -> Grid:
        """Check `pixels` and return their grid. Raises InputError."""
        step, t = self.settings.patch_size * self.merge, pixels
        if t.dim() != 3 or t.shape[0] != 3 or t.shape[1] % step or t.shape[2] % step or not t.numel():
            raise InputError(f"pixels are {list(t.shape)}, must be [3, height, width], sides multiples of {step}")
        own = self._grid(pixels)
        if grid is not None and tuple(grid) != own:
            raise InputError(f"thw_grid is {grid}, pixels of {list(t.shape)} make {own}")
        return own

    def frame(self, rows: Tensor, grid: Grid, ends: Tensor) -> Framed:
        """Add a break token after each row of patches, and an end token after the last row."""
        down, across = self.side(grid)
        breaks = ends[[0] * (down - 1) + [1]][:, None]
        return Framed(torch.cat([rows.view(down, across, -1), breaks], dim=1).flatten(0, 1))

    def _grid(self, pixels: Tensor) -> Grid:
        return 1, pixels.shape[1] // self.settings.patch_size, pixels.shape[2] // self.settings.patch_size

    @torch.no_grad()
    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """Encode checked pixels to float32 [rows, hidden size of the language model]."""
        s = self.settings
        weight = self._w(f"{TOWER}.patch_conv.weight")
        patches = cut_patches(pixels.to(weight.device, torch.float32), s.patch_size)
        place = grid[1], grid[2]
        x = rms_norm(patches @ weight.flatten(1).T, self._w(f"{TOWER}.ln_pre.weight"), EPS)
        cos, sin = self._rotation(place, x.device)
        for i in range(s.layers_used):
            p = f"{TOWER}.transformer.layers.{i}."
            x = x + self._attention(rms_norm(x, self._w(f"{p}attention_norm.weight"), EPS), p + "attention.", cos, sin)
            x = x + self._feed_forward(rms_norm(x, self._w(f"{p}ffn_norm.weight"), EPS), p + "feed_forward.")
        return self._project(x, place)

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
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        return mixed.transpose(0, 1).reshape(h.shape) @ self._w(f"{p}o_proj.weight").T

    def _feed_forward(self, h: Tensor, p: str) -> Tensor:
        gate = ACTIVATIONS[self.settings.activation](h @ self._w(f"{p}gate_proj.weight").T)
        return (gate * (h @ self._w(f"{p}up_proj.weight").T)) @ self._w(f"{p}down_proj.weight").T

    def _project(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        s = self.settings
        if s.projector_norm:
            x = rms_norm(x, self._w(f"{PROJECTOR}.norm.weight"), s.norm_eps)
            m, (rows, columns) = s.merge_size, grid
            # [channel, row in block, column in block] of each block, in the order of unfold.
            blocks = x.view(rows // m, m, columns // m, m, -1).permute(0, 2, 4, 1, 3)
            merge = self._w(f"{PROJECTOR}.patch_merger.merging_layer.weight")
            x = blocks.reshape(rows // m * (columns // m), -1) @ merge.T
        for i, act in ((1, ACTIVATIONS[s.projector_activation]), (2, None)):
            bias = self._w(f"{PROJECTOR}.linear_{i}.bias") if s.projector_bias else None
            x = functional.linear(x, self._w(f"{PROJECTOR}.linear_{i}.weight"), bias)
            x = x if act is None else act(x)
        return x
