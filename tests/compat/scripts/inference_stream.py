"""Jobs streamed by hand: enqueue, iterate, healing, the final result, and the output fed back as context."""

import sys

import torch

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler

config = ExLlamaV2Config(sys.argv[1])
model = ExLlamaV2(config)
model.load()
cache = ExLlamaV2Cache(model, max_seq_len=2048)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)

context = tokenizer.encode("Once upon a time, there was a gir", add_bos=True)
for turn in range(2):
    job = ExLlamaV2DynamicJob(
        input_ids=context,
        max_new_tokens=20,
        token_healing=turn == 0,
        decode_special_tokens=False,
        stop_conditions=[tokenizer.eos_token_id],
        gen_settings=ExLlamaV2Sampler.Settings(temperature=0.8, top_p=0.9),
        identifier="stream",
    )
    generator.enqueue(job)
    new_ids = torch.empty((1, 0), dtype=torch.long)
    text, eos = "", False
    while not eos:
        for result in generator.iterate():
            assert result["identifier"] == "stream"
            if result["stage"] == "streaming":
                text += result.get("text", "")
                new_ids = torch.cat((new_ids, result.get("token_ids", new_ids[:, :0])), dim=-1)
                if result["eos"]:
                    eos = True
                    assert text == result["full_completion"]
                    assert result["eos_reason"] in ("stop_token", "max_new_tokens")
                    assert result["prompt_tokens"] == context.shape[-1]
                    assert min(result[k] for k in ("time_enqueued", "time_prefill", "time_generate")) >= 0
                    if turn == 1:
                        assert result["cached_tokens"] > 0
    if turn == 0:
        context = context[:, :-1]
    context = torch.cat((context, new_ids), dim=-1)
