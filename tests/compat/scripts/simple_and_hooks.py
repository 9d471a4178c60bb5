"""The base generator, a custom filter in the documented form, and a post-sampling hook."""

import sys

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2BaseGenerator, ExLlamaV2Sampler
from exllamav2.generator.base import ExLlamaV2Filter


class OneOf(ExLlamaV2Filter):
    def __init__(self, model, tokenizer, words):
        super().__init__(model, tokenizer)
        self.ids = {int(tokenizer.encode(word, add_bos=False)[0, 0]) for word in words}

    def begin(self, prefix_str):
        pass

    def feed(self, token):
        pass

    def next(self):
        return self.ids, set()


config = ExLlamaV2Config()
config.model_dir = sys.argv[1]
config.prepare()
model = ExLlamaV2(config)
model.load()
cache = ExLlamaV2Cache(model, batch_size=2)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2BaseGenerator(model, cache, tokenizer)
generator.warmup()
settings = ExLlamaV2Sampler.Settings(temperature=0.85, top_k=50, top_p=0.8, token_repetition_penalty=1.01)
settings.disallow_tokens(tokenizer, [tokenizer.eos_token_id])
output = generator.generate_simple("Our story begins in", settings, 12, seed=1234)
assert output.startswith("Our story begins in")
assert generator.sequence_ids.shape[0] == 1

words = OneOf(model, tokenizer, ["cat", "dog"])
filtered = generator.generate_simple("Pets: ", settings, 6, filters=[words], completion_only=True)
ids = set(tokenizer.encode(filtered, add_bos=False)[0].tolist())
assert ids

seen = []


def hook(result):
    seen.append((int(result.sampled_token), float(result.sampled_prob)))


settings = settings.clone()
settings.post_sampling_hooks = [hook]
outputs = generator.generate_simple(["One day,", "Far away, in a land"], settings, 5, seed=7)
assert len(outputs) == 2
assert len(seen) == 10
