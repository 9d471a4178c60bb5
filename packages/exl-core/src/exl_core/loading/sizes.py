"""The bytes that each module will need, determined without weights: theirs, the cache, and working memory of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exl_kernels.kv import KVKind, KVPages
from exl_kernels.moe.cuda import most_scratch_bytes
from exl_kernels.moe.dequantized import dequantized_bytes, most_padded_rows
from exl_kernels.sampling import workspace_bytes
from exl_kernels.selection import CPU_CHUNK_ROWS, DECODE_TOKENS, PACKED_ROWS, STEP_ROWS

from ..errors import MissingTensorError
from ..layers import Attention, Embedding, GatedMLP, Head, Linear, Module, MoE, PositionEmbedding
from .checkpoint import Checkpoint, TensorReader
from .linears import EXL2_TENSORS, GPTQ_TENSORS

if TYPE_CHECKING:
    from ..config import ExLlamaV2Config

__all__ = [
    "CacheSize",
    "ModuleSize",
    "cache_layer_bytes",
    "linear_bytes",
    "module_sizes",
    "module_tensors",
    "rope_bytes",
    "state_bytes",
]

# Upper bounds of the repacked form of a quantized matrix over the file's, for matrices of a million weights and more,
# on the CPU and on a GPU.
REPACKED = {"cpu": 1.008, "cuda": 1.031}


@dataclass(frozen=True)
class CacheSize:
    """A cache on the devices of the layers: `tokens` over all rows."""

    kind: KVKind
    tokens: int


@dataclass(frozen=True)
class ModuleSize:
    """Bytes of one module on a kind of device. `scratch` is needed during its pass only."""

    key: str
    weights: int
    layers: tuple[int, ...]  # layers whose keys and values are on its device
    scratch: int


def module_sizes(
    config: ExLlamaV2Config, modules: Sequence[Module], kind: str, rows: int, output_rows: int
) -> list[ModuleSize]:
    """Return the sizes on a "cpu" or "cuda" device for passes of `rows` tokens, `output_rows` of which get logits."""
    checkpoint = config.checkpoint
    assert checkpoint is not None
    claimed: set[str] = set()
    weights = [_own_weights(m, checkpoint, kind, claimed) for m in modules]
    loose = _loose_tensors(modules, checkpoint, claimed)
    # Memory of attention and dense MLPs, which passes of many rows keep from one layer to the next.
    kept = 0
    if kind == "cuda" and rows > PACKED_ROWS:
        kept = max((_scratch(m, config, kind, rows) for m in modules if not isinstance(m, Head | MoE)), default=0)
    return [
        ModuleSize(
            module.key,
            own + 4 * loose.get(index, 0),
            (module.layer_idx,) if isinstance(module, Attention) else (),
            _scratch(module, config, kind, output_rows if isinstance(module, Head) else rows)
            + (kept if isinstance(module, MoE) else 0),
        )
        for index, (module, own) in enumerate(zip(modules, weights, strict=True))
    ]


def module_tensors(modules: Sequence[Module], checkpoint: Checkpoint) -> list[set[str]]:
    """Return the names of the tensors that each module reads from the files; missing tensors are no error."""
    found: list[set[str]] = []
    for module in modules:
        names: set[str] = set()
        with suppress(MissingTensorError):
            _own_weights(module, checkpoint, "cpu", names)
        found.append(names & set(checkpoint.tensors))
    return found


def cache_layer_bytes(config: ExLlamaV2Config, cache: CacheSize) -> int:
    """Return the bytes of one layer's keys and values."""
    key, value, scales = KVPages.stored_widths(cache.kind, config.head_dim)
    element = 2 if cache.kind == "fp16" else 1
    return cache.tokens * config.num_key_value_heads * (element * (key + value) + 2 * 2 * scales)


def rope_bytes(config: ExLlamaV2Config) -> int:
    """Return the bytes of cos and sin, float32, for every position of the model."""
    return 4 * config.rope_settings().rotary_dim * config.max_seq_len


def state_bytes(config: ExLlamaV2Config, kind: str, rows: int) -> int:
    """Return the bytes of the hidden state of a chunk and its normalised copy."""
    element = 4 if kind == "cpu" or config.arch.float_residual else 2
    return 2 * rows * config.hidden_size * element


def _own_weights(module: Module, checkpoint: Checkpoint, kind: str, claimed: set[str]) -> int:
    """Return the bytes of the embedding table and of every matrix inside; their tensors are added to `claimed`."""
    if isinstance(module, (Embedding, PositionEmbedding)):
        name = f"{module.key}.weight"
        claimed.add(name)
        return checkpoint.entry(name).nbytes if name in checkpoint.tensors else 0
    reader = TensorReader(checkpoint)
    return sum(linear_bytes(linear, reader, kind, claimed) for linear in module.submodules())


def linear_bytes(linear: Linear, reader: TensorReader, kind: str, claimed: set[str]) -> int:
    """Return the bytes of one loaded matrix on a kind of device; the names of its tensors are added to `claimed`."""
    spec, tensors = linear.spec, reader.checkpoint.tensors
    bias = 4 * linear.out_features if spec.bias else 0
    for key in (spec.key, spec.fused_key, spec.alternate_key):
        if key is None:
            continue
        for marker, parts in (("q_weight", EXL2_TENSORS), ("qweight", (*GPTQ_TENSORS, "g_idx"))):
            if f"{key}.{marker}" in tensors:
                names = {f"{key}.{part}" for part in (*parts, "bias")} & set(tensors)
                claimed |= names
                whole = tensors[f"{key}.{marker}"].shape[-1]
                share = min(-(-linear.out_features // 32) * 32 / whole, 1.0) if key == spec.fused_key else 1.0
                held = sum(tensors[n].nbytes for n in names)
                if kind == "cuda" and marker == "q_weight" and linear.stored(reader).fine_scales:
                    scales = -(-linear.in_features // 32) * whole // 2  # four bits for every 32 rows
                    held += max(0, scales - tensors[f"{key}.q_scale"].nbytes)
                return int(held * share * REPACKED[kind]) + bias
        stored = next((n for n in (f"{key}.weight", key) if n in tensors), None)
        if stored is not None:
            claimed |= {stored, f"{key}.bias"}
            wide = (tensors[stored].dtype == "F32" or spec.unit_rows) and kind == "cpu"
            rows = max(linear.out_features, tensors[stored].shape[0] if spec.wider else 0)
            return rows * linear.in_features * (4 if wide else 2) + bias
    raise MissingTensorError(f"Could not find {spec.key}.* in model")


def _loose_tensors(modules: Sequence[Module], checkpoint: Checkpoint, claimed: set[str]) -> dict[int, int]:
    """Return module number -> elements of tensors below its key that belong to no matrix, such as norms."""
    first = {m.key: i for i, m in reversed(list(enumerate(modules)))}
    found: dict[int, int] = {}
    for name, entry in checkpoint.tensors.items():
        if name in claimed:
            continue
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            index = first.get(".".join(parts[:end]))
            if index is not None:
                elements = 1
                for size in entry.shape:
                    elements *= size
                found[index] = found.get(index, 0) + elements
                break
    return found


def _scratch(module: Module, config: ExLlamaV2Config, kind: str, rows: int) -> int:
    """Return the working memory of a pass at the module's widest moment, without the hidden state."""
    linears = list(module.submodules())
    if not linears:
        return 0
    fused = kind == "cpu" and type(module) in (Attention, GatedMLP)
    more = 0
    element, busy = (2 if kind == "cuda" else 4), min(rows, CPU_CHUNK_ROWS) if fused else rows
    if isinstance(module, Head):
        busy, width = rows, 2 * config.padded_vocab_size  # float32 logits, and a copy where columns are cut
        element = 4
        sampled = min(STEP_ROWS, DECODE_TOKENS * config.decode_rows)  # a row of each sequence and its draft tokens
        more = workspace_bytes(sampled, config.padded_vocab_size) if kind == "cuda" else 0
    elif isinstance(module, Attention):
        width = 2 * module.q_proj.out_features + 2 * module.k_proj.out_features + config.hidden_size
    else:
        width = 2 * max(linear.out_features for linear in linears) + config.hidden_size
        if isinstance(module, MoE):
            width += (module.chosen + 1) * config.hidden_size * 4 // element
    dequantized = 0
    if kind == "cuda" and rows > PACKED_ROWS:
        dequantized = 2 * max(linear.in_features * linear.out_features for linear in linears)
    if kind == "cuda":  # added or scaled results of float matrices are float32; their half source stays
        finished = [q.out_features for q in linears if q.spec.bias or q.spec.prescale != 1.0]
        dequantized += 6 * busy * max(finished, default=0)
    if isinstance(module, MoE) and kind == "cuda":
        width_of_one = module.experts[0].up.out_features
        more = most_scratch_bytes(
            rows=rows,
            chosen=module.chosen,
            experts=len(module.experts),
            hidden=config.hidden_size,
            width=width_of_one,
        )
        if rows > PACKED_ROWS:
            more = max(more, _dequantized_experts(module, config, rows))
    return busy * width * element + dequantized + more


def _dequantized_experts(module: MoE, config: ExLlamaV2Config, rows: int) -> int:
    """Return the most bytes that experts of a prompt hold: matrices, and rows padded to at most twice their number."""
    width = module.experts[0].up.out_features
    padded = most_padded_rows(rows * module.chosen, len(module.experts))
    return dequantized_bytes(config.hidden_size, width) + 2 * padded * (2 * config.hidden_size + 2 * width)
