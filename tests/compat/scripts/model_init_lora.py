"""Command-line glue and an adapter switched between generations."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from exllamav2 import ExLlamaV2Cache, ExLlamaV2Lora, model_init
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler

parser = argparse.ArgumentParser()
model_init.add_args(parser)
args = parser.parse_args(["-m", sys.argv[1], "-l", "1024"])
model_init.check_args(args)
model_init.print_options(args)
model, tokenizer = model_init.init(args, quiet=True)
cache = ExLlamaV2Cache(model)
generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)

with tempfile.TemporaryDirectory() as folder:
    tensors = {}
    for layer in range(model.config.num_hidden_layers):
        key = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{key}.lora_A.weight"] = torch.ones(2, model.config.hidden_size) * 0.1
        tensors[f"{key}.lora_B.weight"] = torch.ones(model.config.hidden_size, 2) * 0.1
    save_file(tensors, Path(folder) / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"]}
    (Path(folder) / "adapter_config.json").write_text(json.dumps(about))
    lora = ExLlamaV2Lora.from_directory(model, folder)

settings = ExLlamaV2Sampler.Settings.greedy()
texts = []
for loras in (None, lora, [lora], None):
    generator.set_loras(loras)
    texts.append(generator.generate("Once upon a time,", max_new_tokens=20, gen_settings=settings, add_bos=True))
assert texts[0] == texts[3] != texts[1] == texts[2]
