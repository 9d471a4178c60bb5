"""A draft model, and n-gram guesses: fewer passes, the same text."""

import sys

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler


def load(folder):
    config = ExLlamaV2Config(folder)
    model = ExLlamaV2(config)
    model.load()
    return config, model, ExLlamaV2Cache(model, max_seq_len=1024)


config, model, cache = load(sys.argv[1])
_, draft_model, draft_cache = load(sys.argv[2])
tokenizer = ExLlamaV2Tokenizer(config)
texts = []
for kwargs in (
    {},
    {"draft_model": draft_model, "draft_cache": draft_cache, "num_draft_tokens": 3},
    {"use_ngram_draft": True, "max_ngram": 4},
):
    generator = ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer, **kwargs)
    text, last = generator.generate(
        "Once upon a time,",
        max_new_tokens=40,
        gen_settings=ExLlamaV2Sampler.Settings.greedy(),
        add_bos=True,
        return_last_results=True,
    )
    texts.append(text)
    if kwargs:
        assert last["accepted_draft_tokens"] + last["rejected_draft_tokens"] > 0
assert texts == texts[:1] * 3
