"""Writes an EXL2 model folder of a given shape filled with random codes: real file layout, no quantization, no meaning.

    python benchmarks/make_random_model.py OUT [--shape tinyllama] [--bits 4.0] [--layers N | --gigabytes G]

Values are scaled so that activations stay of order one through the layers, and the mean of a matrix is zero. The same
arguments give the same bytes. Matrices are drawn in threads, one for each core.
"""

from __future__ import annotations

import argparse
import json
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from exl_kernels.formats import exl2_groups
from exl_kernels.safetensors_file import write_safetensors

WIDTHS = (2, 3, 4, 5, 6, 8)
WEIGHT_STD = 0.02


@dataclass(frozen=True)
class Shape:
    """The sizes that make a Llama, a Qwen3 or a Qwen3 with experts."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    head_norms: bool = False
    """Norms of the heads of q and k, as in Qwen3."""
    experts: int = 0
    """Experts of `intermediate` features each, with a router of float weights, as in Qwen3-MoE; 0: one MLP."""
    chosen: int = 0

    def linears(self) -> dict[str, tuple[int, int]]:
        """Key below the layer -> (in, out)."""
        head_dim = self.hidden // self.heads
        mlps = [f"mlp.experts.{number}" for number in range(self.experts)] or ["mlp"]
        return {
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (self.hidden, self.kv_heads * head_dim),
            "self_attn.v_proj": (self.hidden, self.kv_heads * head_dim),
            "self_attn.o_proj": (self.hidden, self.hidden),
            **{f"{mlp}.gate_proj": (self.hidden, self.intermediate) for mlp in mlps},
            **{f"{mlp}.up_proj": (self.hidden, self.intermediate) for mlp in mlps},
            **{f"{mlp}.down_proj": (self.intermediate, self.hidden) for mlp in mlps},
        }


SHAPES = {
    "tinyllama": Shape(2048, 5632, 22, 32, 4, 32000),
    "8b": Shape(4096, 14336, 32, 32, 8, 128256),
    "70b": Shape(8192, 28672, 80, 64, 8, 128256),
    "qwen3-8b": Shape(4096, 12288, 36, 32, 8, 151936, head_norms=True),
    "qwen3-moe": Shape(2048, 768, 3, 32, 4, 4096, head_norms=True, experts=128, chosen=8),
    "tiny": Shape(256, 768, 2, 4, 2, 2048),
    "tiny-qwen3": Shape(256, 768, 2, 4, 2, 2048, head_norms=True),
}


def plan_for(bits: float, group_size: int = 128) -> str:
    """A plan of at most two neighbouring widths whose codes average `bits`."""
    low = max((w for w in WIDTHS if w <= bits), default=WIDTHS[0])
    high = min((w for w in WIDTHS if w > bits), default=WIDTHS[-1])
    if low >= bits or low == high:
        return f"1:{low}b_{group_size}g"
    share = (bits - low) / (high - low)
    return f"{share:.4f}:{high}b_{group_size}g/{1 - share:.4f}:{low}b_{group_size}g"


def random_words(shape: tuple[int, int], generator: np.random.Generator) -> Tensor:
    """Return int32 words of random bits."""
    count = -(-shape[0] * shape[1] // 2)
    drawn = generator.integers(0, 2**64, count, dtype=np.uint64).view(np.int32)
    return torch.from_numpy(drawn[: shape[0] * shape[1]].reshape(shape))


def random_codes(rows: int, columns: int, width: int, generator: np.random.Generator) -> Tensor:
    """Return the int32 words of random codes [rows, columns] of `width` bits whose mean is their zero, 2^(width - 1).

    The top bit is set with a probability of 1/2 + 2^-width. Codes of a lower mean would add up: outputs would grow from
    layer to layer, beyond halves, and depend on nothing but their mean.
    """
    shape = rows * width // 32, columns
    words, more = random_words(shape, generator), random_words(shape, generator)
    for _ in range(width - 2):
        more &= random_words(shape, generator)
    tops = [sum(1 << bit for bit in range(32) if (32 * word + bit) % width == width - 1) for word in range(width)]
    mask = torch.from_numpy(np.array(tops, dtype=np.uint32).view(np.int32)).repeat(shape[0] // width)
    return words.bitwise_or_(more.bitwise_and_(mask[:, None]))


SHARED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Matrices that share the row order of another one in the same layer, as in converted models: they have one input."""


def random_exl2(
    in_features: int,
    out_features: int,
    bits: float,
    generator: np.random.Generator,
    order: np.random.Generator | None = None,
) -> dict[str, Tensor]:
    """The five tensors of one matrix, of random codes; `order`, or `generator`, draws the order of its rows."""
    columns = -(-out_features // 32) * 32
    groups = exl2_groups(plan_for(bits), in_features)
    starts, scales, codes, words = [], [], [], 0
    for width, rows in groups:
        starts += [width, words]
        words += rows * width // 32
        codes.append(random_codes(rows, columns, width, generator))
        code_rms = (2.0**width) / 12**0.5
        scale_rms = 108.5  # root mean square of (c + 1)^2 over c = 0..15
        scales.append(256 * WEIGHT_STD / (code_rms * scale_rms))
    return {
        "q_weight": torch.cat(codes),
        "q_scale": random_words((len(groups), columns // 8), generator),
        "q_scale_max": torch.tensor(scales, dtype=torch.float16),
        "q_groups": torch.tensor(starts, dtype=torch.int16),
        "q_invperm": torch.from_numpy((order or generator).permutation(in_features).astype(np.int32)),
    }


def random_halves(rows: int, columns: int, std: float, generator: np.random.Generator) -> Tensor:
    """Return normal values [rows, columns] in half precision."""
    return torch.from_numpy(generator.standard_normal((rows, columns), dtype=np.float32)).mul_(std).half()


class _Parts:
    """Tensors that threads draw, each matrix with a random generator of its own."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._drawn: list[tuple[str, Callable[[], Tensor | dict[str, Tensor]]]] = []

    def _generator(self) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64((self._seed, len(self._drawn))))

    def matrix(self, key: str, in_features: int, out_features: int, bits: float) -> None:
        """Add the five tensors of an EXL2 matrix."""
        layer, _, name = key.rpartition(".")
        seed = zlib.crc32(f"{layer}.{SHARED.get(name, name)}".encode())
        order = np.random.Generator(np.random.SFC64((self._seed, seed)))
        self._drawn.append((key, partial(random_exl2, in_features, out_features, bits, self._generator(), order)))

    def halves(self, key: str, rows: int, columns: int, std: float) -> None:
        """Add a matrix of normal values."""
        self._drawn.append((key, partial(random_halves, rows, columns, std, self._generator())))

    def tensors(self) -> dict[str, Tensor]:
        """Draw everything. Tensors of a matrix have its key and their own name."""
        found: dict[str, Tensor] = {}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for (key, _), drawn in zip(self._drawn, pool.map(lambda part: part[1](), self._drawn), strict=True):
                if isinstance(drawn, Tensor):
                    found[key] = drawn
                else:
                    found |= {f"{key}.{part}": tensor for part, tensor in drawn.items()}
        return found


EMBEDDING_BLOCK = 8192
"""Rows of the embedding that one thread draws at a time."""


def make_model(folder: Path, shape: Shape, bits: float, head_bits: float = 6, seed: int = 0) -> int:
    """Write config.json, tokenizer.json and model.safetensors into `folder`; returns the bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = _Parts(seed)
    starts = range(0, shape.vocab, EMBEDDING_BLOCK)
    for start in starts:
        parts.halves(f"embedding.{start}", min(EMBEDDING_BLOCK, shape.vocab - start), shape.hidden, 1.0)
    ones: dict[str, int] = {"model.norm.weight": shape.hidden}
    for layer in range(shape.layers):
        for part, (in_features, out_features) in shape.linears().items():
            parts.matrix(f"model.layers.{layer}.{part}", in_features, out_features, bits)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            ones[f"model.layers.{layer}.{norm}.weight"] = shape.hidden
        if shape.head_norms:
            for norm in ("q_norm", "k_norm"):
                ones[f"model.layers.{layer}.self_attn.{norm}.weight"] = shape.hidden // shape.heads
        if shape.experts:
            parts.halves(f"model.layers.{layer}.mlp.gate.weight", shape.experts, shape.hidden, WEIGHT_STD)
    parts.matrix("lm_head", shape.hidden, shape.vocab, head_bits)
    tensors = parts.tensors()
    tensors["model.embed_tokens.weight"] = torch.cat([tensors.pop(f"embedding.{start}") for start in starts])
    tensors |= {name: torch.ones(size, dtype=torch.float16) for name, size in ones.items()}
    write_safetensors(folder / "model.safetensors", tensors)
    quantization = {"quant_method": "exl2", "bits": bits, "head_bits": head_bits}
    config = {**llama_config(shape, 4096, rope_theta=10000.0), "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder, shape.vocab)
    return sum(t.nbytes for t in tensors.values())


def llama_config(shape: Shape, positions: int, *, rope_theta: float) -> dict[str, Any]:
    """Return the content of config.json for a model of this shape."""
    family = ("Qwen3Moe" if shape.experts else "Qwen3") if shape.head_norms else "Llama"
    return {
        "architectures": [f"{family}ForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": shape.hidden // shape.heads,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": positions,
        "model_type": {"Qwen3Moe": "qwen3_moe", "Qwen3": "qwen3", "Llama": "llama"}[family],
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "vocab_size": shape.vocab,
        **(
            {
                "num_experts": shape.experts,
                "num_experts_per_tok": shape.chosen,
                "moe_intermediate_size": shape.intermediate,
                "norm_topk_prob": True,
            }
            if shape.experts
            else {}
        ),
    }


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A byte-level tokenizer.json with `vocab` ids: specials, the 256 bytes, then words that text never spells."""
    pieces = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    ids = {piece: i for i, piece in enumerate(pieces + [f"word{i}" for i in range(len(pieces), vocab)])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(pieces[:3])
    tokenizer.save(str(folder / "tokenizer.json"))


def layers_for(shape: Shape, bits: float, gigabytes: float) -> int:
    """Return the number of layers that bring the weights to about `gigabytes` (10^9 bytes)."""
    fixed = shape.vocab * shape.hidden * (2 + 6 / 8)
    layer = sum(i * o for i, o in shape.linears().values()) * (bits + 0.04) / 8
    return max(1, round((gigabytes * 1e9 - fixed) / layer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama")
    parser.add_argument("--bits", type=float, default=4.0)
    parser.add_argument("--head-bits", type=float, default=6)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--gigabytes", type=float)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    if args.gigabytes:
        shape = replace(shape, layers=layers_for(shape, args.bits, args.gigabytes))
    if args.layers:
        shape = replace(shape, layers=args.layers)
    size = make_model(args.out, shape, args.bits, args.head_bits, args.seed)
    print(json.dumps({"model": str(args.out), "bytes": size, "layers": shape.layers, "bits": args.bits}))


if __name__ == "__main__":
    main()
