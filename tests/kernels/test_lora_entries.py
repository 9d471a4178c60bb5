"""Tables of adapters on the CPU: each number is where the kernels read it."""

from __future__ import annotations

import pytest
import torch

from exl_kernels import _native
from exl_kernels.linear import lora
from exl_kernels.linear.lora import LoraEntry, LoraTable


@pytest.mark.parametrize("biased", [False, True])
def test_an_entry_is_a_row_in_the_layout_of_the_kernels(monkeypatch: pytest.MonkeyPatch, biased: bool) -> None:
    bias = torch.zeros(4) if biased else None
    entry = LoraEntry(torch.zeros(3, 8).half(), torch.zeros(3, 4).half(), torch.ones(3), bias)
    given: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(lora, "check_operand", lambda *_: None)  # that operands are on a GPU
    monkeypatch.setattr(lora, "launch_on", lambda x: None)
    monkeypatch.setattr(_native, "cuda_lora_add", lambda x, **operands: given.update(operands))
    LoraTable([None, entry]).add(torch.zeros(1, 8).half(), torch.zeros(1, 4).half())
    none, row = given["table"]
    fields = _native.lora_entry_fields()
    found = {field.name: int(row.view(torch.uint8)[field.offset :][: field.size].view(torch.int64)) for field in fields}
    tensors = {"a": entry.a, "b": entry.b, "scale": entry.scale}
    expected = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    assert found == expected | {"bias": 0 if bias is None else bias.data_ptr(), "rank": 3}
    assert not none.any()
    assert row.nbytes == sum(field.size for field in fields)
