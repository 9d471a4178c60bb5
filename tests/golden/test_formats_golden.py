"""EXL2 files of exllamav2's converter dequantize to exactly its own weights."""

from pathlib import Path

import pytest
import torch

from exl_kernels import formats
from exl_kernels.quantize.folder import quantize_folder

DATA = Path(__file__).parent / "data"
GOLDEN = formats.read_safetensors_header(DATA / "golden.safetensors").entries
MATRICES = sorted(name for name in GOLDEN if ".weight." in name)


def test_every_golden_matrix_is_found() -> None:
    assert len(MATRICES) == 16


def read_matrix(folder: Path, module: str) -> torch.Tensor:
    entries = formats.read_safetensors_folder(folder)
    keys = ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")
    return formats.exl2_dequantize({key: formats.read_tensor(entries[f"{module}.{key}"]) for key in keys}, name=module)


@pytest.mark.parametrize("golden", MATRICES)
def test_dequantized_weights_are_bit_exact(golden: str) -> None:
    model, module = golden.split(".weight.")
    found = read_matrix(DATA / f"pylib-4m-{model}", module)
    expected = formats.read_tensor(GOLDEN[golden])
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize(("bits", "head_bits"), [(3.5, 4), (4.5, 6)])
def test_our_writer_is_as_near_the_weights_at_the_same_size(tmp_path: Path, bits: float, head_bits: int) -> None:
    quantize_folder(DATA / "pylib-4m-fp16", tmp_path / "ours", bits=bits, head_bits=head_bits)
    reference = DATA / f"pylib-4m-exl2-{bits}"
    weights = formats.read_safetensors_folder(DATA / "pylib-4m-fp16")

    def error(folder: Path) -> float:
        modules = [
            name.removesuffix(".q_weight") for name in formats.read_safetensors_folder(folder) if ".q_weight" in name
        ]
        assert len(modules) == 4 * 7 + 1
        total = 0.0
        for module in modules:
            weight = formats.read_tensor(weights[f"{module}.weight"]).float()
            total += float((read_matrix(folder, module).float().T - weight).square().sum() / weight.square().sum())
        return total

    size = (tmp_path / "ours/output.safetensors").stat().st_size
    assert size <= 1.001 * (reference / "output.safetensors").stat().st_size
    # Calibrated rounding trades error in the weights for error in the outputs, so ours must be nearer.
    assert error(tmp_path / "ours") <= error(reference)
