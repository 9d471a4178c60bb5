"""exl-core alone: perplexity of a text under a model, in windows with a cache that is used again.

python examples/perplexity.py MODEL_FOLDER TEXT_FILE [WINDOW]
"""

import math
import sys
from pathlib import Path

import torch

from exl_core import ExLlamaV2, ExLlamaV2Config, ExLlamaV2Tokenizer

config = ExLlamaV2Config(sys.argv[1])
model = ExLlamaV2(config)
model.load()
tokenizer = ExLlamaV2Tokenizer(config)
window = int(sys.argv[3]) if len(sys.argv) > 3 else min(512, config.max_seq_len)

ids = tokenizer.encode(Path(sys.argv[2]).read_text(encoding="utf-8"))
loss, count = 0.0, 0
for start in range(0, ids.shape[1] - 1, window - 1):
    part = ids[:, start : start + window]
    if part.shape[1] < 2:
        break
    logits = model.forward(part)[0, :-1, : config.vocab_size]
    loss += torch.nn.functional.cross_entropy(logits.float(), part[0, 1:], reduction="sum").item()
    count += part.shape[1] - 1
print(f"{count} tokens, perplexity {math.exp(loss / count):.3f}")
