"""QuantMatrix against its twins: formats, widths, modes, odd sizes, permutations; the bitwise laws; refusals."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from effort import trials
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exl_kernels import formats, threads
from exl_kernels.errors import DTypeError, FormatError, ShapeError, UnsupportedError
from exl_kernels.linear import QuantMatrix
from exl_kernels.reference import linear as linear_reference

WIDTHS = (2, 3, 4, 5, 6, 8)
ISAS: tuple[threads.ISA, ...] = ("scalar", "avx2", "avx512")
EXACT_TOLERANCE = 2e-6
# The twin's fused multiply-add rounds twice, so its results may be a last bit apart.
INT8_TWIN_TOLERANCE = 1e-6
HALF_ROUNDING = 2.0**-11
# Error bound of int8 activations on normal noise: a step of max / 127 in 32 values.
INT8_TOLERANCE = 0.015


@pytest.fixture(autouse=True)
def _restore_threads_and_isa() -> Iterator[None]:
    before = threads.num_threads(), threads.isa()
    yield
    threads.set_num_threads(before[0])
    threads.set_isa(before[1])


def random_exl2(n: int, groups: list[tuple[int, int]], seed: int = 0) -> dict[str, Tensor]:
    """A matrix of random codes and scales with `groups` of (bits, rows)."""
    gen = torch.Generator().manual_seed(seed)
    words = [rows * bits // 32 for bits, rows in groups]
    starts = [sum(words[:g]) for g in range(len(groups))]

    def random_words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=gen, dtype=torch.int64).to(torch.int32)

    pairs = [v for (bits, _), start in zip(groups, starts, strict=True) for v in (bits, start)]
    return {
        "q_weight": random_words(sum(words), n),
        "q_scale": random_words(len(groups), n // 8),
        "q_scale_max": (torch.rand(len(groups), generator=gen) * 0.02 + 0.0005).half(),
        "q_groups": torch.tensor(pairs, dtype=torch.int16),
        "q_invperm": torch.randperm(sum(rows for _, rows in groups), generator=gen).int(),
        "bias": torch.randn(n, generator=gen).half(),
    }


def random_gptq(bits: int, k: int, n: int, group_of: Tensor | None, groups: int, seed: int) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(seed)

    def random_words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=gen, dtype=torch.int64).to(torch.int32)

    tensors = {
        "qweight": random_words(k * bits // 32, n),
        "qzeros": random_words(groups, n * bits // 32),
        "scales": (torch.rand(groups, n, generator=gen) * 0.01 + 0.001).half(),
        "bias": torch.randn(n, generator=gen).half(),
    }
    return tensors if group_of is None else {**tensors, "g_idx": group_of.int()}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def without_bias(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: t for key, t in tensors.items() if key != "bias"}


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    whole = torch.int16 if a.dtype == torch.float16 else torch.int32
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


group_lists = st.lists(st.tuples(st.sampled_from(WIDTHS), st.sampled_from((32, 64, 96, 128))), min_size=1, max_size=7)
row_counts = st.sampled_from((1, 2, 3, 7, 8, 16, 33, 64, 65))


class TestExl2:
    @settings(max_examples=trials(40, 12), deadline=None)
    @given(
        groups=group_lists,
        n=st.sampled_from((8, 32, 40, 96, 160)),
        rows=row_counts,
        isa=st.sampled_from(ISAS),
        prescale=st.sampled_from((1.0, 0.37)),
        with_bias=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def test_matmuls_and_weights(
        self,
        groups: list[tuple[int, int]],
        n: int,
        rows: int,
        isa: threads.ISA,
        prescale: float,
        with_bias: bool,
        seed: int,
    ) -> None:
        tensors = random_exl2(n, groups, seed)
        if not with_bias:
            del tensors["bias"]
        bias = tensors.get("bias")
        weight = formats.exl2_dequantize(without_bias(tensors))
        x = normal(rows, weight.shape[0], seed=seed + 1)
        threads.set_isa(isa)
        exact = QuantMatrix.from_exl2(tensors, prescale=prescale, compute="exact")
        assert bitwise_equal(exact.dequantize(), weight)
        oracle = linear_reference.matmul(x, weight, bias, prescale)
        assert distance(exact.matmul(x), oracle) < EXACT_TOLERANCE

        int8 = QuantMatrix.from_exl2(tensors, prescale=prescale, compute="int8")
        assert bitwise_equal(int8.dequantize(), weight)
        twin = linear_reference.matmul_int8(x, linear_reference.exl2_blocks(tensors), n, bias, prescale)
        assert distance(int8.matmul(x), twin) < INT8_TWIN_TOLERANCE

    def test_int8_error_is_that_of_the_activations(self) -> None:
        tensors = without_bias(random_exl2(512, [(4, 128)] * 8))
        x = normal(16, 1024)
        exact, int8 = (QuantMatrix.from_exl2(tensors, compute=c).matmul(x) for c in ("exact", "int8"))
        assert 1e-4 < distance(int8, exact) < INT8_TOLERANCE

    def test_an_outlier_costs_its_own_block_only(self) -> None:
        tensors = without_bias(random_exl2(256, [(4, 128)] * 4))
        x = normal(1, 512)
        x[0, 77] = 1000.0
        exact, int8 = (QuantMatrix.from_exl2(tensors, compute=c).matmul(x) for c in ("exact", "int8"))
        assert distance(int8, exact) < INT8_TOLERANCE

    @pytest.mark.parametrize("bits", WIDTHS)
    def test_extreme_codes_and_activations_do_not_saturate(self, bits: int) -> None:
        tensors = without_bias(random_exl2(64, [(bits, 64)]))
        tensors["q_weight"].fill_(-1)
        weight = formats.exl2_dequantize(tensors)
        matrix = QuantMatrix.from_exl2(tensors, compute="int8")
        for sign in (1.0, -1.0):
            x = torch.full((3, 64), sign)
            for isa in ISAS:
                threads.set_isa(isa)
                # Equal activations are exact in int8; what is left is that its weights are not rounded to half.
                assert distance(matrix.matmul(x), linear_reference.matmul(x, weight)) < HALF_ROUNDING

    def test_facts(self) -> None:
        matrix = QuantMatrix.from_exl2(random_exl2(64, [(4, 128), (4, 128)]), name="layer.q_proj")
        assert (matrix.in_features, matrix.out_features, matrix.format, matrix.name) == (
            256,
            64,
            "exl2",
            "layer.q_proj",
        )
        stored = 256 * 64 * 4 + 2 * (16 + 32) + 2 * 64 * 4 + 256 * 32
        assert matrix.bits_per_weight == pytest.approx(stored / (256 * 64))
        # In memory a matrix is no larger than in its file, but for scale tables of 64 bytes a group and the bias.
        assert matrix.nbytes <= stored / 8 + 2 * 64 + 4 * 64
        assert "layer.q_proj" in repr(matrix)


class TestGptq:
    @settings(max_examples=trials(40, 12), deadline=None)
    @given(
        bits=st.sampled_from((2, 3, 4, 8)),
        groups=st.integers(1, 5),
        group_size=st.sampled_from((16, 32, 48, 128)),
        n=st.sampled_from((32, 96, 160)),
        rows=row_counts,
        order=st.sampled_from(("sequential", "act-order", "random")),
        v2=st.booleans(),
        isa=st.sampled_from(ISAS),
        seed=st.integers(0, 1000),
    )
    def test_matmuls_and_weights(
        self,
        bits: int,
        groups: int,
        group_size: int,
        n: int,
        rows: int,
        order: str,
        v2: bool,
        isa: threads.ISA,
        seed: int,
    ) -> None:
        k = -(-groups * group_size // 32) * 32
        groups = -(-k // group_size)
        gen = torch.Generator().manual_seed(seed)
        group_of = torch.arange(k) // group_size
        if order == "act-order":
            group_of = group_of[torch.randperm(k, generator=gen)]
        elif order == "random":
            group_of = torch.randint(0, groups, (k,), generator=gen)
        g_idx = None if order == "sequential" else group_of
        if g_idx is not None and not g_idx.any():
            g_idx = None  # all zero means the same as none
            group_of = torch.arange(k) // group_size
        tensors = random_gptq(bits, k, n, g_idx, groups, seed)
        zeros: Any = "v2" if v2 else "classic"
        weight = formats.gptq_dequantize(without_bias(tensors), bits=bits, zeros=zeros, group_size=group_size)
        x = normal(rows, k, seed=seed + 1)
        threads.set_isa(isa)
        options: dict[str, Any] = {"bits": bits, "zeros": zeros, "group_size": group_size, "prescale": 0.5}
        exact = QuantMatrix.from_gptq(tensors, compute="exact", **options)
        assert bitwise_equal(exact.dequantize(), weight)
        assert distance(exact.matmul(x), linear_reference.matmul(x, weight, tensors["bias"], 0.5)) < EXACT_TOLERANCE
        int8 = QuantMatrix.from_gptq(tensors, compute="int8", **options)
        blocks = linear_reference.gptq_blocks(tensors, bits, v2, group_of.numpy())
        twin = linear_reference.matmul_int8(x, blocks, n, tensors["bias"], 0.5)
        assert distance(int8.matmul(x), twin) < INT8_TWIN_TOLERANCE

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_scales_in_other_float_types_are_read_as_half(self, dtype: torch.dtype) -> None:
        tensors = random_gptq(4, 64, 32, None, 2, 0)
        tensors["scales"] = tensors["scales"].to(dtype)
        weight = formats.gptq_dequantize({**without_bias(tensors), "scales": tensors["scales"].half()}, bits=4)
        assert bitwise_equal(QuantMatrix.from_gptq(tensors).dequantize(), weight)


class TestFloat:
    @settings(max_examples=trials(30, 10), deadline=None)
    @given(
        k=st.integers(1, 200),
        n=st.integers(1, 100),
        rows=row_counts,
        dtype=st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
        compute=st.sampled_from(("exact", "int8")),
        isa=st.sampled_from(ISAS),
        with_bias=st.booleans(),
    )
    def test_matmuls_and_weights(
        self, k: int, n: int, rows: int, dtype: torch.dtype, compute: Any, isa: threads.ISA, with_bias: bool
    ) -> None:
        weight, x = normal(n, k, seed=k).to(dtype), normal(rows, k, seed=n)
        bias = normal(n, seed=3).to(dtype) if with_bias else None
        threads.set_isa(isa)
        matrix = QuantMatrix.from_float(weight, bias, prescale=2.0, compute=compute)
        assert distance(matrix.matmul(x), linear_reference.matmul(x, weight.T, bias, 2.0)) < EXACT_TOLERANCE
        assert torch.equal(matrix.dequantize(), weight.T.half())
        assert matrix.bits_per_weight == 8 * dtype.itemsize


def every_kind() -> dict[str, QuantMatrix]:
    exl2 = random_exl2(96, [(6, 128), (5, 96), (4, 128), (3, 64)], seed=5)
    gptq = random_gptq(4, 416, 96, torch.arange(416).flip(0) // 128, 4, 6)
    return {
        "exl2 exact": QuantMatrix.from_exl2(exl2, compute="exact"),
        "exl2 int8": QuantMatrix.from_exl2(exl2, compute="int8"),
        "gptq exact": QuantMatrix.from_gptq(gptq, compute="exact"),
        "gptq int8": QuantMatrix.from_gptq(gptq, compute="int8"),
        "f16": QuantMatrix.from_float(normal(90, 416).half()),
        "f32": QuantMatrix.from_float(normal(90, 416)),
    }


@pytest.mark.parametrize("kind", sorted(every_kind()))
class TestBitwiseLaws:
    def test_a_row_does_not_depend_on_the_others(self, kind: str) -> None:
        matrix = every_kind()[kind]
        x = normal(200, 416, seed=9)
        alone = torch.cat([matrix.matmul(row[None]) for row in x])
        for rows in (2, 3, 5, 8, 13, 64, 65, 129, 200):
            assert bitwise_equal(matrix.matmul(x[:rows]), alone[:rows]), f"{rows} rows"
            assert bitwise_equal(matrix.matmul(x[-rows:]), alone[-rows:]), f"last {rows} rows"

    def test_thread_count_changes_nothing(self, kind: str) -> None:
        matrix = every_kind()[kind]
        for rows in (1, 70):
            x, results = normal(rows, 416), []
            for n in (1, 2, 3, 7):
                threads.set_num_threads(n)
                results.append(matrix.matmul(x))
            assert all(bitwise_equal(r, results[0]) for r in results)

    def test_instruction_set_changes_nothing(self, kind: str) -> None:
        matrix = every_kind()[kind]
        for rows in (1, 2, 70):
            x, results = normal(rows, 416), []
            for isa in ISAS:
                threads.set_isa(isa)
                results.append(matrix.matmul(x))
            assert all(bitwise_equal(r, results[0]) for r in results)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_bad_activations_stay_in_their_row(self, kind: str, bad: float) -> None:
        matrix = every_kind()[kind]
        x = normal(5, 416)
        clean = matrix.matmul(x)
        x[2, 100] = bad
        y = matrix.matmul(x)
        assert not torch.isfinite(y[2]).any()
        assert bitwise_equal(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])

    def test_zeros_give_the_bias(self, kind: str) -> None:
        matrix = every_kind()[kind]
        y = matrix.matmul(torch.zeros(3, 416))
        assert torch.isfinite(y).all()
        assert bitwise_equal(y[0], y[2])

    def test_any_layout_of_the_input(self, kind: str) -> None:
        matrix = every_kind()[kind]
        x = normal(3, 2, 416)
        y = matrix.matmul(x)
        assert y.shape == (3, 2, matrix.out_features)
        assert bitwise_equal(matrix.matmul(x.transpose(0, 1)), y.transpose(0, 1).contiguous())
        out = torch.full((3, 2, matrix.out_features), 7.0)
        assert matrix.matmul(x, out) is out
        assert bitwise_equal(out, y)
        assert matrix.matmul(x[0, 0]).shape == (matrix.out_features,)
        assert matrix.matmul(torch.empty(0, 416)).shape == (0, matrix.out_features)


def test_threads_of_the_caller_take_turns() -> None:
    matrix = every_kind()["exl2 int8"]
    x = normal(4, 416)
    expected = matrix.matmul(x)
    failures: list[int] = []

    def work() -> None:
        failures.extend(1 for _ in range(50) if not torch.equal(matrix.matmul(x), expected))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=250)
    assert not failures
    assert not any(worker.is_alive() for worker in workers)


def test_a_forked_child_has_threads_of_its_own(tmp_path: Any) -> None:
    import os

    threads.set_num_threads(3)
    matrix = every_kind()["exl2 int8"]
    x = normal(70, 416)
    expected = matrix.matmul(x)
    pid = os.fork()
    if pid == 0:
        equal = torch.equal(matrix.matmul(x), expected)
        os._exit(0 if equal else 1)
    _, status = os.waitpid(pid, 0)
    assert status == 0


class TestRefusals:
    def test_matmuls(self) -> None:
        matrix = every_kind()["exl2 int8"]
        with pytest.raises(ShapeError, match="the last must be 416"):
            matrix.matmul(torch.zeros(2, 415))
        with pytest.raises(ShapeError):
            matrix.matmul(torch.tensor(1.0))
        with pytest.raises(DTypeError, match="float32"):
            matrix.matmul(torch.zeros(2, 416, dtype=torch.float16))
        with pytest.raises(DTypeError, match="meta"):
            matrix.matmul(torch.zeros(2, 416, device="meta"))
        for out in (torch.empty(2, 95), torch.empty(2, 96, dtype=torch.float64), torch.empty(96, 2).T):
            with pytest.raises(ShapeError, match="out is"):
                matrix.matmul(torch.zeros(2, 416), out)

    def test_exl2(self) -> None:
        good = random_exl2(64, [(4, 64), (3, 32)])
        with pytest.raises(FormatError, match=r"w\.q: q_scale is missing"):
            QuantMatrix.from_exl2({k: t for k, t in good.items() if k != "q_scale"}, name="w.q")
        changes: list[dict[str, Tensor]] = [
            {"q_weight": good["q_weight"][:-1]},
            {"q_weight": good["q_weight"].long()},
            {"q_weight": good["q_weight"].flatten()},
            {"q_scale": good["q_scale"][:, :-1]},
            {"q_groups": torch.tensor([7, 0, 3, 8], dtype=torch.int16)},
            {"q_groups": torch.tensor([4, 0, 3, 7], dtype=torch.int16)},
            {"q_invperm": torch.zeros(96, dtype=torch.int32)},
            {"q_invperm": good["q_invperm"][:-32]},
            {"q_scale_max": torch.tensor([float("nan"), 1.0]).half()},
            {"q_scale_max": torch.tensor([float("inf"), 1.0]).half()},
            {"bias": torch.zeros(63).half()},
            {"bias": torch.full((64,), float("nan")).half()},
            {"bias": torch.zeros(64, dtype=torch.int32)},
        ]
        for change in changes:
            with pytest.raises(FormatError, match=r"w\.q"):
                QuantMatrix.from_exl2({**good, **change}, name="w.q")

    def test_gptq(self) -> None:
        good = random_gptq(4, 64, 32, None, 2, 0)
        changes: list[tuple[dict[str, Tensor], dict[str, Any]]] = [
            ({"qweight": good["qweight"][:, :-1]}, {}),
            ({"scales": torch.full((2, 32), float("inf"))}, {}),
            ({"g_idx": torch.full((64,), 2, dtype=torch.int32)}, {}),
            ({"g_idx": torch.zeros(63, dtype=torch.int32)}, {}),
            ({}, {"bits": 5}),
            ({}, {"bits": 8}),
            ({}, {"group_size": 16}),
        ]
        for change, options in changes:
            with pytest.raises(FormatError, match=r"w\.q"):
                QuantMatrix.from_gptq({**good, **change}, name="w.q", **options)

    def test_options(self) -> None:
        weight = normal(4, 4)
        with pytest.raises(UnsupportedError, match="compute"):
            QuantMatrix.from_float(weight, compute="int4")  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match="device"):
            QuantMatrix.from_float(weight, device="meta")
        with pytest.raises(FormatError, match="prescale"):
            QuantMatrix.from_float(weight, prescale=float("nan"))
        with pytest.raises(FormatError, match="int32"):
            QuantMatrix.from_float(weight.int())
        with pytest.raises(FormatError, match="neither of them 0"):
            QuantMatrix.from_float(torch.zeros(0, 4))
        with pytest.raises(ValueError, match="at least 1"):
            threads.set_num_threads(0)
        with pytest.raises(ValueError, match="sse9"):
            threads.set_isa("sse9")  # type: ignore[arg-type]


def test_quantized_activations_of_the_twin() -> None:
    q, scale = linear_reference.quantize_activations(np.array([[1.0, -2.0, 0.5], [0, 0, 0]], dtype=np.float32))
    assert q.tolist() == [[64, -127, 32], [0, 0, 0]]
    assert scale[0] == np.float32(2) / np.float32(127)
    assert scale[1] == 0
