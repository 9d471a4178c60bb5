"""The kind of tool that measures a model: generation, speed of prompts and tokens, perplexity over a file of text.

It takes the flags of exllamav2's own tool and imports what that one imports.
"""

import argparse
import gc
import math
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812

from exllamav2 import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Cache_TP,
    ExLlamaV2Config,
    ExLlamaV2Tokenizer,
    model_init,
)
from exllamav2.attn import ExLlamaV2Attention
from exllamav2.conversion.quantize import list_live_tensors
from exllamav2.conversion.tokenize import get_tokens
from exllamav2.generator import ExLlamaV2BaseGenerator, ExLlamaV2Sampler
from exllamav2.linear import ExLlamaV2Linear
from exllamav2.mlp import ExLlamaV2MLP
from exllamav2.moe_mlp import ExLlamaV2MoEMLP
from exllamav2.parallel_decoder import ExLlamaV2ParallelDecoder

CACHES = {"fp16": ExLlamaV2Cache, "q4": ExLlamaV2Cache_Q4, "q6": ExLlamaV2Cache_Q6, "q8": ExLlamaV2Cache_Q8}


def parse(argv):
    parser = argparse.ArgumentParser(description="Test inference on a model")
    parser.add_argument("-ed", "--eval_dataset", type=str, help="Perplexity evaluation dataset (.parquet or text)")
    parser.add_argument("-er", "--eval_rows", type=int, default=128, help="Number of rows")
    parser.add_argument("-el", "--eval_length", type=int, default=2048, help="Tokens per row")
    parser.add_argument("-et", "--eval_token", action="store_true", help="Evaluate token by token, FP16 cache")
    parser.add_argument("-eq4", "--eval_token_q4", action="store_true", help="Evaluate token by token, Q4 cache")
    parser.add_argument("-eq6", "--eval_token_q6", action="store_true", help="Evaluate token by token, Q6 cache")
    parser.add_argument("-eq8", "--eval_token_q8", action="store_true", help="Evaluate token by token, Q8 cache")
    parser.add_argument("-p", "--prompt", type=str, help="Generate from prompt")
    parser.add_argument("-pnb", "--prompt_no_bos", action="store_true", help="Don't add BOS to the prompt")
    parser.add_argument("-t", "--tokens", type=int, default=128, help="Max no. tokens")
    parser.add_argument("-ps", "--prompt_speed", action="store_true", help="Test prompt processing speed")
    parser.add_argument("-s", "--speed", action="store_true", help="Test raw generation speed")
    parser.add_argument("-nwu", "--no_warmup", action="store_true", help="Skip warmup")
    parser.add_argument("-mol", "--max_output_len", type=int, help="Set max output chunk size")
    model_init.add_args(parser)
    args = parser.parse_args(argv)
    model_init.check_args(args)
    model_init.print_options(args)
    return args


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def load(args):
    model, tokenizer = model_init.init(args, allow_auto_split=True, benchmark=True, max_output_len=args.max_output_len)
    cache = None
    if not model.loaded:
        print(" -- Loading model...")
        if args.tensor_parallel:
            cache = ExLlamaV2Cache_TP(model, base=ExLlamaV2Cache)
        else:
            cache = ExLlamaV2Cache(model, lazy=True)
            model.load_autosplit(cache)
    if cache is None:
        cache = ExLlamaV2Cache(model)
    return model, tokenizer, cache


def test_prompt(model, tokenizer, cache, args):
    with torch.inference_mode():
        generator = ExLlamaV2BaseGenerator(model, cache, tokenizer)
        if not args.no_warmup:
            generator.warmup()
        settings = ExLlamaV2Sampler.Settings()
        settings.temperature = 1.0
        settings.top_k = 0
        settings.top_p = 0.8
        settings.token_repetition_penalty = 1.02
        settings.disallow_tokens(tokenizer, [tokenizer.eos_token_id])
        begin = time.time()  # clock: what the tool prints
        add_bos = not args.prompt_no_bos
        output = generator.generate_simple(
            args.prompt, settings, args.tokens, seed=1, token_healing=True, add_bos=add_bos
        )
        synchronize()
        total = max(time.time() - begin, 1e-9)  # clock: what the tool prints
        print(output)
        print(
            f" -- Response generated in {total:.2f} seconds, {args.tokens} tokens, {args.tokens / total:.2f} tokens/s"
        )
    return output


def test_prompt_speed(model, cache):
    with torch.inference_mode():
        ids = torch.randint(0, model.config.vocab_size - 1, (1, model.config.max_seq_len))
        model.forward(ids[:, -1:])
        length, lengths = 128, []
        while length <= model.config.max_seq_len:
            cache.current_seq_len = 0
            begin = time.time()  # clock: what the tool prints
            model.forward(ids[:, :length], cache, preprocess_only=True)
            synchronize()
            total = max(time.time() - begin, 1e-9)  # clock: what the tool prints
            print(f" ** Length {length:>5} tokens: {length / total:>11.4f} t/s")
            lengths.append(cache.current_seq_len)
            length += 128
    return lengths


def test_token_speed(model, cache):
    with torch.inference_mode():
        cache.current_seq_len = 0
        ids, steps = torch.randint(0, model.config.vocab_size - 1, (1, 1)), 64
        begin = time.time()  # clock: what the tool prints
        for _ in range(steps):
            logits = model.forward(ids, cache)
            ids = logits[:, -1:, : model.config.vocab_size].argmax(dim=-1).cpu()
        synchronize()
        total = max(time.time() - begin, 1e-9)  # clock: what the tool prints
        print(f" ** Position {cache.current_seq_len:>5}: {steps / total:>11.4f} t/s")
    return cache.current_seq_len


def perplexity(rows, forward):
    logprob_sum, logprob_count = 0.0, 0
    with torch.inference_mode():
        for index in range(rows.shape[0]):
            input_ids = rows[index : index + 1, :]
            logits = forward(input_ids[:, :-1]).float() + 1e-10
            log_probs = F.log_softmax(logits, dim=-1)
            target_ids = input_ids[:, 1:].to(log_probs.device)
            token_log_probs = log_probs.gather(-1, target_ids.unsqueeze(-1)).squeeze(-1)
            logprob_sum += token_log_probs.sum().item()
            logprob_count += target_ids.numel()
    return math.exp(-logprob_sum / logprob_count)


def test_perplexity(model, tokenizer, args):
    rows = get_tokens(args.eval_rows, args.eval_length, args.eval_dataset, tokenizer)
    if model.config.arch.lm.requires_bos:
        rows = torch.cat((torch.full((rows.shape[0], 1), tokenizer.bos_token_id), rows[:, :-1]), dim=1)
    found = {"": perplexity(rows, model.forward)}
    for kind, cls in CACHES.items():
        if getattr(args, "eval_token" if kind == "fp16" else f"eval_token_{kind}"):
            cache = cls(model, max_seq_len=args.eval_length)

            def by_token(ids, cache=cache):
                cache.current_seq_len = 0
                return torch.cat([model.forward(ids[:, i : i + 1], cache) for i in range(ids.shape[1])], dim=1)

            found[kind] = perplexity(rows, by_token)
    for kind, value in found.items():
        print(f" -- Evaluation perplexity{f' ({kind})' if kind else ''}: {value:.4f}")
    return rows, found


def check_modules(model):
    """Count the modules that such tools look for."""
    kinds = (ExLlamaV2Attention, ExLlamaV2MLP, ExLlamaV2MoEMLP, ExLlamaV2ParallelDecoder)
    layers = model.config.num_hidden_layers
    assert [sum(isinstance(m, kind) for m in model.modules) for kind in kinds] == [layers, layers, 0, 0]
    assert isinstance(model.modules_dict["model.layers.0.self_attn.q_proj"], ExLlamaV2Linear)
    assert ExLlamaV2Attention.Params(batch_size=1, seq_len=1, past_len=0).is_causal()


def main(folder):
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary) / "text.txt"
        args = parse(["-m", folder, "-gs", "auto", "-l", "512", "-p", "Once upon a time,", "-t", "24", "-ps", "-s"])
        model, tokenizer, cache = load(args)
        assert isinstance(model, ExLlamaV2)
        assert isinstance(model.config, ExLlamaV2Config)
        assert isinstance(tokenizer, ExLlamaV2Tokenizer)
        assert not isinstance(cache, ExLlamaV2Cache_8bit)
        assert (model.config.max_seq_len, cache.max_seq_len) == (512, 512)
        check_modules(model)
        assert len(test_prompt(model, tokenizer, cache, args)) > len(args.prompt)
        args.tokens = 400
        data.write_text(test_prompt(model, tokenizer, cache, args))
        assert test_prompt_speed(model, cache) == [128, 256, 384, 512]
        assert test_token_speed(model, cache) == 64

        args = parse(
            ["-m", folder, "-l", "512", "-ed", str(data), "-er", "3", "-el", "48", "-et", "-eq4", "-eq6", "-eq8"]
        )
        model, tokenizer, _ = load(args)
        rows, found = test_perplexity(model, tokenizer, args)
        assert rows.shape == (3, 48)
        assert set(found) == {"", "fp16", "q4", "q6", "q8"}
        # The model wrote the text: it is far more likely than its tokens in another order, whatever the cache.
        assert 1.0 < found[""] < 20.0
        assert all(abs(value / found[""] - 1) < 0.1 for value in found.values())
        shuffled = rows[:, torch.randperm(rows.shape[1], generator=torch.Generator().manual_seed(1))]
        assert perplexity(shuffled, model.forward) > 3 * found[""]
    gc.collect()
    list_live_tensors()


if __name__ == "__main__":
    main(sys.argv[1])
