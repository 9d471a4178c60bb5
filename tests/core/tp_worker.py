"""One process of a tensor parallel model: `python tp_worker.py JOB.json`, with torchrun's variables set.

The job's `task` is "cases": run every model of `cases` and save its results; or the failure that process 1 causes:
"die", "hang", "differ" or "dequantize"; or "starve": a split that leaves process 1 without heads. Each process writes
what it saw to `JOB.json.RANK`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import exl_core
from exl_core import ExLlamaV2, ExLlamaV2Cache_TP, ExLlamaV2Config, ExLlamaV2Lora, ProcessExchange, errors
from exl_core.execution.sharded.exchange import Exchange
from exl_kernels import threads

CHUNKS = ((0, 9), (9, 10), (10, 24))


def ids_of(vocab: int) -> Tensor:
    return torch.randint(0, vocab, (2, 24), generator=torch.Generator().manual_seed(5))


def run_case(case: dict[str, Any], exchange: Exchange | None) -> dict[str, Any]:
    """Load and run one model, over the devices of `exchange` or on one; return logits, keys and counts."""
    config = ExLlamaV2Config(case["folder"])
    config.cpu_matmul = "int8"
    model = ExLlamaV2(config)
    base = getattr(exl_core, case.get("cache", "ExLlamaV2Cache"))
    if exchange is None:
        model.load()
        cache = base(model, batch_size=2, max_seq_len=64)
    else:
        model.load_tp(case.get("split"), exchange=exchange)
        cache = ExLlamaV2Cache_TP(model, base, batch_size=2, max_seq_len=64)
    loras = [ExLlamaV2Lora.from_directory(model, case["lora"])] if "lora" in case else None
    ids = ids_of(config.vocab_size)
    logits = [model.forward(ids[:, a:b], cache, loras=loras) for a, b in CHUNKS]
    before = 0 if exchange is None else exchange.count
    logits.append(model.forward(ids[:, :5], loras=loras))
    heads = [0, config.num_key_value_heads]
    if model.tp_context is not None:
        ((_, *heads),) = model.tp_context.local_heads
    return {
        "logits": logits,
        "keys": [cache.get_kv_state(layer, 2, 0, 24)[0] for layer in range(config.num_hidden_layers)],
        "heads": heads,
        "exchanges": 0 if exchange is None else exchange.count - before,
        "weights": [linear.get_weight_tensor_dq() for linear in model.linears() if "experts" not in linear.key],
        "bytes": model.weight_bytes(),
    }


def failure(job: dict[str, Any], exchange: ProcessExchange) -> list[str]:
    """Let process 1 fail after the first pass; return the errors that this process saw in two more passes."""
    model = ExLlamaV2(ExLlamaV2Config(job["folder"]))
    if job["task"] == "starve":
        try:
            model.load_tp([99.0, 1.0], exchange=exchange)
        except errors.DeviceError as error:
            return [str(error)] * 2
    model.load_tp(exchange=exchange)
    ids = ids_of(model.config.vocab_size)
    model.forward(ids)
    if exchange.home == 1 and job["task"] == "die":
        os._exit(0)
    if exchange.home == 1 and job["task"] == "hang":
        time.sleep(job["limit"] * 3)
    if exchange.home == 1 and job["task"] == "differ":
        ids = ids + 1 - 2 * (ids == model.config.vocab_size - 1).long()
    seen = []
    for _ in range(2):
        try:
            if exchange.home == 1 and job["task"] == "dequantize":
                next(model.linears()).get_weight_tensor_dq()
            model.forward(ids)
        except errors.PeerError as error:
            seen.append(str(error))
    return seen


def main(path: Path) -> None:
    threads.set_num_threads(1)
    job = json.loads(path.read_text())
    exchange = ProcessExchange(limit=job["limit"])
    cases = job.get("cases")
    result = failure(job, exchange) if cases is None else [run_case(case, exchange) for case in cases]
    torch.save(result, f"{path}.{exchange.home}")
    if cases is None:  # else the end of the process closes the exchange
        exchange.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
