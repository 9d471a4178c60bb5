"""A conversation with answers streamed as they are written. Each line of standard input is a message; Ctrl-C ends it.

echo "Tell me a story about a fox." | python examples/streaming_chat.py [MODEL_FOLDER]
"""

import sys
from pathlib import Path

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.bundled import default_model_dir


def main(folder: str | Path) -> None:
    config = ExLlamaV2Config(folder)
    model = ExLlamaV2(config)
    model.load()
    tokenizer = ExLlamaV2Tokenizer(config)
    generator = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=2048), tokenizer)
    settings = ExLlamaV2Sampler.Settings(temperature=0.7)

    messages: list[dict[str, str]] = []
    for line in sys.stdin:
        messages.append({"role": "user", "content": line.strip()})
        # The template ends where the answer begins. What earlier turns computed is found in the prefix cache.
        ids = tokenizer.encode(tokenizer.apply_chat_template(messages), encode_special_tokens=True)
        job = ExLlamaV2DynamicJob(ids, 200, gen_settings=settings, seed=1, stop_conditions=config.eos_token_ids)
        generator.enqueue(job)
        while generator.num_remaining_jobs():
            for result in generator.iterate():
                print(result.get("text", ""), end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": job.full_completion.strip()})


try:
    main(sys.argv[1] if len(sys.argv) > 1 else default_model_dir())
except KeyboardInterrupt:
    sys.exit(130)
