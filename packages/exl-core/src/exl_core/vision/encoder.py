"""The base of all image encoders: weights, input images, attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import FormatError, ModelStateError, UnsupportedError
from ..loading.checkpoint import TensorSource
from ..loading.linears import require_finite_float

__all__ = ["Encoder", "Framed", "Grid", "Picture", "cut_patches", "rms_norm", "rotate"]

Grid = tuple[int, int, int]
"""Patches in time, height and width, before any merging."""


@dataclass(frozen=True)
class Picture:
    """An image (or video) ready for a tower."""

    pixels: Tensor  # float32: [3, H, W], or patches [T * H * W, numbers of a patch], depending on the tower
    grid: Grid
    size: tuple[int, int]  # width, height of the resized image


@dataclass(frozen=True)
class Framed:
    """Rows [n, hidden] for the language model: the tower's rows between the embeddings of framing tokens."""

    rows: Tensor
    pre_tokens: int = 0
    post_tokens: int = 0


class Encoder(ABC):
    """From an image to rows of the language model's hidden size, in float32.

    Weights are stored under their names in the files (after the architecture's key map).
    """

    pieces: ClassVar[tuple[str, str]]  # the two tokens whose embeddings frame an image
    merge: int  # patches of a side that become one row of the output
    settings: object  # of the tower in the model's files; frozen

    def __init__(self, text_hidden_size: int) -> None:
        self.text_hidden_size = text_hidden_size
        self._weights: dict[str, Tensor] | None = None

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, by name."""

    @abstractmethod
    def preprocess(self, image: Any) -> Picture:
        """Preprocess a PIL image as the published processor does. Raises InputError."""

    def preprocess_video(self, frames: Sequence[Any]) -> Picture:
        """Preprocess PIL images of one size, in order. Raises UnsupportedError if the tower takes images only."""
        raise UnsupportedError(f"{type(self).__name__} takes images only, no video")

    @abstractmethod
    def check(self, pixels: Tensor, grid: Grid | None) -> Grid:
        """Check `pixels` and return their grid. Raises InputError."""

    @abstractmethod
    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """Encode checked pixels on any device to float32 [rows, hidden size of the language model]."""

    @abstractmethod
    def frame(self, rows: Tensor, grid: Grid, ends: Tensor) -> Framed:
        """Add framing rows; ends: embeddings [2, hidden] of `pieces`."""

    def time_step(self, fps: float) -> float:
        """Return the positions from one patch of time to the next, for a video of `fps` frames a second."""
        return 1.0

    def reported_grid(self, grid: Grid) -> Grid | None:
        """Return the grid that the language model receives (`ExLlamaV2MMEmbedding.thw_grid`), or None."""
        return None

    def side(self, grid: Grid) -> tuple[int, int]:
        """Return (rows, columns) of the output of one image or frame."""
        return grid[1] // self.merge, grid[2] // self.merge

    # ------------------------------------------------------------------------------------------------------- weights

    @torch.inference_mode(False)  # as the weights of a model
    def load(self, source: TensorSource, device: torch.device) -> None:
        """Read all weights. Raises MissingTensorError, FormatError."""
        weights = {}
        for name, shape in self.shapes().items():
            tensor = source.read(name)
            if tuple(tensor.shape) != shape:
                raise FormatError(f"{source.describe(name)}: shape {list(tensor.shape)}, expected {list(shape)}")
            require_finite_float(tensor, source.describe(name))
            weights[name] = tensor.to(device, torch.float32)
        self._weights = weights

    def unload(self) -> None:
        """Drop the weights."""
        self._weights = None

    @property
    def loaded(self) -> bool:
        """Whether the weights are loaded."""
        return self._weights is not None

    def weight_bytes(self) -> int:
        """Return the bytes of loaded weights."""
        return sum(t.nbytes for t in (self._weights or {}).values())

    # ------------------------------------------------------------------------------------------------------ operators

    def _w(self, name: str) -> Tensor:
        if self._weights is None:
            raise ModelStateError("the vision tower is not loaded: call load() first")
        return self._weights[name]

    def _linear(self, x: Tensor, key: str) -> Tensor:
        """Compute x W^T, plus the bias where the file has one."""
        bias = f"{key}.bias"
        return functional.linear(x, self._w(f"{key}.weight"), self._weights.get(bias) if self._weights else None)

    def _layer_norm(self, x: Tensor, key: str, eps: float) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], self._w(f"{key}.weight"), self._w(f"{key}.bias"), eps)


def cut_patches(pixels: Tensor, size: int) -> Tensor:
    """Cut [3, H, W] into [patches, 3 * size * size], row by row, in the order of a convolution's weight."""
    channels, height, width = pixels.shape
    cut = pixels.reshape(channels, height // size, size, width // size, size)
    return cut.permute(1, 3, 0, 2, 4).reshape(-1, channels * size * size)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + half) of the last dimension by the angles with these cos and sin, broadcast."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
