"""Matrices packed in parts, and copied to a GPU through pinned memory of bounded size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exl_kernels import _native
from exl_kernels.formats import Exl2Parts, GptqFormat, GptqParts
from exl_kernels.linear import QuantMatrix, upload
from exl_kernels.linear.upload import Uploads

Exl2 = dict[str, Tensor]
SHAPES = [(64, 32, [(4, 64)]), (512, 96, [(5, 128), (4, 128), (3, 128), (2, 128)]), (96, 288, [(6, 32), (8, 64)])]


def random_words(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=generator)


def exl2(k: int, n: int, groups: list[tuple[int, int]]) -> Exl2:
    starts, words = [], 0
    for bits, rows in groups:
        starts += [bits, words]
        words += bits * rows // 32
    return {
        "q_weight": random_words(words, n, seed=1),
        "q_scale": random_words(len(groups), n // 8, seed=2),
        "q_scale_max": torch.linspace(0.01, 0.02, len(groups)).half(),
        "q_groups": torch.tensor(starts, dtype=torch.int16),
        "q_invperm": torch.randperm(k, generator=torch.Generator().manual_seed(3)).to(torch.int32),
    }


def parts_of(tensors: Exl2) -> Exl2Parts:
    return Exl2Parts(**{key: tensors[key] for key in Exl2Parts._fields})


def gptq(k: int, n: int) -> GptqParts:
    scales = torch.linspace(0.01, 0.02, k // 64 * n).half().view(k // 64, n)
    group = torch.arange(k, dtype=torch.int32) // 64
    return GptqParts(random_words(k // 8, n, seed=4), random_words(k // 64, n // 8, seed=5), scales, group)


@pytest.mark.parametrize(("k", "n", "groups"), SHAPES)
def test_parts_of_an_image_are_those_of_the_whole(k: int, n: int, groups: list[tuple[int, int]]) -> None:
    parts = parts_of(exl2(k, n, groups))
    whole = _native.CudaLayout.from_exl2("m", parts, 2)
    layout = _native.CudaLayout.from_exl2("m", parts, 2, pack=False)
    assert layout.image is None
    assert whole.image is not None
    image = torch.zeros_like(whole.image)
    for first in range(layout.tiles):
        layout.pack_exl2(
            "m", parts, first=first, out=image[first * layout.tile_bytes : (first + 1) * layout.tile_bytes], threads=2
        )
    # Bytes of scales that no group uses are whatever the memory held: zeros in `image`, ones here.
    other = torch.full_like(image, 255)
    layout.pack_exl2("m", parts, first=0, out=other, threads=1)
    unused = other != image
    assert torch.equal(image[~unused], whole.image[~unused])
    assert int(unused.sum()) < image.numel() // 8


def test_gptq_in_parts() -> None:
    parts = gptq(256, 64)
    whole = _native.CudaLayout.from_gptq("m", parts, GptqFormat(), 2)
    layout = _native.CudaLayout.from_gptq("m", parts, GptqFormat(), 2, pack=False)
    assert whole.image is not None
    image = torch.zeros_like(whole.image)
    half = layout.tiles // 2 * layout.tile_bytes
    layout.pack_gptq("m", parts, GptqFormat(), first=0, out=image[:half], threads=1)
    first = layout.tiles // 2
    layout.pack_gptq("m", parts, GptqFormat(), first=first, out=image[half:], threads=2)
    assert torch.equal(image, whole.image)


def test_parts_that_are_not_of_the_layout_are_rejected() -> None:
    small, large = parts_of(exl2(*SHAPES[0])), parts_of(exl2(*SHAPES[1]))
    layout = _native.CudaLayout.from_exl2("m", small, 1, pack=False)
    tile = torch.zeros(layout.tile_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="not those of this layout"):
        layout.pack_exl2("m", large, first=0, out=tile, threads=1)
    for first, out in ((layout.tiles, tile), (0, tile[1:]), (2**63, tile)):
        with pytest.raises(ValueError, match="whole tiles"):
            layout.pack_exl2("m", small, first=first, out=out, threads=1)
    with pytest.raises(ValueError, match="packed in parts"):
        layout.code(0, 0)


@pytest.mark.cuda
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("slot", [1, 4096, upload.SLOT_BYTES])
def test_matrices_are_on_the_gpu_at_the_end(slot: int, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors that they are read from are overwritten as soon as a matrix is made."""
    monkeypatch.setattr(upload, "SLOT_BYTES", slot)
    uploads = Uploads()
    made, wanted = [], []
    for shape in SHAPES * 2:
        tensors = exl2(*shape)
        wanted.append(QuantMatrix.from_exl2(tensors, device="cuda:0").dequantize().cpu())
        if together:
            with uploads:
                made.append(QuantMatrix.from_exl2(tensors, device="cuda:0"))
        else:
            made.append(QuantMatrix.from_exl2(tensors, device="cuda:0"))
        for tensor in tensors.values():
            tensor.zero_()
    uploads.finish()
    for matrix, values in zip(made, wanted, strict=True):
        assert torch.equal(matrix.dequantize().cpu(), values)


@pytest.mark.cuda
def test_without_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = exl2(*SHAPES[1])
    wanted = QuantMatrix.from_exl2(tensors, device="cuda:0").dequantize().cpu()
    empty = torch.empty

    def refuse(*sizes: object, **options: object) -> Tensor:
        if options.get("pin_memory"):
            raise RuntimeError("no pinned memory left")
        return empty(*sizes, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty", refuse)
    with Uploads() as uploads:
        matrix = QuantMatrix.from_exl2(tensors, device="cuda:0")
    uploads.finish()
    assert torch.equal(matrix.dequantize().cpu(), wanted)
