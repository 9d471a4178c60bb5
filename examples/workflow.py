"""The whole way in twenty lines: folder, model, cache, tokenizer, generator, text.

python examples/workflow.py [MODEL_FOLDER]
"""

import sys

from exl_core import ExLlamaV2, ExLlamaV2Cache_Q8, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler
from exl_generate.bundled import default_model_dir

config = ExLlamaV2Config(sys.argv[1] if len(sys.argv) > 1 else default_model_dir())
model = ExLlamaV2(config)
cache = ExLlamaV2Cache_Q8(model, max_seq_len=2048, lazy=True)
model.load_autosplit(cache)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)

settings = ExLlamaV2Sampler.Settings(temperature=0.9, top_p=0.95)
prompts = ["Once upon a time, a small fox", "One day, an old bear"]
stops = tokenizer.eos_token_ids
for text in generator.generate(prompts, 60, gen_settings=settings, seed=1, stop_conditions=stops, add_bos=True):
    print(text, end="\n\n")
