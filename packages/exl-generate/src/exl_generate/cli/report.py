"""`exl bench --report`: one JSON object that an owner of a card attaches to an issue."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from exl_core.config import ExLlamaV2Config
from exl_core.device import Device, devices
from exl_core.layers import Embedding
from exl_core.loading.memory import free_bytes
from exl_generate.errors import CapacityError
from exl_kernels.cuda_ops import read_all
from exl_kernels.device import CudaDevice, cuda_status
from exl_kernels.kv import KVKind

from . import bench
from .doctor import examine
from .models import Loaded, load, note
from .random_model import SHAPES, Shape, write_random_model

__all__ = ["make", "run"]

#: Raised when a key changes its meaning or is removed.
VERSION = 1
#: Memory of a device that is left for buffers and activations.
SPARE = 2**30
DRIVER_FILE = Path("/proc/driver/nvidia/version")


def run(folder: Path | None, prompt_tokens: int, new_tokens: int, batches: list[int], cache: KVKind) -> None:
    """Print the report of this machine, for the model in `folder` or a random one."""
    print(json.dumps(make(folder, prompt_tokens, new_tokens, batches, cache), indent=1))


def make(folder: Path | None, prompt_tokens: int, new_tokens: int, batches: list[int], cache: KVKind) -> dict[str, Any]:
    """Measure memory bandwidth, prompts and decode steps; return the report.

    Speeds are tokens a second, bandwidth is bytes a second. `share_of_bandwidth` counts the bytes of the weights of
    each step, keys and values left out.

    Raises:
        CapacityError: the model and the cache of the largest batch do not fit.
        RequestError: prompt and new tokens are more than the model's context.
    """
    place = devices()[0]
    bandwidth = read_bandwidth(place)
    with _model(folder, place, max(batches) * (prompt_tokens + new_tokens)) as (name, where):
        bench.check(ExLlamaV2Config(where), prompt_tokens, new_tokens, batches, cache)
        loaded = load(where)
        rows = []
        for batch in batches:
            note(f"measuring {name} with {batch} sequences")
            rows.append(bench.measure(loaded, prompt_tokens, new_tokens, batch, cache))
        model: dict[str, Any] = {"name": name, "random_weights": folder is None, **_description(loaded)}
    return {
        "report": VERSION,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": place.name,
        "card": _card(place),
        "driver": _driver(),
        "read_bytes_per_second": round(bandwidth),
        "model": model,
        "cache": cache,
        "prompt": {"tokens": prompt_tokens, "tokens_per_second": round(rows[0]["prefill_tps"], 1)},
        "new_tokens": new_tokens,
        "decode": [_decode(row, model["bytes_per_step"], bandwidth) for row in rows],
        "doctor": _doctor(),
    }


def read_bandwidth(place: Device) -> float:
    """Return the bytes a second of reading a buffer far larger than every cache: the median of several reads."""
    free = free_bytes([place])[0] or 2**30
    words = min(2**32 if place.is_cuda else 2**28, free // 4) // 16 * 4
    if not place.is_cuda:
        # Not of integers: torch adds those more slowly than memory gives them.
        values = torch.ones(words)

        def read_on_cpu() -> None:
            values.sum()

        return float(values.nbytes) / statistics.median(_seconds(read_on_cpu) for _ in range(7))
    buffer = torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device=place.torch_device)
    sink = torch.zeros(16, dtype=torch.uint8, device=buffer.device)
    times = []
    for _ in range(30):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        read_all(buffer, sink)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return float(buffer.nbytes / statistics.median(times))


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@contextmanager
def _model(folder: Path | None, place: Device, tokens: int) -> Iterator[tuple[str, Path]]:
    """Yield name and folder: the given folder, or a random model in a temporary one."""
    if folder is not None:
        yield folder.resolve().name, folder
        return
    with tempfile.TemporaryDirectory(prefix="exl-report-") as made:
        name, shape = choose(place, tokens, free_bytes([place])[0], shutil.disk_usage(made).free)
        note(f"writing random weights of the shape {name}, {shape.weight_bytes() / 1e9:.1f} GB, to {made}")
        write_random_model(Path(made), shape)
        yield name, Path(made)


def choose(place: Device, tokens: int, free: int | None, disk: int) -> tuple[str, Shape]:
    """Return the largest shape that fits, with its name; on the CPU the smallest shape.

    Args:
        place: the device.
        tokens: length of the cache.
        free: bytes of the device that a model may use; None if not known.
        disk: bytes of the temporary folder.

    Raises:
        CapacityError: not even the smallest shape fits.
    """
    names = list(SHAPES) if place.is_cuda else list(SHAPES)[-1:]
    needed = 0
    for name in names:
        shape = SHAPES[name]
        needed = round(1.1 * (shape.weight_bytes() + tokens * shape.cache_bytes())) + SPARE
        if shape.weight_bytes() < 0.9 * disk and (free is None or needed <= free):
            return name, shape
    raise CapacityError(
        f"{names[-1]} with {tokens} tokens needs {needed / 2**30:.1f} GiB; {place.name} has "
        f"{(free or 0) / 2**30:.1f} GiB free and the temporary folder {disk / 2**30:.1f} GiB: lower --batch, or set "
        "TMPDIR to a folder with more room"
    )


def _description(loaded: Loaded) -> dict[str, Any]:
    """Shape of the model, and the bytes of weights that a decode step reads."""
    config, modules = loaded.config, loaded.model.modules
    return {
        "architecture": config.architecture,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "bytes_per_step": sum(module.weight_bytes() for module in modules if not isinstance(module, Embedding)),
    }


def _decode(row: dict[str, Any], step: int, bandwidth: float) -> dict[str, Any]:
    steps = row["decode_tps"] / row["batch"]
    return {
        "batch": row["batch"],
        "tokens_per_second": round(row["decode_tps"], 1),
        "share_of_bandwidth": round(step * steps / bandwidth, 3),
        "prompt_tokens_per_second": round(row["prefill_tps"], 1),
    }


def _card(place: Device) -> dict[str, Any] | None:
    """The GPU that was measured; None for the CPU."""
    if not place.is_cuda:
        return None
    card: CudaDevice = cuda_status().devices[place.torch_device.index or 0]
    return {
        "name": card.name,
        "compute_capability": ".".join(map(str, card.compute_capability)),
        "sms": card.sm_count,
        "memory_bytes": card.memory_bytes,
        "code": card.code,
    }


def _driver() -> str | None:
    """Version of the NVIDIA driver, e.g. "580.65.06"; None without one."""
    try:
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", DRIVER_FILE.read_text())
    except OSError:
        return None
    return found.group() if found else None


def _doctor() -> dict[str, Any]:
    """Return the findings of `exl doctor` without the folder of the bundled model: other people read the report."""
    facts = examine()
    del facts["packages"]["bundled model"]
    return facts
