"""formatron's own integration."""

import sys

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler

from formatron.formatter import FormatterBuilder  # isort: skip
from formatron.integrations.exllamav2 import create_formatter_filter  # isort: skip
from formatron.schemas.dict_inference import infer_mapping  # isort: skip

config = ExLlamaV2Config(sys.argv[1])
model = ExLlamaV2(config)
model.load()
cache = ExLlamaV2Cache(model, max_seq_len=1024)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)

choice = FormatterBuilder()
choice.append_line(f"It is a {choice.choose('cat', 'dog', capture_name='animal')}.")
mapping = FormatterBuilder()
mapping.append_line(f"{mapping.json(infer_mapping({'age': 3}), capture_name='json')}")
outputs = generator.generate(
    prompt=["What is it? ", "As JSON: "],
    max_new_tokens=60,
    gen_settings=ExLlamaV2Sampler.Settings.greedy(),
    filters=[[create_formatter_filter(model, tokenizer, f)] for f in (choice, mapping)],
    completion_only=True,
    add_bos=True,
    stop_conditions=[tokenizer.eos_token_id],
)
assert outputs[0].strip() in ("It is a cat.", "It is a dog."), outputs
assert "age" in outputs[1], outputs
