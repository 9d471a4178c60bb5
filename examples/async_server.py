"""The inside of a server: requests come in from many clients, run together, and some clients hang up.

python examples/async_server.py [MODEL_FOLDER]
"""

import asyncio
import random
import sys
from pathlib import Path

from exl_core import ExLlamaV2, ExLlamaV2Cache_Q4, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_generate import ExLlamaV2DynamicGeneratorAsync, ExLlamaV2DynamicJobAsync
from exl_generate.bundled import default_model_dir


async def answer(
    generator: ExLlamaV2DynamicGeneratorAsync, tokenizer: ExLlamaV2Tokenizer, prompt: str, patience: int
) -> str:
    """One request. A client that hangs up has its job cancelled: its pages are free for others at once."""
    ids = tokenizer.encode(prompt, add_bos=True)
    job = ExLlamaV2DynamicJobAsync(generator, ids, 40, stop_conditions=tokenizer.eos_token_ids, max_rq_tokens=16)
    text, reason = "", "client hung up"
    async for result in job:
        text += result.get("text", "")
        if result["eos"]:
            reason = result["eos_reason"]
        elif len(text) > patience:
            await job.cancel()
            break
    return f"{reason:14} {prompt}{text[:40]!r}"


async def main(folder: str | Path) -> None:
    config = ExLlamaV2Config(folder)
    model = ExLlamaV2(config)
    model.load()
    tokenizer = ExLlamaV2Tokenizer(config)
    cache = ExLlamaV2Cache_Q4(model, max_seq_len=4096)
    dice = random.Random(1)
    async with ExLlamaV2DynamicGeneratorAsync(model, cache, tokenizer, max_batch_size=8) as generator:
        requests = []
        for i in range(24):
            patience = dice.choice([10, 1000, 1000])
            prompt = dice.choice(["Once upon a time,", "One day,", "The old bear"])
            requests.append(asyncio.create_task(answer(generator, tokenizer, prompt, patience), name=str(i)))
            await asyncio.sleep(0.01)  # clients come when they like
        for request in asyncio.as_completed(requests):
            print(await request)


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else default_model_dir()))
