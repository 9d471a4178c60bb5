"""Limits of the kernels, and the kernel that a GPU would run for a call, for known cards also without having the card.

The answers come from the functions that plan the launches (rust/exl-cuda, `select` of each family). A GPU test compares
the launched kernels with the answers (tests/kernels/test_cuda_selection.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from . import _native
from .errors import DeviceError, FormatError, ShapeError
from .formats import Exl2Parts, GptqFormat, GptqParts

__all__ = [
    "BLOCK_ROWS",
    "COLUMN_MARKS",
    "CPU_CHUNK_ROWS",
    "DECODE_TOKENS",
    "FEW_ROWS",
    "FILLED_ROWS",
    "FUSED_ACTIVATIONS",
    "HEAD_DIM_STEP",
    "LIMITS",
    "MAX_HEAD_DIM",
    "MAX_LOGITS",
    "MIDDLE_ROWS",
    "MOST_EXCHANGES",
    "MOST_GPUS",
    "MOST_REPORTED",
    "PACKED_ROWS",
    "STEP_ROWS",
    "AdapterSizes",
    "Card",
    "MatrixShape",
    "NormOperation",
    "RouterPlan",
    "Selection",
    "adapter_kernels",
    "attention_stores_keys",
    "has_fine_scales",
    "is_decode_step",
    "known_cards",
    "norm_kernel",
    "pass_rows",
    "refusal_of_adapted_rows",
    "refusal_of_adapted_shapes",
    "refusal_of_experts",
    "rope_store_kernel",
    "runs_packed",
]

LIMITS = _native.kernel_limits()
"""Limits of the kernels, defined in Rust. They do not depend on the machine or on the architectures of the build."""

FEW_ROWS = LIMITS.few_rows
"""Most rows of `gemm_few` and `gemm_direct`, and columns of their packed input."""

PACKED_ROWS = LIMITS.packed_rows
"""Most rows of a call on packed weights. Up to there a row's result does not depend on the number of rows. More rows
are cheaper by dequantizing once, except in captured steps."""

MIDDLE_ROWS = LIMITS.middle_rows
"""Rows below PACKED_ROWS for which captured steps have a bucket of their own: `gemm_batch` has kernels for as many."""

BLOCK_ROWS = LIMITS.block_rows
"""Rows of a block of a captured step's matmuls: one launch on cards with wgmma, elsewhere launches of PACKED_ROWS."""

STEP_ROWS = LIMITS.step_rows
"""Most tokens of a decode step, captured or not, whose results do not depend on other rows."""

FILLED_ROWS = LIMITS.filled_rows
"""Most rows of windows that are filled up to one length, for a GPU: one pass of so many takes less time than two passes
of few, since each reads all weights."""

DECODE_TOKENS = LIMITS.decode_tokens
"""Most tokens of a row in a decode step: the last token and its drafts."""

CPU_CHUNK_ROWS = LIMITS.cpu_chunk_rows
"""Rows that a fused half of a layer (`block`) computes at a time on the CPU."""

MAX_HEAD_DIM = LIMITS.most_head_dim
"""Largest head dimension on a GPU."""

HEAD_DIM_STEP = LIMITS.head_dim_step
"""Head dimensions on a GPU are multiples of this number."""

MAX_LOGITS = LIMITS.most_logits
"""Widest row of logits that is sampled: 2^19 weights of 2^44 fit an unsigned 64-bit sum."""

MOST_REPORTED = LIMITS.most_reported
"""Most candidates that a GPU reports for a row; rows that report more are left to the CPU."""

MOST_GPUS = LIMITS.exchange_gpus
"""Most GPUs that exchange results."""

MOST_EXCHANGES = LIMITS.exchanges
"""Most exchanges of a step."""

COLUMN_MARKS = LIMITS.column_marks
"""Marks of each GPU that stores columns into the results of others."""

FUSED_ACTIVATIONS = LIMITS.activations
"""Names of the activations that GPU kernels apply. "gelu" is the tanh approximation."""

RouterPlan = _native.RouterPlan
AdapterSizes = _native.AdapterSizes

NormOperation = Literal["rms", "layer", "rms parts", "add rms", "add post"]
"""The result of a launch that norms rows: an RMS norm, a LayerNorm, RMS norms of two parts of each row, x + y and its
RMS norm, or x + norm(y) and its norm, where either norm may be absent."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The kernel of a matmul, a layer's experts, attention or a norm, or the kernels of sampling or adapters."""

    kernel: str
    """For a matmul gemv_ring, gemv_ring_adapted (which adds adapters), gemm_few, gemm_direct, gemm_batch, gemm_tile or
    gemm_large (dequantize, then cuBLAS). The name of the launched function for attention, such as
    attention_fp16_128_decode1. The names of all launched functions in their order for sampling, such as
    "sample_shape + sample_choose", and for experts that share launches; "CPU" for rows that no GPU samples."""
    joined: bool
    """Whether one launch takes all matrices with norm, gate and residual. Otherwise `kernel` is that of the first
    matrix alone."""
    refused: tuple[tuple[str, str], ...]
    """Faster kernels and the reason why each does not take the call. For sampling, launched kernels and the reason why
    they do not suffice without further launches."""

    @classmethod
    def of(cls, kernel: str, refused: Iterable[_native.RefusedKernel], *, joined: bool = True) -> Selection:
        """Return the selection of `kernel`, `joined` or not, with what the native module `refused`."""
        return cls(kernel, joined, tuple((one.kernel, one.why) for one in refused))

    @property
    def reasons(self) -> tuple[str, ...]:
        """The refusals as sentences, such as "attention_few: it needs clusters"."""
        return tuple(f"{kernel}: {why}" for kernel, why in self.refused)


def has_fine_scales(q_groups: Tensor, words: int) -> bool:
    """Return whether an EXL2 matrix has a scale for every 32 rows on a GPU: some of its groups are smaller than 128.

    One launch takes matrices that are alike in this: see `fine_scales` of `QuantMatrix.from_exl2`.

    Args:
        q_groups: int16 [2 * groups], as in the file.
        words: rows of q_weight.

    Returns:
        True or False; False for groups that the format forbids, which the matrix is rejected for.
    """
    return _native.cuda_has_fine_scales(q_groups.tolist(), words)


class MatrixShape:
    """The properties of a quantized matrix that decide its kernel: format, group size, bit widths, order of inputs.

    Packed weights are not read, so `q_weight` and `qweight` may be uninitialized tensors of the right shape.
    """

    __slots__ = ("_native",)

    def __init__(self, native: _native.CudaShape) -> None:
        """Wrap a shape of the `native` module; use `from_exl2` or `from_gptq`."""
        self._native = native

    @property
    def in_features(self) -> int:
        """Rows of the matrix."""
        return int(self._native.in_features)

    @property
    def out_features(self) -> int:
        """Columns of the stored matrix, padding included."""
        return int(self._native.out_features)

    @classmethod
    def from_exl2(cls, tensors: Mapping[str, Tensor], *, name: str = "", fine_scales: bool = False) -> MatrixShape:
        """Take the shape from q_weight, q_scale, q_scale_max, q_groups and q_invperm, as `QuantMatrix.from_exl2`.

        Args:
            tensors: the tensors by these names.
            name: the matrix's name in errors.
            fine_scales: as for `QuantMatrix.from_exl2`.

        Raises:
            FormatError: the tensors do not fit the format.
            UnsupportedError: the matrix is too large for a GPU.
        """
        parts = Exl2Parts(**{key: tensors[key] for key in Exl2Parts._fields})
        try:
            return cls(_native.CudaShape.from_exl2(name, parts, fine_scales=fine_scales))
        except TypeError as error:
            raise FormatError(f"{name or 'matrix'}: {error}") from error

    @classmethod
    def from_gptq(
        cls,
        tensors: Mapping[str, Tensor],
        *,
        bits: int = 4,
        zeros: Literal["classic", "v2"] = "classic",
        group_size: int | None = None,
        name: str = "",
    ) -> MatrixShape:
        """Take the shape from GPTQ tensors.

        Args:
            tensors: qweight, qzeros, scales (float16) and g_idx (or None), as for `QuantMatrix.from_gptq`.
            bits: 2, 3, 4 or 8.
            zeros: "classic" or "v2".
            group_size: as for `QuantMatrix.from_gptq`.
            name: name of the matrix in messages.

        Raises:
            FormatError: the tensors do not fit the format.
            UnsupportedError: the matrix is too large for a GPU.
        """
        if group_size is not None and group_size < 1:
            group_size = None
        parts = GptqParts(tensors["qweight"], tensors["qzeros"], tensors["scales"], tensors.get("g_idx"))
        return cls(_native.CudaShape.from_gptq(name, parts, GptqFormat(bits, zeros == "v2", group_size)))


class SamplingPlan(Protocol):
    """A `sampling.Plan`, which this module cannot import."""

    @property
    def native(self) -> _native.SamplingPlan:
        """The plan of the native module."""


class Card:
    """The properties of a GPU that decide which kernels run.

    The code that the card runs counts: a module built for `80+ptx` runs no Hopper kernel on an H100.
    """

    __slots__ = ("_native", "name")

    def __init__(self, native: _native.CudaCard, name: str) -> None:
        """Wrap a card of the `native` module and its `name`; use `device` or `named`."""
        self._native = native
        self.name = name

    @classmethod
    def device(cls, index: int = 0) -> Card:
        """Return GPU `index` of this machine, in torch's numbering, with the code that this module holds for it.

        Raises:
            DeviceError: there is no such GPU.
        """
        return cls(_native.CudaCard.device(index), f"cuda:{index}")

    @classmethod
    def named(cls, name: str) -> Card:
        """Return a card of `known_cards`, with the code of a build for it. Case, spaces and "RTX" do not matter.

        Raises:
            DeviceError: the name is not known.
        """
        found = _native.CudaCard.named(name)
        if found is None:
            raise DeviceError(f"card {name!r} is not known; known cards: {', '.join(known_cards())}")
        return cls(found, name)

    @property
    def code(self) -> int:
        """Architecture of the code that the card runs, 80 for sm_80."""
        return int(self._native.code)

    @property
    def features(self) -> frozenset[str]:
        """The features that the card's code may use: of "bulk_copy", "clusters", "tested_clusters", "wgmma",
        "async_copy" and "mma_pipeline".
        """
        return frozenset(self._native.features)

    @property
    def takes_float_blocks(self) -> bool:
        """Whether float matrices allow batch-invariant passes of STEP_ROWS rows, as quantized ones do (`pass_rows`)."""
        return "wgmma" in self.features

    def plan(
        self,
        matrices: Sequence[MatrixShape],
        rows: int,
        *,
        activation: bool = False,
        norm: Literal["rms", "layer"] | None = None,
        residual: bool = False,
        adapters: _native.AdapterSizes | None = None,
    ) -> _native.MatmulPlan:
        """Return the plan of a batch-invariant `linear.fused.FusedLinear` over one to three matrices.

        Args:
            matrices: the matrices of the launch.
            rows: number of float16 rows.
            activation: two matrices are gate and up, or one has its results activated.
            norm: the norm of the input that is fused.
            residual: a residual is added.
            adapters: sizes of the adapters that the launch adds (`PlannedMatmul.takes_adapters`).
        """
        shapes = [matrix._native for matrix in matrices]
        call = _native.MatmulCall(rows, norm=norm, residual=residual, invariant=True, adapters=adapters)
        return _native.cuda_plan_fused(self._native, shapes, call, activation=activation)

    def matmul(self, matrix: MatrixShape, rows: int, *, invariant: bool = False) -> Selection:
        """Return the kernel that multiplies `rows` float16 rows by `matrix`, batch-invariant or not."""
        plan = self.plan_alone(matrix, rows, invariant=invariant)
        return Selection.of(plan.kernel, plan.refused)

    def plan_alone(self, matrix: MatrixShape, rows: int, *, invariant: bool = False) -> _native.MatmulPlan:
        """Return the plan of a launch that multiplies `rows` float16 rows by `matrix`, `invariant` or not."""
        return _native.cuda_plan_alone(self._native, matrix._native, rows, invariant=invariant)

    def float_matmul(self, rows: int, *, in_features: int, out_features: int) -> str:
        """Return the kernel that multiplies batch-invariant float16 rows by a float matrix.

        Args:
            rows: number of rows.
            in_features: inputs of the matrix.
            out_features: its outputs.
        """
        return _native.cuda_select_float(self._native, rows, in_features=in_features, out_features=out_features)

    def plan_router(
        self,
        rows: int,
        *,
        hidden: int,
        experts: int,
        chosen: int,
        sparse: bool = False,
        quantized: bool = False,
        rms: int | None = None,
    ) -> RouterPlan:
        """Return the plan of `moe.ExpertRouter`, which says also why no kernel routes.

        Args:
            rows: number of rows.
            hidden: features of a row.
            experts: experts of the layer.
            chosen: experts a row.
            sparse: the router has a jitter.
            quantized: the router's matrix is quantized.
            rms: features of the RMS norm before the router, which the same launch may apply; None for no RMS norm.
        """
        router = _native.RouterShape(hidden=hidden, experts=experts, chosen=chosen, sparse=sparse, quantized=quantized)
        return _native.cuda_plan_router(self._native, router, rows, rms=rms)

    def experts(
        self,
        experts: Sequence[tuple[MatrixShape, MatrixShape, MatrixShape]],
        rows: int,
        chosen: int,
        *,
        invariant: bool = False,
    ) -> Selection:
        """Return how the experts of a layer run.

        Args:
            experts: gate, up and down of each expert.
            rows: number of rows.
            chosen: experts a row.
            invariant: rows are batch-invariant, as always for few rows and in captured steps.

        Returns:
            The functions of shared launches, whose matmuls end in 8, 16, 32 or 64, so many rows of an expert at a time,
            or in 2x8 or 2x16, which multiply two tiles of features with one load of these rows; or experts_dequantized
            (`moe.GroupedExperts`); or experts_apart, one after the other.
        """
        return _of_experts(self.plan_experts(experts, rows, chosen, invariant=invariant))

    def plan_experts(
        self,
        experts: Sequence[tuple[MatrixShape, MatrixShape, MatrixShape]],
        rows: int,
        chosen: int,
        *,
        invariant: bool = False,
    ) -> _native.ExpertsPlan:
        """Return the plan of `moe.GroupedExperts`, with the scratch memory of a launch.

        `experts`, `rows`, `chosen` and `invariant` are as for the method `experts`.

        Its `kernel` names shared launches by their rows: experts_by_8, experts_by_16, experts_by_32, experts_by_64,
        experts_by_2x8 or experts_by_2x16.
        """
        shapes = [[matrix._native for matrix in parts] for parts in experts]
        return _native.cuda_select_experts(self._native, shapes, rows, chosen, invariant=invariant)

    def float_experts(
        self, rows: int, chosen: int, *, experts: int, hidden: int, width: int, invariant: bool = False
    ) -> Selection:
        """Return how the experts of a layer run whose matrices are all float.

        Args:
            rows: number of rows.
            chosen: experts a row.
            experts: experts of the layer.
            hidden: features of a row.
            width: features between gate, up and down.
            invariant: as for the method `experts`.

        Returns:
            As the method `experts`; for prompts of large experts experts_sorted, one matmul after the other of rows
            sorted by expert.
        """
        sizes = {"experts": experts, "hidden": hidden, "width": width}
        return _of_experts(_native.cuda_select_float_experts(self._native, rows, chosen, **sizes, invariant=invariant))

    def attention(
        self,
        kind: str,
        head_dim: int,
        q_heads: int,
        kv_heads: int,
        *,
        batch: int,
        tokens: int,
        keys: int,
        window: int = 0,
        softcap: float = 0.0,
        rotated: int | None = None,
        interleaved: bool = False,
        stored: bool = False,
    ) -> Selection:
        """Return the kernel of attention.

        Args:
            kind: "fp16", "fp8", "q8", "q6" or "q4".
            head_dim: elements of a head.
            q_heads: query heads.
            kv_heads: key/value heads.
            batch: number of sequences.
            tokens: new tokens of each sequence.
            keys: keys in the cache.
            window: sliding window in tokens; 0 is off.
            softcap: limit of the logits; 0 is off.
            rotated: rotated elements of each head, if the launch rotates and stores keys (`attend_own`); None: they are
                stored before (`paged_attention`, `attend_stored`).
            interleaved: neighbours are rotated, as for `apply_rope`.
            stored: `attend_stored`, where few tokens of a sequence may have blocks of their own.
        """
        shape = _native.AttentionShape(
            _native.AttentionHeads(kind, head_dim, q_heads=q_heads, kv_heads=kv_heads),
            batch=batch,
            tokens=batch * tokens,
            keys=keys,
            window=window,
            softcap=softcap,
        )
        if rotated is not None:
            shape = shape.with_own_keys(rotated, interleaved=interleaved)
        if stored:
            shape = shape.with_rows(tokens)
        plan = _native.cuda_select_attention(self._native, shape)
        return Selection.of(plan.kernel, plan.refused)

    def refusal_of_pages(self, kind: str, head_dim: int) -> str | None:
        """Return why no kernel of attention takes pages of `kind` with heads of `head_dim` elements, or None."""
        return _native.cuda_refusal_of_pages(self._native, kind, head_dim)

    def sampling(
        self,
        plan: SamplingPlan,
        rows: int,
        width: int,
        *,
        mirostat: bool = False,
        negative: bool = False,
        top_n: int = 0,
    ) -> Selection:
        """Return the kernels that `sampling.launch` launches for rows of one plan.

        Args:
            plan: the transforms of the rows.
            rows: number of rows.
            width: logits of a row.
            mirostat: the rows have a mirostat threshold.
            negative: the rows have logits of a negative prompt.
            top_n: candidates that each row reports.

        Raises:
            ShapeError: `rows`, `width` or `top_n` is negative.
        """
        if min(rows, width, top_n) < 0:
            raise ShapeError(f"{rows} rows of {width} logits, {top_n} reported; none of them can be negative")
        choice = _native.cuda_select_sampling(
            self._native, plan.native, rows, width, mirostat=mirostat, mixed=negative, top_n=top_n
        )
        return Selection.of(" + ".join(choice.kernels) or "CPU", choice.refused)


def _of_experts(plan: _native.ExpertsPlan) -> Selection:
    refused = () if plan.refused is None else (("shared launches", plan.refused),)
    return Selection(" + ".join(plan.launches) or plan.kernel, plan.shares, refused)


def known_cards() -> tuple[str, ...]:
    """Return the names of the cards that `Card.named` knows."""
    return tuple(_native.cuda_cards())


def rope_store_kernel(kind: str, head_dim: int, *, tokens: int, rotated: int, interleaved: bool = False) -> Selection:
    """Return the kernel of `fused.rope_store` for `tokens` aligned float16 tokens, which does not depend on the card.

    Args:
        kind: storage format of the cache.
        head_dim: elements of a head.
        tokens: number of tokens.
        rotated: rotated elements of each head.
        interleaved: neighbours are rotated.
    """
    choice = _native.cuda_select_rope_store(kind, head_dim, tokens=tokens, rotated=rotated, interleaved=interleaved)
    return Selection.of(" + ".join(choice.kernels), choice.refused)


def norm_kernel(
    operation: NormOperation, width: int, *, float32: bool = False, columns: int | None = None
) -> Selection:
    """Return the kernel of a norm of aligned rows with float32 weights, which does not depend on the card.

    Args:
        operation: what the launch computes.
        width: elements of a row.
        float32: the rows are float32; otherwise float16.
        columns: columns of the input of a matmul that the launch packs; None: it writes rows.

    Raises:
        ShapeError: no kernel computes that.
    """
    try:
        choice = _native.cuda_select_norm(operation, width, float32=float32, columns=columns)
    except ValueError as error:
        raise ShapeError(str(error)) from None
    return Selection.of(" + ".join(choice.kernels), choice.refused)


def adapter_kernels(rows: int, ranks: int, *, columns: int | None = None, gated: bool = False) -> Selection:
    """Return the kernels of `linear.lora` before and after a matmul that does not add adapters itself, in their order.

    Args:
        rows: number of rows.
        ranks: ranks of the adapters of all matrices of a joined matmul together (`LoraGroup`); 0 for the adapters of
            one matrix whose matmul is not joined (`LoraTable`).
        columns: columns of the matmul's input, if another launch can pack that (`FusedLinear.input_of`).
        gated: the results have a gate.
    """
    choice = _native.cuda_select_adapters(rows, ranks, columns=columns, gated=gated)
    return Selection.of(" + ".join(choice.kernels), choice.refused)


def pass_rows(whole_blocks: bool) -> int:
    """Return the most rows of a pass, other than a decode step, that run on packed weights and are batch-invariant.

    STEP_ROWS where one launch takes BLOCK_ROWS rows of every matrix (wgmma): two blocks take as long as dequantizing
    each matrix. Else PACKED_ROWS.

    Args:
        whole_blocks: for every matrix, the plan of BLOCK_ROWS rows is a `whole_block`, or `Card.takes_float_blocks`.
    """
    return _native.cuda_pass_rows(whole_blocks)


def runs_packed(rows: int, *, decodes: bool, packed: int) -> bool:
    """Return whether a pass runs on packed weights, so that its matmuls are batch-invariant.

    Args:
        rows: number of rows.
        decodes: the pass is a decode step, captured or not.
        packed: `pass_rows` of the model.
    """
    return _native.cuda_runs_packed(rows, decodes=decodes, packed=packed)


def refusal_of_adapted_rows(rows: int, *, invariant: bool = False) -> str | None:
    """Return why the kernels of `linear.lora` do not add the adapters of so many rows, or None.

    Args:
        rows: number of rows.
        invariant: the rows are asked to be batch-invariant (`device.row_invariant`), as those of captured steps are.
    """
    return _native.cuda_refusal_of_adapted_rows(rows, invariant=invariant)


def refusal_of_adapted_shapes(in_features: int, widths: Sequence[int]) -> str | None:
    """Return why the kernels of `linear.lora` do not add adapters to matrices over one input, or None.

    Args:
        in_features: inputs of the matrices.
        widths: outputs of each matrix.
    """
    return _native.cuda_refusal_of_adapted_shapes(in_features, list(widths))


def refusal_of_experts(activation: str, chosen: int) -> str | None:
    """Return why experts cannot share launches on any card, whatever their matrices, or None.

    Args:
        activation: kind of activation.
        chosen: experts a row.
    """
    return _native.CudaExperts.refusal(activation, chosen)


def attention_stores_keys(tokens: int) -> bool:
    """Return whether the launch of attention of a step of `tokens` tokens a sequence rotates and stores their keys.

    Otherwise a launch before it does.
    """
    return _native.cuda_attention_stores_keys(tokens)


def is_decode_step(tokens: int) -> bool:
    """Return whether sequences of `tokens` tokens each are those of a decode step; longer ones are prompts.

    Attention may give each token of a decode step blocks of its own, read queries, keys and values that are parts of
    wider rows, and pack its results as the input of a matmul.
    """
    return _native.cuda_is_decode_step(tokens)
