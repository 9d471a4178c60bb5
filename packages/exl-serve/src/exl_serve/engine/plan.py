"""Compute the memory that models need, without loading them: `python -m exl_serve.engine.plan`.

It reads one `ModelConfig` as JSON a line, and writes one line of JSON for each: `needs` and `free` (bytes a device),
`fits`, `table`, or `problem`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from exl_serve.config.model import ModelConfig

__all__ = ["main", "plan_of"]


def plan_of(config: ModelConfig) -> dict[str, Any]:
    """Return the plan of one model; `problem` instead where its folder cannot be used."""
    from exl_core import ExLlamaV2Config
    from exl_core.device import using_devices
    from exl_core.loading.plan import plan
    from exl_kernels.errors import ExlError
    from exl_serve.engine.load import cache_tokens

    try:
        with using_devices(config.device, "device"):
            described = ExLlamaV2Config(str(Path(config.path)))
            if config.max_seq_len is not None:
                described.max_seq_len = min(config.max_seq_len, described.max_seq_len)
            described.max_decode_batch = config.max_batch_size
            tokens = cache_tokens(config, described)
            draft = None if config.draft is None else ExLlamaV2Config(config.draft)
            if draft is not None:
                draft.max_decode_batch = config.max_batch_size
            found = plan(
                described,
                cache=config.cache,
                cache_tokens=tokens,
                loras=tuple(config.adapters.values()),
                draft=draft,
                draft_cache_tokens=None if draft is None else tokens,
            )
    except (ExlError, OSError, ValueError) as error:
        return {"id": config.id, "problem": str(error)}
    return {
        "id": config.id,
        "needs": {device.device.name: device.used for device in found.devices},
        "free": {device.device.name: device.free for device in found.devices},
        "fits": found.fits,
        "table": found.table(),
        "cache_tokens": tokens,
    }


def main() -> None:
    """Answer one line for each line of standard input."""
    for line in sys.stdin.buffer:
        if line.strip():
            found = plan_of(msgspec.json.decode(line, type=ModelConfig))
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
