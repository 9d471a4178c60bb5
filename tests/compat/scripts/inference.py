"""The text-generation workflow: config, model, lazy cache, autosplit, tokenizer, generator; a prompt, a batch."""

import sys

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler

config = ExLlamaV2Config(sys.argv[1])
config.arch_compat_overrides()
model = ExLlamaV2(config)
cache = ExLlamaV2Cache(model, max_seq_len=2048, lazy=True)
model.load_autosplit(cache, progress=False)
tokenizer = ExLlamaV2Tokenizer(config)

generator = ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer)
generator.warmup()

output = generator.generate(prompt="Once upon a time,", max_new_tokens=12, add_bos=True, seed=1)
assert output.startswith("Once upon a time,")
assert len(output) > 25

prompts = ["One day, a cat", "One day, a dog", "The little fox"]
outputs = generator.generate(prompt=prompts, max_new_tokens=12, add_bos=True, seed=1)
assert [text[:12] for text in outputs] == [prompt[:12] for prompt in prompts]

gen_settings = ExLlamaV2Sampler.Settings(token_repetition_penalty=1.05, temperature=0.9, top_k=0, top_p=0.95)
each = [gen_settings, ExLlamaV2Sampler.Settings.greedy(), gen_settings]
outputs, last = generator.generate(
    prompt=prompts,
    max_new_tokens=12,
    gen_settings=each,
    stop_conditions=[tokenizer.eos_token_id, "."],
    completion_only=True,
    add_bos=True,
    return_last_results=True,
)
assert all("." not in text for text in outputs)
assert all(result["eos"] and result["new_tokens"] <= 12 for result in last)
