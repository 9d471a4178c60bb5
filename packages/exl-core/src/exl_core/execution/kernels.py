"""The kernels that the steps of a model run on a card, determined from the headers of the model's files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from exl_kernels.selection import PACKED_ROWS, STEP_ROWS, Card, MatrixShape, Selection, rope_store_kernel

from ..config import ExLlamaV2Config
from ..config.rope_config import main_rope
from ..errors import ModelStateError
from ..layers import Head, Linear, Module, build_modules
from ..layers.description import AttentionDescription, ExpertsDescription, MatmulDescription, MlpDescription
from ..layers.norm import rms_of
from ..loading.checkpoint import Checkpoint, TensorReader, TensorSource
from ..loading.linears import LinearOptions, LinearSpec, read_quantized
from .fused import uncovered
from .half import description_of, why_apart

__all__ = ["KEYS", "ROWS", "KernelUse", "kernel_uses", "tokens_of_sequence"]

ROWS = (1, 8, 32, 64, 512)
"""Default numbers of rows of a step: decoding alone and in batches, and a prompt."""

KEYS = 256
"""Default number of keys that attention reads."""

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
    why_not = uncovered(modules) or _decided_by_host(modules, shapes)
    halves = [(module, why_not or why_apart(module)) for module in modules[1:-2]]
    rotated = main_rope(config).rotary_dim
    found: list[KernelUse] = []
    for count in rows:
        uses = _Uses(count, card, shapes)
        for _, layer in groupby(halves, lambda half: half[0].key):
            for half, why in layer:
                about = description_of(half)
                if isinstance(about, AttentionDescription):
                    uses.attention(about, cache, keys, rotated, joined=why is None)
                if why is None:
                    assert isinstance(about, MatmulDescription), "why_apart"
                    uses.half(about)
                elif isinstance(about, ExpertsDescription):
                    uses.experts(about, why)
                else:
                    uses.alone(half.submodules(), [why])
        head = modules[-1]
        if isinstance(head, Head):
            uses.head(head, chained=not any(why for _, why in halves))
        found += uses.rows()
    return found


def _decided_by_host(modules: Sequence[Module], shapes: _Shapes) -> str | None:
    """Return why every module runs its own pass, or None: the host chooses float experts, so no step is captured."""
    for module in modules:
        about = description_of(module)
        if isinstance(about, ExpertsDescription) and any(shapes.all(expert) is None for expert in about.experts):
            return f"the experts of {module.key} are float matrices, which the host chooses: no launches are joined"
    return None


class _Shapes:
    """The shapes of a model's quantized matrices, read once each."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._source = _WithoutWeights(TensorReader(checkpoint))
        self._known: dict[str, MatrixShape | None] = {}

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


@dataclass(frozen=True)
class _Matmul:
    """Matrices that are multiplied in one launch if possible."""

    operation: str
    linears: tuple[Linear, ...]
    norm: bool = False
    gate: bool = False
    residual: bool = False


def _matmuls(about: MatmulDescription) -> list[_Matmul]:
    """Return the matmuls of a half whose launches are joined."""
    norm, residual = rms_of(about.norm) is not None, about.post is None
    if isinstance(about, AttentionDescription):
        inner = _matmuls(about.mlp) if isinstance(about.mlp, MlpDescription) else []
        return [_Matmul("q+k+v", about.first, norm=norm), _Matmul("o", (about.last,), residual=residual), *inner]
    gate = len(about.first) > 1
    first = _Matmul("gate+up" if gate else "up", about.first, norm=norm, gate=gate)
    return [first, _Matmul("down", (about.last,), residual=residual)]


class _Uses:
    """Kernels and reasons by operation, over all layers, at one number of rows."""

    def __init__(self, count: int, card: Card, shapes: _Shapes) -> None:
        self.count = count
        self._invariant = count <= STEP_ROWS
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

        If one of them, except down, cannot launch with norm, gate and residual, none does.
        """
        found = [(matmul, self._joined(matmul)) for matmul in _matmuls(half)]
        apart = [
            f"{matmul.operation} is launched apart: {reason}"
            for matmul, selected in found
            if matmul.operation != "down" and (selected is None or not selected.joined)
            for reason in (["it is not quantized"] if selected is None else selected.reasons[-1:])
        ]
        if apart or not self._invariant:
            self.alone(half.module.submodules(), apart)
            return
        for matmul, selected in found:
            self._matmul(matmul.operation, selected)

    def head(self, head: Head, *, chained: bool) -> None:
        """Add the head's matmul, which includes the last norm where kernels pack the inputs of the next ones."""
        fused = self._fused((head.linear,), norm=True)
        if chained and fused is not None and fused.joined and fused.kernel in ("gemm_few", "gemm_direct"):
            self._matmul("head", fused)
        else:
            self._matmul("head", self._alone(head.linear))

    def experts(self, half: ExpertsDescription, why_apart: str) -> None:
        """Add the router, the experts' matmuls (one entry where they share launches), and those of a shared expert."""
        known: set[Linear] = set()
        if self._shapes.of(half.router) is None:
            self.add("router", "experts_route")
            known.add(half.router)
        shapes = [self._shapes.all(expert) for expert in half.experts]
        quantized = [(gate, up, down) for gate, up, down in (parts for parts in shapes if parts is not None)]
        if len(quantized) == len(shapes):
            found = self._card.experts(quantized, self.count, half.chosen, invariant=self._invariant)
            if found.joined:
                self.add("experts", found.kernel)
                known.update(linear for expert in half.experts for linear in expert)
                why_apart = ""
            elif found.refused:
                why_apart = found.reasons[0]
        reasons = [why_apart] if why_apart else []
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

    def _joined(self, matmul: _Matmul) -> Selection | None:
        """Return the selection; None where a matrix is not quantized."""
        return self._fused(matmul.linears, norm=matmul.norm, gate=matmul.gate, residual=matmul.residual)

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
