"""Images by their aliases in a prompt: through generate(), and through a job; the second finds them in the cache."""

import sys

from PIL import Image

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer, ExLlamaV2VisionTower
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler

config = ExLlamaV2Config(sys.argv[1])
config.max_seq_len = 2048
vision_model = ExLlamaV2VisionTower(config)
vision_model.load(progress=True)
model = ExLlamaV2(config)
cache = ExLlamaV2Cache(model, lazy=True, max_seq_len=2048)
model.load_autosplit(cache, progress=True)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer)

image_embeddings = [
    vision_model.get_image_embeddings(model=model, tokenizer=tokenizer, image=Image.open(file), text_alias=alias)
    for alias, file in (("{{IMAGE_1}}", sys.argv[2]), ("{{IMAGE_2}}", sys.argv[3]))
]
for embedding in image_embeddings:
    first, last = embedding.get_vision_token_range()
    assert first > embedding.first_index
    assert last == embedding.first_index + embedding.length - embedding.post_tokens
    assert embedding.get_size_in_bytes() > 0
    assert embedding.metadata["patches_size"][0] > 0

prompt = "{{IMAGE_1}}\n{{IMAGE_2}}\nDescribe both."
output = generator.generate(
    prompt=prompt,
    max_new_tokens=16,
    add_bos=False,
    encode_special_tokens=True,
    decode_special_tokens=True,
    gen_settings=ExLlamaV2Sampler.Settings.greedy(),
    embeddings=image_embeddings,
)
assert isinstance(output, str)
assert output

input_ids = tokenizer.encode(prompt, add_bos=False, encode_special_tokens=True, embeddings=image_embeddings)
job = ExLlamaV2DynamicJob(
    input_ids=input_ids,
    max_new_tokens=16,
    decode_special_tokens=True,
    gen_settings=ExLlamaV2Sampler.Settings.greedy(),
    embeddings=image_embeddings,
)
generator.enqueue(job)
text, cached = "", 0
while generator.num_remaining_jobs():
    for result in generator.iterate():
        text += result.get("text", "")
        cached = result.get("cached_tokens", cached)
assert output.endswith(text)
assert cached >= sum(embedding.length for embedding in image_embeddings)
