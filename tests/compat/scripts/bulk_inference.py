"""Many jobs at once: a large batch of one-token steps, results told apart by identifier."""

import sys

from exllamav2 import ExLlamaV2, ExLlamaV2Cache_Q4, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler

config = ExLlamaV2Config(sys.argv[1])
model = ExLlamaV2(config)
model.load()
cache = ExLlamaV2Cache_Q4(model, max_seq_len=256 * 64)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer, max_batch_size=1024, max_q_size=1)

gen_settings = ExLlamaV2Sampler.Settings(temperature=0.8)
for i in range(150):
    prompt = f"The {('cat', 'dog', 'fox')[i % 3]} said"
    generator.enqueue(
        ExLlamaV2DynamicJob(
            tokenizer.encode(prompt, add_bos=True),
            max_new_tokens=6,
            gen_settings=gen_settings,
            seed=i,
            identifier=(i, prompt),
        )
    )
completions = {}
while generator.num_remaining_jobs():
    for result in generator.iterate():
        if result["eos"]:
            completions[result["identifier"]] = result["full_completion"]
assert len(completions) == 150
