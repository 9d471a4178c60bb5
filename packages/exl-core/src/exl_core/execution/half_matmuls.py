"""The matmuls of a half of a layer, and the decisions that depend on their plans, for modules that are loaded or not.

Executors build their launches by this; the report of kernels (`kernels.py`) asks the same functions without weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, cast, get_args

from exl_kernels.device import rows_are_invariant
from exl_kernels.linear.fused import Activation
from exl_kernels.selection import attention_stores_keys, pass_rows, refusal_of_adapted_shapes

from ..layers import Head, Linear, Module, Norm, RMSNorm
from ..layers.description import AttentionDescription, MatmulDescription, MlpDescription
from ..layers.norm import layer_of, rms_of
from .environment import refusal_of_joined_rows
from .half_launches import POST_NORMS, HeadNormLaunch, LastLaunch, M, NormLaunch, Prologue

__all__ = [
    "HalfMatmul",
    "HalfPlan",
    "MakeMatmul",
    "NormShape",
    "head_with_norm",
    "joins_rows",
    "matmuls_of",
    "norms_of_heads",
    "packed_rows_of",
    "refusal_of_blocks",
]

MakeMatmul = Callable[[tuple[Linear, ...], Norm | None, Activation | None], M]
"""(linears side by side, norm of their input, activation of their results) -> the matmul."""

NormShape = Callable[[RMSNorm], tuple[int, ...]]
"""The shape of a norm's weight."""


class HalfMatmul(NamedTuple):
    """A matmul with the prologue and epilogue that one launch may have."""

    linears: tuple[Linear, ...]
    norm: RMSNorm | None
    """The norm of the input that the launch applies."""
    residual: bool
    """The launch adds the hidden state."""
    required: bool
    """The half's launches are joined only if this one is."""


def matmuls_of(about: MatmulDescription) -> tuple[HalfMatmul, HalfMatmul]:
    """Return the first and the last matmul of a half.

    A hidden state of float32 is normed and added by launches of their own. The last matmul of an MLP may run alone.
    """
    norm = None if about.float_residual else rms_of(about.norm)
    residual = about.post is None and not about.float_residual
    required = not isinstance(about, MlpDescription)
    return (
        HalfMatmul(about.first, norm, residual=False, required=True),
        HalfMatmul((about.last,), None, residual=residual, required=required),
    )


class HalfPlan(Generic[M]):
    """The matmuls of a half, and how their plans let it run.

    Args:
        about: the half.
        make: makes a matmul, of loaded matrices or of shapes.
        norm_shape: of the norms of q and k.
        mlp: the plan of the MLP that takes the same normed input and is part of the half, or None.

    Attributes:
        first: the first matmul, which norms its input where a launch may do that (`own_norm`).
        first_normed: the first matmul of a normed input.
        first_layered: the first matmul with the LayerNorm of its input, which takes few rows; None for other norms.
        last: the last matmul.
        input_norm: norm of the input, if the preceding half may compute it.
        first_matmul: the only reader of the normed input, if the preceding half may pack it for this matmul.
        adds_apart: one launch norms the last matmul's result, adds it to the hidden state, and norms that for the next
            half.
        head_norms: norms of q and k that attention of one token a row can apply, or None (`norms_of_heads`).
        part_norms: norms of all of q and of all of k that one launch applies, or None (`norms_of_parts`).
        plain: the half has only an RMS norm, a gate of an MLP and the residual besides its matmuls and attention.
    """

    def __init__(
        self, about: MatmulDescription, make: MakeMatmul[M], norm_shape: NormShape, mlp: HalfPlan[M] | None = None
    ) -> None:
        self.about, self.mlp = about, mlp
        first, last = matmuls_of(about)
        self.own_norm, self.adds_residual = first.norm, last.residual
        self.input_norm = rms_of(about.norm)
        self._last_required = last.required
        self.activation = _activation_of(about)
        self.first = self.first_normed = make(about.first, None, self.activation)
        if self.own_norm is not None:
            self.first = make(about.first, self.own_norm, self.activation)
        self.first_matmul = None if mlp is not None else self.first_normed  # the MLP reads the normed input, too
        layer = None if about.float_residual else layer_of(about.norm)
        self.first_layered = None if layer is None else make(about.first, layer, self.activation)
        self.last = make((about.last,), None, None)
        spec = about.last.spec
        self._last_adds = self.last.is_quantized and not spec.bias and spec.prescale == 1.0
        self.adds_apart = rms_of(about.post) is not None or (about.float_residual and about.post is None)
        self._shapes_heads = isinstance(about, AttentionDescription) and shapes_heads(about)
        self.head_norms = self.part_norms = None
        if isinstance(about, AttentionDescription):
            self.head_norms = norms_of_heads(about, norm_shape)
            self.part_norms = None if self.head_norms is not None else norms_of_parts(about, norm_shape)
        self.plain = mlp is None and self.own_norm is not None and _is_plain(about, self.head_norms)

    def joins(self, rows: int) -> bool:
        """Return whether the matmuls that must be joined have kernels for `rows` rows, many rows in blocks."""
        own = all(matmul.joins(rows) for matmul in self.required())
        return own and (self.mlp is None or self.mlp.joins(rows))

    def required(self) -> tuple[M, ...]:
        """Return the matmuls without whose kernels nothing is joined."""
        return (self.first, self.last) if self._last_required else (self.first,)

    def first_of_unnormed(self, rows: int) -> M:
        """Return the first matmul of `rows` joined rows that no launch has normed.

        It is `first_normed` where it needs a launch of the norm before it.
        """
        if self.own_norm is not None:
            return self.first
        layered = self.first_layered
        return layered if layered is not None and layered.joins(rows) else self.first_normed

    def first_adapted(self, rows: int, *, normed: bool) -> M:
        """Return the first matmul of `rows` joined rows that adapters change.

        It is the one with the norm where neither an earlier launch (`normed`) nor one of its own norms the input.
        """
        norms = not normed and self.norm_launch(rows, joined=True, adapted=True) is NormLaunch.ADAPTERS
        return self.first if norms else self.first_normed

    def norm_launch(self, rows: int, *, joined: bool, adapted: bool = False) -> NormLaunch:
        """Return the launch that norms an input of `rows` rows that no earlier launch has normed.

        Args:
            rows: rows of the pass.
            joined: the launches of the half are joined.
            adapted: adapters change the first matmul.
        """
        norm = self.about.norm
        if norm is None:
            return NormLaunch.NONE
        if not joined or self.mlp is not None:  # the MLP reads the normed input, too
            return NormLaunch.OWN
        if adapted:
            return NormLaunch.OWN if self.own_norm is None else NormLaunch.ADAPTERS
        if self.first_of_unnormed(rows) is not self.first_normed:
            return NormLaunch.MATMUL
        layer = None if self.about.float_residual else layer_of(norm)
        packs = layer is not None and self.first_normed.input_columns(rows) is not None
        return NormLaunch.PACKING if packs else NormLaunch.OWN

    def head_norm_launch(self, tokens: int, *, together: bool) -> HeadNormLaunch:
        """Return the launch that norms q and k.

        Args:
            tokens: tokens of each sequence.
            together: one matmul has left q, k and v side by side.
        """
        if not self._shapes_heads:
            return HeadNormLaunch.NONE
        if together and self.head_norms is not None and attention_stores_keys(tokens):
            return HeadNormLaunch.ATTENTION
        return HeadNormLaunch.PARTS if together and self.part_norms is not None else HeadNormLaunch.OWN

    def last_launch(self, rows: int, following: Prologue[M], *, joined: bool, invariant: bool) -> LastLaunch:
        """Return the launch that adds the results of `rows` rows to the hidden state.

        Args:
            rows: rows of the pass.
            following: the part of the next prologue that the half may do.
            joined: the launches of the half are joined.
            invariant: the pass asks for batch-invariant rows.
        """
        if joined and following.chained is not None:
            return LastLaunch.PACKING_MATMUL
        if self.adds_residual and (joined or self.adds_at_once(rows, invariant=invariant)):
            return LastLaunch.MATMUL
        if self.adds_apart:
            packs = joined and following.matmul is not None and following.matmul.input_columns(rows) is not None
            return LastLaunch.PACKING_POST_NORM if packs else LastLaunch.POST_NORM
        if joined or following.norm is None or self.about.float_residual:
            return LastLaunch.SUM
        return LastLaunch.SUM_AND_NORM

    def norms_next(self, rows: int, following: Prologue[M], *, joined: bool, invariant: bool) -> bool:
        """Return whether the launches that end the half leave the next one its input normed, or packed for its matmul.

        Arguments as for `last_launch`.
        """
        launch = self.last_launch(rows, following, joined=joined, invariant=invariant)
        if launch is LastLaunch.PACKING_MATMUL:
            return True
        return following.norm is not None and (not joined or launch in POST_NORMS)

    def adds_at_once(self, rows: int, *, invariant: bool) -> bool:
        """Return whether torch multiplies `rows` rows by the last matrix, dequantized, and adds the hidden state.

        The sum is rounded once.
        """
        return self._last_adds and not rows_are_invariant(rows, invariant=invariant)

    def refusal_of_adapters(self) -> str | None:
        """Return why joined launches cannot add adapters to every matrix, or None."""
        for linears in (self.about.first, (self.about.last,)):
            why = refusal_of_adapted_shapes(linears[0].in_features, [linear.out_features for linear in linears])
            if why is not None:
                return why
        return None if self.mlp is None else self.mlp.refusal_of_adapters()

    def chains(self, rows: int) -> bool:
        """Return whether all matmuls of `rows` rows can pack one another's inputs."""
        inner = isinstance(self.about, AttentionDescription) or self.first.chains_to(self.last, rows)
        return self.plain and inner

    def chained_first(self, rows: int) -> M | None:
        """Return the first matmul, whose input the last matmul of the preceding half may pack, if all are chained."""
        return self.first if self.chains(rows) else None

    def chains_to(self, following: M, rows: int) -> bool:
        """Return whether the last matmul can pack its results of `rows` rows as the input of `following`."""
        return self.chains(rows) and self.last.chains_to(following, rows)


def _activation_of(about: MatmulDescription) -> Activation | None:
    """Return the activation that the first matmul applies, or None; always one where there is a gate (`why_apart`)."""
    fuses = isinstance(about, MlpDescription) and about.activation in get_args(Activation)
    return cast(Activation, about.activation) if fuses and isinstance(about, MlpDescription) else None


def shapes_heads(a: AttentionDescription) -> bool:
    """Return whether a norm or a clamp changes q, k or v."""
    return a.q_norm is not None or a.k_norm is not None or bool(a.clip)


def _is_plain(about: MatmulDescription, head_norms: tuple[RMSNorm, RMSNorm] | None) -> bool:
    if about.post is not None:
        return False
    if isinstance(about, AttentionDescription):
        return not shapes_heads(about) or head_norms is not None
    return isinstance(about, MlpDescription) and about.gated


def norms_of_heads(a: AttentionDescription, norm_shape: NormShape) -> tuple[RMSNorm, RMSNorm] | None:
    """Return norms of q and k that attention of one token a row can apply, or None.

    These are RMS norms whose weight all heads share.
    """
    q, k = rms_of(a.q_norm), rms_of(a.k_norm)
    if q is None or k is None or a.clip or q.eps != k.eps:
        return None
    return (q, k) if norm_shape(q) == norm_shape(k) == (a.head_dim,) else None


def norms_of_parts(a: AttentionDescription, norm_shape: NormShape) -> tuple[RMSNorm, RMSNorm] | None:
    """Return RMS norms of all heads of q together and of all heads of k, which one launch applies; None for others."""
    q, k = rms_of(a.q_norm), rms_of(a.k_norm)
    if q is None or k is None or a.clip or q.eps != k.eps:
        return None
    return (q, k) if (norm_shape(q), norm_shape(k)) == tuple((width,) for width in a.widths[:2]) else None


def head_with_norm(norm: Module | None, head: Head, make: MakeMatmul[M], padded: Callable[[Linear], bool]) -> M | None:
    """Return the last norm and the head as one matmul, whose input the last half may pack; None if there is none."""
    rms = rms_of(norm) if isinstance(norm, Norm) else None
    if rms is None or padded(head.linear) or head.linear.out_features != head.padded_vocab_size:
        return None
    return make((head.linear,), rms, None)


def refusal_of_blocks(rows: int, refusal: Callable[[], str | None]) -> str | None:
    """Return why a captured step of `rows` rows is not batch-invariant, or None.

    The modules' own passes of few rows are. More rows run in blocks, where joined kernels take them, or by separate
    matmuls in blocks; `refusal` returns why a half does not allow that.
    """
    if rows_are_invariant(rows, invariant=False):
        return None
    return refusal_of_joined_rows(rows) or refusal()


def packed_rows_of(takes_blocks: Iterable[bool], refusals: Iterable[str | None]) -> int:
    """Return the most rows of a pass on a GPU that run on packed weights (`selection.pass_rows`).

    Args:
        takes_blocks: of each matrix.
        refusals: of each module, why STEP_ROWS rows are not batch-invariant, or None.
    """
    return pass_rows(all(takes_blocks) and all(why is None for why in refusals))


def joins_rows(rows: int, *, invariant: bool) -> bool:
    """Return whether halves that have joined launches for `rows` rows use them in a pass that is `invariant` or not."""
    return refusal_of_joined_rows(rows) is None and rows_are_invariant(rows, invariant=invariant)
