"""EXL2 folders of published shapes with random weights, for measuring speed without a download."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from exl_kernels.safetensors_file import write_safetensors

__all__ = ["SHAPES", "Shape", "write_random_model"]

GROUP = 128
BITS = 4
HEAD_BITS = 6
WEIGHT_STD = 0.02
#: Root mean square of (c + 1)^2 over the scale codes c = 0..15.
SCALE_RMS = 108.5


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int

    def linears(self) -> dict[str, tuple[int, int]]:
        """Key below a layer -> (in_features, out_features)."""
        kv = self.kv_heads * self.hidden // self.heads
        return {
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (self.hidden, kv),
            "self_attn.v_proj": (self.hidden, kv),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "mlp.gate_proj": (self.hidden, self.intermediate),
            "mlp.up_proj": (self.hidden, self.intermediate),
            "mlp.down_proj": (self.intermediate, self.hidden),
        }

    def weight_bytes(self) -> int:
        """Bytes of the folder's weights, scales left out."""
        layer = sum(k * n for k, n in self.linears().values()) * BITS // 8
        return self.layers * layer + self.vocab * self.hidden * (16 + HEAD_BITS) // 8

    def cache_bytes(self) -> int:
        """Bytes of the keys and values of one token in half precision."""
        return self.layers * 2 * self.kv_heads * (self.hidden // self.heads) * 2


#: From large to small: the shapes of Llama 3.1 8B, Llama 3.2 3B and TinyLlama, and one for a CPU.
SHAPES = {
    "llama-8b": Shape(4096, 14336, 32, 32, 8, 128256),
    "llama-3b": Shape(3072, 8192, 28, 24, 8, 128256),
    "llama-1b": Shape(2048, 5632, 22, 32, 4, 32000),
    "llama-30m": Shape(512, 1536, 8, 8, 4, 4096),
}


def write_random_model(folder: Path, shape: Shape) -> None:
    """Write config.json, tokenizer.json and model.safetensors, at 4 bits a weight and 6 in the head.

    One layer is drawn and written for every layer. Codes are symmetric about zero, so that activations keep their size.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(256, shape.hidden, generator=generator).half()
    norm = torch.ones(shape.hidden, dtype=torch.float16)
    tensors = {"model.embed_tokens.weight": rows.repeat(shape.vocab // 256 + 1, 1)[: shape.vocab]}
    layer = {key: _matrix(*sizes, BITS, generator) for key, sizes in shape.linears().items()}
    for index in range(shape.layers):
        for key, matrix in layer.items():
            tensors |= {f"model.layers.{index}.{key}.{part}": tensor for part, tensor in matrix.items()}
        for key in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{index}.{key}.weight"] = norm
    tensors["model.norm.weight"] = norm
    head = _matrix(shape.hidden, shape.vocab, HEAD_BITS, generator)
    tensors |= {f"lm_head.{part}": tensor for part, tensor in head.items()}
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(_config(shape)))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(shape.vocab)))


def _matrix(k: int, n: int, bits: int, generator: torch.Generator) -> dict[str, Tensor]:
    """The five tensors of an EXL2 matrix [k, n], in groups of 128 rows."""
    groups = k // GROUP
    words = _words(k * bits // 32, n, generator)
    if bits == BITS:
        # Code 0 has no opposite: where it was drawn, write 8, which is the weight 0.
        drawn = ~(words | words >> 1 | words >> 2 | words >> 3) & 0x11111111
        words |= drawn << 3
    scale = 256 * WEIGHT_STD / (2.0**bits / 12**0.5 * SCALE_RMS)
    first_rows = [group * GROUP * bits // 32 for group in range(groups)]
    return {
        "q_weight": words,
        "q_scale": _words(groups, n // 8, generator),
        "q_scale_max": torch.full((groups,), scale, dtype=torch.float16),
        "q_groups": torch.tensor([[bits, row] for row in first_rows], dtype=torch.int16).flatten(),
        "q_invperm": torch.randperm(k, generator=generator).to(torch.int32),
    }


def _words(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randint(-(2**31), 2**31, (rows, columns), generator=generator, dtype=torch.int64).to(torch.int32)


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": 8192,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "vocab_size": shape.vocab,
        "quantization_config": {"quant_method": "exl2", "bits": BITS, "head_bits": HEAD_BITS},
        "random_weights": asdict(shape),
    }


def _tokenizer(vocab: int) -> dict[str, object]:
    """A vocabulary of made-up words: speed is measured with ids."""
    names = ["<unk>", "<s>", "</s>", *(f"word{i}" for i in range(3, vocab))]
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": name, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for i, name in enumerate(names[:3])
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {name: i for i, name in enumerate(names)},
            "merges": [],
            "unk_token": "<unk>",
        },
    }
