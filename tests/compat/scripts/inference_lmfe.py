"""lm-format-enforcer through the wrapper that exllamav2's documentation gives, and through its own class."""

import json
import sys
from functools import lru_cache

from lmformatenforcer import JsonSchemaParser
from lmformatenforcer.integrations.exllamav2 import (
    ExLlamaV2TokenEnforcerFilter as OwnFilter,
)
from lmformatenforcer.integrations.exllamav2 import build_token_enforcer_tokenizer_data
from lmformatenforcer.tokenenforcer import TokenEnforcer

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler
from exllamav2.generator.filters import ExLlamaV2Filter, ExLlamaV2PrefixFilter


@lru_cache(10)
def _get_lmfe_tokenizer_data(tokenizer):
    return build_token_enforcer_tokenizer_data(tokenizer)


class ExLlamaV2TokenEnforcerFilter(ExLlamaV2Filter):
    def __init__(self, model, tokenizer, character_level_parser):
        super().__init__(model, tokenizer)
        self.token_enforcer = TokenEnforcer(_get_lmfe_tokenizer_data(tokenizer), character_level_parser)
        self.token_sequence = []

    def begin(self, prefix_str=""):
        self.token_sequence = []

    def feed(self, token):
        self.token_sequence.append(int(token[0][0]))

    def next(self):
        allowed = self.token_enforcer.get_allowed_tokens(self.token_sequence)
        return sorted(getattr(allowed, "allowed_tokens", allowed)), []

    def use_background_worker(self):
        return True


schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
config = ExLlamaV2Config(sys.argv[1])
model = ExLlamaV2(config)
model.load()
cache = ExLlamaV2Cache(model, max_seq_len=2048)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)

filters = [
    [
        ExLlamaV2TokenEnforcerFilter(model, tokenizer, JsonSchemaParser(schema)),
        ExLlamaV2PrefixFilter(model, tokenizer, ["{", " {"]),
    ],
    [OwnFilter(JsonSchemaParser(schema), tokenizer)],
    None,
]
outputs, last = generator.generate(
    prompt=["A cat as JSON: ", "A dog as JSON: ", "A fox is"],
    max_new_tokens=80,
    gen_settings=ExLlamaV2Sampler.Settings.greedy(),
    filters=filters,
    filter_prefer_eos=True,
    completion_only=True,
    stop_conditions=[tokenizer.eos_token_id],
    add_bos=True,
    return_last_results=True,
)
for output in outputs[:2]:
    assert set(json.loads(output)) == {"name", "age"}, output
assert last[0]["new_tokens"] / max(last[0]["time_generate"], 1e-9) > 0
