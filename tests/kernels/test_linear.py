"""QuantMatrix against the dequantized weights in FP64: formats, modes, instruction sets, thread counts, rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from exl_kernels import formats, threads
from exl_kernels.linear import QuantMatrix

WIDTHS = (2, 3, 4, 5, 6, 8)


@pytest.fixture(autouse=True)
def _restore_threads_and_isa() -> Iterator[None]:
    before = threads.num_threads(), threads.isa()
    yield
    threads.set_num_threads(before[0])
    threads.set_isa(before[1])


def random_exl2(k: int, n: int, groups: list[tuple[int, int]], seed: int = 0) -> dict[str, Tensor]:
    """A matrix of random codes and scales with `groups` of (bits, rows)."""
    gen = torch.Generator().manual_seed(seed)
    words = [rows * bits // 32 for bits, rows in groups]
    starts = [sum(words[:g]) for g in range(len(groups))]

    def random_words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, generator=gen, dtype=torch.int64).to(torch.int32)

    return {
        "q_weight": random_words(sum(words), n),
        "q_scale": random_words(len(groups), n // 8),
        "q_scale_max": (torch.rand(len(groups), generator=gen) * 0.02 + 0.0005).half(),
        "q_groups": torch.tensor(
            [v for (bits, _), start in zip(groups, starts, strict=True) for v in (bits, start)], dtype=torch.int16
        ),
        "q_invperm": torch.randperm(k, generator=gen).int(),
        "bias": torch.randn(n, generator=gen).half(),
    }


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("compute", ["exact", "int8"])
def test_every_isa_gives_the_same_bits_near_the_oracle(bits: int, compute: str) -> None:
    k, n = 288, 96
    tensors = random_exl2(k, n, [(bits, 128), (bits, 128), (bits, 32)], seed=bits)
    matrix = QuantMatrix.from_exl2(tensors, compute=compute, prescale=0.5)  # type: ignore[arg-type]
    weight = formats.exl2_dequantize({key: t for key, t in tensors.items() if key != "bias"})
    assert torch.equal(matrix.dequantize().view(torch.int16), weight.view(torch.int16))
    x = torch.randn(7, k, generator=torch.Generator().manual_seed(1))
    oracle = (x.double() @ weight.double() + tensors["bias"].double()) * 0.5
    results = []
    for isa in ("scalar", "avx2", "avx512"):
        threads.set_isa(isa)
        results.append(matrix.matmul(x))
    assert all(torch.equal(results[0], r) for r in results)
    error = float((results[0].double() - oracle).norm() / oracle.norm())
    assert error < (1e-6 if compute == "exact" else 0.012)
