"""The streaming generator: a stream with stop conditions, a full context that is cut and begun again, statistics."""

import sys

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2Sampler, ExLlamaV2StreamingGenerator

config = ExLlamaV2Config(sys.argv[1])
model = ExLlamaV2(config)
model.load()
tokenizer = ExLlamaV2Tokenizer(config)
draft_config = ExLlamaV2Config(sys.argv[2])
draft_model = ExLlamaV2(draft_config)
draft_model.load()

for draft, ngram in ((None, False), (draft_model, False), (None, True)):
    cache = ExLlamaV2Cache(model, max_seq_len=96)
    generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer, draft)
    generator.speculative_ngram = ngram
    generator.set_stop_conditions(["\n\n\n\n", tokenizer.single_id("~~no such piece~~") or tokenizer.eos_token_id])
    settings = ExLlamaV2Sampler.Settings(temperature=0.7, top_k=50, top_p=0.8, token_repetition_penalty=1.01)
    settings.temperature_last = True
    ids = tokenizer.encode("Once upon a time, a fox and a hen", add_bos=True)
    generator.begin_stream_ex(ids, settings)
    restarts, said = 0, ""
    for _ in range(140):
        result = generator.stream_ex()
        said += result["chunk"]
        if generator.full():
            kept = generator.sequence_ids[:, -40:]
            generator.begin_stream_ex(kept, settings)
            restarts += 1
        elif result["eos"]:
            break
    assert restarts >= 1 or result["eos"]
    assert said
    efficiency, accuracy, tokens, drafted, accepted = generator.get_sd_stats()
    assert tokens > 0
    assert 0 <= accepted <= drafted
    generator.reset_sd_stats()
    assert generator.get_sd_stats()[2] == 0
