"""The decode step of a model, and the pass of a prompt, with the launches between matmuls joined.

The launches are made from the descriptions of the loaded modules. A half of a layer whose launches can be joined runs
joined, any other as the module's own forward pass, in the same captured step. Results are bitwise identical to the
modules' own.

Up to 64 rows a Llama layer takes five launches: norm and q, k, v; rotation, storing and attention; o and residual;
norm, gate, up and activation; down and residual. For three to eight rows each matmul packs the input of the next one,
and the head's matmul includes the last norm. For more rows, and for BF16, a separate launch norms and packs the input
of a matmul. Captured steps of still more rows run their matmuls in blocks of 128 rows, on cards without wgmma of 64:
results stay batch-invariant.
Where the matrices do not allow joining, a layer takes ten launches plus those that pack inputs. Adapters
take two launches more for each matmul that they change: one before it, which also norms the input, and one behind it,
which also adds the residual or applies the gate. For prompts of more rows than are batch-invariant (`PACKED_ROWS`)
torch runs the matmuls, residual sums included.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from exl_kernels.fused import embed
from exl_kernels.linear.fused import FusedLinear, Packed
from exl_kernels.linear.fused import Norm as InputNorm
from exl_kernels.selection import BLOCK_ROWS, PACKED_ROWS

from ..errors import InputError
from ..layers import Attention, Embedding, Head, Module, Norm, RMSNorm
from .attention_half import AttentionHalf
from .batch import Step
from .half import Half, ModuleHalf, Normed, is_changed, row_blocks, why_apart
from .halves import chains, half_of, run_chained
from .mlp_half import MlpHalf

if TYPE_CHECKING:
    from ..language_model import LanguageModel

__all__ = ["JoinedLaunches", "joined_launches_of", "joins_adapters"]

JOINED_ROWS_VARIABLE = "EXL_DECODE_JOINED_ROWS"
JOINED_ADAPTERS_VARIABLE = "EXL_DECODE_JOINED_ADAPTERS"  # "0": a step with adapters runs the modules' own passes
JOINED_ROWS = PACKED_ROWS
"""Most rows of joined launches, unless the variable says otherwise."""


def joined_rows() -> int:
    """Return EXL_DECODE_JOINED_ROWS (0: never join), default JOINED_ROWS, at most PACKED_ROWS. Raises InputError."""
    text = os.environ.get(JOINED_ROWS_VARIABLE, "").strip()
    if text and not text.isdecimal():
        raise InputError(f"{JOINED_ROWS_VARIABLE} is {text!r}, must be a number of rows from 0 to {PACKED_ROWS}")
    return min(int(text or JOINED_ROWS), PACKED_ROWS)


def joins_adapters() -> bool:
    """Return whether captured steps with adapters use joined launches: EXL_DECODE_JOINED_ADAPTERS is not 0."""
    return os.environ.get(JOINED_ADAPTERS_VARIABLE, "1").strip() != "0"


class JoinedLaunches:
    """The joined launches of a model, for a step of few tokens or a prompt; or of the modules on one of its devices.

    Args:
        embedding: the embedding; None for a later section, which takes the hidden state instead of ids.
        halves: the halves of the layers.
        norm: the last norm, or None.
        head: the head; None for a section that returns the hidden state.
    """

    def __init__(
        self, embedding: Embedding | None, halves: Sequence[Half], norm: Norm | None, head: Head | None
    ) -> None:
        self._embedding = embedding
        self._halves = list(halves)
        # A section may begin with the second half of a layer, or end with the first.
        first = bool(halves) and isinstance(halves[0], MlpHalf)
        pairs = len(halves) - (len(halves) - first) % 2
        self._before, self._after = self._halves[:first], self._halves[pairs:]
        self._layers = _pairs(self._halves[first:pairs])
        self._norm = norm
        self._last_norm = norm if type(norm) is RMSNorm and not is_changed(norm) else None
        self._head = head
        self._joined_head = _joined_head(self._last_norm, head)
        self._plain_head = None
        if head is not None and head.linear.quant.out_features == head.padded_vocab_size:
            self._plain_head = FusedLinear([head.linear.quant], max_rows=BLOCK_ROWS)
        self._last = max((i for i, half in enumerate(self._halves) if _stores(half)), default=-1)
        self._sections: dict[
            tuple[int, int], JoinedLaunches
        ] = {}  # kept: captured steps have addresses of their tensors
        self._taken: dict[int, bool] = {}  # answers of `takes` for numbers of rows, which captured steps ask every time

    def section(self, begin: int, end: int) -> JoinedLaunches:
        """Return the launches of the model's modules `begin` to `end` - 1, which are on one device.

        Call it on the launches of a whole model, which keep the section.
        """
        found = self._sections.get((begin, end))
        if found is None:
            norm_at = 1 + len(self._halves)
            found = self._sections[begin, end] = JoinedLaunches(
                self._embedding if begin == 0 else None,
                self._halves[max(begin - 1, 0) : max(end - 1, 0)],
                self._norm if begin <= norm_at < end else None,
                self._head if begin <= norm_at + 1 < end else None,
            )
        return found

    def run(self, given: Tensor, step: Step, logits: Tensor | None = None) -> Tensor:
        """Run a step.

        Args:
            given: ids int64 [T] on the device; for a section without embedding, the hidden state [T, hidden], which is
                changed in place.
            step: the step. Its adapters must be `RowAdapters`.
            logits: float32 [T, padded vocabulary], which a head fills.

        Returns:
            The logits; the hidden state [T, hidden] where there is no head.
        """
        x, joined = self._begin(given)
        layers = self._layers
        blocks = x.shape[0] > PACKED_ROWS and self.takes(x.shape[0])
        if blocks:
            h = self._hidden(x, True, step)
        elif step.loras:
            h = self._adapted(x, joined, step)
        elif joined and layers is not None and all(chains(*layer, x.shape[0]) for layer in layers):
            return self._run_chained(layers, x, step, logits)
        else:
            h = self._hidden(x, joined, step)
        if self._head is None or logits is None:
            return h
        return self._logits_of_blocks(h, step, logits) if blocks else self._head.forward(h, step, out=logits)

    def takes(self, rows: int) -> bool:
        """Return whether results of `run` for `rows` rows are batch-invariant: every matmul has a joined kernel.

        Up to PACKED_ROWS rows the modules' own passes are, too.
        """
        if rows <= PACKED_ROWS:
            return True
        if joined_rows() < PACKED_ROWS:
            return False
        if rows not in self._taken:
            self._taken[rows] = all(not isinstance(half, ModuleHalf) and half.join(rows) for half in self._halves)
        return self._taken[rows]

    def hidden(self, ids: Tensor, step: Step, last_of: int = 0) -> Tensor:
        """Return the head's input [T, hidden] for ids int64 [T] on the device.

        `last_of`: return only that of the last token of each of so many rows of equal length.
        """
        return self._hidden(*self._begin(ids), step, last_of)

    def _hidden(self, x: Tensor, joined: bool, step: Step, last_of: int = 0) -> Tensor:
        h: Tensor | None = None
        if joined:
            return self._joined_hidden(x, step, last_of)
        for index, (half, following) in enumerate(zip(self._halves, self._following(), strict=True)):
            if not last_of or index != self._last:
                x, h = half.run(x, h, following, step)
            elif isinstance(half, AttentionHalf):
                x, h = half.run_last(x, h, following, step, last_of)
            else:
                x, h = _last_rows(half.run(x, h, None, step)[0], last_of), None
        return self._normed(x) if h is None else h

    def _normed(self, x: Tensor) -> Tensor:
        return x if self._norm is None else self._norm.forward(x)

    def _joined_hidden(self, x: Tensor, step: Step, last_of: int) -> Tensor:
        h: Normed = None
        matmuls = [*(half.first_matmul for half in self._halves[1:]), None][: len(self._halves)]
        for half, following, matmul in zip(self._halves, self._following(), matmuls, strict=True):
            x, h = half.run_joined(x, h, following, step, matmul)
        assert not isinstance(h, Packed), "no matmul follows the last half"
        if h is None:
            return self._normed(_last_rows(x, last_of) if last_of else x)
        return _last_rows(h, last_of) if last_of else h

    def _adapted(self, x: Tensor, joined: bool, step: Step) -> Tensor:
        """Return the head's input of a step with adapters."""
        h: Normed = None
        for half, following in zip(self._halves, self._following(), strict=True):
            if joined and half.takes_adapters(step):
                x, h = half.run_joined(x, h, following, step)
            else:
                x, h = half.module.forward(x, step), None
        assert not isinstance(h, Packed), "no half was given a matmul to pack for"
        return self._normed(x) if h is None else h

    def _logits_of_blocks(self, h: Tensor, step: Step, logits: Tensor) -> Tensor:
        """Write the logits of more than PACKED_ROWS rows h, block by block; returns them."""
        assert self._head is not None
        head, blocks = self._plain_head, row_blocks(h.shape[0])
        if head is not None and not step.loras and all(head.takes_at_once(b.stop - b.start) for b in blocks):
            for block in blocks:
                head.chained(h[block], logits[block])
            return self._head.finish(logits)
        for some, to in zip(torch.split(h, PACKED_ROWS), torch.split(logits, PACKED_ROWS), strict=True):
            self._head.forward(some, step, out=to)
        return logits

    def head(self, h: Tensor, step: Step) -> Tensor:
        """Return logits float32 [T, padded vocabulary] for a result of `hidden`."""
        assert self._head is not None, "asked of a whole model"
        return self._head.forward(h, step)

    def store(self, ids: Tensor, step: Step) -> None:
        """Store the keys and values of ids int64 [T] in the cache without further results."""
        x, joined = self._begin(ids)
        h: Normed = None
        for half, following in zip(self._halves[: self._last], self._following(), strict=False):
            if joined:
                x, h = half.run_joined(x, h, following, step)
            else:
                assert not isinstance(h, Packed)
                x, h = half.run(x, h, following, step)
        assert not isinstance(h, Packed), "no half was given a matmul to pack for"
        last = self._halves[self._last]
        if isinstance(last, AttentionHalf):
            last.store(x, h, step)
        else:
            last.run(x, h, None, step)

    def _begin(self, given: Tensor) -> tuple[Tensor, bool]:
        """Return the hidden state, of the embedded ids if there is an embedding, and whether the layers run joined."""
        x = given
        if self._embedding is not None:
            assert self._embedding.weight is not None
            dtype: Literal["float16", "float32"] = "float32" if self._embedding.float_residual else "float16"
            x = embed(self._embedding.weight, given, factor=self._embedding.scale, dtype=dtype)
        return x, x.shape[0] <= joined_rows() and all(half.join(x.shape[0]) for half in self._halves)

    def _following(self) -> list[RMSNorm | None]:
        """Return the norm after each half."""
        return [*(half.input_norm for half in self._halves[1:]), self._last_norm][: len(self._halves)]

    def _run_chained(
        self, layers: list[tuple[AttentionHalf, MlpHalf]], x: Tensor, step: Step, logits: Tensor | None
    ) -> Tensor:
        for half in self._before:
            x, _ = half.run_joined(x, None, None, step)
        head = None if logits is None or self._after else self._normed_head(step, logits, x.shape[0])
        packed: Packed | None = None
        following = [*(attention.qkv for attention, _ in layers[1:]), head][: len(layers)]
        for layer, matmul in zip(layers, following, strict=True):
            packed = run_chained(*layer, x, packed, matmul, step)
        for half in self._after:
            x, _ = half.run_joined(x, None, None, step)
        if head is not None and packed is not None and logits is not None and self._head is not None:
            head.chained(packed, logits)
            self._head.finish(logits)
            return logits
        h = self._normed(x)
        return h if self._head is None or logits is None else self._head.forward(h, step, out=logits)

    def _normed_head(self, step: Step, logits: Tensor, rows: int) -> FusedLinear | None:
        """Return the last norm and the head as one matmul, if it takes packed input."""
        head = self._joined_head
        fits = head is not None and head.takes_packed(rows) and head.out_features == logits.shape[-1]
        return head if fits and not step.loras else None


def _joined_head(norm: RMSNorm | None, head: Head | None) -> FusedLinear | None:
    """Return the last norm and the head as one matmul, if one device has both."""
    if norm is None or head is None or head.linear.quant.out_features != head.linear.out_features:
        return None
    weight = norm.loaded_weight
    if weight.device != head.linear.quant.device:
        return None
    return FusedLinear([head.linear.quant], norm=InputNorm(weight, norm.eps))


def _pairs(halves: Sequence[Half]) -> list[tuple[AttentionHalf, MlpHalf]] | None:
    """Return layers of joined attention and joined MLP; None where a layer has another half."""
    found = []
    for attention, mlp in zip(halves[::2], halves[1::2], strict=False):
        if not isinstance(attention, AttentionHalf) or not isinstance(mlp, MlpHalf):
            return None
        found.append((attention, mlp))
    return found if 2 * len(found) == len(halves) else None


def _stores(half: Half) -> bool:
    return isinstance(half, AttentionHalf) or (isinstance(half, ModuleHalf) and isinstance(half.module, Attention))


def _last_rows(x: Tensor, batch: int) -> Tensor:
    """Return x [T, hidden] of the last token of each of `batch` rows."""
    return x.view(batch, -1, x.shape[1])[:, -1].contiguous()


def joined_launches_of(model: LanguageModel) -> JoinedLaunches | str:
    """Return the joined launches of a loaded model, or the reason why there are none."""
    why = uncovered(model.modules)
    if why is not None:
        return why
    first, norm, head, middle = _parts(model.modules)
    assert isinstance(first, Embedding)
    assert isinstance(norm, Norm)
    assert isinstance(head, Head)
    halves = [half_of(module, first.float_residual) for module in middle]
    if all(isinstance(half, ModuleHalf) for half in halves):
        return next((why for why in map(why_apart, middle) if why), "all matrices have padding columns")
    return JoinedLaunches(first, halves, norm, head)


def _parts(modules: Sequence[Module]) -> tuple[Module, Module, Module, Sequence[Module]]:
    """Return the embedding, the last norm, the head, and the modules between."""
    return modules[0], modules[-2], modules[-1], modules[1:-2]


def uncovered(modules: Sequence[Module]) -> str | None:
    """Return why a model of these modules, loaded or not, has no joined launches; None if it may have them.

    At least one half of a layer must still be joinable.
    """
    first, norm, head, middle = _parts(modules)
    if not isinstance(first, Embedding) or not isinstance(norm, Norm) or not isinstance(head, Head):
        return "the model's modules are not those of a decoder"
    for module, kind in ((first, Embedding), (head, Head)):
        if type(module) is not kind or is_changed(module):
            return f"{module.key} has code that joined launches do not support"
    if not any(isinstance(module, Attention) for module in middle):
        return "the model has no attention"
    return None
