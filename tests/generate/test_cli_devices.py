"""Where the `exl` command runs a model, and how it says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_core import ExLlamaV2, auto_device
from exl_core.config import ExLlamaV2Config
from exl_core.device import GIB
from exl_core.loading import memory
from exl_core.loading.plan import DEFAULT_RESERVE, plan
from exl_generate.cli import doctor
from exl_kernels.device import CudaDevice, CudaStatus
from exl_kernels.errors import DeviceError
from exl_kernels.selection import Card

MODEL = str(Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5")
RUNS = [
    ("generate", "x", "-m", MODEL, "-n", "2", "--json"),
    ("chat", "-m", MODEL, "--chat-template", "plain", "-n", "2", "--json"),
    ("bench", "-m", MODEL, "--prompt-tokens", "8", "--new-tokens", "2", "--json"),
    ("info", MODEL, "--plan", "--json"),
]


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXL_DEVICE", raising=False)


def gpus(patch: pytest.MonkeyPatch, *reasons: str | None, free: int = 8 << 30) -> None:
    """Stand-ins for GPUs; a reason says why one cannot be used."""
    cards = tuple(CudaDevice(i, f"Card {i}", (9, 0), 132, 1 << 17, 80 << 30, why) for i, why in enumerate(reasons))
    none = "no NVIDIA driver" if not cards else cards[0].reason if all(reasons) else None
    patch.setattr(auto_device, "cuda_status", lambda: CudaStatus(True, ("90a",), "13.0", "13.0", cards, none))
    patch.setattr(auto_device, "may_have_gpu", lambda status: bool(status.devices))
    patch.setattr(torch.cuda, "is_available", lambda: bool(cards))
    patch.setattr(torch.cuda, "device_count", lambda: len(cards))
    patch.setattr(torch.cuda, "get_arch_list", lambda: [])
    patch.setattr(memory, "free_cuda_bytes", lambda device: free)


def treated_as(patch: pytest.MonkeyPatch, *names: str) -> None:
    """Let the kernels' table have these known cards in place of this machine's."""

    def device(index: int) -> Card:
        if index >= len(names):
            raise DeviceError(f"cuda:{index} is busy")
        return Card.named(names[index])

    patch.setattr(doctor.Card, "device", device)


@pytest.mark.parametrize("command", RUNS, ids=lambda c: c[0])
def test_the_cpu_is_announced_in_one_line(exl, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    gpus(monkeypatch)
    code, out, err = exl(*command, stdin="hello\n")
    assert code == 0
    assert err == "exl: running on the CPU: no NVIDIA GPU found\n"
    assert json.loads(out.splitlines()[0])


def test_a_skipped_gpu_is_announced_with_the_reason(exl, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, "no code for it")
    code, _, err = exl(*RUNS[0])
    assert (code, err) == (0, "exl: running on the CPU; cuda:0 (Card 0) is skipped: no code for it\n")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("command", RUNS, ids=lambda c: c[0])
@pytest.mark.parametrize("option", [True, False])
def test_a_named_device_is_not_announced(
    exl, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], option: bool
) -> None:
    """Neither is the GPU asked for anything."""
    gpus(monkeypatch, None)
    monkeypatch.setenv("EXL_DEVICE", "cuda:7" if option else "cpu")
    code, _, err = exl(*command, *(("--device", "cpu") if option else ()), stdin="hello\n")
    assert (code, err) == (0, "")


def test_a_plan_for_the_gpus(exl, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, "no code for it", None)
    code, out, err = exl(*RUNS[-1])
    assert code == 0
    assert [d["device"] for d in json.loads(out)["plan"]["devices"]] == ["cuda:1"]
    assert err == "exl: running on cuda:1 (Card 1, 80 GiB); cuda:0 (Card 0) is skipped: no code for it\n"
    out = exl(*RUNS[-1], "--device", "cpu:0=1,cpu:1=1")[1]
    assert [d["device"] for d in json.loads(out)["plan"]["devices"]] == ["cpu:0", "cpu:1"]


def test_a_model_beyond_the_gpu_names_the_way_to_the_cpu(exl, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, None, free=1000)
    code, out, err = exl(*RUNS[0])
    assert (code, out) == (1, "")
    assert "Insufficient space" in err
    assert "--device cpu" in err


@pytest.mark.parametrize("command", RUNS, ids=lambda c: c[0])
def test_a_device_that_is_none(exl, command: tuple[str, ...]) -> None:
    code, out, err = exl(*command, "--device", "gpu", stdin="hello\n")
    assert (code, out) == (1, "")
    assert err.startswith('exl: --device is \'gpu\', must be "auto", "cpu"')
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("extra", [(), ("--draft", MODEL)])
def test_several_devices_share_a_model(exl, monkeypatch: pytest.MonkeyPatch, extra: tuple[str, ...]) -> None:
    """The cache is on the devices of its layers, devices fill in order, and the text is the same."""
    common = (*RUNS[0], "--greedy", *extra)
    whole = json.loads(exl(*common, "--device", "cpu")[1])
    need = plan(ExLlamaV2Config(MODEL), cache_tokens=256, reserve=0).devices[0]
    cap = ((need.weights + need.cache) * 0.7 + need.tables + need.scratch + DEFAULT_RESERVE[0]) / GIB
    models, load = [], ExLlamaV2.load_autosplit

    def watched(model: ExLlamaV2, *args: Any, **kwargs: Any) -> None:
        load(model, *args, **kwargs)
        models.append(model)

    monkeypatch.setattr(ExLlamaV2, "load_autosplit", watched)
    code, out, err = exl(*common, "--device", f"cpu:0={cap:.6f},cpu:1=1")
    assert (code, err) == (0, "")
    assert [set(model.placement.names) for model in models] == [{"cpu:0", "cpu:1"}]
    assert json.loads(out)["completion"] == whole["completion"]


def test_doctor_says_where_models_run(exl, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch)
    assert json.loads(exl("doctor", "--json")[1])["models"] == {"device": "running on the CPU: no NVIDIA GPU found"}
    monkeypatch.setenv("EXL_DEVICE", "cpu:0,cpu:1")
    assert json.loads(exl("doctor", "--json")[1])["models"] == {"device": "cpu:0, cpu:1 (EXL_DEVICE)"}
    monkeypatch.setenv("EXL_DEVICE", "tpu")
    assert "EXL_DEVICE is 'tpu'" in json.loads(exl("doctor", "--json")[1])["models"]["device"]


@pytest.mark.parametrize("value", ["tpu", "cuda"])
def test_doctor_fails_where_the_chosen_device_cannot_be_used(exl, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    gpus(monkeypatch)
    monkeypatch.setenv("EXL_DEVICE", value)
    code, out, _ = exl("doctor")
    assert (code, out.splitlines()[-1]) == (1, "models cannot run here")
    assert json.loads(exl("doctor", "--json")[1])["ok"] is False


def test_doctor_says_what_would_make_a_card_faster(exl, monkeypatch: pytest.MonkeyPatch) -> None:
    def card(index: int, code: str | None) -> CudaDevice:
        reason = None if code else "no code"
        return CudaDevice(index, f"Card {index}", (8, 9), 128, 1 << 17, 24 << 30, reason, code, "89")

    cards = tuple(card(index, code) for index, code in enumerate(["80+ptx", "80", "89", None, "86"]))
    status = CudaStatus(True, ("80",), "13.0", "13.0", cards, None, "EXL_CUDA_ARCHS: 80")
    monkeypatch.setattr(doctor, "cuda_status", lambda: status)
    monkeypatch.setenv("EXL_CUDA_GRAPHS", "0")
    treated_as(monkeypatch, "4090", "A100", "4090")
    code, out, _ = exl("doctor", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["cuda"]["chosen_by"] == "EXL_CUDA_ARCHS: 80"
    assert facts["cuda"]["devices"].split("; ")[0] == "0: Card 0, 24 GiB, code of 80+ptx"
    ampere = "async_copy, mma_pipeline"
    known = [f"{index}: {ampere}" for index in range(3)]
    assert facts["cuda"]["kernels_use"].split("; ") == [*known, "4: cuda:4 is busy"]
    portable, older, unused, graphs = facts["advice"]
    assert "cuda:0 (Card 0) runs portable code" in portable
    assert "cuda:1 (Card 1) runs code for sm_80" in older
    assert "cuda:3 (Card 3) is not used" in unused
    assert all("`EXL_CUDA_ARCHS=89 uv sync`" in line for line in (portable, older, unused))
    assert "EXL_CUDA_GRAPHS=0" in graphs
    assert "faster: cuda:0 (Card 0)" in " ".join(exl("doctor")[1].split())


def test_doctor_names_the_card_whose_limits_are_imposed(exl, monkeypatch: pytest.MonkeyPatch) -> None:
    card = CudaDevice(0, "Card", (9, 0), 82, 99 << 10, 80 << 30, None, "80+ptx", "90a", "3090")
    status = CudaStatus(True, ("80+ptx",), "13.0", "13.0", (card,), None)
    monkeypatch.setattr(doctor, "cuda_status", lambda: status)
    treated_as(monkeypatch, "3090")
    facts = json.loads(exl("doctor", "--json")[1])
    assert facts["cuda"]["devices"] == "0: Card, 80 GiB, code of 80+ptx, treated as a 3090"
    assert facts["advice"][0] == "EXL_CUDA_LIMITS treats cuda:0 (Card) as a 3090: unset it"


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("H100", "bulk_copy, clusters, tested_clusters, wgmma"),
        ("4090", "async_copy, mma_pipeline"),
        ("2080 Ti", "kernels for any card alone"),
    ],
)
def test_doctor_says_what_the_kernels_of_a_card_may_use(
    exl, monkeypatch: pytest.MonkeyPatch, name: str, features: str
) -> None:
    card = CudaDevice(0, name, (9, 0), 132, 1 << 17, 80 << 30, None, "90a", "90a")
    monkeypatch.setattr(doctor, "cuda_status", lambda: CudaStatus(True, ("90a",), "13.0", "13.0", (card,), None))
    treated_as(monkeypatch, name)
    assert json.loads(exl("doctor", "--json")[1])["cuda"]["kernels_use"] == f"0: {features}"
