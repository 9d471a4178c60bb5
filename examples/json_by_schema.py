"""Output that is JSON of a given schema, whatever the model would like to say. Needs "./packages/exl-filters[grammar]".

python examples/json_by_schema.py [MODEL_FOLDER]
"""

import json
import sys

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_filters import ExLlamaV2GrammarFilter
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler
from exl_generate.bundled import default_model_dir

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "likes": {"type": "array", "items": {"enum": ["berries", "fish", "honey"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}

config = ExLlamaV2Config(sys.argv[1] if len(sys.argv) > 1 else default_model_dir())
model = ExLlamaV2(config)
model.load()
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=1024), tokenizer)

grammar = ExLlamaV2GrammarFilter(model, tokenizer, json_schema=json.dumps(SCHEMA))
text = generator.generate(
    "A bear as JSON: ",
    max_new_tokens=120,
    gen_settings=ExLlamaV2Sampler.Settings(temperature=0.8),
    seed=1,
    filters=[grammar],
    stop_conditions=tokenizer.eos_token_ids,
    completion_only=True,
    add_bos=True,
)
print(json.dumps(json.loads(text), indent=2))
