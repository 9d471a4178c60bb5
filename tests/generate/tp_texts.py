"""One process of torchrun, or the only one: texts of the bundled model with drafts, as `tp_texts.py FILE [DRAFTS]`.

Writes the texts and the numbers of accepted guesses to FILE.RANK.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from exl_core import (
    ExLlamaV2,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_TP,
    ExLlamaV2Config,
    ExLlamaV2Tokenizer,
    ProcessExchange,
)
from exl_core.execution.sharded.exchange import Exchange
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler
from exl_generate.bundled import default_model_dir, draft_model_dir
from exl_kernels import threads

PROMPTS = ["Once upon a time, a small fox", "One day, an old bear"]


def texts(exchange: Exchange | None, drafts: str, tp: bool = True) -> dict[str, Any]:
    """Return texts and counts; `drafts` is "model" or "ngram"."""
    model = ExLlamaV2(ExLlamaV2Config(default_model_dir()))
    cache: Any
    if tp:
        model.load_tp(exchange=exchange)
        cache = ExLlamaV2Cache_TP(model, ExLlamaV2Cache_Q4, max_seq_len=1024)
    else:
        model.load()
        cache = ExLlamaV2Cache_Q4(model, max_seq_len=1024)
    more: dict[str, Any] = {"use_ngram_draft": True}
    if drafts == "model":
        small = ExLlamaV2(ExLlamaV2Config(draft_model_dir()))
        small.load()
        more = {"draft_model": small, "draft_cache": ExLlamaV2Cache_Q4(small, max_seq_len=1024)}
    generator = ExLlamaV2DynamicGenerator(model, cache, ExLlamaV2Tokenizer(model.config), **more)
    settings = ExLlamaV2Sampler.Settings(temperature=0.8, top_k=40)
    made, last = generator.generate(PROMPTS, 24, gen_settings=settings, seed=5, add_bos=True, return_last_results=True)
    return {"texts": made, "accepted": [result["accepted_draft_tokens"] for result in last]}


if __name__ == "__main__":
    threads.set_num_threads(1)
    group = ProcessExchange(limit=120.0)
    found = texts(group, sys.argv[2])
    Path(f"{sys.argv[1]}.{os.environ['RANK']}").write_text(json.dumps(found))
    group.close()
