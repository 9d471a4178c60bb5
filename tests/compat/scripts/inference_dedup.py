"""Eight prompts with a long common prefix in a cache that would not hold eight copies of it."""

import sys

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob

config = ExLlamaV2Config(sys.argv[1])
model = ExLlamaV2(config)
model.load()
cache = ExLlamaV2Cache(model, max_seq_len=2048)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)

prefix = "Once upon a time, there was a little fox who lived in the woods. " * 34
jobs = [
    ExLlamaV2DynamicJob(input_ids=tokenizer.encode(prefix + f"On day {i},", add_bos=True), max_new_tokens=8)
    for i in range(8)
]
for job in jobs:
    generator.enqueue(job)
most, done = 0, []
while generator.num_remaining_jobs():
    done += [result for result in generator.iterate() if result["eos"]]
    most = max(most, len(generator.active_jobs))
assert len(done) == 8
assert most >= 4
assert sum(result["cached_pages"] for result in done) >= 2
