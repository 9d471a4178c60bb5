"""Decode steps and prompts of every family's layer layout: share of the read roof, and of Llama's share.

    python benchmarks/bench_families.py [--family NAME ...] [--batch 1 8 32] [--layers 8] [--prompt 2048] [--twins]

Random weights of true shapes (gpu_model.py), FP16 cache, context 256. Dense families have 8 layers unless --layers says
otherwise, mixtures of experts all of theirs. Llama is measured in the same run; `share_of_llama` is the family's share
of the roof divided by Llama's at that batch. With --twins, `share_of_twin` compares with a Llama of the same hidden
size and vocabulary and as many weights a layer: smaller layers and heads have smaller shares in any family. For experts
the bytes of a step are those of the experts that its rows choose on average where every expert is as likely. JSON
lines; with --prompt also tokens a second of a prompt.

A mixture of BF16 experts: --family qwen3-30b-a3b --expert-layers 8 --bits bf16 (10 GB).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import torch
from bench_step import CACHES, PAGE, measure, profile
from gpu_model import build_config
from gpu_timing import emit, environment, read_roof

from exl_core import ExLlamaV2, PagedParams
from exl_core.layers import Head, Linear, MoE

CONTEXT = 256
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def like_llama(architecture: str, **changes: Any) -> dict[str, Any]:
    return {**LLAMA, "architectures": [architecture], **changes}


def sizes(hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, head_dim: int = 128) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "head_dim": head_dim,
    }


FAMILIES: dict[str, dict[str, Any]] = {
    "llama3-8b": LLAMA,
    "llama3-70b": like_llama("LlamaForCausalLM", **sizes(8192, 28672, 64, 8, 128256)),
    "mistral-small-24b": like_llama("MistralForCausalLM", **sizes(5120, 32768, 32, 8, 131072)),
    "qwen2.5-32b": like_llama("Qwen2ForCausalLM", **sizes(5120, 27648, 40, 8, 152064)),
    "qwen3-14b": like_llama("Qwen3ForCausalLM", **sizes(5120, 17408, 40, 8, 151936)),
    "qwen3-8b": like_llama("Qwen3ForCausalLM", **sizes(4096, 12288, 32, 8, 151936)),
    "qwen2.5-7b": like_llama("Qwen2ForCausalLM", **sizes(3584, 18944, 28, 4, 152064)),
    "gemma3-12b": like_llama(
        "Gemma3ForCausalLM",
        **sizes(3840, 15360, 16, 8, 262144, 256),
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=1024,
        sliding_window_pattern=6,
        query_pre_attn_scalar=256,
        rope_local_base_freq=10000.0,
    ),
    "gemma2-9b": like_llama(
        "Gemma2ForCausalLM",
        **sizes(3584, 14336, 16, 8, 256000, 256),
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=4096,
        query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
    "glm4-9b": like_llama(
        "Glm4ForCausalLM", **sizes(4096, 13696, 32, 2, 151552), attention_bias=True, partial_rotary_factor=0.5
    ),
    "phi3-mini": like_llama("Phi3ForCausalLM", **sizes(3072, 8192, 32, 32, 32064, 96)),
    "command-r7b": like_llama(
        "Cohere2ForCausalLM",
        **sizes(4096, 14336, 32, 8, 256000),
        layer_norm_eps=1e-5,
        logit_scale=0.25,
        sliding_window=4096,
        sliding_window_pattern=4,
    ),
    "olmo2-7b": like_llama("Olmo2ForCausalLM", **sizes(4096, 11008, 32, 32, 100352)),
    "granite3-8b": like_llama(
        "GraniteForCausalLM",
        **sizes(4096, 12800, 32, 8, 49152),
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.0078125,
        logits_scaling=16.0,
    ),
    "starcoder2-7b": like_llama(
        "Starcoder2ForCausalLM",
        **sizes(4608, 18432, 36, 4, 49152),
        hidden_act="gelu_pytorch_tanh",
        norm_epsilon=1e-5,
        use_bias=True,
    ),
    "gpt2-style-7b": like_llama("GPT2LMHeadModel", **sizes(4096, 16384, 32, 32, 50257), n_inner=16384),
    "qwen3-30b-a3b": like_llama(
        "Qwen3MoeForCausalLM",
        **sizes(2048, 6144, 32, 4, 151936),
        num_hidden_layers=48,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "mixtral-8x7b": like_llama(
        "MixtralForCausalLM",
        **sizes(4096, 14336, 32, 8, 32000),
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
}
EXPERTS = ("qwen3-30b-a3b", "mixtral-8x7b")


def expert_bytes(model: ExLlamaV2, batch: int) -> int:
    """Bytes of experts that a step of so many rows leaves unread, where every expert is as likely."""
    unread = 0.0
    for module in model.modules:
        if isinstance(module, MoE):
            held = sum(linear.weight_bytes() for expert in module.experts for linear in expert)
            unread += held * (1 - module.chosen / len(module.experts)) ** batch
    return int(unread)


def twin_of(config: dict[str, Any], model: ExLlamaV2) -> dict[str, Any]:
    """Return a Llama with the hidden size, the vocabulary, the heads and, to 1 %, the weights a layer of a dense model.

    So both read as many keys and values.
    """
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    linears = [part for module in model.modules if not isinstance(module, Head) for part in module.submodules()]
    weights = sum(part.in_features * part.out_features for part in linears if isinstance(part, Linear)) / layers
    about = model.config
    heads, kv_heads, head_dim = about.num_attention_heads, about.num_key_value_heads, about.head_dim
    attention = hidden * head_dim * 2 * (heads + kv_heads)
    width = round((weights - attention) / (3 * hidden * 256)) * 256
    made = sizes(hidden, width, heads, kv_heads, config["vocab_size"], head_dim)
    return like_llama("LlamaForCausalLM", **made, num_hidden_layers=layers)


def shares(config: dict[str, Any], bits: str, batches: list[int], roof: float) -> dict[int, float]:
    """Return the share of the roof of a dense model's step by batch."""
    model = build_config(config, bits)
    lines = {batch: measure(model, "fp16", CONTEXT, batch, roof, 0) for batch in batches}
    return {
        batch: 100.0 * int(str(line["bytes_per_step"])) / (float(str(line["p50_us"])) * 1e-6) / roof
        for batch, line in lines.items()
    }


def prompt_speed(model: ExLlamaV2, tokens: int, rounds: int = 5) -> float:
    """Tokens a second of one prompt, without logits but the last's: the median of some rounds."""
    cache = CACHES["fp16"](model, max_seq_len=-(-tokens // PAGE) * PAGE)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens))
    table = torch.arange(cache.max_seq_len // PAGE, dtype=torch.int32)[None]
    taken = []
    for _ in range(rounds + 1):
        params = PagedParams(1, table, torch.zeros(1, dtype=torch.int32), 0, PAGE, tokens)
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.forward_chunk(ids, cache, attn_params=params, last_id_only=True)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return tokens / statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=sorted(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--layers", type=int, default=8, help="of dense families")
    parser.add_argument("--expert-layers", type=int, help="of mixtures of experts (default: all)")
    parser.add_argument("--prompt", type=int, default=0, help="also a prompt of so many tokens")
    parser.add_argument("--bits", default="4.0")
    parser.add_argument("--twins", action="store_true", help="compare dense families with Llamas of their sizes")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    roof, about = read_roof(), environment()
    of_llama: dict[int, float] = {}
    for family in dict.fromkeys(["llama3-8b", *args.family]):
        config = dict(FAMILIES[family])
        layers = args.expert_layers if family in EXPERTS else args.layers
        config["num_hidden_layers"] = layers or config["num_hidden_layers"]
        model = build_config(config, args.bits)
        twin: dict[int, float] = {}
        if args.twins and family not in ("llama3-8b", *EXPERTS):
            twin = shares(twin_of(config, model), args.bits, args.batch, roof)
        for batch in args.batch:
            line = measure(model, "fp16", CONTEXT, batch, roof, 0)
            read = int(str(line["bytes_per_step"])) - expert_bytes(model, batch)
            share = 100.0 * read / (float(str(line["p50_us"])) * 1e-6) / roof
            of_llama.setdefault(batch, share)
            emit(
                {
                    "bench": "families",
                    **about,
                    "family": family,
                    "layers": config["num_hidden_layers"],
                    "bpw": args.bits,
                    "cache": "fp16",
                    "batch": batch,
                    "ctx": CONTEXT,
                    "roof_gb_s": roof / 1e9,
                    **line,
                    "bytes_per_step": read,
                    "gbps": read / float(str(line["p50_us"])) / 1e3,
                    "pct_of_read_roof": share,
                    "share_of_llama": share / of_llama[batch],
                    **({"share_of_twin": share / twin[batch]} if twin else {}),
                    "apart_reason": model.decode.apart_reason,
                    "reason": model.decode.reason,
                }
            )
            if args.profile:
                print(profile(model, "fp16", CONTEXT, batch), flush=True)
        if args.prompt:
            speed = prompt_speed(model, args.prompt)
            emit(
                {
                    "bench": "families",
                    **about,
                    "family": family,
                    "layers": config["num_hidden_layers"],
                    "prompt": args.prompt,
                    "prompt_tok_s": speed,
                }
            )
        del model
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
