"""The operators between the projections of attention: norm, rotation, storing and softmax of heads over a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from exl_kernels.attention import paged_attention
from exl_kernels.kv import store_kv
from exl_kernels.rope import apply_rope

from ..execution.batch import Step
from .description import AttentionDescription
from .norm import Norm

if TYPE_CHECKING:
    from exl_kernels.kv import KVPages

__all__ = ["AttentionOptions", "Heads", "shape_heads", "shape_part"]

PICTURE_TOKENS = 64  # tokens of images in one call, each with a mask over all keys


class AttentionOptions(TypedDict):
    """The arguments of all kernels of attention that they take by name."""

    scale: float
    window: int
    softcap: float
    max_keys: int | None


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one attention, or of some of its heads, in a step.

    Keys and values of the step are stored before they are read, so that a token's result does not depend on how the
    prompt was cut into chunks. The methods run operator by operator. Launches that join these operators take their
    arguments from here: the properties, and q, k and v [T, heads, head_dim] each.
    """

    about: AttentionDescription
    step: Step

    @property
    def pages(self) -> KVPages:
        """Keys and values of the layer."""
        return self.step.pages(self.about.layer_idx)

    @property
    def options(self) -> AttentionOptions:
        """Scale, window and softcap of the layer, and the most keys of the step."""
        a = self.about
        return {"scale": a.scale, "window": a.window, "softcap": a.softcap, "max_keys": self.step.max_keys}

    def shaped(self, parts: Iterable[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of projections as `shape_heads` does, with q and k rotated."""
        q, k, v = shape_heads(self.about, parts)
        self.rotate(q, self.step.rope_positions)
        self.rotate(k, self.step.rope_positions)
        return q, k, v

    def rotate(self, t: Tensor, positions: Tensor) -> None:
        """Rotate heads in place by rows `positions` of the layer's table; none of a layer without rotation."""
        if self.about.rope != "none":
            apply_rope(t, *self.step.table(self.about.rope), positions, interleaved=self.about.interleaved)

    def store(self, k: Tensor, v: Tensor) -> None:
        """Store keys and values."""
        store_kv(self.pages, k, v, self.step.slots)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, then attend with q, all of them rotated."""
        self.store(k, v)
        mixed = self.read(q, self.step.rows, self.step.positions)
        if self.about.window and self.step.pictures is not None:
            self._read_pictures(q, mixed)
        return mixed

    def read(self, q: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Attend with q over the stored keys; rows and positions are those of its tokens."""
        step = self.step
        return paged_attention(q, self.pages, step.block_table, rows, positions, key_mask=step.key_mask, **self.options)

    def _read_pictures(self, q: Tensor, mixed: Tensor) -> None:
        """Write the rows of `mixed` for tokens of images: from a window before their own place to the image's end.

        The kernel counts a window from the last visible place, so each of these tokens needs a separate mask.
        """
        step = self.step
        assert step.pictures is not None
        keys = torch.arange(step.max_keys or 0, device=q.device)
        for tokens, own in zip(*(torch.split(t, PICTURE_TOKENS) for t in step.pictures), strict=True):
            rows = step.rows[tokens].long()
            mask = torch.zeros((len(tokens), len(keys)), device=q.device)
            if step.key_mask is not None:
                mask += step.key_mask[rows, : len(keys)]
            mask.masked_fill_(keys[None] <= own[:, None] - self.about.window, -torch.inf)
            mixed[tokens] = paged_attention(
                q[tokens],
                self.pages,
                step.block_table[rows],
                torch.arange(len(tokens), dtype=torch.int32, device=q.device),
                step.positions[tokens],
                scale=self.about.scale,
                softcap=self.about.softcap,
                key_mask=mask,
                max_keys=step.max_keys,
            )


def shape_heads(a: AttentionDescription, parts: Iterable[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Clamp projections q, k and v [T, heads * head_dim], and norm q and k, in place.

    Returns heads [T, heads, head_dim] of each, for the rotation.
    """
    q, k, v = (shape_part(a, t, norm) for t, norm in zip(parts, (a.q_norm, a.k_norm, None), strict=True))
    return q, k, v


def shape_part(a: AttentionDescription, t: Tensor, norm: Norm | None = None) -> Tensor:
    """Do as `shape_heads` with one projection.

    Args:
        a: the attention.
        t: the projection.
        norm: norm over each head, or over the whole row of heads if the weight is as wide as the row; or None.
    """
    if a.clip:
        t.clamp_(-a.clip, a.clip)
    if norm is not None and norm.shapes[0] == (t.shape[1],):
        t, norm = norm.apply(t, out=t), None
    t = t.view(t.shape[0], -1, a.head_dim)
    return t if norm is None else norm.apply(t, out=t)
