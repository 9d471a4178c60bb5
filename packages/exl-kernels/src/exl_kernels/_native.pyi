"""
Native operators, private to `exl_kernels`. The package's modules check their arguments and are the public API.
"""

from collections.abc import Sequence
from os import PathLike
from typing import Final, final

from numpy import int64
from numpy.typing import NDArray
from torch import Tensor

from exl_kernels.formats import Exl2Codes, Exl2Parts, GptqFormat, GptqParts
from exl_kernels.sampling import Plan, Row, TokenTarget

__all__ = [
    "AdapterSizes",
    "AttentionBlock",
    "AttentionCall",
    "AttentionHeads",
    "AttentionOptions",
    "AttentionPlan",
    "AttentionShape",
    "AttentionTables",
    "BlockNorm",
    "Candidates",
    "CudaBuild",
    "CudaCard",
    "CudaExperts",
    "CudaFloat",
    "CudaLayout",
    "CudaLinearGroup",
    "CudaMatrix",
    "CudaPages",
    "CudaProbe",
    "CudaShape",
    "DraftHistory",
    "DraftRates",
    "DraftText",
    "EpilogueAdapters",
    "Exl2Group",
    "ExpertRouter",
    "Experts",
    "ExpertsPlan",
    "Failure",
    "FileHeader",
    "HeadNorms",
    "HeaderEntry",
    "KernelChoice",
    "KernelLimits",
    "Launch",
    "LoraRows",
    "MatmulCall",
    "MatmulInput",
    "MatmulPlan",
    "MatmulTuning",
    "Matrix",
    "MatrixSize",
    "MemoryField",
    "MlpBlock",
    "NewKeys",
    "NextInput",
    "NormPrologue",
    "PaddedGroup",
    "Pages",
    "PeerColumns",
    "PeerExchange",
    "PeerParts",
    "ProbedDevice",
    "RefusedKernel",
    "Rotation",
    "RouterPlan",
    "RouterShape",
    "Sampled",
    "SamplingConstants",
    "SamplingPlan",
    "SamplingWorkspace",
    "StagedRows",
    "StepLimits",
    "StepSizes",
    "StepStage",
    "Tokens",
    "__version__",
    "activate",
    "apply_rope",
    "best_isa",
    "cuda_activation",
    "cuda_add_post_norm",
    "cuda_add_rms_norm",
    "cuda_attention_stores_keys",
    "cuda_build",
    "cuda_cards",
    "cuda_embed",
    "cuda_has_fine_scales",
    "cuda_is_decode_step",
    "cuda_kv_transfer",
    "cuda_launches",
    "cuda_layer_norm",
    "cuda_layer_norm_packed",
    "cuda_lora_add",
    "cuda_lora_expand",
    "cuda_lora_shrink",
    "cuda_pass_rows",
    "cuda_plan_alone",
    "cuda_plan_fused",
    "cuda_plan_router",
    "cuda_probe",
    "cuda_probe_empty",
    "cuda_probe_read",
    "cuda_refusal_of_adapted_rows",
    "cuda_refusal_of_adapted_shapes",
    "cuda_refusal_of_pages",
    "cuda_rms_norm",
    "cuda_rms_norm_parts",
    "cuda_rope",
    "cuda_rope_store",
    "cuda_rows_invariant",
    "cuda_runs_packed",
    "cuda_sample_answers",
    "cuda_sample_fill",
    "cuda_sample_launch",
    "cuda_select_adapters",
    "cuda_select_attention",
    "cuda_select_experts",
    "cuda_select_float",
    "cuda_select_float_experts",
    "cuda_select_norm",
    "cuda_select_rope_store",
    "cuda_select_sampling",
    "cuda_softcap",
    "dequantized_bytes",
    "exl2_check",
    "exl2_dequantize",
    "exl2_groups",
    "exl2_pack",
    "exl2_quantize",
    "exl2_total_bits",
    "gptq_check",
    "gptq_dequantize",
    "gptq_quantize",
    "isa",
    "kernel_limits",
    "kv_load",
    "kv_store",
    "layer_norm",
    "lora_entry_fields",
    "most_padded_rows",
    "num_threads",
    "paged_attention",
    "pin_threads",
    "plan_padded_experts",
    "read_bandwidth",
    "read_into",
    "rms_norm",
    "run_empty",
    "safetensors_header",
    "sample_rows",
    "sampling_distribution",
    "sampling_shaped",
    "set_isa",
    "set_num_threads",
]

__version__: Final[str]
"""
Version of the native module.
"""

@final
class AdapterSizes:
    """
    Sizes of the adapters of a matmul's rows, by which plans decide whether it adds them itself.
    """
    def __new__(cls, /, *, levels: int, most_rank: int) -> AdapterSizes:
        """
        `levels`: most adapters of a row; `most_rank`: the largest rank.
        """
    @property
    def levels(self, /) -> int: ...
    @property
    def most_rank(self, /) -> int: ...

@final
class AttentionBlock:
    """
    Norm, q, k, v, their norms, RoPE, cache, attention, o, post norm, residual.
    """
    def __new__(
        cls,
        /,
        norms: Sequence[BlockNorm | None],
        matrices: Sequence[Matrix],
        *,
        head_dim: int,
        scale: float,
        window: int,
        softcap: float,
        clip: float,
    ) -> AttentionBlock: ...
    def forward(self, /, x: Tensor, tokens: Tokens, pages: Pages) -> None:
        """
        x [T, hidden] float32, in place.
        """

@final
class AttentionCall:
    """
    One launch of attention: its checked operands and its plan. It keeps the operands alive.
    """
    @property
    def partial_floats(self, /) -> int:
        """
        Floats of `partials` that `run` needs.
        """
    def run(self, /, partials: Tensor | None = None, tickets: Tensor | None = None) -> None:
        """
        Launch the kernel. `partials` float32 and `tickets` int32, at least as many as `partial_floats` and `ticket_counters` say, aligned to 16
        bytes; tickets are zero before and after the launch.
        """
    @property
    def ticket_counters(self, /) -> int:
        """
        Counters in `tickets` that `run` needs.
        """

@final
class AttentionHeads:
    """
    The heads of a layer's attention, and the format of their pages.
    """
    def __new__(cls, /, kind: str, head_dim: int, *, q_heads: int, kv_heads: int) -> AttentionHeads:
        """
        `kind`: format of the pages; `q_heads` query heads over `kv_heads` key heads.
        """

@final
class AttentionOptions:
    """
    A layer's options for scores and weights.
    """
    def __new__(cls, /, scale: float, *, window: int, softcap: float) -> AttentionOptions:
        """
        `scale` of q * k; `window`: number of keys that a token sees, 0 for all before it; `softcap`: limit of scores, 0 for none.
        """
    @property
    def scale(self, /) -> float: ...
    @property
    def softcap(self, /) -> float: ...
    @property
    def window(self, /) -> int: ...

@final
class AttentionPlan:
    """
    The kernel of a call of attention.
    """
    @property
    def blocks(self, /) -> int:
        """
        Blocks that share the keys of a tile of query rows.
        """
    @property
    def kernel(self, /) -> str:
        """
        Name of its function.
        """
    @property
    def refused(self, /) -> list[RefusedKernel]: ...

@final
class AttentionShape:
    """
    The properties of a call of attention that decide its kernel.
    """
    def __new__(
        cls, /, heads: AttentionHeads, *, batch: int, tokens: int, keys: int, window: int = 0, softcap: float = 0.0
    ) -> AttentionShape:
        """
        `tokens`: query tokens of all `batch` sequences; `keys`: no token sees a key at or beyond this index; `window` and `softcap` as of
        `AttentionOptions`. The pages have 256 tokens, and the keys of the call are stored before.
        """
    def with_own_keys(self, /, rotated: int, *, interleaved: bool = False) -> AttentionShape:
        """
        The call whose launch stores its own keys, with `rotated` elements of each head rotated.
        """
    def with_pages(self, /, page_size: int, columns: int) -> AttentionShape:
        """
        The call with a block table of `columns` pages of `page_size` tokens.
        """
    def with_rows(self, /, tokens: int, *, windows: bool = False) -> AttentionShape:
        """
        The call with at most `tokens` tokens a row of the block table; `windows` as of `CudaPages.attention`.
        """

@final
class AttentionTables:
    """
    The keys that the tokens of a call see.
    """
    def __new__(
        cls,
        /,
        block_table: Tensor,
        *,
        rows: Tensor,
        positions: Tensor,
        key_mask: Tensor | None = None,
        max_keys: int | None = None,
    ) -> AttentionTables:
        """
        `block_table` int32 [B, max_pages], `rows` and `positions` int32 [T], `key_mask` float32 [B, width]. Every position is below
        `max_keys`, which is the capacity of the block table by default.
        """
    @property
    def block_table(self, /) -> Tensor: ...
    @property
    def key_mask(self, /) -> Tensor | None: ...
    @property
    def max_keys(self, /) -> int | None: ...
    @property
    def positions(self, /) -> Tensor: ...
    @property
    def rows(self, /) -> Tensor: ...

@final
class BlockNorm:
    """
    A norm inside a block: RMSNorm without a bias, or LayerNorm.
    """
    def __new__(cls, /, weight: Tensor, bias: Tensor | None, eps: float, layer: bool) -> BlockNorm: ...

@final
class Candidates:
    """
    The final candidates of a row.
    """
    @property
    def ids(self, /) -> list[int]:
        """
        In ascending order.
        """
    @property
    def weights(self, /) -> list[int]:
        """
        Their probabilities times a common factor.
        """

@final
class CudaBuild:
    """
    The kernels of this build.
    """
    @property
    def archs(self, /) -> list[str]:
        """
        Architectures that the kernels were built for.
        """
    @property
    def note(self, /) -> str:
        """
        The reason for missing kernels; "" when there are all.
        """
    @property
    def origin(self, /) -> str:
        """
        The reason for these architectures.
        """
    @property
    def toolkit(self, /) -> str:
        """
        Version of the toolkit; "" when there was none.
        """

@final
class CudaCard:
    """
    The properties of a GPU that decide its kernels: a GPU of this machine, or one known by name.
    """
    @property
    def code(self, /) -> int:
        """
        Architecture of the code that the card runs, 80 for sm_80.
        """
    @staticmethod
    def device(index: int) -> CudaCard:
        """
        The GPU `index` of this machine with the code that this module holds for it.
        """
    @property
    def features(self, /) -> list[str]:
        """
        The features that the code has, of "bulk_copy", "clusters", "tested_clusters", "wgmma", "async_copy" and "mma_pipeline".
        """
    @staticmethod
    def named(name: str) -> CudaCard | None:
        """
        A card of `cuda_cards` with the code of a build for it, or None.
        """

@final
class CudaExperts:
    """
    The gated MLPs of a layer, all quantized or all of float matrices, some of which each row uses.
    """

    most_chosen: Final[int]
    """
    Most experts of a row.
    """
    most_pairs: Final[int]
    """
    Most rows of a call times the experts of each.
    """
    def __new__(
        cls, /, matrices: Sequence[Sequence[CudaMatrix]] | Sequence[Sequence[CudaFloat]], activation: str
    ) -> CudaExperts:
        """
        (gate, up, down) of each expert, all on one GPU. Raises ValueError with the reason if shared launches cannot take them.
        """
    def combine(
        self,
        /,
        parts: Tensor,
        *,
        places: Tensor,
        weights: Tensor,
        out: Tensor,
        launch: Launch,
        shared: Tensor | None = None,
        shared_weights: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> None:
        """
        Compute out [rows, hidden] = residual + sum of weights * parts, + shared * shared_weights, in the order of choices; `parts` float16
        [_, hidden]; `places` int32 [rows, chosen]: the row of each choice's result there; the rest as for `run`.
        """
    @property
    def count(self, /) -> int:
        """
        Number of experts.
        """
    def dequantize(self, /, table: Tensor, *, numbers: Tensor, part: int, out: Tensor, launch: Launch) -> None:
        """
        Write a matrix of each expert of `numbers` int64 [n] into `out` float16 [n, in, out]; part 0 is gate, 1 up, 2 down. `table` as for
        `run`. For quantized experts.
        """
    @staticmethod
    def most_scratch_bytes(*, rows: int, chosen: int, experts: int, hidden: int, width: int) -> int:
        """
        Most bytes of scratch memory of the shared launches of a call on any card; `width`: features between gate, up and down.
        """
    def pad(
        self,
        /,
        padded: Tensor,
        order: Tensor,
        begins: Tensor,
        *,
        chosen: int,
        rows: Tensor,
        places: Tensor,
        launch: Launch,
    ) -> None:
        """
        Write the row of each padded row into `rows` int32, 0 for padding, and the padded row of each pair of a row and an expert into
        `places` int32 [pairs]. `padded` int32 [n, 3]: an expert, its first padded row and their number. `order` int64 [pairs]: pairs sorted
        by expert; `begins` int64 [experts + 1]: where each expert's begin there.
        """
    def plan(self, /, rows: int, chosen: int, invariant: bool) -> ExpertsPlan:
        """
        The plan of a call of `rows` rows with `chosen` experts each, whose results do not depend on one another if `invariant`.
        """
    @staticmethod
    def refusal(activation: str, chosen: int) -> str | None:
        """
        Why no card runs `chosen` experts a row with this activation in shared launches, whatever their matrices; None where one may.
        """
    def run(
        self,
        /,
        table: Tensor,
        h: Tensor,
        *,
        ids: Tensor,
        weights: Tensor,
        scratch: Tensor,
        out: Tensor,
        launch: Launch,
        shared: Tensor | None = None,
        shared_weights: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> None:
        """
        Compute out [rows, hidden] = residual + sum of weights * the experts of h, + shared * shared_weights. All are float16, except
        `weights` and `shared_weights`, which are float32. `ids` int64 and `weights` have shape [rows, chosen]; `table` holds the bytes of
        `table`; `scratch` is uint8, the bytes of a plan of at least as many rows.
        """
    def table(self, /) -> bytes:
        """
        The table of all experts that the launches read, to be copied to the GPU.
        """
    @property
    def width(self, /) -> int:
        """
        Features between gate, up and down.
        """

@final
class CudaFloat:
    """
    A float matrix on a GPU: y = (x @ weight^T * scale + bias) * prescale.
    """
    def __new__(cls, /, weight: Tensor, bias: Tensor | None, *, scale: float, prescale: float) -> CudaFloat:
        """
        weight: float16 [out, in]; bias: float32 [out].
        """
    def matmul(
        self,
        /,
        x: Tensor,
        out: Tensor,
        launch: Launch,
        *,
        multipliers: Tensor | None = None,
        scratch: Tensor | None = None,
    ) -> None:
        """
        Multiply x [m, in] float16 into out [m, out] float16, bfloat16 or float32. A row's result does not depend on the other rows.

        multipliers: float32 [m], by which sums are multiplied before the bias is added. scratch: uint8 of `scratch_bytes`, if there are any.
        """
    def scratch_bytes(self, /, x: Tensor) -> int:
        """
        Bytes of scratch memory of a call with x.
        """

@final
class CudaLayout:
    """
    A matrix repacked on the CPU: five tensors to be moved to the GPU. The image may be packed in parts instead, by `pack_exl2` and
    `pack_gptq`.
    """
    def code(self, /, row: int, feature: int) -> int:
        """
        The code at a row of the layout and a feature, read from the image.
        """
    @property
    def features(self, /) -> Tensor:
        """
        int32
        """
    @staticmethod
    def from_exl2(
        name: str, parts: Exl2Parts, threads: int, pack: bool = True, *, fine_scales: bool = False
    ) -> CudaLayout:
        """
        `pack` = False leaves the image to `pack_exl2`.
        """
    @staticmethod
    def from_gptq(name: str, parts: GptqParts, format: GptqFormat, threads: int, pack: bool = True) -> CudaLayout: ...
    @property
    def image(self, /) -> Tensor | None:
        """
        uint8; None if it is packed in parts
        """
    @property
    def in_features(self, /) -> int: ...
    @property
    def maxima(self, /) -> Tensor:
        """
        float16
        """
    @property
    def out_features(self, /) -> int: ...
    def pack_exl2(self, /, name: str, parts: Exl2Parts, *, first: int, out: Tensor, threads: int) -> None:
        """
        Pack the tiles from `first` on into `out`, uint8 [their number * tile_bytes] on the CPU. `parts`: as given to `from_exl2`.
        """
    def pack_gptq(
        self, /, name: str, parts: GptqParts, format: GptqFormat, *, first: int, out: Tensor, threads: int
    ) -> None:
        """
        As `pack_exl2`, with the parts and the format given to `from_gptq`.
        """
    @property
    def row_of_feature(self, /) -> Tensor:
        """
        int16 that holds unsigned numbers
        """
    @property
    def rows(self, /) -> int:
        """
        Rows of K in the layout, including padding.
        """
    @property
    def tile_bytes(self, /) -> int:
        """
        Bytes of a tile of the image.
        """
    @property
    def tiles(self, /) -> int:
        """
        Number of tiles of the image.
        """
    @property
    def units(self, /) -> Tensor:
        """
        int32, two a unit
        """

@final
class CudaLinearGroup:
    """
    One to three quantized matrices on a GPU over one input, optionally with an activation: of a gate, or of one matrix's results.
    """
    def __new__(cls, /, matrices: Sequence[CudaMatrix], activation: str | None = None) -> CudaLinearGroup: ...
    def plan(self, /, call: MatmulCall) -> MatmulPlan:
        """
        The plan of a call of `run`.
        """
    def plan_alone(self, /, rows: int, *, bfloat16: bool = False, invariant: bool = False) -> MatmulPlan:
        """
        The plan of a call of the first matrix only, as `QuantMatrix.matmul` launches it; x is aligned to 16 bytes.
        """
    def plan_with(self, /, kernel: str, call: MatmulCall, tuning: MatmulTuning | None = None) -> MatmulPlan:
        """
        The plan of a call by the kernel of this name, for benchmarks and tests that compare kernels.
        """
    def run(
        self,
        /,
        plan: MatmulPlan,
        x: Tensor | None,
        y: Tensor | None,
        launch: Launch,
        *,
        scratch: Tensor | None = None,
        exchange: Tensor | None = None,
        residual: Tensor | None = None,
        norm: NormPrologue | None = None,
        next: NextInput | None = None,
        chained: bool = False,
        input_activation: str | None = None,
        adapters: EpilogueAdapters | None = None,
    ) -> None:
        """
        Compute y [m, N] = norm(x) @ W, gated, with `residual` added, by `plan`; y is [2, m, N] if the plan has a separate gate.

        `scratch` and `exchange`, uint8 and aligned to 128 bytes, have the plan's sizes. Without x, its rows are packed in `scratch`;
        `chained`: the previous matmul wrote them there as its `next`. `norm` is then weight plus offset, in the order of the layout, padded
        to whole units of 256. Without y, results go only to `next`. `input_activation`: an activation of x, if the plan activates inputs.
        `adapters`: of the rows, if the plan is for them.
        """

@final
class CudaMatrix:
    """
    A matrix whose tensors are on a GPU.
    """
    def __new__(
        cls,
        /,
        layout: CudaLayout,
        *,
        image: Tensor,
        units: Tensor,
        maxima: Tensor,
        features: Tensor,
        row_of_feature: Tensor,
        bias: Tensor | None,
        prescale: float,
    ) -> CudaMatrix:
        """
        The tensors of `layout`, moved to one GPU, and a float32 bias there or None.
        """
    def dequantize(self, /, out: Tensor, stream: int) -> None:
        """
        Write W [in_features, out_features] float16 into `out`.
        """

@final
class CudaPages:
    """
    One layer's pages on a GPU: the addresses, and the tensors that own them.
    """
    def __new__(
        cls,
        /,
        kind: str,
        head_dim: int,
        *,
        key: Tensor,
        value: Tensor,
        key_scales: Tensor | None,
        value_scales: Tensor | None,
    ) -> CudaPages:
        """
        key, value: [P, page, H, row]; scales [P, page, H, row] if the kind has them.
        """
    def attention(
        self,
        /,
        q: Tensor,
        *,
        q_stride: int,
        tables: AttentionTables,
        options: AttentionOptions,
        out: Tensor,
        launch: Launch,
        new_keys: NewKeys | None = None,
        into: MatmulInput | None = None,
        tokens: int | None = None,
        windows: bool = False,
    ) -> AttentionCall:
        """
        Check and plan a launch of attention over these pages; see `exl_kernels.attention.cuda`. q: flat, `q_stride` elements between
        tokens. With `into`, results go there, and only the shape of `out` is used. `tokens`: the
        most tokens of a row of the block table, whose keys are stored before; None: not known. `windows`: rows of few tokens are windows
        of prompts, and neighbours may be of one sequence.
        """

@final
class CudaProbe:
    """
    The driver and the GPUs of this machine.
    """
    @property
    def devices(self, /) -> list[ProbedDevice]: ...
    @property
    def driver_version(self, /) -> tuple[int, int] | None:
        """
        Highest CUDA version that the driver supports, or None without a driver.
        """
    @property
    def reason(self, /) -> str | None:
        """
        Why CUDA cannot be used, or None.
        """

@final
class CudaShape:
    """
    The shape of a quantized matrix in the GPU's layout, without its weights.
    """
    @staticmethod
    def from_exl2(name: str, parts: Exl2Parts, *, fine_scales: bool = False) -> CudaShape: ...
    @staticmethod
    def from_gptq(name: str, parts: GptqParts, format: GptqFormat) -> CudaShape: ...
    @property
    def in_features(self, /) -> int:
        """
        Rows of the matrix.
        """
    @property
    def out_features(self, /) -> int:
        """
        Columns of the matrix.
        """

@final
class DraftHistory:
    """
    Texts in bounded memory, which the guesses of many requests may depend on.
    """
    def __new__(cls, /, order: int, capacity: int, limit: int) -> DraftHistory:
        """
        `order`: longest n-gram; `capacity`: most tokens; ids from `limit` on are never proposed.
        """
    def append(self, /, ids: NDArray[int64]) -> None:
        """
        Append these ids to the present text.
        """
    def cut(self, /) -> None:
        """
        End the present text.
        """
    @property
    def memory(self, /) -> int:
        """
        Bytes in use.
        """
    @property
    def tokens(self, /) -> int:
        """
        Tokens that can be found.
        """

@final
class DraftRates:
    """
    The share of guesses that held, by evidence; see exl_kernels.drafting.
    """
    def __new__(cls, /, memory: float) -> DraftRates:
        """
        After `memory` guesses of one kind, earlier ones count half.
        """

@final
class DraftText:
    """
    The text of one request, and guesses at its next tokens.
    """
    def __new__(cls, /, order: int, capacity: int, limit: int) -> DraftText:
        """
        `order`: longest n-gram; `capacity`: most tokens kept; ids from `limit` on are never proposed.
        """
    def follow(self, /, ids: NDArray[int64], budget: int, rates: DraftRates) -> bool:
        """
        Read at most `budget` further ids of the text. Returns whether all of it has been read.
        """
    def guess(
        self,
        /,
        most: int,
        shared: DraftHistory | None,
        rates: DraftRates,
        *,
        shortest: int,
        threshold: int,
        fallback: bool,
    ) -> tuple[list[int], list[float]]:
        """
        Return up to `most` guesses at the next tokens, and for each the probability that it and those before it hold.
        `shortest`: fewest tokens of a context; `threshold`: times that the first guess must have followed it; `fallback`: other texts count
        only where this one has no match.
        """
    @property
    def memory(self, /) -> int:
        """
        Bytes in use.
        """
    @property
    def read(self, /) -> int:
        """
        Tokens read.
        """

@final
class EpilogueAdapters:
    """
    The adapters of the rows of a matmul that adds them itself.
    """
    def __new__(
        cls, /, table: Tensor, *, slots: Tensor | None, sizes: AdapterSizes, looks: int | None = None
    ) -> EpilogueAdapters:
        """
        `table` and `slots` as for `LoraRows`; `sizes`: of the entries. `looks`: how often a block polls for the results of others before it
        computes them itself, for tests; None: some milliseconds long.
        """

@final
class Exl2Group:
    """
    Rows of an EXL2 matrix whose codes have one width.
    """
    @property
    def bits(self, /) -> int: ...
    @property
    def rows(self, /) -> int: ...

@final
class ExpertRouter:
    """
    The choice of experts and weights from the logits of a router: made once with the layer.
    """

    most_hidden: Final[int]
    """
    Most features of a row.
    """
    def __new__(
        cls,
        /,
        weight: Tensor,
        bias: Tensor | None,
        *,
        prescale: float,
        chosen: int,
        normalize: bool,
        jitter: float | None,
    ) -> ExpertRouter:
        """
        Logits are (h @ weight^T + bias) * prescale; `weight` [experts, hidden] float16 or bfloat16, `bias` float32. If `jitter` is not
        negative, two experts are chosen by the sparse mixer.
        """
    def plan(self, /, rows: int, norm: NormPrologue | None = None) -> RouterPlan:
        """
        The plan of `rows` rows, whose launch applies `norm` first where it can.
        """
    @staticmethod
    def refusal(*, hidden: int, experts: int, chosen: int, quantized: bool) -> str | None:
        """
        Why no kernel chooses `chosen` of `experts` experts by a router of `hidden` features, whatever the card and the rows; None where one does.
        """
    def route(
        self,
        /,
        plan: RouterPlan,
        h: Tensor,
        *,
        logits: Tensor,
        arrivals: Tensor,
        ids: Tensor,
        weights: Tensor,
        launch: Launch,
        normed: Tensor | None = None,
    ) -> None:
        """
        Write the experts of each row of h [rows, hidden] float16: `ids` int64 and `weights` float32 [rows, chosen]. `logits` float32
        [scratch rows, experts] is scratch; `arrivals` int32 [scratch rows] is zero before and after. A plan that norms writes the normed h into
        `normed`, like h. `plan` is one of this router.
        """

@final
class Experts:
    """
    The gated MLPs of a layer, among which rows choose.
    """
    def __new__(
        cls, /, experts: Sequence[Sequence[Matrix]], shared: Sequence[Matrix] | None, activation: str
    ) -> Experts:
        """
        `experts` and `shared`: gate, up and down.
        """
    @property
    def hidden(self, /) -> int: ...
    def run(
        self,
        /,
        h: Tensor,
        *,
        ids: Tensor,
        weights: Tensor,
        out: Tensor,
        add: bool = False,
        shared: Tensor | None = None,
        shared_weights: Tensor | None = None,
    ) -> None:
        """
        out [rows, hidden] = (out, if `add`) + sum of weights * the experts of h (+ the shared expert's result * shared_weights). All
        float32, `ids` int64; `ids` and `weights` [rows, chosen]. The shared expert's result is `shared` where given, else that of its own
        matrices. `out` does not overlap the other operands.
        """

@final
class ExpertsPlan:
    """
    How the experts of a layer run.
    """
    @property
    def dequantizes(self, /) -> bool:
        """
        The call dequantizes some experts at a time.
        """
    @property
    def kernel(self, /) -> str:
        """
        As reports name it.
        """
    @property
    def launches(self, /) -> list[str]:
        """
        Names of the functions of shared launches, in their order; none where experts are dequantized, sorted or run one after the other.
        """
    @property
    def refused(self, /) -> str | None:
        """
        Why the experts cannot share launches, or None.
        """
    @property
    def rows(self, /) -> int:
        """
        Rows of a call of shared launches: more rows are several calls. All rows where experts are dequantized, sorted or refused.
        """
    @property
    def scratch_bytes(self, /) -> int:
        """
        Bytes of scratch memory of shared launches; 0 where the experts cannot share them.
        """
    @property
    def shares(self, /) -> bool:
        """
        One call for all experts is faster than one expert after the other.
        """
    @property
    def sorts(self, /) -> bool:
        """
        The call sorts its rows by expert, for a matmul of each. Calls that neither sort nor dequantize share launches.
        """

@final
class Failure:
    """
    No token: everything is excluded, or (`not_finite`) an allowed logit is NaN or +inf.

    With a pair of prompts (CFG) `not_finite` covers every logit, allowed or not, since the mix sums over all of them.
    """

    __match_args__: Final[tuple[str]]
    def __eq__(self, value: object, /) -> bool: ...
    def __getnewargs__(self, /) -> tuple[bool]:
        """
        Copies and pickles.
        """
    def __ne__(self, value: object, /) -> bool: ...
    def __new__(cls, /, not_finite: bool) -> Failure: ...
    def __repr__(self, /) -> str: ...
    @property
    def not_finite(self, /) -> bool: ...

@final
class FileHeader:
    """
    The header of a safetensors file.
    """
    @property
    def entries(self, /) -> list[HeaderEntry]:
        """
        In the order of the data.
        """
    @property
    def metadata(self, /) -> dict[str, str]: ...

@final
class HeadNorms:
    """
    RMS norms of each head of the queries and of the keys, before the rotation.
    """
    def __new__(cls, /, q: Tensor, k: Tensor, eps: float) -> HeadNorms:
        """
        Weights `q` and `k` float32 [head_dim].
        """

@final
class HeaderEntry:
    """
    A tensor of a safetensors file.
    """
    @property
    def dtype(self, /) -> str: ...
    @property
    def name(self, /) -> str: ...
    @property
    def nbytes(self, /) -> int: ...
    @property
    def offset(self, /) -> int:
        """
        First byte, counted from the start of the file.
        """
    @property
    def shape(self, /) -> list[int]: ...

@final
class KernelChoice:
    """
    The kernels of a call.
    """
    @property
    def kernels(self, /) -> list[str]:
        """
        Names of their functions, in the order of the launches; none where the CPU computes the call.
        """
    @property
    def refused(self, /) -> list[RefusedKernel]:
        """
        Kernels that would be faster, or would need no further launches.
        """

@final
class KernelLimits:
    """
    Limits of the kernels: constants of the crates, independent of the machine and of the architectures of the build.
    """
    @property
    def activations(self, /) -> tuple[str, str, str]:
        """
        Names of the activations that kernels of a GPU apply.
        """
    @staticmethod
    def attention_counters(sms: int) -> int:
        """
        Return the int32 counters that launches of attention need on a GPU of `sms` SMs if blocks share the keys of tiles.
        """
    @property
    def block_rows(self, /) -> int:
        """
        Most rows of a launch on packed weights, on cards with wgmma, and of a block of a captured step's matmuls.
        """
    @property
    def column_marks(self, /) -> int:
        """
        Marks of each GPU that stores columns into the results of others.
        """
    @property
    def cpu_chunk_rows(self, /) -> int:
        """
        Rows that a fused half of a layer computes at a time on the CPU.
        """
    @property
    def decode_tokens(self, /) -> int:
        """
        Most tokens of a row in a decode step: the last token and its drafts.
        """
    @property
    def exchange_gpus(self, /) -> int:
        """
        Most GPUs that exchange results.
        """
    @property
    def exchanges(self, /) -> int:
        """
        Most exchanges of a step.
        """
    @property
    def few_rows(self, /) -> int:
        """
        Most rows of `gemm_few` and `gemm_direct`, and columns of their packed input.
        """
    @property
    def filled_rows(self, /) -> int:
        """
        Most rows of windows that are filled up to one length, so that one pass takes them.
        """
    @property
    def gemv_rows(self, /) -> int:
        """
        Most rows of a matmul for which `gemv_ring` is chosen where `gemm_few` fits, too.
        """
    @property
    def grid_rows(self, /) -> int:
        """
        Most blocks of a launch along its second and its third dimension.
        """
    @property
    def head_dim_step(self, /) -> int: ...
    @property
    def middle_rows(self, /) -> int:
        """
        Rows below `packed_rows` for which captured steps have a bucket of their own.
        """
    @property
    def most_head_dim(self, /) -> int:
        """
        Largest head dimension of attention on a GPU; all are multiples of `head_dim_step`.
        """
    @property
    def most_logits(self, /) -> int:
        """
        Widest row of logits: 2^19 weights of 2^44 fit an unsigned 64-bit sum.
        """
    @property
    def most_packed_width(self, /) -> int:
        """
        Widest row that a launch of an elementwise operator packs as the input of a matmul.
        """
    @property
    def most_reported(self, /) -> int:
        """
        Most candidates that a GPU reports for a row.
        """
    @property
    def packed_rows(self, /) -> int:
        """
        Most rows of a call that multiplies packed weights. Up to there a row's result does not depend on the number of rows.
        """
    @property
    def sampling_blocks(self, /) -> int:
        """
        Entries of a row of the sampler's maxima and sums.
        """
    @property
    def sampling_segment(self, /) -> int:
        """
        Logits that a block of the sampler shapes; rows in its memory are multiples of it.
        """
    @property
    def step_rows(self, /) -> int:
        """
        Most tokens of a decode step, captured or not, whose results do not depend on other rows.
        """
    @property
    def unit_rows(self, /) -> int:
        """
        Rows of K that layouts of weights and packed inputs are padded to.
        """

@final
class Launch:
    """
    Queueing of kernels: the stream, as the driver's handle, and whether a kernel may begin while its predecessor drains (programmatic
    dependent launch).
    """
    def __new__(cls, /, stream: int, programmatic: bool) -> Launch: ...

@final
class LoraRows:
    """
    The adapters of the rows of a pass, for the matrices of one joined matmul, as launches before and after it take them.
    """
    def __new__(cls, /, table: Tensor, *, slots: Tensor | None, middle: Tensor) -> LoraRows:
        """
        `table` int64 [levels, matrices, sets, 5], entries as for `cuda_lora_add`; `slots` int32 [T], the set of each row, negative for none;
        None: set 0 for all rows. Both must be written before the launches that may overlap with those of the adapters. `middle` float32
        [T, levels * matrices * largest rank]: result of `cuda_lora_shrink`, operand of `cuda_lora_expand`.
        """

@final
class MatmulCall:
    """
    The properties of a call of a matmul that decide its kernel, besides its matrices.
    """
    def __new__(
        cls,
        /,
        rows: int,
        *,
        bfloat16: bool = False,
        norm: str | None = None,
        residual: bool = False,
        aligned_input: bool = True,
        aligned_output: bool = True,
        invariant: bool = False,
        adapters: AdapterSizes | None = None,
    ) -> MatmulCall:
        """
        A call of `rows` rows of float16, or of `bfloat16`. `norm`: "rms" or "layer" where the input is normed; `residual`: one is added.
        `aligned_input`: x is aligned to 16 bytes; `aligned_output`: y is aligned to 8 bytes and the residual to 4; `invariant`: a row's
        result must not depend on the number of rows; `adapters`: the
        launch adds adapters of these sizes.
        """

@final
class MatmulInput:
    """
    The packed input of a matmul as the destination of results.
    """
    def __new__(cls, /, matrix: CudaMatrix, columns: int, scratch: Tensor) -> MatmulInput:
        """
        `scratch` uint8 of the matmul by `matrix`, packed for `columns` rows.
        """

@final
class MatmulPlan:
    """
    The kernel of a call of `CudaLinearGroup.run` and the memory that it needs.
    """
    @property
    def activates_input(self, /) -> bool:
        """
        Whether `run` can apply an activation to x.
        """
    def chains_to(self, /, next: MatmulPlan) -> bool:
        """
        Whether a call by this plan can write its results packed as the input of a call by `next`, of the same GPU and as many features.
        """
    @property
    def columns_for_adapters(self, /) -> int | None:
        """
        Columns in which the launch of adapters before the matmul packs its rows into the scratch memory; None where it leaves them as they are.
        """
    @property
    def dequantizes(self, /) -> bool:
        """
        Whether the caller dequantizes the matrix and multiplies by cuBLAS; `run` has no launch for that.
        """
    @property
    def exchange_bytes(self, /) -> int:
        """
        Bytes of the inter-block workspace, all ones before and after every launch; 0 for none.
        """
    @property
    def input_columns(self, /) -> int | None:
        """
        Columns of the kernel's layout in which a launch other than a matmul can pack rows into the scratch memory, or None.
        """
    @property
    def joined(self, /) -> bool:
        """
        Whether `run` takes all matrices with norm, gate and residual. Otherwise each matrix has a separate plan.
        """
    @property
    def kernel(self, /) -> str:
        """
        gemv_ring, gemv_ring_adapted, gemm_few, gemm_direct, gemm_batch, gemm_tile or gemm_large.
        """
    @property
    def pays_apart(self, /) -> bool:
        """
        Whether one launch of all matrices is faster than a launch each, where norm and residual are launches of their own.
        """
    @property
    def refused(self, /) -> list[RefusedKernel]:
        """
        Faster kernels and why each does not take the call.
        """
    @property
    def rows(self, /) -> int:
        """
        Rows of a launch. A call of more rows is several launches, each by the plan of its rows.
        """
    @property
    def scratch_bytes(self, /) -> int:
        """
        Bytes of scratch memory, aligned to 128.
        """
    @property
    def separate_activation(self, /) -> bool:
        """
        Whether y has the results of one matrix before their activation, which is left to the caller.
        """
    @property
    def separate_gate(self, /) -> bool:
        """
        Whether y is [2, m, N], the results of gate and up, with the activation left to the caller.
        """
    @property
    def takes_packed(self, /) -> bool:
        """
        Whether the previous matmul can write its results packed into the scratch memory, in the layout of `gemm_few`.
        """
    @property
    def whole_block(self, /) -> bool:
        """
        Whether one launch on packed weights takes a whole block of rows.
        """

@final
class MatmulTuning:
    """
    Launch parameters of a kernel that override its plan, for benchmarks and tests.
    """
    @staticmethod
    def batch(*, slots: int = 0, activations: int = 0, cut: int = 0, groups: int = 0, looks: int = 0) -> MatmulTuning:
        """
        Of gemm_batch: slots of the ring, activations streamed (1) or kept (2), parts that K is cut into, warpgroups, and polls for
        the blocks that share K; 0 keeps the planned number.
        """
    @staticmethod
    def few(*, cut: int = 0, slots: int = 0, window: int = 0, passes: int = 0) -> MatmulTuning:
        """
        Of gemm_few: parts that K is cut into, slots of the ring, of which `window` are under way, and passes over the tiles; 0 keeps the
        planned number.
        """
    @staticmethod
    def ring(*, slots: int, window: int) -> MatmulTuning:
        """
        Of gemv_ring: `slots` of the ring, of which `window` are under way.
        """

@final
class Matrix:
    """
    A matrix in the kernels' layout.
    """
    @property
    def bits_per_weight(self, /) -> float: ...
    def columns(self, /, columns: Sequence[int]) -> Matrix:
        """
        The given columns, in this order. Raises ValueError for columns that the matrix does not have.
        """
    def dequantize(self, /, out: Tensor) -> None:
        """
        Write W [K, N] float16 into `out`.
        """
    @staticmethod
    def from_exl2(name: str, parts: Exl2Parts, *, bias: Tensor | None, prescale: float, exact: bool) -> Matrix: ...
    @staticmethod
    def from_float(weight: Tensor, bias: Tensor | None, prescale: float) -> Matrix:
        """
        `weight` [out, in].
        """
    @staticmethod
    def from_gptq(
        name: str, parts: GptqParts, format: GptqFormat, *, bias: Tensor | None, prescale: float, exact: bool
    ) -> Matrix: ...
    @property
    def in_features(self, /) -> int: ...
    def matmul(self, /, x: Tensor, out: Tensor) -> None:
        """
        Multiply `x` [.., K] with the matrix into `out` [.., N]; both float32. Raises ValueError if the lengths do not fit.
        """
    @property
    def nbytes(self, /) -> int: ...
    @property
    def out_features(self, /) -> int: ...
    def quarter_features(self, /, first: int, last: int) -> list[int]:
        """
        The input features of quarters [first, last) of K, in the order in which `quarters` takes them.
        """
    def quarters(self, /, first: int, last: int) -> Matrix:
        """
        The rows of quarters [first, last) of K, without bias and prescale. Raises ValueError if they have no rows.
        """

@final
class MatrixSize:
    """
    The size of a matrix.
    """
    @property
    def in_features(self, /) -> int: ...
    @property
    def out_features(self, /) -> int: ...

@final
class MemoryField:
    """
    A field of memory that Python fills in and kernels read, in bytes.
    """
    @property
    def element(self, /) -> int:
        """
        One element.
        """
    @property
    def name(self, /) -> str: ...
    @property
    def offset(self, /) -> int: ...
    @property
    def size(self, /) -> int:
        """
        All elements.
        """

@final
class MlpBlock:
    """
    Norm, gate if there is one, up, activation, down, post norm, residual.
    """
    def __new__(
        cls, /, norms: Sequence[BlockNorm | None], gate: Matrix | None, matrices: Sequence[Matrix], activation: str
    ) -> MlpBlock: ...
    def forward(self, /, x: Tensor) -> None:
        """
        x [T, hidden] float32, in place.
        """

@final
class NewKeys:
    """
    Keys and values of the call's own tokens, which are not in the pages: rotated and stored in the same launch.
    """
    def __new__(
        cls,
        /,
        *,
        key: Tensor,
        value: Tensor,
        stride: int,
        rotation: Rotation,
        slots: Tensor,
        early: bool,
        norms: HeadNorms | None = None,
    ) -> NewKeys:
        """
        `key` and `value` flat, `stride` elements between tokens; `slots` int64 [T]. `early`: everything except queries, keys and values may
        be read before the preceding launches have ended.
        """

@final
class NextInput:
    """
    The input of the next matmul as the destination of results.
    """
    def __new__(cls, /, group: CudaLinearGroup, scratch: Tensor, normed: bool = False) -> NextInput:
        """
        `scratch` uint8, of the plan of that `group`; `normed`: it norms its input, so that results include their sums of squares.
        """

@final
class NormPrologue:
    """
    Norm of a matmul's input, or RMS norm of a sum of residuals. A layer's is made once and used by every step.
    """
    def __new__(
        cls, /, weight: Tensor, eps: float, offset: float, *, layer: bool = False, bias: Tensor | None = None
    ) -> NormPrologue:
        """
        x / sqrt(mean(x^2) + eps) * (weight + offset); `weight` float32 [width of x], for a matmul aligned to 16 bytes, on the GPU of x.
        `layer`: a LayerNorm, (x - mean(x)) / sqrt(var(x) + eps) * weight + `bias`, which is like the weight.
        """

@final
class PaddedGroup:
    """
    Experts that are multiplied at once.
    """
    @property
    def experts(self, /) -> int:
        """
        Number of experts.
        """
    @property
    def rows(self, /) -> int:
        """
        Padded rows of each.
        """

@final
class Pages:
    """
    One layer's pages: the addresses, and the tensors that own them.
    """
    def __new__(
        cls,
        /,
        kind: str,
        head_dim: int,
        *,
        key: Tensor,
        value: Tensor,
        key_scales: Tensor | None,
        value_scales: Tensor | None,
    ) -> Pages:
        """
        key, value: [P, page, H, row]; scales [P, page, H, row] if the kind has them.
        """

@final
class PeerColumns:
    """
    Results of several GPUs, as one of them sees them, which stores its columns into each.
    """
    def __new__(
        cls,
        /,
        results: Sequence[Tensor],
        *,
        half: int,
        marks: Sequence[Tensor],
        me: int,
        step: Tensor,
        failed: Tensor,
        limit_ns: int,
    ) -> PeerColumns:
        """
        results: int32 of one size on each GPU, `half` words for stores of even numbers and the rest for odd ones; marks: int32
        [gpus, blocks] on each GPU, zeros at first; me, step, failed: as for `PeerExchange`.
        """
    def store(
        self, /, own: Tensor, begins: Sequence[int], number: int, launch: Launch, *, mark: bool, wait: bool
    ) -> None:
        """
        Store own [rows, width], of 32-bit words, into the results of all GPUs: into the part that `number` says. begins: first column of each
        GPU and the number of columns; mark: tell the others; wait: for the others' columns.
        """

@final
class PeerExchange:
    """
    The exchange buffers of GPUs that exchange parts of results, as one of them sees them.
    """
    def __new__(
        cls, /, buffers: Sequence[Tensor], *, half: int, me: int, step: Tensor, failed: Tensor, limit_ns: int
    ) -> PeerExchange:
        """
        buffers: int64 on each GPU, zeros, `half` words for exchanges of even numbers and at least as many for odd ones; me: place of this
        GPU among them; step, failed: int32 [1] on this GPU.
        """
    def gather(
        self,
        /,
        *,
        own: Tensor,
        full: Tensor,
        parts: PeerParts,
        number: int,
        launch: Launch,
        send: bool = True,
        receive: bool = True,
    ) -> None:
        """
        Send own [rows, width] to the receivers and gather all parts in full [rows, columns], both of 32-bit words.
        """

@final
class PeerParts:
    """
    Columns of each GPU's part of results. Made once for the exchanges of equal parts.
    """
    def __new__(cls, /, begins: Sequence[int], *, receivers: int) -> PeerParts:
        """
        begins: first column of each GPU and the number of columns; receivers: bit of each GPU that gets the whole.
        """

@final
class ProbedDevice:
    """
    One visible GPU, in the driver's and torch's numbering. `exl_kernels.device.CudaDevice` documents the fields.
    """
    @property
    def code(self, /) -> str | None: ...
    @property
    def compute_capability(self, /) -> tuple[int, int]:
        """
        (major, minor)
        """
    @property
    def index(self, /) -> int: ...
    @property
    def memory_bytes(self, /) -> int: ...
    @property
    def name(self, /) -> str: ...
    @property
    def own_arch(self, /) -> str: ...
    @property
    def reason(self, /) -> str | None:
        """
        Why the kernels of this build do not run on it, or None.
        """
    @property
    def shared_bytes_per_block(self, /) -> int: ...
    @property
    def sm_count(self, /) -> int: ...
    @property
    def treated_as(self, /) -> str | None: ...

@final
class RefusedKernel:
    """
    A kernel that is faster than the chosen one, and why it does not take the call.
    """
    @property
    def kernel(self, /) -> str: ...
    @property
    def why(self, /) -> str: ...

@final
class Rotation:
    """
    Rotary position embedding of a call's tokens.
    """
    def __new__(cls, /, *, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Rotation:
        """
        `cos` and `sin` float32 [S, R/2], `positions` int64 [T]; `interleaved`: pairs are neighbours, not halves.
        """
    @property
    def cos(self, /) -> Tensor: ...
    @property
    def interleaved(self, /) -> bool: ...
    @property
    def positions(self, /) -> Tensor: ...
    @property
    def sin(self, /) -> Tensor: ...

@final
class RouterPlan:
    """
    How a number of rows is routed.
    """
    @property
    def kernel(self, /) -> str:
        """
        experts_route or experts_route_many; "topk" or "sparse_mixture" where the caller computes logits and chooses.
        """
    @property
    def norms(self, /) -> bool:
        """
        The launch norms the rows first.
        """
    @property
    def refused(self, /) -> str | None:
        """
        Why no kernel routes, or None.
        """
    @property
    def routes(self, /) -> bool:
        """
        One launch chooses the experts.
        """
    @property
    def scratch_rows(self, /) -> int:
        """
        Rows of `logits` and `arrivals` of `ExpertRouter.route`.
        """

@final
class RouterShape:
    """
    A router that need not be loaded.
    """
    def __new__(cls, /, *, hidden: int, experts: int, chosen: int, sparse: bool, quantized: bool) -> RouterShape:
        """
        Of `hidden` features; it chooses `chosen` of `experts` experts. `sparse`: two experts are chosen by the sparse mixer.
        """

@final
class Sampled:
    """
    A token with its final probability.
    """

    __match_args__: Final[tuple[str, str, str, str]]
    def __eq__(self, value: object, /) -> bool: ...
    def __getnewargs__(self, /) -> tuple[int, float, list[int], list[float]]:
        """
        Copies and pickles.
        """
    def __ne__(self, value: object, /) -> bool: ...
    def __new__(
        cls,
        /,
        token: int,
        probability: float,
        top_tokens: Sequence[int] = ...,
        top_probabilities: Sequence[float] = ...,
    ) -> Sampled: ...
    def __repr__(self, /) -> str: ...
    @property
    def probability(self, /) -> float: ...
    @property
    def token(self, /) -> int: ...
    @property
    def top_probabilities(self, /) -> list[float]: ...
    @property
    def top_tokens(self, /) -> list[int]:
        """
        The first candidates by falling probability, at most `top_n` of the row.
        """

@final
class SamplingConstants:
    """
    Constants of a plan on a GPU, made once for each GPU that samples with it.
    """
    def __new__(cls, /, *, bias: Tensor | None = None, xtc_ignored: Tensor | None = None) -> SamplingConstants:
        """
        `bias` float32, `xtc_ignored` int32: packed ids that XTC keeps.
        """

@final
class SamplingPlan:
    """
    A request's settings, an `exl_kernels.sampling.Plan`, as the CPU's and the GPU's rows use them.
    """
    def __new__(
        cls, /, plan: Plan, bias: Tensor | None = None, *, bias_ids: Tensor | None = None, bias_rest: float = 0.0
    ) -> SamplingPlan:
        """
        The settings of `plan`. `bias` (float32) is that of the first ids, or of `bias_ids` (int32, each once), and `bias_rest` then that of
        all others.
        """
    @property
    def tail_free(self, /) -> bool:
        """
        Whether rows take a tail-free cut, for which a GPU needs more memory.
        """

@final
class SamplingWorkspace:
    """
    Memory that calls of one GPU share: staged rows, and the workspace of the kernels.
    """
    def __new__(
        cls,
        /,
        *,
        staging: Tensor,
        device_copy: Tensor,
        shaped: Tensor,
        maxima: Tensor,
        sums: Tensor,
        wide: Tensor,
        tails: Tensor,
    ) -> SamplingWorkspace:
        """
        `staging` uint8 in pinned memory, `device_copy` of the same size on the GPU. Also on the GPU: `shaped` float32 [N, pitch], `maxima`
        int32 and `sums` int64 [N, 2048], for calls of up to N rows of up to `pitch` logits, `wide` uint8 of `wide_bytes(N)`, zero at the
        beginning, and `tails` int32 [N, 2, pitch], which may be empty until a row has a tail-free cut.
        """
    @property
    def rows(self, /) -> int:
        """
        Most rows of a call.
        """
    @staticmethod
    def wide_bytes(rows: int) -> int:
        """
        Bytes of `wide` for `rows` rows.
        """

@final
class StagedRows:
    """
    The rows of a call in the staging memory, and the launches that they need besides shaping and choosing.
    """
    @property
    def bytes(self, /) -> int:
        """
        Needed bytes. If they exceed the staging memory, the rows are not in it.
        """

@final
class StepLimits:
    """
    The bounds of a step's inputs.
    """
    def __new__(cls, /, *, vocab: int, positions: int, pages: int) -> StepLimits:
        """
        Ids, positions and page numbers are below `vocab`, `positions` and `pages`.
        """
    @property
    def vocab(self, /) -> int: ...

@final
class StepSizes:
    """
    The sizes of a captured step's inputs.
    """
    def __new__(cls, /, *, batch: int, q_len: int, pages: int, page_size: int) -> StepSizes:
        """
        `batch` rows of `q_len` tokens in `pages` pages of `page_size` tokens.
        """
    @property
    def bytes(self, /) -> int:
        """
        Bytes of the buffer.
        """
    @property
    def fields(self, /) -> list[MemoryField]:
        """
        The fields of the buffer.
        """

@final
class StepStage:
    """
    The pinned buffer of one captured step's inputs.
    """
    def __new__(cls, /, buffer: Tensor, sizes: StepSizes) -> StepStage:
        """
        `buffer`: uint8 on the CPU, of `sizes.bytes` bytes.
        """
    def fill(self, /, ids: Tensor | None, *, past: Tensor, table: Tensor, limits: StepLimits) -> bool:
        """
        Write a step into the buffer. Returns False and leaves the buffer unchanged if an operand is invalid or too large.
        ids int64 [rows, q_len] or None for zeros, past int32 [rows], table int32 [rows, width].
        """
    def send(self, /, to: Tensor, stream: int) -> None:
        """
        Queue the copy of the buffer to `to`, uint8 of the same length on a GPU.
        """

@final
class Tokens:
    """
    Operands of a step's tokens: made once, used by every layer.
    """
    def __new__(cls, /, tables: AttentionTables, rotation: Rotation, slots: Tensor) -> Tokens:
        """
        `slots` int64 [T]: the places of the tokens' keys and values.
        """

def activate(kind: str, x: Tensor, *, up: Tensor | None, out: Tensor) -> None:
    """
    out = activation(x) [* up]; out may be x or up.
    """

def apply_rope(x: Tensor, *, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> None:
    """
    Rotate x [T, H, D] in place; cos, sin [S, R/2].
    """

def best_isa() -> str: ...
def cuda_activation(gate: Tensor, *, up: Tensor | None, out: Tensor, kind: str, launch: Launch) -> None: ...
def cuda_add_post_norm(
    x: Tensor,
    *,
    y: Tensor,
    post: NormPrologue | None,
    norm: NormPrologue | None,
    out: Tensor | None = None,
    into: MatmulInput | None = None,
    launch: Launch,
) -> None:
    """
    x += post(y), out = norm(x): x [rows, width] float16 or float32, y and out float16. A norm comes with out, or with
    `into`, whose scratch then has the normed rows packed as a matmul's input.
    """

def cuda_add_rms_norm(
    x: Tensor, *, y: Tensor, weight: Tensor, out: Tensor, eps: float, weight_offset: float, launch: Launch
) -> None:
    """
    x += y, out = rms_norm(x); all [rows, width] of one type, weight float32 [width].
    """

def cuda_attention_stores_keys(tokens: int) -> bool:
    """
    Whether the launch of attention rotates and stores the keys of a step of `tokens` tokens a sequence; a launch before it does otherwise.
    """

def cuda_build() -> CudaBuild:
    """
    Return what this build holds.
    """

def cuda_cards() -> list[str]:
    """
    Names of the cards whose kernels can be listed on other machines.
    """

def cuda_embed(table: Tensor, *, ids: Tensor, out: Tensor, factor: float, launch: Launch) -> None:
    """
    Write table[ids] * factor into out [T, width] float16 or float32.
    """

def cuda_has_fine_scales(q_groups: Sequence[int], words: int) -> bool:
    """
    Whether the GPU's layout of an EXL2 matrix stores a scale for every 32 rows because some groups are smaller than 128 rows. False for
    groups that the format forbids.

    `q_groups`: as in the file; `words`: rows of `q_weight`.
    """

def cuda_is_decode_step(tokens: int) -> bool:
    """
    Whether attention reads sequences of `tokens` tokens each as those of a decode step: each token may have blocks of its own, and results
    may be packed as the input of a matmul. Longer ones are read as prompts.
    """

def cuda_kv_transfer(pages: CudaPages, *, k: Tensor, v: Tensor, slots: Tensor, load: bool, launch: Launch) -> None:
    """
    Encode k, v [T, H, D] into slots [T], or (`load`) decode the slots into them.
    """

def cuda_launches() -> dict[str, int]:
    """
    Number of launches of each kernel of the GPUs in use by this process. A captured launch counts once. Empty before the first use of a
    GPU.
    """

def cuda_layer_norm(
    x: Tensor, *, weight: Tensor, bias: Tensor | None, out: Tensor, eps: float, launch: Launch
) -> None: ...
def cuda_layer_norm_packed(
    x: Tensor, *, weight: Tensor, bias: Tensor | None, eps: float, into: MatmulInput, launch: Launch
) -> None:
    """
    LayerNorm of x [rows, width] float16 with weight and bias float32 [width], packed in the scratch of `into`.
    """

def cuda_lora_add(x: Tensor, *, y: Tensor, table: Tensor, slots: Tensor | None, middle: Tensor, launch: Launch) -> None:
    """
    Compute y [T, out] += (x [T, in] A) B with the entry that each row's slot names, all float16.

    table: int64 [entries, 5], addresses of A [rank, in] and B [rank, out] float16, scale [rank] and bias [out] (or 0) float32, and the
    rank. slots: int32 [T], negative for none; None: entry 0 for all rows. middle: float32 [T, largest rank], overwritten.
    """

def cuda_lora_expand(
    y: Tensor,
    *,
    out: Tensor,
    widths: Sequence[int],
    rows: LoraRows,
    launch: Launch,
    residual: Tensor | None = None,
    gate: str | None = None,
) -> None:
    """
    Compute out = y + the adapters' results [+ residual], or the gated activation of both halves of y, all float16.

    y: [T, sum of widths], the outputs of all matrices side by side. out: like y, or [T, width] with `gate` ("silu", "gelu" or
    "quickgelu"); may be y or the residual. rows: with the middle that `cuda_lora_shrink` filled.
    """

def cuda_lora_shrink(
    x: Tensor,
    rows: LoraRows,
    launch: Launch,
    *,
    norm: NormPrologue | None = None,
    normed: Tensor | None = None,
    into: MatmulInput | None = None,
) -> None:
    """
    Compute the middle of `rows`: x [T, in] float16 times the A of each row's adapters. norm: an RMS norm of x that comes first. normed: like
    x, gets the normed rows; or into: its scratch gets the rows packed, normed if there is a norm.
    """

def cuda_pass_rows(whole_blocks: bool) -> int:
    """
    Most rows of a pass, other than a decode step, that run on packed weights and are batch-invariant. `whole_blocks`: the plan of a block of
    every matrix is a `whole_block`.
    """

def cuda_plan_alone(card: CudaCard, shape: CudaShape, rows: int, *, invariant: bool = False) -> MatmulPlan:
    """
    The plan of one matrix without an epilogue, as `QuantMatrix.matmul` runs aligned float16.
    """

def cuda_plan_fused(
    card: CudaCard, shapes: Sequence[CudaShape], call: MatmulCall, *, activation: bool = False
) -> MatmulPlan:
    """
    The plan of a matmul of several matrices over one input, as `CudaLinearGroup.plan` makes it for a loaded group with or without an
    activation.
    """

def cuda_plan_router(card: CudaCard, router: RouterShape, rows: int, *, rms: int | None = None) -> RouterPlan:
    """
    The plan of a router for `rows` rows, as `ExpertRouter.plan` makes it for a loaded one. `rms`: features of the RMS norm before it, or None.
    """

def cuda_probe() -> CudaProbe:
    """
    Open the driver and return what it finds.
    """

def cuda_probe_empty(device: int, launch: Launch) -> None:
    """
    Launch an empty kernel, to measure the cost of a launch.
    """

def cuda_probe_read(buffer: Tensor, sink: Tensor, stream: int) -> None:
    """
    Read all of `buffer` (uint8) to measure the read bandwidth; `sink` is a uint8 tensor of at least 4 elements.
    """

def cuda_refusal_of_adapted_rows(rows: int, *, invariant: bool = False) -> str | None:
    """
    Why the kernels do not add the adapters of `rows` rows, which are asked to be batch-invariant or not; None if they do.
    """

def cuda_refusal_of_adapted_shapes(in_features: int, widths: Sequence[int]) -> str | None:
    """
    Why the kernels do not add adapters to matrices over one input, with `widths` outputs each, or None.
    """

def cuda_refusal_of_pages(card: CudaCard, kind: str, head_dim: int) -> str | None:
    """
    Why a card has no kernel of attention for pages of `kind` with heads of `head_dim` elements; None if it has.
    """

def cuda_rms_norm(
    x: Tensor, *, weight: Tensor, out: Tensor, eps: float, weight_offset: float, launch: Launch
) -> None: ...
def cuda_rms_norm_parts(x: Tensor, *, first: Tensor, second: Tensor, eps: float, launch: Launch) -> None:
    """
    RMS norms, in place, of the first elements of each row of x [rows, stride] float16: of as many as `first` has, then of as many as
    `second` has, both float32.
    """

def cuda_rope(x: Tensor, *, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, launch: Launch) -> None: ...
def cuda_rope_store(
    pages: CudaPages, q: Tensor, *, q_stride: int, q_heads: int, new_keys: NewKeys, launch: Launch
) -> None:
    """
    Rotate q [T, `q_heads`, D] and the new keys in place, and encode the new keys and values into their slots. q is flat, with `q_stride`
    elements between tokens. Everything except q, keys and values may be read before the preceding launches have ended; there are no norms.
    """

def cuda_rows_invariant(rows: int, invariant: bool) -> bool:
    """
    Whether a row's result of a quantized matmul does not depend on the number of rows, if the matmul is asked to be `invariant` or not.
    """

def cuda_runs_packed(rows: int, *, decodes: bool, packed: int) -> bool:
    """
    Whether a pass of `rows` rows runs on packed weights, batch-invariant: a decode step, or one of up to `packed` rows, which
    `cuda_pass_rows` returns.
    """

def cuda_sample_answers(workspace: SamplingWorkspace, count: int) -> list[Sampled | Failure | None]:
    """
    The answers of the last launch over `workspace`, whose stream has been synchronized. None: sample this row on the CPU.
    """

def cuda_sample_fill(
    workspace: SamplingWorkspace, requests: Sequence[Row], constants: Sequence[SamplingConstants | None], stream: int
) -> StagedRows:
    """
    Write the rows to the staging memory and queue its copy on `stream`. If the needed bytes exceed the staging memory, nothing useful was
    written and nothing is queued. `constants`: of each request; None: it has none.
    """

def cuda_sample_launch(
    workspace: SamplingWorkspace, rows: StagedRows, launch: Launch, next: TokenTarget | None = None
) -> None:
    """
    Launch for the rows that `cuda_sample_fill` wrote and copied. The answers are in the workspace once the stream has passed. `next`: int64
    [count] on the GPU that receives the tokens, clamped to ids below the given limit, and the source and destination of a copy before
    the launch. Rows that are left to the CPU may write no token.
    """

def cuda_select_adapters(rows: int, ranks: int, *, columns: int | None = None, gated: bool = False) -> KernelChoice:
    """
    The kernels that add the adapters of `rows` rows, of A and of B. `ranks`: of all matrices of a joined matmul together, or 0 for those of one
    matrix whose matmul is not joined; `columns`: of the matmul's input, if the launch can pack that; `gated`: the results have a gate.
    """

def cuda_select_attention(card: CudaCard, shape: AttentionShape) -> AttentionPlan:
    """
    The kernel of a call of attention, as it is launched.
    """

def cuda_select_experts(
    card: CudaCard, experts: Sequence[Sequence[CudaShape]], rows: int, chosen: int, *, invariant: bool = False
) -> ExpertsPlan:
    """
    How the experts (gate, up, down) of a layer run for `rows` rows with `chosen` experts each, batch-invariant or not.
    """

def cuda_select_float(card: CudaCard, rows: int, *, in_features: int, out_features: int) -> str:
    """
    The kernel of `rows` batch-invariant float16 rows of a float matrix, aligned to 16 bytes like them.
    """

def cuda_select_float_experts(
    card: CudaCard, rows: int, chosen: int, *, experts: int, hidden: int, width: int, invariant: bool = False
) -> ExpertsPlan:
    """
    As `cuda_select_experts`, for `experts` experts of float matrices with aligned weights; `width`: features between gate, up and down.
    """

def cuda_select_norm(operation: str, width: int, *, float32: bool = False, columns: int | None = None) -> KernelChoice:
    """
    The kernel of a norm of float16 rows, or of float32 rows, with a float32 weight. `operation`: "rms", "layer", "rms parts", "add rms" (x + y
    and its RMS norm) or "add post" (x + norm(y) and its norm). `columns`: of the input of a matmul that the launch packs.
    """

def cuda_select_rope_store(
    kind: str, head_dim: int, *, tokens: int, rotated: int, interleaved: bool = False
) -> KernelChoice:
    """
    The kernel that rotates and stores `tokens` tokens of float16 in aligned tensors.
    """

def cuda_select_sampling(
    card: CudaCard,
    plan: SamplingPlan,
    rows: int,
    width: int,
    *,
    mirostat: bool = False,
    mixed: bool = False,
    top_n: int = 0,
) -> KernelChoice:
    """
    The kernels that sample `rows` rows of `width` logits with one plan; none where the CPU samples the rows. `mirostat`: the rows have a
    threshold; `mixed`: they have logits of a negative prompt; `top_n`: candidates to report.
    """

def cuda_softcap(x: Tensor, cap: float, launch: Launch) -> None:
    """
    x = cap * tanh(x / cap), in place; x is float32.
    """

def dequantized_bytes() -> int:
    """
    Memory for dequantized matrices of experts, unless a single one is larger.
    """

def exl2_check(name: str, parts: Exl2Parts) -> list[Exl2Group]:
    """
    Check an EXL2 matrix and return its groups.
    """

def exl2_dequantize(name: str, parts: Exl2Parts, out: Tensor) -> None:
    """
    Dequantize W [K, N] into `out`.
    """

def exl2_groups(name: str, plan_text: str, k: int) -> list[Exl2Group]:
    """
    Return the groups that `plan` cuts `k` rows into.
    """

def exl2_pack(name: str, codes: Exl2Codes, perm: Tensor | None, parts: Exl2Parts) -> None:
    """
    Pack `codes` into `parts`.
    """

def exl2_quantize(
    name: str, weight: Tensor, plan_text: str, *, perm: Tensor | None, grid: bool, parts: Exl2Parts
) -> None:
    """
    Quantize `weight` [out, in] into `parts`.
    """

def exl2_total_bits(name: str, plan_text: str, k: int, n: int) -> int:
    """
    Bits of a [k, n] matrix under `plan`.
    """

def gptq_check(name: str, parts: GptqParts, format: GptqFormat) -> MatrixSize:
    """
    Check a GPTQ matrix and return its size.
    """

def gptq_dequantize(name: str, parts: GptqParts, format: GptqFormat, out: Tensor) -> None:
    """
    Dequantize W [K, N] into `out`.
    """

def gptq_quantize(
    name: str, weight: Tensor, format: GptqFormat, *, symmetric: bool, perm: Tensor | None, parts: GptqParts
) -> None:
    """
    Quantize `weight` [out, in] into `parts` (qweight, qzeros, scales, g_idx).
    """

def isa() -> str: ...
def kernel_limits() -> KernelLimits:
    """
    Return the limits of the kernels.
    """

def kv_load(pages: Pages, *, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """
    Decode slots [T] into k, v [T, H, D].
    """

def kv_store(pages: Pages, *, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """
    Encode k, v [T, H, D] into slots [T].
    """

def layer_norm(x: Tensor, *, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None:
    """
    Like `rms_norm`, with mean and bias.
    """

def lora_entry_fields() -> list[MemoryField]:
    """
    Return the fields of an entry of a table of adapters: device addresses and the rank, 64-bit integers.
    """

def most_padded_rows(pairs: int, experts: int) -> int:
    """
    Most padded rows of dequantized experts whose rows are `pairs` in all.
    """

def num_threads() -> int: ...
def paged_attention(
    q: Tensor, pages: Pages, tables: AttentionTables, *, scale: float, window: int, softcap: float, out: Tensor
) -> None:
    """
    See `exl_kernels.attention.paged_attention`.
    """

def pin_threads() -> bool: ...
def plan_padded_experts(begins: Tensor, *, most: int, plan: Tensor) -> list[PaddedGroup]:
    """
    Divide the experts that have rows into groups that are multiplied at once.

    `begins` int64 [experts + 1] on the CPU: where the rows of each expert begin; `most`: experts of a group. `plan` uint8 [20 * experts] on
    the CPU gets the experts' numbers as int64, then, from byte 8 * experts, int32 [_, 3]: an expert, its first padded row and their number.
    """

def read_bandwidth(data: Tensor) -> float:
    """
    Bytes per second at which the pool reads `data` (int64) once.
    """

def read_into(path: str | PathLike[str], offset: int, out: Tensor, name: str) -> None:
    """
    Fill `out` (uint8) with the file's bytes at `offset`.
    """

def rms_norm(x: Tensor, *, weight: Tensor, offset: float, eps: float, out: Tensor) -> None:
    """
    Normalize x [.., D] into out (which may be x); weight float32 [D] or [H, D], the last dimensions of x's shape.
    """

def run_empty(tasks: int) -> None:
    """
    Run `tasks` empty tasks, to measure the overhead of a job.
    """

def safetensors_header(path: str | PathLike[str]) -> FileHeader:
    """
    Check the header of a safetensors file and return it.
    """

def sample_rows(requests: Sequence[Row]) -> list[Sampled | Failure]:
    """
    Sample each row from its float32 logits in CPU memory.
    """

def sampling_distribution(request: Row) -> Candidates:
    """
    The final candidates of one row. Raises `LookupError` if there are none.
    """

def sampling_shaped(request: Row, out: Tensor) -> None:
    """
    Write the logits of one row after steps 1 to 8 into `out` (float32, one for each id of the vocabulary).
    """

def set_isa(wanted: str) -> str: ...
def set_num_threads(n: int) -> None: ...
