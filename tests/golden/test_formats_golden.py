"""EXL2 files written by exllamav2's own converter, dequantized, against its own weights: equal to the bit."""

from pathlib import Path

import pytest
import torch

from exl_kernels import formats

DATA = Path(__file__).parent / "data"
GOLDEN = formats.read_safetensors_header(DATA / "golden.safetensors").entries
MATRICES = sorted(name for name in GOLDEN if ".weight." in name)


def test_every_golden_matrix_is_found() -> None:
    assert len(MATRICES) == 16


@pytest.mark.parametrize("golden", MATRICES)
def test_dequantized_weights_are_bit_exact(golden: str) -> None:
    model, module = golden.split(".weight.")
    entries = formats.read_safetensors_folder(DATA / f"pylib-4m-{model}")
    keys = ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")
    tensors = {key: formats.read_tensor(entries[f"{module}.{key}"]) for key in keys}
    found = formats.exl2_dequantize(tensors, name=module)
    expected = formats.read_tensor(GOLDEN[golden])
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
