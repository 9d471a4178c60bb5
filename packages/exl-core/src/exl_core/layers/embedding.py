"""The token embedding: from ids to rows in the hidden state's type."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..device import activation_dtype
from ..embeddings import EMBEDDING_INDEX
from ..errors import FormatError, ModelStateError
from ..execution.batch import Step
from ..loading.checkpoint import TensorSource
from ..loading.linears import check_vocabulary, require_finite_float
from .module import WeightModule

if TYPE_CHECKING:
    from ..contracts import Adapter

__all__ = ["Embedding"]

SERIAL = 1 << 14
"""Elements of an operator that torch runs in the calling thread."""


class Embedding(WeightModule):
    """Rows of the table [vocab, hidden], stored in the file's float type; returned as float32, on a GPU as half.

    Negative ids read row 0 (a pad id is -1); the model rejects ids beyond the vocabulary.

    Args:
        key: name of the module in the files.
        vocab_size: rows of the table.
        hidden_size: columns of the table.
        scale: factor of the rows.
        float_residual: return float32 rows on a GPU too (families whose hidden state exceeds half's range).
    """

    name = "Embedding"

    def __init__(
        self, key: str, vocab_size: int, hidden_size: int, scale: float = 1.0, float_residual: bool = False
    ) -> None:
        self.key = key
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.scale = scale
        self.float_residual = float_residual
        self.weight: Tensor | None = None

    def load(self, source: TensorSource, device: torch.device) -> None:
        """Read and check the table.

        Raises:
            FormatError: the table has a wrong shape or is not finite.
        """
        name = f"{self.key}.weight"
        weight = source.read(name)
        if weight.dim() != 2 or weight.shape[1] != self.hidden_size:
            raise FormatError(
                f"{source.describe(name)}: shape {list(weight.shape)}, expected [{self.vocab_size}, {self.hidden_size}]"
            )
        check_vocabulary(weight.shape[0], self.vocab_size, source.describe(name))
        require_finite_float(weight, source.describe(name))
        self.weight = weight.to(device)

    def forward(self, x: Tensor, step: Step | None = None) -> Tensor:
        """Look up ids int64 [T] -> [T, hidden]. Ids of `step.embeddings` give their rows, unscaled.

        An adapter may bring a table (of several the first counts), or add to the model's. Raises ModelStateError.
        """
        if self.weight is None:
            raise ModelStateError(f"{self.key} is not loaded: call model.load() first")
        loras, embeddings = ((), ()) if step is None else (step.loras, step.embeddings)
        if not embeddings:
            rows = self._lookup(x.clamp(min=0), loras)
        else:
            rows = self._lookup(x.clamp(min=0).masked_fill(x >= EMBEDDING_INDEX, 0), loras)
            for embedding in embeddings:
                mine, own = embedding.select(x)
                rows[mine] = own
        return rows if self.float_residual else rows.to(activation_dtype(rows.device))

    def _lookup(self, ids: Tensor, loras: tuple[Adapter, ...]) -> Tensor:
        """Return float32 [T, hidden] of ids below the vocabulary."""
        assert self.weight is not None
        table = next((lora.embedding for lora in loras if lora.embedding is not None), self.weight)
        rows = _gathered(table, ids, self.scale)
        for lora in loras:
            if lora.embedding_pair is not None:
                rows += lora.embedding_pair.forward(ids) * self.scale
        return rows


def _gathered(table: Tensor, ids: Tensor, scale: float) -> Tensor:
    """Return float32 rows [T, hidden] of a float table, times `scale`.

    Not by large operators of torch on a CPU: these wake all threads of torch's pool, which takes tens of milliseconds
    where other processes are busy.
    """
    if table.device.type != "cpu":
        rows = table[ids].float()
        return rows if scale == 1.0 else rows * scale
    width, bits = table.shape[1], torch.int16 if table.element_size() == 2 else torch.int32
    found = torch.from_numpy(table.view(bits).numpy()[ids.numpy()]).view(table.dtype)
    out = torch.empty(found.shape, dtype=torch.float32)
    at_once = max(1, SERIAL // width)
    for part, into in zip(torch.split(found, at_once), torch.split(out, at_once), strict=True):
        into.copy_(part)
        if scale != 1.0:
            into *= scale
    return out
