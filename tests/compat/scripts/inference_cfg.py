"""Classifier-free guidance: pairs of prompts, one settings object per prompt, scales from -1 to 2."""

import sys

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler

config = ExLlamaV2Config(sys.argv[1])
model = ExLlamaV2(config)
model.load()
cache = ExLlamaV2Cache(model, max_seq_len=4096)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)

scales = [-1.0, 0.0, 0.5, 1.0, 2.0]
prompts = [("Once upon a time, a happy cat", "Once upon a time, a sad dog")] * len(scales)
settings = []
for scale in scales:
    gen_settings = ExLlamaV2Sampler.Settings.greedy()
    gen_settings.cfg_scale = scale
    settings.append(gen_settings)
outputs = generator.generate(
    prompt=prompts, max_new_tokens=12, gen_settings=settings, completion_only=True, add_bos=True
)
plain = generator.generate(
    prompt=[prompts[0][1], prompts[0][0]],
    max_new_tokens=12,
    gen_settings=ExLlamaV2Sampler.Settings.greedy(),
    completion_only=True,
    add_bos=True,
)
assert [outputs[1], outputs[3]] == plain
