"""The devices that "auto" means, on machines that this one is not."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_core import ExLlamaV2, ExLlamaV2Config, auto_device, errors
from exl_core.device import GIB, device_line, devices, using_devices
from exl_core.loading import memory
from exl_core.loading.plan import plan
from exl_kernels.device import CudaDevice, CudaStatus

pytestmark = pytest.mark.covers("core: loading")

NO_DRIVER = "no NVIDIA driver: libcuda.so.1 cannot be opened; install the NVIDIA driver"
TOO_OLD = (
    "the NVIDIA driver is too old: it supports CUDA 12.2, these kernels need CUDA 13.0 or newer; update the driver"
)
NO_CODE = "this build's kernels are for sm_90a, and {} is sm_{}: rebuild with EXL_CUDA_ARCHS={}"


may_have_gpu = auto_device.may_have_gpu


def gpu(index: int, name: str, capability: tuple[int, int], code: bool = True) -> CudaDevice:
    number = f"{capability[0]}{capability[1]}"
    reason = None if code else NO_CODE.format(name, number, number)
    return CudaDevice(index, name, capability, 128, 100 << 10, 24 << 30, reason)


class Machine:
    """Stand-in for the GPUs of this machine."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.torch_sees(0)
        self.pci(present=False)

    def has(self, *cards: CudaDevice, reason: str | None = None) -> None:
        if cards and all(card.reason for card in cards):
            reason = cards[0].reason
        status = CudaStatus(True, ("90a",), "13.0.88", "13.0" if cards else None, cards, reason)
        self._patch.setattr(auto_device, "cuda_status", lambda: status)
        self.torch_sees(len(cards))

    def torch_sees(self, count: int, archs: tuple[str, ...] = ("sm_90", "compute_120")) -> None:
        self._patch.setattr(torch.cuda, "is_available", lambda: count > 0)
        self._patch.setattr(torch.cuda, "device_count", lambda: count)
        self._patch.setattr(torch.cuda, "get_arch_list", lambda: list(archs))

    def pci(self, *, present: bool) -> None:
        self._patch.setattr(auto_device, "may_have_gpu", lambda status: present or bool(status.devices))

    def free_memory(self, count: int) -> None:
        self._patch.setattr(memory, "free_cuda_bytes", lambda device: count)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.delenv("EXL_DEVICE", raising=False)
    return Machine(monkeypatch)


def names() -> list[str]:
    return [d.name for d in devices()]


def test_without_a_gpu_it_is_the_cpu(machine: Machine) -> None:
    machine.has(reason=NO_DRIVER)
    assert names() == ["cpu"]
    assert device_line() == "running on the CPU: no NVIDIA GPU found"


@pytest.mark.parametrize("reason", [NO_DRIVER, TOO_OLD])
def test_a_card_that_the_driver_does_not_serve_is_reported_with_the_remedy(machine: Machine, reason: str) -> None:
    machine.has(reason=reason)
    machine.pci(present=True)
    assert names() == ["cpu"]
    assert device_line() == f"running on the CPU: {reason}"


def test_a_card_without_code_is_skipped(machine: Machine) -> None:
    machine.has(gpu(0, "Tesla P40", (6, 1), code=False))
    assert names() == ["cpu"]
    assert "rebuild with EXL_CUDA_ARCHS=61" in str(device_line())


def test_the_usable_one_of_two(machine: Machine) -> None:
    machine.has(gpu(0, "Tesla P40", (6, 1), code=False), gpu(1, "NVIDIA H100", (9, 0)))
    assert names() == ["cuda:1"]
    line = str(device_line())
    assert line.startswith("running on cuda:1 (NVIDIA H100, 24 GiB); cuda:0 (Tesla P40) is skipped: this build's")
    assert "\n" not in line


def test_all_usable_ones_in_order(machine: Machine) -> None:
    machine.has(gpu(0, "A", (9, 0)), gpu(1, "B", (9, 0)))
    assert names() == ["cuda:0", "cuda:1"]
    assert device_line() == "running on cuda:0 (A, 24 GiB); split models also use cuda:1 (B, 24 GiB)"


@pytest.mark.parametrize(("archs", "usable"), [(("sm_80", "sm_90"), False), (("sm_100",), False), (("sm_120",), True)])
def test_a_card_that_torch_has_no_code_for_is_skipped(machine: Machine, archs: tuple[str, ...], usable: bool) -> None:
    machine.has(gpu(0, "RTX 5090", (12, 0)))
    machine.torch_sees(1, archs)
    assert names() == (["cuda:0"] if usable else ["cpu"])
    assert ("no code for sm_120: install a newer torch" in str(device_line())) is not usable


def test_binaries_and_ptx_of_torch(machine: Machine) -> None:
    for archs, expected in (
        (("sm_80",), ["cuda:0"]),  # 8.6 runs binaries of 8.0
        (("sm_89",), ["cpu"]),
        (("compute_80",), ["cuda:0"]),
        (("compute_90",), ["cpu"]),
        ((), ["cuda:0"]),  # torch does not say
    ):
        machine.has(gpu(0, "RTX 3090", (8, 6)))
        machine.torch_sees(1, archs)
        assert names() == expected


def test_a_torch_that_cannot_use_the_driver_is_named(machine: Machine) -> None:
    machine.has(gpu(0, "NVIDIA H100", (9, 0)))
    machine.torch_sees(0)
    assert names() == ["cpu"]
    assert "finds no GPU; it is built for CUDA" in str(device_line())


@pytest.mark.parametrize("value", ["auto", " AUTO ", ""])
def test_auto_by_name(machine: Machine, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    machine.has(gpu(0, "A", (9, 0)))
    monkeypatch.setenv("EXL_DEVICE", value)
    assert names() == ["cuda:0"]


def test_the_variable_and_the_caller_decide_before_auto(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.has(gpu(0, "A", (9, 0)))
    monkeypatch.setenv("EXL_DEVICE", "cpu:1")
    assert names() == ["cpu:1"]
    assert device_line() is None
    with using_devices("cpu", "--device"):
        assert names() == ["cpu"]
        with using_devices(None):
            assert names() == ["cpu"]
        with using_devices("auto"):
            assert names() == ["cuda:0"]
    with using_devices("tpu", "--device"), pytest.raises(errors.DeviceError, match="--device is 'tpu'"):
        devices()
    assert names() == ["cpu:1"]


def test_the_choice_is_logged_once(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.has(gpu(0, "a card of this test", (9, 0)))
    with caplog.at_level(logging.INFO, logger="exl_core.device"):
        devices()
        devices()
    assert [r.getMessage() for r in caplog.records] == ["running on cuda:0 (a card of this test, 24 GiB)"]


def test_a_card_that_is_not_used_is_a_warning(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """A script that configures no logging prints warnings, and nothing below."""
    machine.has(gpu(0, "a 4090 of this test", (8, 9), code=False))
    devices()
    devices()
    (record,) = [r for r in caplog.records if r.name == "exl_core.device"]
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("running on the CPU")
    assert "a 4090 of this test" in record.getMessage()


def test_a_machine_without_a_card_is_no_warning(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.has(reason="no driver in this test")
    with caplog.at_level(logging.WARNING, logger="exl_core.device"):
        devices()
    assert caplog.records == []


def test_a_line_that_the_caller_shows_is_not_logged(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.has(gpu(0, "a card that is named", (8, 9), code=False))
    assert "a card that is named" in str(device_line())
    devices()
    assert caplog.records == []


def test_splits_go_to_the_usable_gpus(lab: Any, machine: Machine) -> None:
    """Scripts written for exllamav2 give splits in GiB."""
    machine.has(gpu(0, "A", (9, 0)), gpu(1, "B", (9, 0)))
    machine.free_memory(8 << 30)
    config = ExLlamaV2Config(lab.write(num_hidden_layers=6))
    whole = plan(config, cache=None, gpu_split=[64.0]).devices[0]
    share = (whole.weights * 0.6 + whole.tables + whole.scratch) / GIB
    split, first, third = (ExLlamaV2(config) for _ in range(3))
    split.load([share, share], lazy=True)
    assert set(split.placement.names) == {"cuda:0", "cuda:1"}
    first.load(lazy=True)
    assert set(first.placement.names) == {"cuda:0"}
    need = plan(config, cache_tokens=256, reserve=0).devices[0]
    machine.free_memory(int((need.weights + need.cache) * 0.6) + need.tables + need.scratch)
    assert [d.modules != [] for d in plan(config, cache_tokens=256, reserve=0).devices] == [True, True]
    with pytest.raises(errors.InputError, match="3 entries for 2 device"):
        third.load([1.0, 1.0, 1.0])


def test_a_model_beyond_the_gpu_is_refused_with_the_remedy(lab: Any, machine: Machine) -> None:
    machine.has(gpu(0, "A", (9, 0)))
    machine.free_memory(1000)
    model = ExLlamaV2(ExLlamaV2Config(lab.write()))
    with pytest.raises(errors.DeviceError, match=r"(?s)Insufficient space.*cuda:0.*EXL_DEVICE=cpu.*--device cpu"):
        model.load()


def test_the_hardware_is_looked_for_where_linux_lists_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = CudaStatus(True, ("90a",), "13.0.88", None, (), NO_DRIVER)
    monkeypatch.setattr(auto_device, "PCI", tmp_path)
    monkeypatch.setattr(auto_device, "DRIVER_FILES", (tmp_path / "nvidiactl",))
    monkeypatch.setattr("sys.platform", "linux")
    for vendor, kind, expected in (
        ("0x8086", "0x030000", False),
        ("0x10de", "0x020000", False),
        ("0x10de", "0x030200", True),
    ):
        card = tmp_path / "0000:01:00.0"
        card.mkdir(exist_ok=True)
        (card / "vendor").write_text(f"{vendor}\n")
        (card / "class").write_text(f"{kind}\n")
        assert may_have_gpu(status) is expected
    (tmp_path / "0000:01:00.0" / "vendor").unlink()
    assert not may_have_gpu(status)
    (tmp_path / "nvidiactl").touch()
    assert may_have_gpu(status)
    assert may_have_gpu(dataclasses.replace(status, devices=(gpu(0, "A", (9, 0)),)))
