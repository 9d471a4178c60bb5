"""Command-line support for scripts that load a model: flags, checks, and the model that they describe."""

from __future__ import annotations

import argparse
from typing import Any

from .config import ExLlamaV2Config
from .config.model_folder import check_model_folder
from .errors import ConfigFileError, InputError
from .model import ExLlamaV2
from .timer import Timer
from .tokenizer import ExLlamaV2Tokenizer

__all__ = ["add_args", "check_args", "init", "post_init_load", "print_options"]


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select a model and how it is loaded."""
    add = parser.add_argument
    add("-m", "--model_dir", type=str, help="folder of the model")
    add("-gs", "--gpu_split", type=str, help='"auto", or GB a device for weights, separated by commas: 20,7.5')
    add("-tp", "--tensor_parallel", action="store_true", help="shard every matrix over all devices")
    add("-l", "--length", type=int, help="maximum sequence length")
    add("-rs", "--rope_scale", type=float, help="linear RoPE scaling factor")
    add("-ra", "--rope_alpha", type=float, help="NTK RoPE alpha")
    add("-ry", "--rope_yarn", type=float, help="YaRN RoPE factor")
    add("-nfa", "--no_flash_attn", action="store_true", help="attention limits as without flash-attn")
    add("-nxf", "--no_xformers", action="store_true", help="attention limits as without xformers")
    add("-nsdpa", "--no_sdpa", action="store_true", help="kept for scripts; no effect")
    add("-ng", "--no_graphs", action="store_true", help="no CUDA graphs")
    add("-lm", "--low_mem", action="store_true", help="shorter chunks: slower prompts, less memory")
    add("-ept", "--experts_per_token", type=int, help="experts each token passes through")
    add("-lq4", "--load_q4", action="store_true", help="quantize float weights to 4 bits while loading")
    add("-fst", "--fast_safetensors", action="store_true", help="ignored")
    add("-ic", "--ignore_compatibility", action="store_true", help="only warn of options that do not fit the model")
    add("-chunk", "--chunk_size", type=int, help="most tokens of a prompt at a time")


def print_options(args: argparse.Namespace) -> None:
    """Print the model folder and every option that is set."""
    options = [
        f"{name}: {value}"
        for name, value in sorted(vars(args).items())
        if name != "model_dir" and name in _names() and value not in (None, False)
    ]
    print(f" -- Model: {args.model_dir}")
    print(f" -- Options: {options}")


def check_args(args: argparse.Namespace) -> None:
    """Raise ConfigFileError unless the folder holds config.json, a tokenizer and weights."""
    if not args.model_dir:
        raise ConfigFileError("no model folder given: use -m <folder>")
    folder = check_model_folder(args.model_dir)
    for names in (("tokenizer.json", "tokenizer.model"), ("*.safetensors",)):
        if not any(any(folder.glob(name)) for name in names):
            raise ConfigFileError(f"Can't find {' or '.join(names)} in {folder}")


def init(
    args: argparse.Namespace,
    quiet: bool = False,
    allow_auto_split: bool = False,
    skip_load: bool = False,
    benchmark: bool = False,
    max_batch_size: int | None = None,
    max_input_len: int | None = None,
    max_output_len: int | None = None,
    progress: bool = False,
) -> tuple[ExLlamaV2, ExLlamaV2Tokenizer]:
    """Build the model and tokenizer that the flags describe. skip_load, and "-gs auto", leave the model unloaded.

    Args:
        args: parsed flags of `add_args`.
        quiet: print nothing.
        allow_auto_split: accept "-gs auto"; the caller must then use model.load_autosplit(cache).
        skip_load: do not load the model.
        benchmark: print the time of loading.
        max_batch_size: overrides the config's.
        max_input_len: overrides the config's.
        max_output_len: overrides the config's.
        progress: draw a bar while loading.

    Returns:
        The model and the tokenizer.

    Raises:
        InputError: "-gs auto" is not allowed, or a flag is invalid.
        ConfigError: the folder is invalid.
    """
    config = ExLlamaV2Config(args.model_dir)
    _apply(args, config)
    for name, value in (
        ("max_batch_size", max_batch_size),
        ("max_input_len", max_input_len),
        ("max_output_len", max_output_len),
    ):
        if value is not None:
            setattr(config, name, value)
    config.arch_compat_overrides(quiet=quiet, warn_only=bool(args.ignore_compatibility))
    model = ExLlamaV2(config)
    if not skip_load:
        post_init_load(model, args, quiet, allow_auto_split, benchmark, progress)
    return model, ExLlamaV2Tokenizer(config)


def post_init_load(
    model: ExLlamaV2,
    args: argparse.Namespace,
    quiet: bool = False,
    allow_auto_split: bool = False,
    benchmark: bool = False,
    progress: bool = False,
) -> None:
    """Load the model as -gs and -tp say; with "-gs auto" it stays unloaded. Arguments and errors as for `init`."""
    if args.gpu_split == "auto" and not allow_auto_split:
        raise InputError("Auto split not allowed: this script does not load with a cache; give GB a device instead")
    if args.gpu_split == "auto" and not args.tensor_parallel:
        return
    split = None if args.gpu_split in (None, "auto") else _split(args.gpu_split)
    if not quiet:
        print(" -- Loading model...")
    load = model.load_tp if args.tensor_parallel else model.load
    with Timer() as timer:
        load(split, progress=progress)
    if benchmark and not quiet:
        print(f" -- Loaded model in {timer.interval:.4f} seconds")


def _apply(args: argparse.Namespace, config: ExLlamaV2Config) -> None:
    if args.rope_yarn is not None:
        if config.alt_rope_method != "yarn":
            config.yarn_rope_original_max_position_embeddings = config.max_seq_len
        config.alt_rope_method = "yarn"
        config.yarn_rope_factor = args.rope_yarn
    overrides: dict[str, Any] = {
        "max_seq_len": args.length,
        "scale_pos_emb": args.rope_scale,
        "scale_alpha_value": args.rope_alpha,
        "num_experts_per_token": args.experts_per_token,
    }
    for name, value in overrides.items():
        if value is not None:
            setattr(config, name, value)
    for name in ("no_flash_attn", "no_xformers", "no_sdpa", "no_graphs"):
        setattr(config, name, getattr(config, name) or bool(getattr(args, name)))
    if args.low_mem:
        config.set_low_mem()
    config.load_in_q4 = config.load_in_q4 or bool(args.load_q4)
    if args.chunk_size is not None:
        config.max_input_len = args.chunk_size
        config.max_attention_size = args.chunk_size**2


def _split(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f'gpu_split is {text!r}, must be "auto" or GB a device separated by commas') from None


def _names() -> set[str]:
    parser = argparse.ArgumentParser(add_help=False)
    add_args(parser)
    return set(vars(parser.parse_args([])))
