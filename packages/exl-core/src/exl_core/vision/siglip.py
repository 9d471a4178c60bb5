"""The SigLIP image encoder and the projector of Gemma 3, in float32."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ConfigError, InputError, UnsupportedError
from ..loading.checkpoint import TensorSource
from .encoder import Encoder, Framed, Grid, Picture, cut_patches, rms_norm
from .images import as_rgb, pixels_of
from .reading import (
    ACTIVATIONS,
    HALF,
    MAX_LAYERS,
    MAX_VISION_WIDTH,
    Preprocessing,
    activation,
    head_dim,
    preprocessing,
    processor_file,
    read_config,
)

__all__ = ["SiglipEncoder", "SiglipSettings", "read_siglip_settings"]

PROCESSORS = ("Gemma3ImageProcessor", "Gemma3ImageProcessorFast", "Gemma3ImageProcessorPil")
TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"
MAX_SIDE = 4096  # most pixels of a side of the square that every image is resized to


@dataclass(frozen=True)
class SiglipSettings:
    """Sizes of the tower and its projector."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    patch_size: int
    image_size: int  # pixels of a side
    side: int  # rows of a side of the output
    norm_eps: float
    activation: str
    preprocessing: Preprocessing

    @property
    def patches(self) -> int:
        """Patches of a side."""
        return self.image_size // self.patch_size


def read_siglip_settings(folder: Path) -> SiglipSettings:
    """Read the settings of a folder's tower.

    Raises:
        ConfigError: a file is invalid.
        UnsupportedError: the tower or an option is not supported.
    """
    read, vision = read_config(folder)
    kind = vision.string("model_type", default="siglip_vision_model")
    if kind != "siglip_vision_model":
        raise UnsupportedError(
            f"{read.file}: a vision tower of type {kind!r} is not supported for this model; SigLIP is"
        )
    hidden = vision.integer("hidden_size", default=768, minimum=1, maximum=MAX_VISION_WIDTH)
    heads = vision.integer("num_attention_heads", default=12, minimum=1, maximum=MAX_VISION_WIDTH)
    patch = vision.integer("patch_size", default=16, minimum=1, maximum=1024)
    size = vision.integer("image_size", default=224, minimum=patch, maximum=MAX_SIDE)
    tokens = read.integer("mm_tokens_per_image", default=256, minimum=1, maximum=1 << 20)
    side, patches = math.isqrt(tokens), size // patch
    if side * side != tokens or side > patches or patches % side:
        raise ConfigError(f"{read.file}: {patches} x {patches} patches do not make {tokens} rows of whole squares")
    if vision.integer("num_channels", default=3) != 3:
        raise ConfigError(f"{vision.file}: num_channels must be 3, the colours of an image")
    images = processor_file(folder, PROCESSORS)
    assert images is not None
    if images.boolean("do_pan_and_scan", default=False):
        raise UnsupportedError(f"{images.file}: do_pan_and_scan is not supported; crop the image yourself")
    for key in ("size->height", "size->width"):
        found = images.integer(key, default=size)
        if found != size:
            raise ConfigError(f"{images.file}: {key} is {found}, the tower's image_size in config.json is {size}")
    return SiglipSettings(
        hidden_size=hidden,
        intermediate_size=vision.integer("intermediate_size", default=3072, minimum=1, maximum=MAX_VISION_WIDTH),
        num_layers=vision.integer("num_hidden_layers", default=12, minimum=1, maximum=MAX_LAYERS),
        num_heads=heads,
        head_dim=head_dim(vision, hidden, heads),
        patch_size=patch,
        image_size=size,
        side=side,
        norm_eps=vision.number("layer_norm_eps", default=1e-6),
        activation=activation(vision, "hidden_act", "gelu_pytorch_tanh"),
        preprocessing=preprocessing(images, HALF, HALF, resample=2),
    )


class SiglipEncoder(Encoder):
    """pixels [3, S, S] -> rows [side * side, hidden size of the language model].

    Patches with learned positions all attend to each other and are then averaged over squares.
    """

    settings: SiglipSettings
    pieces = ("<start_of_image>", "<end_of_image>")

    def __init__(self, settings: SiglipSettings, text_hidden_size: int) -> None:
        super().__init__(text_hidden_size)
        self.settings = settings
        self.merge = settings.patches // settings.side

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, by name."""
        s = self.settings
        h, inner = s.hidden_size, s.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            f"{TOWER}.embeddings.patch_embedding.weight": (h, 3, s.patch_size, s.patch_size),
            f"{TOWER}.embeddings.patch_embedding.bias": (h,),
            f"{TOWER}.embeddings.position_embedding.weight": (s.patches**2, h),
            f"{PROJECTOR}.mm_soft_emb_norm.weight": (h,),
            f"{PROJECTOR}.mm_input_projection.weight": (h, self.text_hidden_size),
        }
        norms = [f"{TOWER}.post_layernorm"]
        for i in range(s.num_layers):
            p = f"{TOWER}.encoder.layers.{i}."
            norms += [f"{p}layer_norm1", f"{p}layer_norm2"]
            linears = {f"self_attn.{m}_proj": (h, h) for m in ("q", "k", "v", "out")}
            linears |= {"mlp.fc1": (inner, h), "mlp.fc2": (h, inner)}
            for name, shape in linears.items():
                shapes |= {f"{p}{name}.weight": shape, f"{p}{name}.bias": shape[:1]}
        for norm in norms:
            shapes |= {f"{norm}.weight": (h,), f"{norm}.bias": (h,)}
        return shapes

    def load(self, source: TensorSource, device: torch.device) -> None:
        """Read all weights. Raises MissingTensorError, FormatError."""
        super().load(source, device)
        assert self._weights is not None
        key = f"{PROJECTOR}.mm_soft_emb_norm.weight"
        # Gemma stores norm weights minus 1. Not in place: the tensor may be the source's.
        self._weights[key] = self._weights[key] + 1.0

    def preprocess(self, image: Any) -> Picture:
        """Preprocess a PIL image. Raises InputError."""
        s = self.settings
        pixels = pixels_of(as_rgb(image), s.image_size, s.image_size, s.preprocessing)
        return Picture(pixels, (1, s.patches, s.patches), (s.image_size, s.image_size))

    def reported_grid(self, grid: Grid) -> Grid:
        """Return the grid of the output rows."""
        return 1, self.settings.side, self.settings.side

    def check(self, pixels: Tensor, grid: Grid | None) -> Grid:
        """Check `pixels` and return their grid. Raises InputError."""
        s = self.settings
        own = (1, s.patches, s.patches)
        if tuple(pixels.shape) != (3, s.image_size, s.image_size):
            raise InputError(f"pixels are {list(pixels.shape)}, must be [3, {s.image_size}, {s.image_size}]")
        if grid is not None and tuple(grid) != own:
            raise InputError(f"thw_grid is {grid}, this tower's is {own}")
        return own

    def frame(self, rows: Tensor, grid: Grid, ends: Tensor) -> Framed:
        """Add one framing row before and one after the image."""
        return Framed(torch.cat([ends[:1], rows, ends[1:]]), 1, 1)

    @torch.no_grad()
    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """Encode checked pixels to float32 [rows, hidden size of the language model]."""
        s, key = self.settings, f"{TOWER}.embeddings.patch_embedding"
        weight = self._w(f"{key}.weight")
        patches = cut_patches(pixels.to(weight.device, torch.float32), s.patch_size)
        x = functional.linear(patches, weight.flatten(1), self._w(f"{key}.bias"))
        x = x + self._w(f"{TOWER}.embeddings.position_embedding.weight")
        act = ACTIVATIONS[s.activation]
        for i in range(s.num_layers):
            p = f"{TOWER}.encoder.layers.{i}."
            x = x + self._attention(self._layer_norm(x, f"{p}layer_norm1", s.norm_eps), f"{p}self_attn.")
            h = self._layer_norm(x, f"{p}layer_norm2", s.norm_eps)
            x = x + self._linear(act(self._linear(h, f"{p}mlp.fc1")), f"{p}mlp.fc2")
        x = self._layer_norm(x, f"{TOWER}.post_layernorm", s.norm_eps)
        squares = functional.avg_pool2d(x.T.reshape(1, -1, s.patches, s.patches), self.merge)[0].flatten(1).T
        x = rms_norm(squares, self._w(f"{PROJECTOR}.mm_soft_emb_norm.weight"), s.norm_eps)
        return x @ self._w(f"{PROJECTOR}.mm_input_projection.weight")

    def _attention(self, h: Tensor, p: str) -> Tensor:
        heads, d = self.settings.num_heads, self.settings.head_dim
        q, k, v = (self._linear(h, f"{p}{m}_proj").view(-1, heads, d).transpose(0, 1)[None] for m in "qkv")
        mixed = functional.scaled_dot_product_attention(q, k, v)[0]
        return self._linear(mixed.transpose(0, 1).reshape(h.shape), f"{p}out_proj")
