"""The decode step of a model, and the pass of a prompt, with the launches between matmuls joined.

The launches are made from the descriptions of the loaded modules. A half of a layer whose launches can be joined runs
joined; one whose matrices allow no joining by separate matmuls, and any other as the module's own forward pass, in the
same captured step. Results are bitwise identical to the modules' own, except where torch adds a prompt's residual.

Up to 64 rows a Llama layer takes five launches: norm and q, k, v; rotation, storing and attention; o and residual;
norm, gate, up and activation; down and residual. For three to eight rows each matmul packs the input of the next one
where both can, and the head's matmul includes the last norm. For more rows, and for BF16, a separate launch norms and
packs the input of a matmul. Captured steps of still more rows run their matmuls in the blocks of their plans: results
stay batch-invariant. Where the matrices of a layer do not allow joining, that layer takes ten launches plus those that
pack inputs. The matmul of one or two rows adds adapters itself where it can. Otherwise they take two launches more for
each matmul that they change: one before it, which also norms the input, and one after it, which also adds the residual
or applies the gate. In prompts of more rows than are batch-invariant (`packed_rows`) torch multiplies dequantized
matrices, and adds the residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from exl_kernels.fused import embed
from exl_kernels.linear.fused import FusedLinear
from exl_kernels.linear.planned import KEPT_PLANS

from ..layers import Attention, Embedding, Head, Module, Norm, RMSNorm
from ..layers.module import is_changed
from ..layers.norm import rms_of
from .batch import Step
from .half import (
    Half,
    HalfInput,
    ModuleHalf,
    NextPrologue,
    OutputTokens,
    PackedInput,
    is_padded,
    joined,
    why_own_pass,
)
from .half_matmuls import head_with_norm, joins_rows, refusal_of_blocks
from .halves import half_of
from .many_rows import ManyRows, takes_many_rows
from .operators import APART, JOINED
from .prologues import next_prologues

if TYPE_CHECKING:
    from ..language_model import LanguageModel

__all__ = ["JoinedLaunches", "joined_launches_of"]


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
        self.halves = list(halves)
        self._norm = norm
        self._last_norm = rms_of(norm)
        self._head = head
        self._joined_head = _joined_head(self._last_norm, head)
        self._last = max((i for i, half in enumerate(halves) if isinstance(half.module, Attention)), default=-1)
        self._sections: dict[
            tuple[int, int], JoinedLaunches
        ] = {}  # kept: captured steps have addresses of their tensors
        self._kept_prologues: dict[tuple[int, tuple[bool, ...], bool, bool], list[NextPrologue]] = {}
        self._refusals: dict[int, str | None] = {}  # by number of rows, which captured steps ask every time

    def section(self, begin: int, end: int) -> JoinedLaunches:
        """Return the launches of the model's modules `begin` to `end` - 1, which are on one device.

        Call it on the launches of a whole model, which keep the section.
        """
        found = self._sections.get((begin, end))
        if found is None:
            norm_at = 1 + len(self.halves)
            found = self._sections[begin, end] = JoinedLaunches(
                self._embedding if begin == 0 else None,
                self.halves[max(begin - 1, 0) : max(end - 1, 0)],
                self._norm if begin <= norm_at < end else None,
                self._head if begin <= norm_at + 1 < end else None,
            )
        return found

    def run(self, given: Tensor, step: Step, logits: Tensor | None = None) -> Tensor:
        """Run a step.

        Args:
            given: ids int64 [T] on the device, of which many run in blocks (`refusal_of_rows`); for a section without
                embedding, the hidden state [T, hidden], which is changed in place.
            step: the step, `invariant` if it has many rows. Its adapters must be `RowAdapters`.
            logits: float32 [T, padded vocabulary], which a head fills.

        Returns:
            The logits; the hidden state [T, hidden] where there is no head.
        """
        x = self._embedded(given)
        head = None if logits is None or step.loras else self._joined_head
        x, left = self._run_halves(x, step, head=head)
        if isinstance(left, PackedInput):
            assert logits is not None
            assert self._head is not None
            left.matmul.chained(left.packed, logits)
            return self._head.finish(logits)
        h = self._normed(x) if left is None else left
        return h if self._head is None or logits is None else self._head.forward(h, step, out=logits)

    def refusal_of_rows(self, rows: int) -> str | None:
        """Return why `run` of `rows` rows is not batch-invariant, as a captured step must be; None if it is."""
        return refusal_of_blocks(rows, lambda: self._refusal_of_halves(rows))

    def _refusal_of_halves(self, rows: int) -> str | None:
        if rows not in self._refusals:
            whys = (half.refusal_of_rows(rows) for half in self.halves)
            self._refusals[rows] = next((why for why in whys if why is not None), None)
        return self._refusals[rows]

    def hidden(self, ids: Tensor, step: Step, output_tokens: OutputTokens = "all") -> Tensor:
        """Return the head's input [T, hidden] of the output tokens, for ids int64 [T] on the device."""
        return self._hidden(self._embedded(ids), step, output_tokens)

    def states(self, ids: Tensor, step: Step) -> Tensor:
        """Return the input of the last norm [T, hidden], for ids int64 [T] on the device."""
        return self._run_halves(self._embedded(ids), step)[0]

    def _joins(self, rows: int, *, invariant: bool) -> list[bool]:
        """Return for each half whether its launches of `rows` rows, which are `invariant` or not, are joined."""
        few = joins_rows(rows, invariant=invariant)
        return [few and half.joins(rows) for half in self.halves]

    def _hidden(self, x: Tensor, step: Step, output_tokens: OutputTokens = "all") -> Tensor:
        rows = x.shape[0]
        x, h = self._run_halves(x, step, output_tokens=output_tokens)
        assert not isinstance(h, PackedInput), "no matmul follows the last half"
        if output_tokens == "last" and x.shape[0] == rows > step.sequences:
            x, h = step.last_rows(x), None if h is None else step.last_rows(h)
        return self._normed(x) if h is None else h

    def _normed(self, x: Tensor) -> Tensor:
        return x if self._norm is None else self._norm.forward(x)

    def _run_halves(
        self,
        x: Tensor,
        step: Step,
        *,
        output_tokens: OutputTokens = "all",
        head: FusedLinear | None = None,
    ) -> tuple[Tensor, HalfInput]:
        """Run the halves, each with joined launches where there are any that add the adapters of the step.

        Args:
            x: the hidden state [T, hidden].
            step: the step.
            output_tokens: the tokens whose hidden states are returned. With "last" the halves from the last attention
                on run apart, for these tokens alone; only adapters may need them all. With "none" that attention ends
                the pass.
            head: the last norm and the head as one matmul, for which the last half may pack its results, or None.

        Returns:
            x, and what the last half did for the last norm or `head`.
        """
        halves, joins = self.halves, self._joins(x.shape[0], invariant=step.invariant)
        if step.loras:  # separate matmuls would leave the adapters out
            joins = [joint and half.takes_adapters(step) for joint, half in zip(joins, halves, strict=True)]
            halves = [half if joint else ModuleHalf(half.module) for joint, half in zip(joins, halves, strict=True)]
        if output_tokens == "none":
            halves, joins = halves[: self._last + 1], [*joins[: self._last], False]
        elif output_tokens == "last" and x.shape[0] > step.sequences and not step.loras:
            joins = [joint and index < self._last for index, joint in enumerate(joins)]
        narrows = -1 if any(joins[self._last :]) else self._last
        rows = x.shape[0] if any(joins) else 0  # launches apart do not ask for the rows
        key = (rows, tuple(joins), head is None, not step.loras)
        prologues = self._kept_prologues.get(key)
        if prologues is None:
            if len(self._kept_prologues) >= KEPT_PLANS:
                self._kept_prologues.pop(next(iter(self._kept_prologues)))
            prologues = self._kept_prologues[key] = next_prologues(
                [half.plan for half in halves], joins, self._last_norm, head, rows, packs=not step.loras
            )
        many = takes_many_rows(x.shape[0], invariant=step.invariant)
        apart = ManyRows(halves, x.shape[0], x.device) if many else APART
        h: HalfInput = None
        for index, (half, joint) in enumerate(zip(halves, joins, strict=True)):
            here = output_tokens if index == narrows else "all"
            if here != "all":
                apart = APART  # for the tokens that are left
            x, h = half.run(x, h, step, JOINED if joint else apart, prologues[index], here)
        return x, h

    def head(self, h: Tensor, step: Step) -> Tensor:
        """Return logits float32 [T, padded vocabulary] for a result of `hidden`."""
        assert self._head is not None, "asked of a whole model"
        return self._head.forward(h, step)

    def store(self, ids: Tensor, step: Step) -> None:
        """Store the keys and values of ids int64 [T] in the cache without further results."""
        self._run_halves(self._embedded(ids), step, output_tokens="none")

    def _embedded(self, given: Tensor) -> Tensor:
        """Return the hidden state, of the embedded ids if there is an embedding."""
        if self._embedding is None:
            return given
        assert self._embedding.weight is not None
        dtype: Literal["float16", "float32"] = "float32" if self._embedding.float_residual else "float16"
        return embed(self._embedding.weight, given, factor=self._embedding.scale, dtype=dtype)


def _joined_head(norm: RMSNorm | None, head: Head | None) -> FusedLinear | None:
    """Return the last norm and the head as one matmul, if one device has both."""
    if norm is None or head is None:
        return None
    if norm.loaded_weight.device != head.linear.quant.device:
        return None
    return head_with_norm(norm, head, joined, is_padded)


def joined_launches_of(model: LanguageModel) -> JoinedLaunches | str:
    """Return the joined launches of a loaded model, or the reason why there are none."""
    why = uncovered(model.modules)
    if why is not None:
        return why
    first, norm, head, middle = _parts(model.modules)
    assert isinstance(first, Embedding)
    assert isinstance(norm, Norm)
    assert isinstance(head, Head)
    halves = [half_of(module) for module in middle]
    if all(type(half) is ModuleHalf for half in halves):
        return next(why for why in (why_own_pass(module, is_padded) for module in middle) if why is not None)
    return JoinedLaunches(first, halves, norm, head)


def _parts(modules: Sequence[Module]) -> tuple[Module, Module, Module, Sequence[Module]]:
    """Return the embedding, the last norm, the head, and the modules between."""
    return modules[0], modules[-2], modules[-1], modules[1:-2]


def uncovered(modules: Sequence[Module]) -> str | None:
    """Return why a model of these modules, loaded or not, has no joined launches; None if it may have them.

    At least one half of a layer must still have joined launches, or be a mixture of experts, whose launches are joined.
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
