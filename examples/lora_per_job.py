"""Adapters belong to jobs: requests with and without one run side by side, each with its own part of the prefix cache.

python examples/lora_per_job.py [MODEL_FOLDER ADAPTER_FOLDER]

Without arguments: the bundled model, and an adapter of random numbers made on the spot.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Lora, ExLlamaV2Tokenizer
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.bundled import default_model_dir


def random_adapter(config: ExLlamaV2Config, folder: Path) -> None:
    """The files that PEFT writes, with rank 8 on every query projection."""
    tensors = {}
    for layer in range(config.num_hidden_layers):
        key = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{key}.lora_A.weight"] = torch.randn(8, config.hidden_size) * 0.2
        tensors[f"{key}.lora_B.weight"] = torch.randn(config.hidden_size, 8) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(about))


config = ExLlamaV2Config(sys.argv[1] if len(sys.argv) > 1 else default_model_dir())
model = ExLlamaV2(config)
model.load()
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=2048), tokenizer)

with tempfile.TemporaryDirectory() as name:
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else name)
    if len(sys.argv) < 3:
        torch.manual_seed(0)
        random_adapter(config, folder)
    strong = ExLlamaV2Lora.from_directory(model, str(folder))
    weak = ExLlamaV2Lora.from_directory(model, str(folder), lora_scaling=0.25)

ids = tokenizer.encode("Once upon a time, a small fox", add_bos=True)
greedy = ExLlamaV2Sampler.Settings.greedy()
adapters: dict[str, list[ExLlamaV2Lora]] = {"no adapter": [], "a quarter of it": [weak], "all of it": [strong]}
for title, loras in adapters.items():
    generator.enqueue(ExLlamaV2DynamicJob(ids, 24, gen_settings=greedy, loras=loras, identifier=title))
while generator.num_remaining_jobs():
    for result in generator.iterate():
        if result["eos"]:
            print(f"{result['identifier']}: {result['full_completion']}")
