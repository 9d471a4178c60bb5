"""EXL2 and GPTQ matrices: native code and numpy twin are bitwise identical, and broken matrices are rejected."""

from typing import Any

import numpy as np
import pytest
import torch
from effort import examples, trials
from hypothesis import given, settings
from hypothesis import strategies as st

from exl_kernels import formats, threads
from exl_kernels.errors import DTypeError, ExlError, FormatError, ShapeError
from exl_kernels.reference import formats as twin

Arrays = dict[str, np.ndarray[Any, Any]]
fast = settings(max_examples=trials(60, 15), deadline=None)


def to_torch(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in arrays.items()}


def bitwise_equal(found: torch.Tensor, expected: np.ndarray[Any, Any]) -> bool:
    return found.shape == expected.shape and found.numpy().tobytes() == np.ascontiguousarray(expected).tobytes()


def assert_same(found: dict[str, torch.Tensor], expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert bitwise_equal(tensor, expected[key]), key


# Halves over the whole range that keeps 8-bit weights finite, subnormals and zero included.
scale_maxima = st.one_of(st.integers(0, 0x5FEF), st.integers(0, 0x0400), st.just(0), st.integers(0x8000, 0x8400)).map(
    lambda bits: np.array([bits], np.uint16).view(np.float16)[0]
)


@st.composite
def exl2_matrices(draw: st.DrawFn) -> tuple[Arrays, list[tuple[int, int]], Arrays]:
    """Codes, scale codes and maxima; groups in any order of widths and of any size; the tensors made of them."""
    groups = draw(
        st.lists(
            st.tuples(st.sampled_from([2, 3, 4, 5, 6, 8]), st.sampled_from([32, 64, 96, 128])), min_size=1, max_size=5
        )
    )
    columns = draw(st.integers(1, 9)) * 8
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    codes = np.concatenate([rng.integers(0, 2**bits, (rows, columns)) for bits, rows in groups]).astype(np.uint8)
    parts = {
        "codes": codes,
        "scale_codes": rng.integers(0, 16, (len(groups), columns)).astype(np.uint8),
        "q_scale_max": np.array([draw(scale_maxima) for _ in groups]),
        "perm": rng.permutation(len(codes)) if draw(st.booleans()) else np.arange(len(codes)),
    }
    tensors = twin.exl2_pack(codes, parts["scale_codes"], parts["q_scale_max"], groups, parts["perm"])
    return parts, groups, tensors


@fast
@given(exl2_matrices())
def test_exl2_pack_and_dequantize_equal_the_twin(matrix: tuple[Arrays, list[tuple[int, int]], Arrays]) -> None:
    parts, groups, tensors = matrix
    given_parts = to_torch(parts)
    packed = formats.exl2_pack(
        given_parts["codes"], given_parts["scale_codes"], given_parts["q_scale_max"], groups, perm=given_parts["perm"]
    )
    assert_same(packed, tensors)
    assert formats.exl2_check(packed) == groups
    assert bitwise_equal(formats.exl2_dequantize(packed), twin.exl2_dequantize(tensors))


plans = st.sampled_from(
    [
        "1:4b_128g",
        "1:2b_32g",
        "1:8b_64g",
        "0.1:5b_32g/0.9:4b_32g",
        "0.05:8b_32g/0.1:4b_128g/0.85:3b_128g",
        "0.5:6b_64g/0.5:3b_32g",
    ]
)


def random_weight(seed: int, out_features: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal weights with outliers, rows of very different size, an all-zero row and an all-zero column."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator) * 0.02
    weight *= torch.exp2(torch.randint(-6, 3, (1, in_features), generator=generator).float())
    weight[torch.rand(weight.shape, generator=generator) < 0.01] *= 20
    weight[seed % out_features] = 0
    weight[:, seed % in_features] = 0
    return weight.to(dtype)


@fast
@given(
    plan=plans,
    seed=st.integers(0, 2**31),
    out_features=st.integers(1, 150),
    in_features=st.integers(1, 12).map(lambda blocks: 32 * blocks),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    reorder=st.booleans(),
)
def test_exl2_quantize_equals_the_twin(
    plan: str, seed: int, out_features: int, in_features: int, dtype: torch.dtype, reorder: bool
) -> None:
    weight = random_weight(seed, out_features, in_features, dtype)
    perm = formats.importance_order(weight) if reorder else None
    groups = formats.exl2_groups(plan, in_features)
    assert sum(rows for _, rows in groups) == in_features
    found = formats.exl2_quantize(weight, plan, perm=perm, fast=True)
    assert_same(found, twin.exl2_quantize(weight.float().numpy(), groups, None if perm is None else perm.numpy()))
    assert 8 * sum(tensor.nbytes for tensor in found.values()) == formats.exl2_total_bits(
        plan, in_features, out_features
    )
    assert not formats.exl2_dequantize(found)[:, out_features:].any()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_exl2_scale_search_finds_the_best_factor(bits: int) -> None:
    weight = random_weight(bits, 96, 256, torch.float32)
    found = formats.exl2_quantize(weight, bits, 64)
    chosen = []
    for g in range(4):
        block = weight.T[64 * g : 64 * g + 64].numpy()
        factors, costs = twin.exl2_scale_costs(block, bits)
        widest, _ = twin.column_scales(block, bits)
        grid = (widest * factors.astype(np.float32)).astype(np.float16)
        used = int(np.argmin(np.abs(grid.astype(np.float64) - found["q_scale_max"][g].item())))
        assert costs[used] <= costs.min() * 1.001
        chosen.append(factors[used])
    expected = twin.exl2_quantize(weight.numpy(), [(bits, 64)] * 4, None, np.array(chosen))
    assert torch.equal(found["q_scale"], torch.from_numpy(expected["q_scale"]))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_exl2_quantized_weights_are_within_a_step(bits: int) -> None:
    weight = random_weight(bits, 64, 128, torch.float32)
    tensors = formats.exl2_quantize(weight, bits, 32, fast=True)
    scales = twin.exl2_scales(tensors["q_scale"].numpy(), tensors["q_scale_max"].numpy())
    steps = torch.from_numpy(scales.astype(np.float32)).repeat_interleave(32, dim=0)
    error = (formats.exl2_dequantize(tensors).float() - weight.T).abs()
    # Half a step and the last rounding to half; weights beyond the widest code are clipped.
    clipped = weight.T.abs() > steps * (2 ** (bits - 1) - 1)
    assert (error <= steps * 0.57)[~clipped & (steps > 0)].all()


def test_exl2_quantize_is_the_same_at_any_thread_count() -> None:
    weight = random_weight(5, 200, 512, torch.float16)
    before, results = threads.num_threads(), []
    try:
        for count in (1, 2, 5):
            threads.set_num_threads(count)
            results.append(formats.exl2_quantize(weight, "0.1:5b_32g/0.9:4b_32g"))
    finally:
        threads.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(results[0][key], other[key]) for key in other)


# GPTQ

gptq_settings = {
    "bits": st.sampled_from([2, 3, 4, 8]),
    "group_size": st.sampled_from([-1, 1, 20, 32, 48, 64, 128]),
    "in_blocks": st.integers(1, 8),
    "out_blocks": st.integers(1, 3),
    "zeros": st.sampled_from(["classic", "v2"]),
    "seed": st.integers(0, 2**31),
}


@fast
@given(**gptq_settings)
def test_gptq_dequantize_equals_the_twin(
    bits: int, group_size: int, in_blocks: int, out_blocks: int, zeros: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows, columns = 32 * in_blocks, 32 * out_blocks
    size = rows if group_size == -1 else group_size
    groups = -(-rows // size)
    halves = rng.integers(0, 0x4C00, (groups, columns)).astype(np.uint16) | (
        rng.integers(0, 2, (groups, columns)) << 15
    ).astype(np.uint16)
    arrays: Arrays = {
        "qweight": twin.pack_columns(rng.integers(0, 2**bits, (rows, columns)), bits),
        "qzeros": twin.pack_rows(rng.integers(0, 2**bits, (groups, columns)), bits),
        "scales": halves.view(np.float16),
    }
    found = formats.gptq_dequantize(to_torch(arrays), bits=bits, zeros=zeros, group_size=group_size)
    assert bitwise_equal(found, twin.gptq_dequantize(arrays, bits, zeros == "v2", size))
    # An index that is all zero means none; any other is honoured row by row.
    arrays["g_idx"] = np.zeros(rows, np.int32)
    again = formats.gptq_dequantize(to_torch(arrays), bits=bits, zeros=zeros, group_size=group_size)
    assert torch.equal(found.view(torch.int16), again.view(torch.int16))
    arrays["g_idx"] = rng.integers(0, groups, rows).astype(np.int32)
    found = formats.gptq_dequantize(to_torch(arrays), bits=bits, zeros=zeros, group_size=group_size)
    assert bitwise_equal(found, twin.gptq_dequantize(arrays, bits, zeros == "v2", size))


@fast
@given(**gptq_settings, symmetric=st.booleans(), act_order=st.booleans())
def test_gptq_quantize_equals_the_twin(
    bits: int, group_size: int, in_blocks: int, out_blocks: int, zeros: Any, seed: int, symmetric: bool, act_order: bool
) -> None:
    weight = random_weight(seed, 32 * out_blocks, 32 * in_blocks, torch.float16)
    perm = formats.importance_order(weight) if act_order else None
    settings_ = {"bits": bits, "group_size": group_size, "zeros": zeros}
    found = formats.gptq_quantize(weight, **settings_, symmetric=symmetric, perm=perm)
    size = weight.shape[1] if group_size == -1 else group_size
    order = None if perm is None else perm.numpy()
    assert_same(found, twin.gptq_quantize(weight.float().numpy(), bits, size, symmetric, zeros == "v2", order))
    weights = formats.gptq_dequantize(found, **settings_).float()
    steps = found["scales"].float()[found["g_idx"].long()]
    if not symmetric and bits > 2:
        # Classic zeros cannot say 0, so an all-positive group loses up to one step; two steps bound every case in which
        # the scale is a normal half.
        assert ((weights - weight.float().T).abs() <= 2.01 * steps)[steps > 2**-14].all()


def test_gptq_group_size_is_guessed_as_the_reference_does() -> None:
    tensors = formats.gptq_quantize(torch.randn(32, 160), group_size=64)
    del tensors["g_idx"]
    assert torch.equal(formats.gptq_dequantize(tensors), formats.gptq_dequantize(tensors, group_size=64))
    with pytest.raises(FormatError, match="group_size 32 cuts 160 rows into 5 groups, but the file has 3"):
        formats.gptq_dequantize(tensors, group_size=32)


# Broken matrices


def good_exl2() -> dict[str, torch.Tensor]:
    return formats.exl2_quantize(torch.randn(64, 128) * 0.1, "0.25:5b_32g/0.75:3b_64g", fast=True)


def edit(key: str, index: int, value: float) -> Any:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[key].view(-1)[index] = value

    return change


def replace(key: str, make: Any) -> Any:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[key] = make(tensors[key])

    return change


BROKEN_EXL2 = {
    "width 7": (edit("q_groups", 0, 7), "group 0 is 7 bits wide"),
    "width -1": (edit("q_groups", 0, -1), "-1 bits wide"),
    "first group not at 0": (edit("q_groups", 1, 1), "group 0 spans packed rows 1..5"),
    "groups run backwards": (edit("q_groups", 3, 0), "group 0 spans packed rows 0..0"),
    "group beyond the words": (edit("q_groups", 5, 999), "beyond|stay within"),
    "group of a broken number of rows": (edit("q_groups", 3, 4), "not a multiple of 5"),
    "rows do not add up": (replace("q_invperm", lambda t: t[:96]), "128 rows in all, but q_invperm has 96"),
    "rows missing": (replace("q_weight", lambda t: t[:8]), "96 rows in all|stay within|spans"),
    "permutation repeats": (edit("q_invperm", 5, 4), "q_invperm: entry 5 is 4; occurs twice"),
    "permutation out of range": (edit("q_invperm", 0, 128), "q_invperm: entry 0 is 128; must lie in 0..128"),
    "permutation negative": (edit("q_invperm", 0, -3), "entry 0 is -3"),
    "NaN scale": (edit("q_scale_max", 1, float("nan")), r"q_scale_max\[1\] is NaN; scales must be finite"),
    "infinite scale": (edit("q_scale_max", 1, float("inf")), "scales must be finite"),
    "weights beyond half": (edit("q_scale_max", 0, 60000.0), "must be at most 4094"),
    "scales of other width": (replace("q_scale", lambda t: t[:, :7].clone()), "q_scale has shape"),
    "scale groups missing": (replace("q_scale_max", lambda t: t[:2]), "q_scale_max has shape"),
    "odd group table": (replace("q_groups", lambda t: t[:5]), "q_groups has shape"),
    "columns not by 8": (replace("q_weight", lambda t: t[:, :60].clone()), "multiple of 8"),
    "wrong element type": (replace("q_weight", lambda t: t.long()), "q_weight is torch.int64"),
    "wrong dimensions": (replace("q_weight", lambda t: t.view(-1)), "with 2 dimensions"),
    "empty": (replace("q_invperm", lambda t: t[:0]), "empty"),
}


@pytest.mark.parametrize("case", BROKEN_EXL2)
def test_the_error_names_a_broken_exl2_matrix(case: str) -> None:
    change, text = BROKEN_EXL2[case]
    tensors = good_exl2()
    change(tensors)
    for reader in (formats.exl2_check, formats.exl2_dequantize):
        with pytest.raises(FormatError, match=text) as caught:
            reader(tensors, name="model.layers.3.mlp.up_proj")
        assert str(caught.value).startswith("model.layers.3.mlp.up_proj: ")


def test_missing_tensors_are_named() -> None:
    tensors = good_exl2()
    del tensors["q_invperm"]
    with pytest.raises(FormatError, match="lm_head: tensor q_invperm is missing"):
        formats.exl2_check(tensors, name="lm_head")


@examples(150, 15)
@given(st.data())
def test_random_damage_is_read_or_refused(data: st.DataObject) -> None:
    torch.manual_seed(0)
    tensors = good_exl2()
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(["q_groups", "q_invperm", "q_scale_max", "q_weight", "q_scale"]))
        raw = tensors[key].view(-1).view(torch.int16)
        raw[data.draw(st.integers(0, raw.numel() - 1))] = data.draw(st.integers(-(2**15), 2**15 - 1))
    try:
        groups = formats.exl2_check(tensors)
    except FormatError:
        return
    assert sum(rows for _, rows in groups) == 128
    expected = twin.exl2_dequantize({key: tensor.numpy() for key, tensor in tensors.items()})
    assert bitwise_equal(formats.exl2_dequantize(tensors), expected)
    assert np.isfinite(expected).all()


BROKEN_GPTQ: dict[str, tuple[Any, dict[str, Any], str]] = {
    "group index too large": (edit("g_idx", 3, 4), {}, r"g_idx\[3\] is 4; groups are numbered 0..4"),
    "group index negative": (edit("g_idx", 3, -1), {}, r"g_idx\[3\] is -1"),
    "group index too short": (replace("g_idx", lambda t: t[:64]), {}, "g_idx has shape"),
    "NaN scale": (edit("scales", 7, float("nan")), {}, r"scales\[7\] is NaN"),
    "zeros of other width": (replace("qzeros", lambda t: t[:, :3].clone()), {}, "qzeros has shape"),
    "other width claimed": (lambda t: None, {"bits": 8}, "check|expected"),
    "five bits": (lambda t: None, {"bits": 5}, "5-bit GPTQ is not a format"),
    "no such convention": (lambda t: None, {"zeros": "v3"}, "zeros 'v3'"),
    "group size 0": (lambda t: None, {"group_size": 0}, "group_size 0"),
    "scales as integers": (replace("scales", lambda t: t.to(torch.int32)), {}, "scales is torch.int32"),
}


@pytest.mark.parametrize("case", BROKEN_GPTQ)
def test_the_error_names_a_broken_gptq_matrix(case: str) -> None:
    change, options, text = BROKEN_GPTQ[case]
    tensors = formats.gptq_quantize(torch.randn(64, 128), group_size=32, perm=torch.randperm(128))
    change(tensors)
    with pytest.raises(FormatError, match=text):
        formats.gptq_dequantize(tensors, name="q", **options)


def test_writers_refuse_what_no_file_can_hold() -> None:
    weight = torch.randn(64, 128)
    broken = weight.clone()
    broken[3, 5], broken[9, 1] = float("inf"), float("nan")
    cases: list[tuple[Any, type[ExlError], str]] = [
        (lambda: formats.exl2_quantize(broken, 4, name="v"), FormatError, r"v: weight\[3, 5\] is inf"),
        (lambda: formats.gptq_quantize(broken), FormatError, r"weight\[3, 5\]"),
        (lambda: formats.exl2_quantize(weight * 1e6, 4), FormatError, "half range"),
        (lambda: formats.exl2_quantize(torch.randn(64, 100), 4), FormatError, "in_features is 100"),
        (lambda: formats.exl2_quantize(weight, 7), FormatError, "2, 3, 4, 5, 6 and 8"),
        (lambda: formats.exl2_quantize(weight, 4, 33), FormatError, "multiples of 32"),
        (lambda: formats.exl2_quantize(weight, "0.5:4b_32g/0.5:5b_32g"), FormatError, "widest first"),
        (lambda: formats.exl2_quantize(weight, "0.5:5b_32g/0.4:4b_32g"), FormatError, "add up to 1"),
        (lambda: formats.exl2_quantize(weight, "4 bits please"), FormatError, "each part is"),
        (lambda: formats.exl2_quantize(weight, "nan:4b_32g"), FormatError, "fractions"),
        (lambda: formats.exl2_quantize(weight, 4, perm=torch.zeros(128, dtype=torch.int64)), FormatError, "twice"),
        (lambda: formats.exl2_quantize(weight, 4, perm=torch.arange(127)), FormatError, "perm has shape"),
        (lambda: formats.exl2_quantize(weight, 4, perm=torch.arange(128).int()), DTypeError, "int64"),
        (lambda: formats.exl2_quantize(weight.long(), 4), DTypeError, "float32"),
        (lambda: formats.exl2_quantize(weight[0], 4), ShapeError, "out_features"),
        (lambda: formats.gptq_quantize(torch.randn(40, 128)), FormatError, "multiples of 32"),
        (lambda: formats.gptq_quantize(weight, bits=5), FormatError, "5 bits"),
        (lambda: formats.exl2_pack(*pack_parts(code=16)), FormatError, r"codes: value 16 at \[2, 3\]"),
        (lambda: formats.exl2_pack(*pack_parts(scale=16)), FormatError, "scale codes: value 16"),
        (lambda: formats.exl2_pack(*pack_parts(rows=40)), FormatError, "multiple of 32"),
    ]
    for call, kind, text in cases:
        with pytest.raises(kind, match=text):
            call()


def pack_parts(code: int = 0, scale: int = 0, rows: int = 32) -> tuple[Any, ...]:
    codes, scales = torch.zeros(32, 32, dtype=torch.uint8), torch.zeros(1, 32, dtype=torch.uint8)
    codes[2, 3], scales[0, 1] = code, scale
    return codes, scales, torch.ones(1, dtype=torch.float16), [(4, rows)]
