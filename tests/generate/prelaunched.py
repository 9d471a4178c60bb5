"""Stand-ins of a model and a sampler on a GPU, over scripted models: captured steps, and tokens that stay there."""

from __future__ import annotations

import signal
from typing import Any

import torch

from exl_core import PagedParams
from exl_core.contracts import ForwardResult
from exl_filters import ExLlamaV2Filter
from exl_generate.testing import ScriptedConfig, ScriptedModel, ScriptedTokenizer
from exl_kernels import sampling as kernels

__all__ = [
    "CONFIG",
    "TOKENIZER",
    "VOCAB",
    "Device",
    "Even",
    "OnDevice",
    "OneBuffer",
    "Overwriting",
    "Preparing",
    "ScriptedReplay",
]

TOKENIZER = ScriptedTokenizer(["a", "b", "c", "ab", "bc", " ", "A", "cab", ".", "é"])
VOCAB = TOKENIZER.get_vocab_size()
CONFIG = ScriptedConfig(vocab_size=VOCAB, max_seq_len=96, max_input_len=32)


class Overwriting(ScriptedModel):
    """Its logits lie in memory that its next pass with logits overwrites, as those of captured steps."""

    def __init__(self, config: ScriptedConfig) -> None:
        super().__init__(config)
        self.given: list[torch.Tensor] = []

    def forward_chunk(self, *args: Any, **kw: Any) -> ForwardResult:
        found = super().forward_chunk(*args, **kw)
        if "logits" in found:
            for logits in self.given:
                logits.fill_(float("nan"))
            self.given = [found["logits"]]
        return found


class OneBuffer(ScriptedModel):
    """Its logits lie in one buffer for all passes of a size, whoever asked for them, as those of captured steps."""

    def __init__(self, config: ScriptedConfig) -> None:
        super().__init__(config)
        self.steps = 0
        self.buffers: dict[int, torch.Tensor] = {}

    def forward_chunk(self, *args: Any, **kw: Any) -> ForwardResult:
        found = super().forward_chunk(*args, **kw)
        self.steps += 1
        if "logits" in found:
            fresh = found["logits"]
            rows = fresh.shape[0] * fresh.shape[1]
            buffer = self.buffers.setdefault(rows, torch.empty(rows, fresh.shape[2]))
            found["logits"] = buffer.copy_(fresh.view(rows, -1)).view(fresh.shape)
        return found


class ScriptedReplay:
    """A step of `Preparing` that waits for its ids."""

    def __init__(self, model: Preparing, cache: Any, params: PagedParams, row_loras: Any) -> None:
        self.model, self.cache, self.params, self.number = model, cache, params, -1
        self.adapters = {} if row_loras is None else {"row_loras": row_loras}
        self.ids = torch.full((params.batch_size,), -1)

    def inputs(self) -> kernels.TokenTarget:
        return kernels.TokenTarget(self.ids, VOCAB)

    def launch(self) -> torch.Tensor:
        self.model.events.append("step")
        if self.model.interrupts:
            signal.raise_signal(signal.SIGINT)
        return self._pass(self.ids.unsqueeze(1))

    def run(self, ids: torch.Tensor) -> torch.Tensor:
        self.model.events.append("run")
        return self._pass(ids)

    def _pass(self, ids: torch.Tensor) -> torch.Tensor:
        if self.model.launch_faults:
            raise self.model.launch_faults.pop()
        with torch.inference_mode():
            found = self.model.forward_chunk(ids, cache=self.cache, attn_params=self.params, **self.adapters)
            logits = found["logits"]
        self.number = self.model.steps
        return logits

    @property
    def is_current(self) -> bool:
        return self.number == self.model.steps


class Preparing(OneBuffer):
    """A model with steps whose inputs are made beforehand. `events` has their launches, and what `Device` did."""

    def __init__(self, config: ScriptedConfig) -> None:
        super().__init__(config)
        self.events: list[str] = []
        self.launch_faults: list[Exception] = []
        self.interrupts = False

    def prelaunchable_step(
        self, q_len: int, cache: Any, attn_params: PagedParams, *, row_loras: Any = None
    ) -> ScriptedReplay:
        return ScriptedReplay(self, cache, attn_params, row_loras)


class OnDevice:
    """Sampling as a GPU does it: tokens are in the inputs of the next step before the host collects them."""

    def __init__(self, device: Device, rows: list[kernels.Row], into: kernels.TokenTarget | None) -> None:
        into = into if device.writes else None
        self.device, self.rows, self.written = device, rows, into is not None
        self.found: list[Any] = []
        for row in rows:
            left = device.leaves and row.top_n > 0
            self.found.append(None if left else device.really(row))
        for i, found in enumerate(self.found if into is not None else []):
            assert into is not None
            into.ids[i] = min(found.token, into.limit - 1) if isinstance(found, kernels.Sampled) else 0

    def collect(self) -> list[kernels.Sampled | kernels.Failure]:
        self.device.events.append("collect")
        if None in self.found:
            self.written = False
        pairs = zip(self.rows, self.found, strict=True)
        return [self.device.really(row) if found is None else found for row, found in pairs]


class Device:
    """Replace `exl_kernels.sampling.launch` of rows on a GPU; `leaves`: rows that report candidates to the CPU."""

    def __init__(self, events: list[str], leaves: bool = False) -> None:
        self.events, self.leaves = events, leaves
        self.writes = True  # else rows are on several devices, and the next step's inputs get none of their tokens
        self.faults: list[Exception] = []
        self._launch = kernels.launch

    def really(self, row: kernels.Row) -> kernels.Sampled | kernels.Failure:
        return self._launch([row]).collect()[0]

    def launch(self, rows: list[kernels.Row], into: kernels.TokenTarget | None = None) -> OnDevice:
        self.events.append("sample")
        if self.faults:
            raise self.faults.pop()
        return OnDevice(self, rows, into)


class Even(ExLlamaV2Filter):
    """Even ids; raises at step `fault`."""

    def __init__(self, fault: int) -> None:
        super().__init__(None, None)
        self.fault, self.at = fault, 0

    def clone(self, c: Any = None) -> Even:
        return Even(self.fault)

    def begin(self, prefix_str: Any = "") -> None:
        self.at = 0

    def feed(self, token: Any) -> None:
        self.at += 1

    def next(self) -> tuple[set[int], set[int]]:
        if self.at == self.fault:
            raise ZeroDivisionError("broken plugin")
        return set(range(4, VOCAB, 2)), set()
