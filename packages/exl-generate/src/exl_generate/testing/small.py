"""A small vocabulary and helpers to make generators, jobs and runs on the scripted model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from exl_generate.dynamic import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exl_generate.dynamic.draft_length import FixedDraftLength
from exl_generate.sampling import Settings
from exl_generate.testing.driving import check_pages, drain
from exl_generate.testing.scripted import ScriptedCache, ScriptedConfig, ScriptedLora, ScriptedModel, ScriptedTokenizer

__all__ = [
    "EOS",
    "PAGE",
    "PIECES",
    "TOKENIZER",
    "VOCAB",
    "AsAsked",
    "ids",
    "job",
    "make",
    "naive",
    "run",
    "says",
    "speculate",
]

#: Letters, some punctuation, a few longer pieces, and the single bytes of two characters.
PIECES: list[str | bytes] = [*map(chr, range(97, 123)), *" .,\n!{}", "the", " the", "\nuser", "xy"]
PIECES += [bytes([b]) for b in "é😀".encode()]
TOKENIZER = ScriptedTokenizer(PIECES)
VOCAB = TOKENIZER.get_vocab_size()
EOS = TOKENIZER.eos_token_id
PAGE = 16

Script = Callable[[list[int]], int | None]


def make(script: Script | None = None, cache_tokens: int = 512, **kw: Any) -> ExLlamaV2DynamicGenerator:
    """Return a generator on the scripted model, with pages of 16 tokens; `model_len` is the model's max_seq_len."""
    model = ScriptedModel(ScriptedConfig(vocab_size=VOCAB, max_seq_len=kw.pop("model_len", 256)), script)
    cache = ScriptedCache(model, max_seq_len=cache_tokens)
    kw.setdefault("page_size", PAGE)
    return ExLlamaV2DynamicGenerator(model, cache, TOKENIZER, **kw)


AsAsked = FixedDraftLength


def speculate(how: str, script: Script | None = None, cache_tokens: int = 512, **kw: Any) -> ExLlamaV2DynamicGenerator:
    """Return a generator that drafts in every step: `how` is "ngram", or "model" for a draft model with the same
    script.
    """
    config = ScriptedConfig(vocab_size=VOCAB, max_seq_len=256)
    model, draft = ScriptedModel(config, script), ScriptedModel(config, script)
    cache = ScriptedCache(model, max_seq_len=cache_tokens)
    kw |= {"use_ngram_draft": True} if how == "ngram" else {}
    if how == "model":
        kw |= {"draft_model": draft, "draft_cache": ScriptedCache(draft, max_seq_len=cache_tokens)}
    generator = ExLlamaV2DynamicGenerator(model, cache, TOKENIZER, page_size=PAGE, **kw)
    generator.drafter.length = AsAsked(generator.num_draft_tokens)
    return generator


def ids(text: str) -> torch.Tensor:
    """Return the ids of a text, int64 [1, n]."""
    return TOKENIZER.encode(text)


def says(*texts: str | int, after: int) -> Script:
    """Return a script that answers a prompt of `after` tokens with these texts or ids, one token each.

    It does not depend on the sampled tokens.
    """
    answer = [t if isinstance(t, int) else int(i) for t in texts for i in ([t] if isinstance(t, int) else ids(t)[0])]
    return lambda context: answer[len(context) - after] if 0 <= len(context) - after < len(answer) else None


def job(text: str, new: int = 8, **kw: Any) -> ExLlamaV2DynamicJob:
    """Return a greedy request."""
    kw.setdefault("gen_settings", Settings.greedy())
    return ExLlamaV2DynamicJob(ids(text), new, **kw)


def run(generator: ExLlamaV2DynamicGenerator, one: ExLlamaV2DynamicJob) -> list[dict[str, Any]]:
    """Return the results of a job that runs alone; the pages are checked when it is done."""
    generator.enqueue(one)
    results = drain(generator)[one]
    check_pages(generator)
    return results


def naive(
    generator: ExLlamaV2DynamicGenerator, prompt: list[int], new: int, loras: Sequence[ScriptedLora] = ()
) -> list[int]:
    """Return the greedy continuation computed from the model's definition."""
    context = list(prompt)
    for _ in range(new):
        model: Any = generator.model
        context.append(int(model.logits(np.array(context), loras).argmax()))
    return context[len(prompt) :]
