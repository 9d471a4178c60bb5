"""Questions about an image: it is encoded once, is in the prompt by an alias, and comes from the prefix cache.

python examples/image_question.py MODEL_FOLDER IMAGE QUESTION [QUESTION ...]

The model: Qwen2-VL, Qwen2.5-VL, Gemma 3, Mistral 3, or Llava with Pixtral, quantized or not.
"""

import sys

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer, ExLlamaV2VisionTower
from exl_core.vision import open_image
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler

if len(sys.argv) < 4:
    sys.exit(__doc__)
folder, file, *questions = sys.argv[1:]

config = ExLlamaV2Config(folder)
config.max_seq_len = min(config.max_seq_len, 8192)
tower = ExLlamaV2VisionTower(config)
tower.load()
model = ExLlamaV2(config)
model.load()
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=8192), tokenizer)

image = tower.get_image_embeddings(model, tokenizer, open_image(file))
width, height = image.metadata["original_size"]
print(f"{width} x {height} pixels are {image.length} tokens at {image.positions_taken} positions")

for question in questions:
    text = tokenizer.apply_chat_template([{"role": "user", "content": f"{image.text_alias}{question}"}])
    ids = tokenizer.encode(text, encode_special_tokens=True, embeddings=[image])
    job = ExLlamaV2DynamicJob(
        ids,
        200,
        gen_settings=ExLlamaV2Sampler.Settings.greedy(),
        stop_conditions=config.eos_token_ids,
        embeddings=[image],
    )
    generator.enqueue(job)
    print(f"\n{question}")
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            print(result.get("text", ""), end="", flush=True)
    print(f"\n({result['cached_tokens']} of {result['prompt_tokens']} prompt tokens were in the cache)")
