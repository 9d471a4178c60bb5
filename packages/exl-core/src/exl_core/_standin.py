"""Plain-torch stand-ins for kernels that have not landed yet. Deleted with the next landing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


class QuantMatrix:
    def __init__(self, w: Tensor, bias: Tensor | None, prescale: float, fmt: str, bits: float, name: str) -> None:
        self._w, self._w32, self._bias, self._prescale = w, w.float(), bias, prescale
        self.in_features, self.out_features = w.shape
        self.format, self.bits_per_weight, self.name = fmt, bits, name
        self.nbytes = w.nbytes
        self.device = torch.device("cpu")

    @classmethod
    def from_exl2(
        cls,
        tensors: Mapping[str, Tensor],
        *,
        prescale: float = 1.0,
        compute: str = "int8",
        device: Any = "cpu",
        name: str = "",
    ) -> QuantMatrix:
        qw = tensors["q_weight"].numpy().view(np.uint32)
        groups = tensors["q_groups"].numpy()
        scale = tensors["q_scale"].numpy().view(np.uint32)
        smax = (tensors["q_scale_max"].float() / 256).half()
        invperm = tensors["q_invperm"].long()
        n = qw.shape[1]
        ends = [*groups[3::2].tolist(), qw.shape[0]]
        parts = []
        for g in range(len(groups) // 2):
            b, start = int(groups[2 * g]), int(groups[2 * g + 1])
            words = qw[start : ends[g]]
            bits = np.unpackbits(np.ascontiguousarray(words.T).view(np.uint8), axis=1, bitorder="little")
            codes = (bits.reshape(n, -1, b).astype(np.int32) << np.arange(b)).sum(-1).T - (1 << (b - 1))
            c = (scale[g][:, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
            c = torch.from_numpy((c.reshape(-1).astype(np.int64) + 1) ** 2)
            s = (c.float() * smax[g].float()).half()
            parts.append((torch.from_numpy(codes).float() * s.float()).half())
        packed = torch.cat(parts)
        bias = tensors.get("bias")
        return cls(packed[invperm], bias.clone() if bias is not None else None, prescale, "exl2", 4.0, name)

    @classmethod
    def from_gptq(cls, tensors: Mapping[str, Tensor], **kw: Any) -> QuantMatrix:
        raise NotImplementedError

    @classmethod
    def from_float(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        prescale: float = 1.0,
        compute: str = "int8",
        device: Any = "cpu",
        name: str = "",
    ) -> QuantMatrix:
        return cls(
            weight.float().t().clone(), bias.clone() if bias is not None else None, prescale, "float", 16.0, name
        )

    def matmul(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y = x @ self._w32
        if self._bias is not None:
            y += self._bias.float()
        y = y * self._prescale
        return y if out is None else out.copy_(y)

    def dequantize(self) -> Tensor:
        return self._w.half()
