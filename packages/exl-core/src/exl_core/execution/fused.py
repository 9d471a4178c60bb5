"""The decode step of a model, and the pass of a prompt, with the launches between matmuls joined.

The launches are made from the descriptions of the loaded modules. A half of a layer whose launches can be joined runs
joined; one whose matrices allow no joining by separate matmuls, and any other as the module's own forward pass, in the
same captured step. Results are bitwise identical to the modules' own.

Up to 64 rows a Llama layer takes five launches: norm and q, k, v; rotation, storing and attention; o and residual;
norm, gate, up and activation; down and residual. For three to eight rows each matmul packs the input of the next one
where both can, and the head's matmul includes the last norm. For more rows, and for BF16, a separate launch norms and
packs the input of a matmul. Captured steps of still more rows run their matmuls in the blocks of their plans: results
stay batch-invariant. Where the matrices of a layer do not allow joining, that layer takes ten launches plus those that
pack inputs. Adapters take two launches more for each matmul that they change: one before it, which also norms the
input, and one behind it, which also adds the residual or applies the gate. For prompts of more rows than are
batch-invariant (`PACKED_ROWS`) torch runs the matmuls, residual sums included.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from exl_kernels.device import row_invariant_matmuls
from exl_kernels.fused import embed
from exl_kernels.linear.fused import FusedLinear, Packed
from exl_kernels.linear.fused import Norm as InputNorm
from exl_kernels.selection import PACKED_ROWS

from ..errors import InputError
from ..layers import Attention, Embedding, Head, Module, Norm, RMSNorm
from ..layers.module import is_changed, refusal_of_float
from .attention_half import AttentionHalf
from .batch import Step
from .half import Half, JoinedHalf, ModuleHalf, Normed, why_apart
from .halves import chains, chains_to, half_of

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
        self._norm = norm
        self._last_norm = norm if type(norm) is RMSNorm and not is_changed(norm) else None
        self._head = head
        self._joined_head = _joined_head(self._last_norm, head)
        self._plain_head = None
        if head is not None and head.linear.quant.out_features == head.padded_vocab_size:
            self._plain_head = FusedLinear([head.linear.quant])
        self._last = max((i for i, half in enumerate(self._halves) if _stores(half)), default=-1)
        self._sections: dict[
            tuple[int, int], JoinedLaunches
        ] = {}  # kept: captured steps have addresses of their tensors
        self._refusals: dict[int, str | None] = {}  # by number of rows, which captured steps ask every time

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
        x = self._embedded(given)
        rows = x.shape[0]
        if rows > PACKED_ROWS and self.refusal_of_rows(rows) is None:
            with row_invariant_matmuls():
                h = self._hidden(x, step, [half.join(rows) for half in self._halves])
                return h if self._head is None or logits is None else self._logits_of_blocks(h, step, logits)
        joins = self._joins(rows)
        if step.loras:
            h = self._adapted(x, step, joins)
        else:
            head = None if logits is None else self._normed_head(rows, logits)
            x, left = self._run_halves(x, step, joins, head=head)
            if isinstance(left, Packed):
                return self._logits_of_packed(left, head, logits)
            h = self._normed(x) if left is None else left
        return h if self._head is None or logits is None else self._head.forward(h, step, out=logits)

    def refusal_of_rows(self, rows: int) -> str | None:
        """Return why results of `run` for `rows` rows are not batch-invariant, as a captured step must be; else None.

        Up to PACKED_ROWS rows the modules' own passes are. More rows run in blocks, where joined kernels take them, or
        by separate matmuls in blocks.
        """
        if rows <= PACKED_ROWS:
            return None
        if joined_rows() < PACKED_ROWS:
            return f"{JOINED_ROWS_VARIABLE} allows joined matmuls of at most {joined_rows()} rows"
        if rows not in self._refusals:
            whys = (half.refusal_of_rows(rows) for half in self._halves)
            of_head = None if self._head is None else refusal_of_float([self._head.linear])
            self._refusals[rows] = of_head or next((why for why in whys if why is not None), None)
        return self._refusals[rows]

    def hidden(self, ids: Tensor, step: Step, last_of: int = 0) -> Tensor:
        """Return the head's input [T, hidden] for ids int64 [T] on the device.

        `last_of`: return only that of the last token of each of so many rows of equal length.
        """
        return self._hidden(self._embedded(ids), step, self._joins(ids.shape[0]), last_of)

    def _joins(self, rows: int) -> list[bool]:
        """Return for each half whether its launches of `rows` rows are joined."""
        few = rows <= joined_rows()
        return [few and half.join(rows) for half in self._halves]

    def _hidden(self, x: Tensor, step: Step, joins: Sequence[bool], last_of: int = 0) -> Tensor:
        x, h = self._run_halves(x, step, joins, last_of=last_of)
        assert not isinstance(h, Packed), "no matmul follows the last half"
        if last_of and x.shape[0] > last_of:
            x, h = _last_rows(x, last_of), None if h is None else _last_rows(h, last_of)
        return self._normed(x) if h is None else h

    def _normed(self, x: Tensor) -> Tensor:
        return x if self._norm is None else self._norm.forward(x)

    def _run_halves(
        self,
        x: Tensor,
        step: Step,
        joins: Sequence[bool],
        *,
        end: int | None = None,
        last_of: int = 0,
        head: FusedLinear | None = None,
    ) -> tuple[Tensor, Normed]:
        """Run the halves before `end` (None: all), each with joined launches where `joins` says so.

        Args:
            x: the hidden state [T, hidden].
            step: the step, without adapters.
            joins: of each half.
            end: number of the first half that does not run, or None.
            last_of: 0, or the number of rows of equal length of which only the last tokens are needed. They alone are
                returned where all halves from the last attention on run apart.
            head: the last norm and the head as one matmul, for which the last half may pack its results, or None.

        Returns:
            x, and its next norm, or x packed for `head`, where the last half has computed that; else None.
        """
        halves, following = self._halves[:end], self._following()
        links = self._links(x.shape[0], joins, halves, head)
        narrows = self._last if last_of and not any(joins[self._last :]) else -1
        h: Normed = None
        chained = False  # h is packed by the preceding half, before the norm
        for index, half in enumerate(halves):
            if chained or links[index] is not None:
                assert isinstance(half, JoinedHalf)
                packed = h if isinstance(h, Packed) else None
                h, chained = half.run_chained(x, packed, links[index], step), links[index] is not None
                continue
            behind = index + 1 < len(halves)
            # The first matmul of a chain norms its input.
            norm = None if behind and links[index + 1] is not None else following[index]
            if joins[index]:
                into = halves[index + 1].first_matmul if behind and joins[index + 1] else None
                x, h = half.run_joined(x, h, norm, step, into)
                continue
            assert not isinstance(h, Packed), "halves that run apart are given no packed input"
            if index != narrows:
                x, h = half.run(x, h, norm, step)
            elif isinstance(half, AttentionHalf):
                x, h = half.run_last(x, h, norm, step, last_of)
            else:
                x, h = _last_rows(half.run(x, h, None, step)[0], last_of), None
        return x, h

    def _links(
        self, rows: int, joins: Sequence[bool], halves: Sequence[Half], head: FusedLinear | None
    ) -> list[FusedLinear | None]:
        """Return for each half the next matmul, if the half packs its results as that matmul's input."""
        links = [
            chains(half, following, rows) if joins[index] and joins[index + 1] else None
            for index, (half, following) in enumerate(pairwise(halves))
        ]
        last = halves[-1] if halves and head is not None and joins[len(halves) - 1] else None
        return [*links, head if last is not None and head is not None and chains_to(last, head, rows) else None]

    def _adapted(self, x: Tensor, step: Step, joins: Sequence[bool]) -> Tensor:
        """Return the head's input of a step with adapters."""
        h: Normed = None
        takes = [joint and half.takes_adapters(step) for joint, half in zip(joins, self._halves, strict=True)]
        for index, (half, following) in enumerate(zip(self._halves, self._following(), strict=True)):
            if takes[index]:
                x, h = half.run_joined(x, h, following if all(takes[index + 1 : index + 2]) else None, step)
            else:
                x, h = half.module.forward(x, step), None
        assert not isinstance(h, Packed), "no half was given a matmul to pack for"
        return self._normed(x) if h is None else h

    def _logits_of_packed(self, packed: Packed, head: FusedLinear | None, logits: Tensor | None) -> Tensor:
        """Write the logits of the last hidden state, packed for the last norm and the head; returns them."""
        assert head is not None
        assert logits is not None
        assert self._head is not None
        head.chained(packed, logits)
        return self._head.finish(logits)

    def _logits_of_blocks(self, h: Tensor, step: Step, logits: Tensor) -> Tensor:
        """Write the logits of many rows h in blocks, inside `row_invariant_matmuls`; returns them."""
        assert self._head is not None
        head = self._plain_head
        blocks = [] if head is None else head.blocks(h.shape[0])
        if (
            head is not None
            and not step.loras
            and all(head.takes_at_once(block.stop - block.start) for block in blocks)
        ):
            for block in blocks:
                head.chained(h[block], logits[block])
            return self._head.finish(logits)
        return self._head.forward(h, step, out=logits)

    def head(self, h: Tensor, step: Step) -> Tensor:
        """Return logits float32 [T, padded vocabulary] for a result of `hidden`."""
        assert self._head is not None, "asked of a whole model"
        return self._head.forward(h, step)

    def store(self, ids: Tensor, step: Step) -> None:
        """Store the keys and values of ids int64 [T] in the cache without further results."""
        x = self._embedded(ids)
        x, h = self._run_halves(x, step, self._joins(x.shape[0]), end=self._last)
        assert not isinstance(h, Packed), "no half was given a matmul to pack for"
        last = self._halves[self._last]
        if isinstance(last, AttentionHalf):
            last.store(x, h, step)
        else:
            last.run(x, h, None, step)

    def _embedded(self, given: Tensor) -> Tensor:
        """Return the hidden state, of the embedded ids if there is an embedding."""
        if self._embedding is None:
            return given
        assert self._embedding.weight is not None
        dtype: Literal["float16", "float32"] = "float32" if self._embedding.float_residual else "float16"
        return embed(self._embedding.weight, given, factor=self._embedding.scale, dtype=dtype)

    def _following(self) -> list[RMSNorm | None]:
        """Return the norm after each half."""
        return [*(half.input_norm for half in self._halves[1:]), self._last_norm][: len(self._halves)]

    def _normed_head(self, rows: int, logits: Tensor) -> FusedLinear | None:
        """Return the last norm and the head as one matmul, if it takes packed input."""
        head = self._joined_head
        fits = head is not None and head.takes_packed(rows) and head.out_features == logits.shape[-1]
        return head if fits else None


def _joined_head(norm: RMSNorm | None, head: Head | None) -> FusedLinear | None:
    """Return the last norm and the head as one matmul, if one device has both."""
    if norm is None or head is None or head.linear.quant.out_features != head.linear.out_features:
        return None
    weight = norm.loaded_weight
    if weight.device != head.linear.quant.device:
        return None
    return FusedLinear([head.linear.quant], norm=InputNorm(weight, norm.eps))


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
