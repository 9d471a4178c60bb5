"""Without a usable GPU: imports work, the reason is a sentence, and entry points raise typed errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_kernels import _native, cuda_ops
from exl_kernels.device import cuda_status, require_cuda
from exl_kernels.errors import DeviceError, DTypeError, UnsupportedError
from exl_kernels.formats import Exl2Parts
from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.cuda import CudaQuantMatrix


def test_status_is_consistent() -> None:
    status = cuda_status()
    assert status == cuda_status()
    assert status.built_with_cuda == bool(status.archs) == bool(status.toolkit)
    assert status.available == (status.reason is None)
    if status.available:
        assert status.devices
        assert status.driver_version is not None
    else:
        assert status.reason is not None
        assert len(status.reason) > 20


def test_the_reason_names_what_is_missing() -> None:
    status = cuda_status()
    if status.reason is None:
        assert any(d.reason is None for d in status.devices)
        return
    words = ("driver", "kernels", "GPU", "torch")
    assert any(word in status.reason for word in words), status.reason


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_require_cuda_refuses_other_devices(device: str) -> None:
    with pytest.raises(DeviceError, match=device):
        require_cuda(device)


def test_require_cuda_says_why() -> None:
    status = cuda_status()
    if status.reason is not None:
        with pytest.raises(DeviceError) as caught:
            require_cuda("cuda")
        assert status.reason in str(caught.value)
    else:
        with pytest.raises(DeviceError, match="does not exist"):
            require_cuda(f"cuda:{len(status.devices)}")


def test_cuda_operators_reject_cpu_tensors() -> None:
    x = torch.ones(2, 8)
    with pytest.raises(DTypeError, match="cpu"):
        cuda_ops.rms_norm(x, x[0], 1e-6)
    with pytest.raises(DTypeError, match="cpu"):
        cuda_ops.layer_norm(x, x[0], None, 1e-6)
    with pytest.raises(DTypeError, match="cpu"):
        cuda_ops.activation(x, "silu")
    with pytest.raises(DTypeError, match="cpu"):
        cuda_ops.apply_rope(x[None], x, x, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(UnsupportedError, match="relu"):
        cuda_ops.activation(x, "relu")


def test_a_matrix_for_an_absent_gpu_is_refused_with_the_reason() -> None:
    status = cuda_status()
    weight = torch.ones(32, 32)
    if status.reason is None:
        assert QuantMatrix.from_float(weight, device="cuda").device.type == "cuda"
        return
    with pytest.raises(DeviceError) as caught:
        QuantMatrix.from_float(weight, device="cuda")
    assert status.reason in str(caught.value)
    with pytest.raises(UnsupportedError, match="meta"):
        QuantMatrix.from_float(weight, device="meta")


@pytest.mark.parametrize("block", [48, 150, None])
def test_many_rows_run_as_their_plan_says(block: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks, at once, or dequantized (None), with matmuls of a stand-in on the CPU."""
    weight = torch.randn(32, 16).half()
    taken: list[int] = []

    class Standin(CudaQuantMatrix):
        def __init__(self) -> None:
            self.name, self.device = "standin", torch.device("cpu")
            self.in_features, self.out_features = weight.shape
            self._group: Any = None

        def _planned(self, rows: int, dtype: torch.dtype, invariant: bool | None) -> Any:
            assert invariant, "as the call asks"
            return SimpleNamespace(dequantizes=block is None, rows=min(rows, block or rows))

        def dequantize(self) -> torch.Tensor:
            return weight

        def _multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
            taken.append(-1)
            out.copy_(x @ weight)

    def launch(group: Any, plan: Any, x: torch.Tensor, out: torch.Tensor) -> None:
        taken.append(plan.rows)
        out.view(plan.rows, -1).copy_(x.view(plan.rows, -1) @ weight)

    monkeypatch.setattr("exl_kernels.linear.cuda.launch_matmul", launch)
    x = torch.randn(3, 50, 32).half()
    got = Standin().matmul(x, invariant=True)
    assert taken == {48: [48, 48, 48, 6], 150: [150], None: [-1]}[block]
    torch.testing.assert_close(got, x @ weight, rtol=1e-2, atol=1e-2)


def test_tensors_that_lie_askew_are_refused() -> None:
    """Kernels read the image by bulk copies and four maxima at a time."""
    k, n = 512, 32
    tensors = Exl2Parts(
        torch.zeros(k // 8, n, dtype=torch.int32),
        torch.zeros(k // 128, n // 8, dtype=torch.int32),
        torch.ones(k // 128, dtype=torch.float16),
        torch.tensor([v for g in range(k // 128) for v in (4, 16 * g)], dtype=torch.int16),
        torch.arange(k, dtype=torch.int32),
    )
    layout = _native.CudaLayout.from_exl2("askew", tensors, 16)

    def at(t: Tensor, odd: int) -> Tensor:
        """A copy whose address is `odd` bytes past a multiple of 128."""
        room = torch.empty(t.nbytes + 256, dtype=torch.uint8)
        first = -room.data_ptr() % 128 + odd
        return room[first : first + t.nbytes].view(t.dtype).view(t.shape).copy_(t)

    packed = layout.image
    assert packed is not None
    for what, image, maxima in (("image", 16, 0), ("maxima", 0, 8)):
        with pytest.raises(ValueError, match=what):
            _native.CudaMatrix(
                layout,
                image=at(packed, image),
                units=layout.units,
                maxima=at(layout.maxima, maxima),
                features=layout.features,
                row_of_feature=layout.row_of_feature,
                bias=None,
                prescale=1.0,
            )
