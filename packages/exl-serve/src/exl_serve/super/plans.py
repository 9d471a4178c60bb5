"""Memory plans from a child process, because planning needs torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from exl_serve.config.load import ConfigError
from exl_serve.config.model import ModelConfig

__all__ = ["plans"]


def plans(models: Sequence[ModelConfig]) -> list[dict[str, Any]]:
    """Return the plan of each model from `exl_serve.engine.plan`. Raises ConfigError for a model that cannot be
    used.
    """
    data = b"".join(msgspec.json.encode(model) + b"\n" for model in models)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "exl_serve.engine.plan"], input=data, capture_output=True, check=False
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for plan in found:
        if "problem" in plan:
            raise ConfigError(f"model {plan['id']}: {plan['problem']}", "model")
    if len(found) != len(models):
        raise ConfigError(f"planning has failed: {done.stderr.decode(errors='replace')[-500:]}", "model")
    return found
