"""A video as a list of frames."""

import sys

from PIL import Image

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer, ExLlamaV2VisionTower
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler

config = ExLlamaV2Config(sys.argv[1])
config.max_seq_len = 2048
vision_model = ExLlamaV2VisionTower(config)
vision_model.load()
model = ExLlamaV2(config)
model.load()
cache = ExLlamaV2Cache(model, max_seq_len=2048)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer)

frames = [Image.open(sys.argv[2]).rotate(5 * i) for i in range(6)]
video = vision_model.get_video_embeddings(
    model=model, tokenizer=tokenizer, video=frames, text_alias="{{VIDEO}}", embeddings_cpu=True
)
assert video.thw_grid[0] == 3
output = generator.generate(
    prompt="{{VIDEO}} What happens?",
    max_new_tokens=12,
    encode_special_tokens=True,
    gen_settings=ExLlamaV2Sampler.Settings.greedy(),
    embeddings=[video],
)
assert output
