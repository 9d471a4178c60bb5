"""One process for each GPU, over NCCL: bitwise the results of one GPU, and typed errors; needs two GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import tp_worker
from test_cuda_devices import second_device
from test_tp_processes import SIZES, run

pytestmark = [pytest.mark.cuda, pytest.mark.covers("core: tensor-parallel")]

WHOLE = {**SIZES, "hidden_size": 512, "intermediate_size": 1408, "head_dim": 64, "vocab_size": 2048}


def test_two_processes_are_bitwise_identical_to_one_gpu(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_device("cuda:1")
    cases: list[dict[str, Any]] = [
        {"folder": str(lab.write(kind="exl2", **WHOLE)), "cache": "ExLlamaV2Cache_Q4"},
        {"folder": str(lab.write(kind="gptq-act-order", **WHOLE))},
    ]
    found = run(tmp_path, {"task": "cases", "limit": 120.0, "cases": cases}, "cuda")
    monkeypatch.setenv("EXL_DEVICE", "cuda:0")
    for number, case in enumerate(cases):
        whole = tp_worker.run_case(case, None)
        for process in found:
            for ours, theirs in zip(process[number]["logits"], whole["logits"], strict=True):
                assert torch.equal(ours, theirs.cpu())


@pytest.mark.parametrize(("task", "message"), [("die", "lost another process"), ("differ", "different arguments")])
def test_a_failing_process_ends_the_passes_of_the_others(lab: Any, tmp_path: Path, task: str, message: str) -> None:
    second_device("cuda:1")
    job = {"task": task, "limit": 15.0, "folder": str(lab.write(kind="exl2", **WHOLE))}
    first, _ = run(tmp_path, job, "cuda")
    assert len(first) == 2
    assert message in first[0]
    assert first[0] == first[1]
