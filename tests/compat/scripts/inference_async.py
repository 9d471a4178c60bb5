"""The async wrapper: several jobs at once, one of them cancelled early."""

import asyncio
import sys

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGeneratorAsync, ExLlamaV2DynamicJobAsync

config = ExLlamaV2Config(sys.argv[1])
model = ExLlamaV2(config)
model.load()
cache = ExLlamaV2Cache(model, max_seq_len=2048)
tokenizer = ExLlamaV2Tokenizer(config)


async def main():
    generator = ExLlamaV2DynamicGeneratorAsync(model=model, cache=cache, tokenizer=tokenizer)

    async def run_job(prompt, cancel_after=None):
        job = ExLlamaV2DynamicJobAsync(generator, input_ids=tokenizer.encode(prompt, add_bos=True), max_new_tokens=24)
        text, tokens = "", 0
        async for result in job:
            text += result.get("text", "")
            tokens += result["stage"] == "streaming"
            if cancel_after is not None and tokens >= cancel_after:
                await job.cancel()
                break
        return text

    short, *others = await asyncio.gather(
        run_job("Once upon a time,", 3), run_job("One day, a cat"), run_job("The little fox")
    )
    assert all(len(text) > len(short) for text in others)
    await generator.close()


asyncio.run(main())
