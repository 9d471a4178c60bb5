"""The launches of each device of a sharded model in a captured step.

Every device has the whole hidden state as input of its matmuls, and the columns of it that its parts of o and down
compute. Four times a layer the devices gather what they computed, by kernels that store into one another's memory:
attention's outputs, o's, the features of the MLP, down's. Each output is computed on one device in the order of one
device's sum, so results are bitwise identical to one device's. Norms of results, and sums with a hidden state of
float32, are launches on each device over all columns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from exl_kernels.fused import embed
from exl_kernels.linear.fused import Packed
from exl_kernels.linear.matmul_input import MatmulInput

from ...device import activation_dtype
from ...layers import Embedding, Head, Linear, Norm
from ...layers.description import AttentionDescription, MlpDescription
from ..attention_half import AttentionHalf
from ..half import NO_PROLOGUE, Features, HalfInput, JoinedHalf, NextPrologue, OutputTokens, PendingMatmul
from ..half_matmuls import joins_rows
from ..many_rows import ManyRows, takes_many_rows
from ..mlp_half import MlpHalf
from ..operators import JoinedOperators, Operators
from .coverage import ANSWER, LoadedWeights, pairs_of, part_of, refusal_of_exchange
from .heads import norm_on
from .matrix import SplitMatrix

if TYPE_CHECKING:
    from ...language_model import LanguageModel
    from ..batch import Step

__all__ = [
    "Gather",
    "ResultRow",
    "Shape",
    "ShardLaunches",
    "embedded",
    "is_captured",
    "operators_for",
    "run_shares",
    "shard_launches_of",
]

Share = TypeVar("Share", AttentionDescription, MlpDescription)

Gather = Callable[[Tensor, Sequence[int], "Tensor | None", "Sequence[int] | None"], Tensor]
"""(own columns [rows, width], first column of each device and their number, result or None, receivers or None) -> all
columns [rows, columns]. Called by all devices in the same order."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The columns of each device of each kind of result, as `Gather` takes them."""

    heads: tuple[int, ...]
    hidden: tuple[int, ...]
    inner: tuple[int, ...]
    vocabulary: tuple[int, ...]


class _Whole(JoinedOperators):
    """Joined launches whose results other devices need: attention packs no input of the last matmul.

    A matmul without a kernel for all its matrices, norm, gate and residual runs by separate launches.
    """

    def first(self, half: JoinedHalf, x: Tensor, h: HalfInput, step: Step) -> Tensor | PendingMatmul | Iterable[Tensor]:
        """Norm and multiply; see `Operators.first`."""
        return super().first(half, x, h, step) if half.first.joins(x.shape[0]) else ROUNDED.first(half, x, h, step)

    def last(
        self, half: JoinedHalf, x: Tensor, y: Features, h: HalfInput, next_prologue: NextPrologue, step: Step
    ) -> HalfInput:
        """Multiply and add; see `Operators.last`."""
        if half.last.joins(x.shape[0]):
            return super().last(half, x, y, h, next_prologue, step)
        return ROUNDED.last(half, x, y, h, next_prologue, step)

    def room(self, half: JoinedHalf, rows: int, step: Step) -> MatmulInput | None:
        """Return None."""
        return None

    def product(self, half: JoinedHalf, y: Tensor, step: Step) -> Tensor:
        """Return y @ last."""
        if not half.last.joins(y.shape[0]):
            return ROUNDED.product(half, y, step)
        return half.last(y, y.new_empty(y.shape[0], half.last.out_features))


class _Rounded(Operators):
    """Separate launches that round each sum twice, as the modules' own passes do after they gather the result."""

    def last(
        self, half: JoinedHalf, x: Tensor, y: Features, h: HalfInput, next_prologue: NextPrologue, step: Step
    ) -> HalfInput:
        """Multiply and add; see `Operators.last`."""
        assert isinstance(y, Tensor), "gathered"
        x.add_(self.product(half, y, step))
        return None

    def product(self, half: JoinedHalf, y: Tensor, step: Step) -> Tensor:
        """Return y @ last."""
        return self.multiplied(half.matrices[-1], y, step)


class _RoundedMany(_Rounded, ManyRows):
    """`_Rounded` of many rows, in memory that all halves of a device share."""


WHOLE, ROUNDED = _Whole(), _Rounded()
ShardOperators = _Whole | _Rounded


def operators_for(shares: Sequence[ShardLaunches], x: Sequence[Tensor], *, invariant: bool) -> list[ShardOperators]:
    """Return the operators of each device for a pass over the hidden states x [T, hidden] of a prompt.

    invariant: the pass asks for batch-invariant rows.
    """
    rows = x[0].shape[0]
    if takes_many_rows(rows, invariant=invariant):
        return [_RoundedMany(share.halves, rows, t.device) for share, t in zip(shares, x, strict=True)]
    return [WHOLE if joins_rows(rows, invariant=invariant) else ROUNDED] * len(shares)


def is_captured(device: torch.device) -> bool:
    """Return whether the current stream of a GPU captures launches."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


class ResultRow(NamedTuple):
    """Bytes of a row of the widest results that devices gather in a prompt."""

    even: int
    """In exchanges of even numbers: attention's outputs, and the gated features."""
    odd: int
    """In exchanges of odd numbers: the hidden state."""

    @classmethod
    def of(cls, shape: Shape, device: torch.device) -> ResultRow:
        """Return the bytes on a device."""
        size = activation_dtype(device).itemsize
        return cls(size * max(shape.heads[-1], shape.inner[-1]), size * shape.hidden[-1])


def run_shares(
    shares: Sequence[ShardLaunches],
    x: Sequence[Tensor],
    steps: Sequence[Step],
    gather: Callable[[list[Tensor], Sequence[int], Sequence[Tensor] | None], list[Tensor]],
    ops: Sequence[ShardOperators],
    output_tokens: OutputTokens = "all",
) -> list[Tensor] | None:
    """Run the layers on some devices of a sharded model, step by step, with an exchange after each matmul.

    Args:
        shares: the launches of these devices.
        x: the hidden state [T, hidden] on each of them; may be changed in place.
        steps: the step on each, with the pages of its heads.
        gather: (columns of each device, first column of each device of the model and their number, memory of the
            result or None) -> all columns on each device.
        ops: how the matmuls of each device run.
        output_tokens: the tokens whose results are needed.

    Returns:
        The hidden state of the output tokens, on each device; None where there are none.
    """
    shape, layers = shares[0].shape, list(zip(*(share.halves for share in shares), strict=True))
    own: list[Tensor] = []  # the columns of x that each device adds to, where they are up to date
    normed: Sequence[Tensor | None] = [None] * len(shares)
    for number, halves in enumerate(layers):
        narrows = output_tokens if number == len(layers) - 2 else "all"  # the last attention
        made: list[Tensor] = []
        for half, whole, h, step, own_ops in zip(halves, x, normed, steps, ops, strict=True):
            _, _, y = half.features(whole, h, step, own_ops, "none" if narrows == "none" else "all")
            if y is not None:
                assert not isinstance(y, Packed), "no room for it"
                made.append(y.now() if isinstance(y, PendingMatmul) else y)
        if not made:
            return None
        if narrows == "last":
            made, own, x = (
                [step.last_rows(t) for t, step in zip(parts, steps, strict=False)] for parts in (made, own, x)
            )
            ops = [ROUNDED] * len(ops)
        features = gather(made, shape.inner if number % 2 else shape.heads, None)
        if halves[0].plan.adds_residual:
            own = own or [share.columns_of(whole) for share, whole in zip(shares, x, strict=True)]
            for half, columns, y, step, own_ops in zip(halves, own, features, steps, ops, strict=True):
                own_ops.last(half, columns, y, None, NO_PROLOGUE, step)
            x, normed = gather(own, shape.hidden, x), [None] * len(shares)
            continue
        if own:  # x is in memory that later exchanges write over
            own, x = [], [whole.clone() for whole in x]
        results = [
            own_ops.product(half, y, step) for half, y, step, own_ops in zip(halves, features, steps, ops, strict=True)
        ]
        following = layers[number + 1] if number + 1 < len(layers) else [None] * len(shares)
        normed = [
            half.finish(whole, y, None if after is None else after.plan.input_norm)
            for half, whole, y, after in zip(halves, x, gather(results, shape.hidden, None), following, strict=True)
        ]
    return list(x)


class ShardLaunches:
    """The launches of one device.

    `run` launches all of a step on torch's current stream of the device.

    Attributes:
        halves: this device's share of the halves of each layer, attention and MLP in turns.
        shape: the columns of each device.
        float_residual: the hidden state is float32.
    """

    def __init__(
        self,
        shard: int,
        shape: Shape,
        halves: Sequence[JoinedHalf],
        embedding: Embedding,
        last: Norm,
        head: Head,
    ) -> None:
        """embedding: its weight is on the home device, which is device 0."""
        part = part_of(head.linear, shard)
        assert part is not None, "shard_launches_of has checked it"
        self.halves, self.shape = list(halves), shape
        self._shard, self._embedding, self.float_residual = shard, embedding, embedding.float_residual
        hidden, others = shape.hidden[-1], len(shape.hidden) - 2
        words = hidden * _words(embedding, part.device)
        self._answered = (0, *(words + ANSWER * other for other in range(others + 1)))
        self._norm, self._head, self._matrix = norm_on(last, part.device, last.loaded_weight), head, part

    def body(self, ids: Tensor, step: Step, exchanges: Callable[[bool], Gather]) -> Callable[[Tensor | None], Tensor]:
        """Return `run` as a function of the logits, for a capture: a run that is not recorded exchanges nothing.

        exchanges: makes the exchanges of a step; True: they send and wait.
        """
        device = self._matrix.device

        def run(logits: Tensor | None) -> Tensor:
            return self.run(ids, step, exchanges(is_captured(device)), logits)

        return run

    def run(self, ids: Tensor, step: Step, gather: Gather, logits: Tensor | None) -> Tensor:
        """Run ids int64 [T] on this device.

        Args:
            ids: read on the home device only.
            step: the step with its tensors, and the pages of this device's heads, on this device.
            gather: exchanges results, 4 times a layer and twice more.
            logits: float32 [T, padded vocabulary], filled on the home device; None on others.

        Returns:
            The logits; on other devices a part of them.
        """
        shape, device, rows = self.shape, self._matrix.device, ids.shape[0]

        def all_columns(made: list[Tensor], begins: Sequence[int], full: Sequence[Tensor] | None) -> list[Tensor]:
            return [gather(made[0], begins, None if full is None else full[0], None)]

        found = run_shares([self], [self._embedded(ids, gather)], [step], all_columns, [WHOLE])
        assert found is not None, "all tokens are output"
        (x,) = found
        h = self._norm.forward(x)
        part = torch.empty((rows, self._matrix.out_features), device=device)
        self._matrix.matmul(h, out=part, invariant=step.invariant)
        if logits is None:
            # Others only send: their result is never read.
            gather(part, shape.vocabulary, torch.empty((rows, shape.vocabulary[-1]), device=device), (0,))
            return part
        whole = logits
        if logits.shape[1] != shape.vocabulary[-1]:
            whole = torch.empty((rows, shape.vocabulary[-1]), device=device)
        gather(part, shape.vocabulary, whole, (0,))
        if whole is not logits:
            logits[:, : whole.shape[1]] = whole
        return self._head.finish(logits)

    def columns_of(self, x: Tensor) -> Tensor:
        """Return a copy of the columns of the hidden state x to which this device's matmuls add."""
        begins = self.shape.hidden
        return x[:, begins[self._shard] : begins[self._shard + 1]].contiguous()

    def _embedded(self, ids: Tensor, gather: Gather) -> Tensor:
        """Return the embedded ids [T, hidden], which the home device sends to the others.

        A number of float32 is sent as two of half, whose bits it has.
        """
        device, sent = self._matrix.device, activation_dtype(self._matrix.device)
        if not self._shard:
            x = embedded(self._embedding, ids)
            gather(x.view(sent), self._answered, None, None)
            return x
        answer = torch.empty((ids.shape[0], ANSWER), dtype=sent, device=device)
        whole = gather(answer, self._answered, None, None)
        return whole[:, : self._answered[1]].contiguous().view(hidden_dtype(self._embedding, device))


def embedded(embedding: Embedding, ids: Tensor) -> Tensor:
    """Return the hidden state [T, hidden] of ids int64 [T] on the embedding's device."""
    assert embedding.weight is not None
    dtype: Literal["float16", "float32"] = "float32" if embedding.float_residual else "float16"
    return embed(embedding.weight, ids, factor=embedding.scale, dtype=dtype)


def hidden_dtype(embedding: Embedding, device: torch.device) -> torch.dtype:
    """Return the type of the hidden state on a device."""
    return torch.float32 if embedding.float_residual else activation_dtype(device)


def _words(embedding: Embedding, device: torch.device) -> int:
    """Return the elements, of the type that devices exchange, of a number of the hidden state."""
    return hidden_dtype(embedding, device).itemsize // activation_dtype(device).itemsize


def shard_launches_of(model: LanguageModel) -> list[ShardLaunches] | str:
    """Return the launches of each device of a model loaded by `load_tp`, or the reason why there are none."""
    context = model.tp_context
    assert context is not None, "loaded by load_tp"
    if not context.exchange.whole:
        return "each device has a process of its own"
    shards = len(context.names)
    why = refusal_of_exchange(model.modules, shards, LoadedWeights(shards))
    if why is not None:
        return why
    embedding, last, head = model.modules[0], model.modules[-2], model.modules[-1]
    assert isinstance(embedding, Embedding)
    assert isinstance(last, Norm)
    assert isinstance(head, Head)
    pairs = pairs_of(model.modules)
    attention, mlp = pairs[0]
    shape = Shape(*map(_begins, (attention.first[0], attention.last, mlp.first[0], head.linear)))
    made = []
    for shard in range(shards):
        halves = [
            half
            for attention, mlp in pairs
            for half in (AttentionHalf(share_of(attention, shard)), MlpHalf(share_of(mlp, shard)))
        ]
        made.append(ShardLaunches(shard, shape, halves, embedding, last, head))
    return made


def _begins(linear: Linear) -> tuple[int, ...]:
    assert isinstance(linear.matrix, SplitMatrix)
    return (0, *accumulate(part.width for part in linear.matrix.parts))


def share_of(about: Share, shard: int) -> Share:
    """Return the description of one device's share of a loaded half: its parts of the matrices, and the norms."""

    def part(linear: Linear) -> Linear:
        mine, matrix = copy.copy(linear), part_of(linear, shard)
        assert matrix is not None, "refusal_of_exchange has checked it"
        mine.matrix, mine.out_features = matrix, matrix.out_features
        return mine

    first, last = tuple(part(linear) for linear in about.first), part(about.last)
    device = last.quant.device

    def there(norm: Norm | None) -> Norm | None:
        return None if norm is None else norm_on(norm, device, norm.loaded_weight)

    found = replace(about, first=first, last=last, norm=there(about.norm), post=there(about.post))
    if isinstance(found, AttentionDescription):
        return replace(found, q_norm=there(found.q_norm), k_norm=there(found.k_norm))
    return found
