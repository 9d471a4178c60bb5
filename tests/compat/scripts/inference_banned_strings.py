"""Banned strings: what is suppressed is reported, and another way is found."""

import sys

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler

config = ExLlamaV2Config(sys.argv[1])
model = ExLlamaV2(config)
model.load()
cache = ExLlamaV2Cache(model, max_seq_len=1024)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)

banned = ["there was", "lived", "named"]
job = ExLlamaV2DynamicJob(
    input_ids=tokenizer.encode("Once upon a time,", add_bos=True),
    max_new_tokens=60,
    min_new_tokens=40,
    stop_conditions=[tokenizer.eos_token_id],
    banned_strings=banned,
    gen_settings=ExLlamaV2Sampler.Settings.greedy(),
)
generator.enqueue(job)
suppressed, text = [], ""
while generator.num_remaining_jobs():
    for result in generator.iterate():
        if "suppressed_text" in result:
            suppressed.append(result["suppressed_text"])
        text += result.get("text", "")
assert suppressed
assert not any(word in text.lower() for word in banned)
