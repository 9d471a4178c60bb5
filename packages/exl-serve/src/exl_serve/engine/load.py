"""Load the generator of a model's configuration."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from exl_serve.config.model import ModelConfig
from exl_serve.engine.client import ModelCard
from exl_serve.engine.vision import Vision
from exl_serve.errors import ServeError

__all__ = ["Loaded", "cache_tokens", "load"]

log = logging.getLogger(__name__)

MOST_CACHE_TOKENS = 1 << 18
"""Largest cache where the configuration sets no size."""
PAGE = 256
STEP_SECONDS = (0.00149, 0.00413)
"""Seconds of a step with 1 and with 64 sequences, for the paced test engine: an 8B model on an H200."""


class Loaded(NamedTuple):
    """The generator and model card that an engine process serves."""

    generator: Any
    card: ModelCard
    #: least seconds of a step by its number of jobs, for the paced test engine
    floor: Callable[[int], float] | None
    #: takes images
    vision: Vision | None = None


def load(config: ModelConfig, report: Callable[[int, int], None] | None = None) -> Loaded:
    """Load the weights of a model; calls `report(done, modules)`. Raises ServeError."""
    from exl_core import ExLlamaV2Config
    from exl_core.device import using_devices

    with using_devices(config.device, "device"):
        folder = Path(config.path)
        described = ExLlamaV2Config(str(folder))
        if config.max_seq_len is not None:
            if config.max_seq_len > described.max_seq_len:
                raise ServeError.invalid(
                    f"max_seq_len is {config.max_seq_len}, the model's is {described.max_seq_len}", "max_seq_len"
                )
            described.max_seq_len = config.max_seq_len
        described.max_decode_batch = config.max_batch_size
        vision: Vision | None = None
        if config.engine == "model":
            generator, vision = _loaded(config, described, report)
        else:
            generator = _scripted(config, described)
    card = _card(config, described, generator, folder, vision is not None)
    return Loaded(generator, card, _pace if config.engine == "paced" else None, vision)


def _loaded(
    config: ModelConfig, described: Any, report: Callable[[int, int], None] | None
) -> tuple[Any, Vision | None]:
    from exl_core import ExLlamaV2, ExLlamaV2Config, ExLlamaV2Tokenizer
    from exl_core.device import devices
    from exl_generate import ExLlamaV2DynamicGenerator
    from exl_generate.cli.models import CACHES, text_drafts
    from exl_generate.draft_vocabulary import check_draft_tokenizer

    model, tokenizer = ExLlamaV2(described), ExLlamaV2Tokenizer(described)
    small = None if config.draft is None else ExLlamaV2(ExLlamaV2Config(config.draft))
    if small is not None:
        small.config.max_decode_batch = config.max_batch_size
        check_draft_tokenizer(tokenizer, ExLlamaV2Tokenizer(small.config))
    tower = _tower(config, described)  # before the cache, which takes what is left
    kind = CACHES[config.cache]
    tokens = cache_tokens(config, described)
    if len(devices()) > 1:
        cache = kind(model, max_seq_len=tokens, lazy=True)
        model.load_autosplit(cache, callback=report)
    else:
        model.load(callback=report)
        cache = kind(model, max_seq_len=tokens)
    extra: dict[str, Any] = text_drafts(model) if config.ngram else {}
    if small is not None:
        small.load()
        extra |= {"draft_model": small, "draft_cache": kind(small, max_seq_len=tokens)}
    generator = ExLlamaV2DynamicGenerator(
        model,
        cache,
        tokenizer,
        max_batch_size=config.max_batch_size,
        max_chunk_size=config.max_chunk_size,
        target_step_seconds=_target_seconds(config, model),
        prompt_wait_seconds=_wait_seconds(config, model),
        **extra,
    )
    generator.warmup()
    return generator, None if tower is None else Vision(tower, model, tokenizer)


def _tower(config: ModelConfig, described: Any) -> Any:
    """Return the loaded image encoder; None where the model has none that is supported here."""
    from exl_core import ExLlamaV2VisionTower
    from exl_core.errors import ConfigFileError, UnsupportedError

    if described.arch.vision is None or not config.vision:
        return None
    if find_spec("PIL") is None:
        log.warning("%s takes text only: images need Pillow (pip install pillow)", config.id)
        return None
    try:
        tower = ExLlamaV2VisionTower(described)
        tower.load()
    except (UnsupportedError, ConfigFileError) as error:
        log.warning("%s takes text only: %s", config.id, error)
        return None
    return tower


def cache_tokens(config: ModelConfig, described: Any) -> int:
    """Return the cache's size in tokens, in whole pages: as configured, else a full context for every sequence, or what
    fits.
    """
    asked = config.cache_tokens
    if asked is not None:
        return -(-asked // PAGE) * PAGE
    from exl_core.loading.plan import plan

    wanted = min(config.max_batch_size * described.max_seq_len, max(MOST_CACHE_TOKENS, described.max_seq_len))
    most = plan(described, cache=config.cache, cache_tokens=PAGE).max_cache_tokens
    if most is not None:
        wanted = min(wanted, int(0.9 * most))
    return max(PAGE, int(wanted) // PAGE * PAGE)


def _scripted(config: ModelConfig, described: Any) -> Any:
    """Return a test engine: a hash function instead of the weights; everything else is real."""
    from exl_core import ExLlamaV2Tokenizer
    from exl_generate import ExLlamaV2DynamicGenerator
    from exl_generate.testing import ScriptedCache, ScriptedConfig, ScriptedModel

    small = ScriptedConfig(
        vocab_size=described.vocab_size,
        max_seq_len=described.max_seq_len,
        max_input_len=2048,
        max_batch_size=config.max_batch_size,
    )
    model = ScriptedModel(small, records=False)
    tokens = config.cache_tokens or min(MOST_CACHE_TOKENS, config.max_batch_size * described.max_seq_len)
    cache = ScriptedCache(model, max_seq_len=-(-tokens // PAGE) * PAGE)
    return ExLlamaV2DynamicGenerator(
        model,
        cache,
        ExLlamaV2Tokenizer(described),
        max_batch_size=config.max_batch_size,
        max_chunk_size=config.max_chunk_size,
        target_step_seconds=_target_seconds(config, model),
        prompt_wait_seconds=_wait_seconds(config, model),
    )


def _target_seconds(config: ModelConfig, model: Any) -> float | None:
    if config.target_itl and model.in_lockstep:
        raise ServeError.invalid(
            f"target_itl is {config.target_itl}, but {config.id} runs in several processes, whose clocks differ; "
            "set it to 0 and a smaller max_chunk_size",
            "target_itl",
        )
    return config.target_itl or None


def _wait_seconds(config: ModelConfig, model: Any) -> float:
    if config.prompt_wait and model.in_lockstep:
        raise ServeError.invalid(
            f"prompt_wait is {config.prompt_wait}, but {config.id} runs in several processes, whose clocks differ; "
            "set it to 0",
            "prompt_wait",
        )
    return config.prompt_wait


def _pace(jobs: int) -> float:
    one, many = STEP_SECONDS
    return one + (many - one) * min(max(jobs - 1, 0), 63) / 63


def _card(config: ModelConfig, described: Any, generator: Any, folder: Path, images: bool) -> ModelCard:
    from exl_generate import __version__ as engine_version

    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.iterdir()):
        # Names, sizes and headers: a safetensors header has every tensor's shape and offset.
        if file.suffix in (".safetensors", ".json") and file.is_file():
            digest.update(f"{file.name} {file.stat().st_size}".encode())
            with open(file, "rb") as opened:
                digest.update(opened.read(1 << 20))
    digest.update(f"{config.cache} {engine_version}".encode())
    ids = [*described.eos_token_ids, generator.tokenizer.eos_token_id]
    return ModelCard(
        id=config.id,
        folder=str(folder),
        max_seq_len=generator.max_seq_len,
        max_batch_size=generator.max_batch_size,
        cache_tokens=generator.max_total_tokens,
        vocab_size=described.vocab_size,
        eos_ids=tuple(sorted({i for i in ids if i is not None and i >= 0})),
        digest=digest.hexdigest(),
        quantization=_quantization(folder),
        cache_format=config.cache,
        modalities=("text", "image") if images else ("text",),
        created=int(folder.stat().st_mtime),
        sampling_defaults=_defaults(folder, config),
        page_size=generator.page_size,
        namespace=generator.namespace_of(()),
    )


def _quantization(folder: Path) -> str:
    found = _json(folder / "config.json").get("quantization_config")
    if not isinstance(found, dict):
        return "float"
    bits = found.get("bits")
    return f"{found.get('quant_method', '?')}{'' if bits is None else f' {bits} bpw'}"


def _defaults(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """Return the defaults of generation_config.json, then of the server's configuration, by the names of `Sampling`."""
    said = _json(folder / "generation_config.json")
    found: dict[str, Any] = {}
    if said.get("do_sample", True):
        names = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
        names["repetition_penalty"] = "token_repetition_penalty"
        for theirs, ours in names.items():
            value = said.get(theirs)
            if isinstance(value, int | float) and not isinstance(value, bool):
                found[ours] = int(value) if ours == "top_k" else float(value)
    return found | dict(config.sampling)


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
