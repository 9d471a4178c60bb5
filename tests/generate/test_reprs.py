"""The repr of model, cache and generators is one short line."""

from __future__ import annotations

from pathlib import Path

from exl_core import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_TP,
    ExLlamaV2Config,
    ExLlamaV2Tokenizer,
)
from exl_generate import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
    ExLlamaV2StreamingGenerator,
)

FOLDER = Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5"


def test_each_repr_is_one_line_with_the_main_facts() -> None:
    config = ExLlamaV2Config(str(FOLDER))
    config.max_seq_len = 512
    model = ExLlamaV2(config)
    about = f"pylib-4m-exl2-4.5: {config.architecture}, {config.num_hidden_layers} layers, "
    about += f"vocabulary {config.vocab_size}, context 512"
    assert repr(model) == f"ExLlamaV2({about}, not loaded)"
    lazy = ExLlamaV2Cache_Q4(model, lazy=True)
    layers = f"{config.num_hidden_layers} layers"
    assert repr(lazy) == f"ExLlamaV2Cache_Q4(1 x 512 tokens, 0 used, {layers}, not allocated)"
    model.load()
    assert repr(model) == f"ExLlamaV2({about}, on cpu)"
    cache = ExLlamaV2Cache(model, batch_size=2)
    tokenizer = ExLlamaV2Tokenizer(config)
    ids = tokenizer.encode("import os")
    model.forward(ids.repeat(2, 1), cache)
    assert repr(cache) == f"ExLlamaV2Cache(2 x 512 tokens, {ids.shape[1]} used, {layers}, on cpu)"
    assert repr(ExLlamaV2Cache_TP(model)) == f"ExLlamaV2Cache_TP(1 x 512 tokens, 0 used, {layers}, on cpu)"

    generator = ExLlamaV2DynamicGenerator(
        model, ExLlamaV2Cache(model), tokenizer, use_ngram_draft=True, max_batch_size=1
    )
    generator.enqueue([ExLlamaV2DynamicJob(ids, 8) for _ in range(3)])
    generator.iterate()
    assert repr(generator) == (
        "ExLlamaV2DynamicGenerator(1 active and 2 pending jobs, 1 of 2 pages of 256 tokens in use, "
        "up to 4 draft tokens)"
    )
    generator.clear_queue()
    assert repr(ExLlamaV2BaseGenerator(model, cache, tokenizer)) == "ExLlamaV2BaseGenerator(0 of 512 tokens held)"
    streaming = ExLlamaV2StreamingGenerator(model, ExLlamaV2Cache(model), tokenizer)
    assert repr(streaming) == "ExLlamaV2StreamingGenerator(0 of 512 tokens held)"
