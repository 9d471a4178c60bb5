"""The kernels that the steps of a model run on a card, determined from the headers of the model's files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from exl_kernels.moe.cuda import ExpertRouter
from exl_kernels.selection import PACKED_ROWS, STEP_ROWS, Card, MatrixShape, Selection, rope_store_kernel

from ..config import ExLlamaV2Config
from ..config.rope_config import main_rope
from ..errors import ModelStateError
from ..layers import Head, Linear, Module, Norm, build_modules
from ..layers.description import (
    AttentionDescription,
    ExpertsDescription,
    HalfDescription,
    MatmulDescription,
    MlpDescription,
)
from ..layers.norm import rms_of
from ..loading.checkpoint import Checkpoint, TensorReader, TensorSource
from ..loading.linears import LinearOptions, LinearSpec, read_quantized
from .capturable import refusal_of_settings
from .environment import joined_rows, refusal_of_joined_rows
from .fused import uncovered
from .half import description_of, why_own_pass
from .half_matmuls import HalfMatmul, is_plain, matmuls_of

__all__ = ["KEYS", "ROWS", "KernelUse", "kernel_uses", "tokens_of_sequence"]

ROWS = (1, 8, 32, 64, 512)
"""Default numbers of rows of a step: decoding alone and in batches, and a prompt."""

KEYS = 256
"""Default number of keys that attention reads."""

_CHOSEN = "are chosen by the host"
_MANY_ROWS = f"more than {PACKED_ROWS} rows are cheaper by dequantizing once"


@dataclass(frozen=True)
class KernelUse:
    """One operation of a layer at one number of rows."""

    operation: str
    """"q+k+v", "o", "gate+up", "down", "rope+store", "attention", "router", "experts", "head", the last part of a
    matrix's key, or an operation that the caller adds."""
    rows: int
    tokens: int
    """Query tokens of each sequence: one in a decode step, all rows in a prompt."""
    kernel: str
    """A name of `exl_kernels.selection`; "cuBLAS" for float matrices. Several names with commas where layers differ."""
    why: tuple[str, ...]
    """The reasons why no faster kernel runs, one sentence each; empty where no faster kernel exists."""


def kernel_uses(
    config: ExLlamaV2Config,
    card: Card,
    *,
    rows: Sequence[int] = ROWS,
    cache: str = "fp16",
    keys: int = KEYS,
) -> list[KernelUse]:
    """Return the kernels of every operation of a layer and of the head, for each number of `rows`.

    Up to STEP_ROWS rows are a step of as many sequences of one token; more are one prompt. Reads the scales of every
    matrix, not its weights.

    Args:
        config: a prepared config.
        card: the GPU.
        rows: numbers of rows of a step.
        cache: storage format of the cache.
        keys: keys that attention reads, at least as many as the prompt has tokens.

    Raises:
        ModelStateError: the config was prepared without tensors.
        FormatError, MissingTensorError: the weight files are broken or incomplete.
    """
    if config.checkpoint is None:
        raise ModelStateError("the config was prepared with no_tensors=True: call config.prepare() first")
    modules = build_modules(config)
    shapes = _Shapes(config.checkpoint)
    why_not = refusal_of_settings(config) or uncovered(modules) or _decided_by_host(modules, shapes, card)
    halves = [(module, why_not or why_own_pass(module, shapes.is_padded)) for module in modules[1:-2]]
    rotated = main_rope(config).rotary_dim
    found: list[KernelUse] = []
    for count in rows:
        blocks = STEP_ROWS >= count > PACKED_ROWS
        refusal = _refusal_of_blocks(modules, shapes, card, count) if blocks else None
        uses = _Uses(count, card, shapes, refusal or refusal_of_joined_rows(min(count, PACKED_ROWS)))
        for _, layer in groupby(halves, lambda half: half[0].key):
            for half, why in layer:
                about = description_of(half)
                if isinstance(about, AttentionDescription):
                    uses.attention(about, cache, keys, rotated, joined=why is None)
                if why is None:
                    assert isinstance(about, MatmulDescription), "why_own_pass"
                    uses.half(about)
                elif isinstance(about, ExpertsDescription):
                    uses.experts(about, why)
                else:
                    uses.alone(half.submodules(), [why])
        head = modules[-1]
        if isinstance(head, Head):
            norm, (last, why) = modules[-2], halves[-1]
            uses.head(head, norm if isinstance(norm, Norm) else None, None if why else description_of(last))
        found += uses.rows()
    return found


def _decided_by_host(modules: Sequence[Module], shapes: _Shapes, card: Card) -> str | None:
    """Return why every module runs its own pass, or None: the host chooses experts, so no step is captured."""
    for module in modules:
        about = description_of(module)
        if isinstance(about, ExpertsDescription):
            found = _experts(about, shapes, card, 1)
            if isinstance(found, str) or found.refused:
                why = found if isinstance(found, str) else found.reasons[0]
                return f"the experts of {module.key} {_CHOSEN}: {why}"
    return None


def _experts(
    about: ExpertsDescription, shapes: _Shapes, card: Card, rows: int, *, invariant: bool = True
) -> Selection | str:
    """Return how rows run through experts, or why no number of rows has shared launches."""
    experts = []
    for expert in about.experts:
        parts = shapes.all(expert)
        if parts is None:
            return "they are float matrices"
        if any(map(shapes.is_padded, expert)):
            return "they have padding columns"
        gate, up, down = parts
        experts.append((gate, up, down))
    return card.experts(experts, rows, about.chosen, invariant=invariant)


def _refusal_of_blocks(modules: Sequence[Module], shapes: _Shapes, card: Card, rows: int) -> str | None:
    """Return which experts keep a step of `rows` rows, more than PACKED_ROWS, from being captured; None if none do."""
    for module in modules[1:-2]:
        about = description_of(module)
        if isinstance(about, ExpertsDescription):
            found = _experts(about, shapes, card, rows)
            if isinstance(found, str) or not found.joined:
                return f"the experts of {module.key} {_CHOSEN}"
    return None


class _Shapes:
    """The shapes of a model's quantized matrices, read once each."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._source = _WithoutWeights(TensorReader(checkpoint))
        self._known: dict[str, MatrixShape | None] = {}

    def is_float(self, linear: Linear) -> bool:
        """Return whether the matrix is not quantized."""
        return self.of(linear) is None

    def is_padded(self, linear: Linear) -> bool:
        """Return whether a quantized matrix has columns beyond the layer's features."""
        shape = self.of(linear)
        return shape is not None and shape.out_features != linear.out_features

    def of(self, linear: Linear) -> MatrixShape | None:
        """Return the shape of a quantized matrix; None for a float matrix."""
        if linear.key not in self._known:
            self._known[linear.key] = _shape(self._source, linear.spec, linear.options)
        return self._known[linear.key]

    def all(self, linears: Iterable[Linear]) -> list[MatrixShape] | None:
        """Return the shapes; None where a matrix is float."""
        shapes = [self.of(linear) for linear in linears]
        quantized = [shape for shape in shapes if shape is not None]
        return quantized if len(quantized) == len(shapes) else None


def _shape(source: TensorSource, spec: LinearSpec, options: LinearOptions) -> MatrixShape | None:
    found = read_quantized(source, spec, options)
    if found is None:
        return None
    kind, tensors, name = found
    if kind == "exl2":
        return MatrixShape.from_exl2(tensors, name=name)
    return MatrixShape.from_gptq(
        tensors, bits=options.gptq_bits, zeros=options.gptq_zeros, group_size=options.gptq_group_size, name=name
    )


class _WithoutWeights:
    """A source of uninitialized packed weights of the right shape, which are never read from the disk."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self.has, self.shape, self.read, self.describe = reader.has, reader.shape, reader.read, reader.describe

    def read_group(self, names: Collection[str]) -> dict[str, Tensor]:
        weights = {name for name in names if name.endswith((".q_weight", ".qweight"))}
        group = self._reader.read_group([name for name in names if name not in weights])
        for name in weights:
            group[name] = torch.empty(self.shape(name), dtype=torch.int32)
        return group


def _matmuls(about: MatmulDescription) -> list[tuple[str, HalfMatmul]]:
    """Return the names and matmuls of a half whose launches are joined."""
    first, last = matmuls_of(about)
    if isinstance(about, AttentionDescription):
        inner = _matmuls(about.mlp) if isinstance(about.mlp, MlpDescription) else []
        return [("q+k+v", first), ("o", last), *inner]
    return [("gate+up" if first.gate else "up", first), ("down", last)]


class _Uses:
    """Kernels and reasons by operation, over all layers, at one number of rows.

    Args:
        count: the number of rows.
        card: the GPU.
        shapes: the shapes of the matrices.
        refusal: why no half joins its launches at this number of rows, or None.
    """

    def __init__(self, count: int, card: Card, shapes: _Shapes, refusal: str | None) -> None:
        self.count = count
        self._invariant = count <= STEP_ROWS  # of a decode step, captured or not (`eager.matmuls_of`)
        self._apart = [] if refusal is None else [refusal]
        self._tokens = tokens_of_sequence(count)
        self._batch = count // self._tokens
        self._card = card
        self._shapes = shapes
        self._kernels: dict[str, dict[str, None]] = {}
        self._why: dict[str, dict[str, None]] = {}

    def rows(self) -> list[KernelUse]:
        return [
            KernelUse(operation, self.count, self._tokens, ", ".join(kernels), tuple(self._why[operation]))
            for operation, kernels in self._kernels.items()
        ]

    def add(self, operation: str, kernel: str, why: Iterable[str] = ()) -> None:
        self._kernels.setdefault(operation, {})[kernel] = None
        self._why.setdefault(operation, {}).update(dict.fromkeys(why))

    def attention(self, a: AttentionDescription, cache: str, keys: int, rotated: int, *, joined: bool) -> None:
        """Add the attention of a half, and the launch before it that rotates and stores keys.

        Args:
            a: the half.
            cache: storage format of the cache.
            keys: keys that attention reads.
            rotated: elements of a head that layers with a rotation rotate.
            joined: the half's launches are joined: attention of a decode step rotates and stores keys itself.
        """
        rotated = 0 if a.rope == "none" else rotated
        if joined and rotated and self._tokens > 1:
            store = rope_store_kernel(cache, a.head_dim, tokens=self.count, rotated=rotated, interleaved=a.interleaved)
            self.add("rope+store", store.kernel, store.reasons)
        found = self._card.attention(
            cache,
            a.head_dim,
            a.widths[0] // a.head_dim,
            a.widths[1] // a.head_dim,
            batch=self._batch,
            tokens=self._tokens,
            keys=max(keys, self._tokens),
            window=a.window,
            softcap=a.softcap,
            rotated=rotated if joined and self._tokens == 1 else None,
            interleaved=a.interleaved,
        )
        self.add("attention", found.kernel, found.reasons)

    def half(self, half: MatmulDescription) -> None:
        """Add the matmuls of a half whose launches are joined.

        If a required one cannot launch with norm and gate, none does.
        """
        apart = list(self._apart)
        for operation, matmul in _matmuls(half):
            found = self._fused(matmul.linears, norm=matmul.norm is not None, gate=matmul.gate)
            if matmul.required and (found is None or not found.joined):
                why = "it is not quantized" if found is None else "".join(found.reasons[-1:])
                apart.append(f"{operation} is launched apart: {why}")
        if apart or not self._invariant:
            self.alone(half.module.submodules(), apart)
            return
        for operation, matmul in _matmuls(half):
            norm, gate, residual = matmul.norm is not None, matmul.gate, matmul.residual
            self._matmul(operation, self._fused(matmul.linears, norm=norm, gate=gate, residual=residual))

    def head(self, head: Head, norm: Norm | None, last: HalfDescription | None) -> None:
        """Add the head's matmul, which includes the last norm where the last half packs its input.

        Args:
            head: the head.
            norm: the last norm.
            last: the last half; None where its launches are not joined.
        """
        found = self._fused((head.linear,), norm=True)
        packs = isinstance(last, MatmulDescription) and is_plain(last) and self.count <= joined_rows()
        takes = rms_of(norm) is not None and not self._shapes.is_padded(head.linear)
        if packs and takes and found is not None and found.joined and found.kernel in ("gemm_few", "gemm_direct"):
            self._matmul("head", found)
        else:
            self._matmul("head", self._alone(head.linear))

    def experts(self, half: ExpertsDescription, why_apart: str) -> None:
        """Add the router, the experts' matmuls (one entry where they share launches), and those of a shared expert."""
        known: set[Linear] = set()
        if self._shapes.is_float(half.router) and ExpertRouter.takes_features(half.router.in_features):
            self.add("router", "experts_route")
            known.add(half.router)
        reasons = [why_apart]
        found = _experts(half, self._shapes, self._card, self.count, invariant=self._invariant)
        if not isinstance(found, str) and found.joined:
            self.add("experts", found.kernel)
            known.update(linear for expert in half.experts for linear in expert)
            reasons = []
        self.alone((linear for linear in half.module.submodules() if linear not in known), reasons)

    def alone(self, linears: Iterable[Linear], why_apart: Sequence[str]) -> None:
        """Add matmuls of one matrix each."""
        for linear in linears:
            self._matmul(linear.key.rpartition(".")[2], self._alone(linear), why_apart)

    def _matmul(self, operation: str, found: Selection | None, why_apart: Sequence[str] = ()) -> None:
        if found is None:
            self.add(operation, "cuBLAS", ["the matrix is not quantized"])
        else:
            reasons = [*why_apart, *found.reasons] if self._invariant else [_MANY_ROWS]
            self.add(operation, found.kernel, reasons)

    def _alone(self, linear: Linear) -> Selection | None:
        shape = self._shapes.of(linear)
        return None if shape is None else self._card.matmul(shape, self.count, invariant=self._invariant)

    def _fused(
        self, linears: Sequence[Linear], *, norm: bool = False, gate: bool = False, residual: bool = False
    ) -> Selection | None:
        """Return the selection; None where a matrix is not quantized."""
        matrices = self._shapes.all(linears)
        if matrices is None:
            return None
        return self._card.fused_matmul(
            matrices, self.count, norm=norm, gate=gate, residual=residual, invariant=self._invariant
        )


def tokens_of_sequence(rows: int) -> int:
    """Return the query tokens of each sequence of a step: one up to STEP_ROWS rows, else all rows (a prompt)."""
    return 1 if rows <= STEP_ROWS else rows
