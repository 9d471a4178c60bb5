"""Which kernel a card runs, asked without a GPU."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from exl_kernels import _native, selection
from exl_kernels.errors import DeviceError, FormatError, ShapeError
from exl_kernels.linear.fused import Activation
from exl_kernels.moe.cuda import most_scratch_bytes
from exl_kernels.sampling import Plan
from exl_kernels.selection import Card, MatrixShape, Selection, known_cards, rope_store_kernel

K = 1024


def exl2(n: int, perm: Tensor | None = None, k: int = K, bits: int = 4) -> MatrixShape:
    groups = k // 128
    table = [number for g in range(groups) for number in (bits, 4 * bits * g)]
    return MatrixShape.from_exl2(
        {
            "q_weight": torch.empty(4 * bits * groups, n, dtype=torch.int32),
            "q_scale": torch.zeros(groups, n // 8, dtype=torch.int32),
            "q_scale_max": torch.ones(groups, dtype=torch.float16),
            "q_groups": torch.tensor(table, dtype=torch.int16),
            "q_invperm": torch.arange(k, dtype=torch.int32) if perm is None else perm.to(torch.int32),
        },
        name="made",
    )


def gptq(n: int, k: int = K) -> MatrixShape:
    return MatrixShape.from_gptq(
        {
            "qweight": torch.empty(k // 8, n, dtype=torch.int32),
            "qzeros": torch.zeros(k // 128, n // 8, dtype=torch.int32),
            "scales": torch.ones(k // 128, n, dtype=torch.float16),
        },
        group_size=128,
        name="made",
    )


@pytest.mark.parametrize("dim", [64, 80, 128, 192, 256])
def test_pages_that_no_kernel_of_a_card_takes(dim: int) -> None:
    """Blocks of a Turing card are too small for 64 keys and values of more than 128 halves each."""
    refused = {
        (card, kind): why
        for card in known_cards()
        for kind in ("fp16", "fp8", "q8", "q6", "q4")
        if (why := Card.named(card).refusal_of_pages(kind, dim)) is not None
    }
    assert set(refused) == ({("2080 Ti", "fp16")} if dim > 128 else set())
    assert all("shared memory" in why for why in refused.values())


def test_norms_and_adapters_say_which_kernel_runs() -> None:
    """Their kernels do not depend on the card."""
    assert selection.norm_kernel("rms", 4096).kernel == "rms_norm_f16_f32"
    assert selection.norm_kernel("layer", 4096, columns=selection.FEW_ROWS).kernel == "layer_norm_packed"
    assert selection.norm_kernel("layer", 4096, columns=selection.PACKED_ROWS).kernel == "layer_norm_packed_for_batch"
    wide = selection.norm_kernel("add post", 5120, float32=True)
    assert wide.kernel == "add_post_norm_f32"
    assert wide.reasons == ("add_short_post_norm_f32: it takes rows of up to 4096 elements",)
    with pytest.raises(ShapeError, match='no kernel computes "rms" of f16 rows into Some'):
        selection.norm_kernel("rms", 4096, columns=8)
    assert selection.adapter_kernels(1, 48).kernel == "lora_shrink_group_1 + lora_expand_group"
    assert selection.adapter_kernels(64, 48, gated=True).kernel == "lora_shrink_group_4 + lora_expand_gated"
    packing = selection.adapter_kernels(8, 48, columns=8)
    assert (packing.kernel, packing.refused) == ("lora_shrink_packing + lora_expand_group", ())
    assert selection.adapter_kernels(8, 0).kernel == "lora_shrink + lora_expand"


def test_adapted_rows_and_shapes_that_no_kernel_takes_are_named() -> None:
    most = selection.PACKED_ROWS
    assert selection.refusal_of_adapted_rows(most) is None
    why = selection.refusal_of_adapted_rows(most + 1)
    assert why == f"adapters are added by kernels to at most {most} rows"
    assert selection.refusal_of_adapted_rows(most + 1, invariant=True) is None
    assert selection.refusal_of_adapted_shapes(64, (2, 4, 6)) is None
    for in_features, widths, says in [
        (68, [2], "8"),
        (64, [3], "even"),
        (64, [], "one to three"),
        (64, [2] * 4, "one"),
    ]:
        assert says in (selection.refusal_of_adapted_shapes(in_features, widths) or "")


@pytest.mark.parametrize("whole_blocks", [False, True])
def test_rows_of_a_pass_decide_whether_it_runs_on_packed_weights(whole_blocks: bool) -> None:
    packed = selection.pass_rows(whole_blocks)
    assert packed == (selection.STEP_ROWS if whole_blocks else selection.PACKED_ROWS)
    assert selection.runs_packed(packed, decodes=False, packed=packed)
    assert not selection.runs_packed(packed + 1, decodes=False, packed=packed)
    assert selection.runs_packed(selection.STEP_ROWS, decodes=True, packed=packed)
    assert not selection.runs_packed(selection.STEP_ROWS + 1, decodes=True, packed=packed)


def test_a_card_of_each_generation() -> None:
    codes = {name: Card.named(name).code for name in known_cards()}
    assert codes == {
        "2080 Ti": 75, "A100": 80, "3060": 86, "3090": 86, "4090": 89, "L4": 89, "L40S": 89,
        "H100": 90, "H200": 90, "B200": 100, "5090": 120,
    }  # fmt: skip
    assert Card.named("rtx-4090").code == Card.named("RTX 4090").code == 89
    assert Card.named("h200").features == {"bulk_copy", "clusters", "tested_clusters", "wgmma"}
    assert Card.named("B200").features == {"async_copy", "bulk_copy", "clusters", "mma_pipeline"}
    assert Card.named("5090").features == {"async_copy", "bulk_copy", "mma_pipeline"}
    assert Card.named("3090").features == {"async_copy", "mma_pipeline"}
    assert not Card.named("2080 Ti").features


def test_an_unknown_card_is_named_with_those_that_are_known() -> None:
    with pytest.raises(DeviceError, match=r"card 'Voodoo 2' is not known; known cards: .*4090.*H200"):
        Card.named("Voodoo 2")


def test_a_card_that_is_not_here_is_an_error() -> None:
    with pytest.raises(DeviceError):
        Card.device(4096)


@pytest.mark.parametrize("make", [exl2, gptq])
def test_rows_decide_on_hopper(make) -> None:
    card, qkv = Card.named("H200"), [make(512), make(128), make(128)]
    counts = (1, 2, 3, 8, 9, 64, 65, 128, 129)
    kernels = {rows: card.plan(qkv, rows, norm="rms") for rows in counts}
    assert [k.kernel for k in kernels.values()] == [
        "gemv_ring", "gemv_ring", "gemm_few", "gemm_few", "gemm_batch", "gemm_batch", "gemm_batch",
        "gemm_batch", "gemm_batch",
    ]  # fmt: skip
    assert all(k.joined for k in kernels.values())
    for rows in counts:
        assert (card.matmul(qkv[0], rows).kernel == "gemm_large") == (rows > 64)
        assert card.matmul(qkv[0], rows, invariant=True).kernel == card.matmul(qkv[0], min(rows, 64)).kernel
    assert not kernels[1].refused
    assert card.matmul(qkv[0], 8).kernel == "gemv_ring"
    head = make(16 * K)
    assert [card.matmul(head, rows).kernel for rows in (1, 2, 3, 8)] == ["gemv_ring"] * 2 + ["gemm_few"] * 2
    assert card.matmul(qkv[0], 64).kernel == "gemm_batch"


@pytest.mark.parametrize("name", ["2080 Ti", "3060", "3090", "4090", "A100", "L4", "L40S"])
def test_cards_before_hopper_join_launches(name: str) -> None:
    card, made = Card.named(name), exl2(512)
    turing = name == "2080 Ti"
    for rows in (1, 8, 9, 64):
        found = card.plan([made], rows, residual=True)
        many = ("gemm_tile", False) if turing else ("gemm_batch", True)
        assert (found.kernel, found.joined) == (("gemm_direct", True) if rows < 9 else many)
        assert rows < 9 or not turing or any("asynchronous copies" in one.why for one in found.refused), rows
        assert rows >= 9 or any("bulk copies" in one.why for one in found.refused), rows
    assert [card.matmul(made, rows).kernel for rows in (1, 8, 512)] == ["gemm_direct", "gemm_direct", "gemm_large"]


def test_permutations_of_their_own_keep_matrices_apart_in_batches_alone() -> None:
    card = Card.named("H100")
    turned = [exl2(256), exl2(256, torch.arange(K).flip(0))]
    assert card.plan(turned, 8, norm="rms").joined
    found = card.plan(turned, 32, norm="rms")
    assert not found.joined
    why = {one.kernel: one.why for one in found.refused}["gemm_batch"]
    assert why == "it takes matrices of one format, group size and input permutation"
    assert not card.plan([exl2(256), gptq(256)], 1).joined


def test_a_gate_needs_a_pair() -> None:
    card = Card.named("H100")
    assert card.plan([exl2(512), exl2(512)], 1, activation=True).joined
    assert not card.plan([exl2(512), exl2(256)], 1, activation=True).joined


def by_rows(
    card: Card,
    experts: list[tuple[MatrixShape, MatrixShape, MatrixShape]],
    rows: int,
    chosen: int,
    *,
    invariant: bool = False,
) -> str:
    return card.plan_experts(experts, rows, chosen, invariant=invariant).kernel


@pytest.mark.parametrize("name", known_cards())
def test_experts_share_launches_up_to_some_work_an_expert(name: str) -> None:
    card = Card.named(name)
    experts = [(exl2(256), exl2(256), exl2(K, k=256))] * 16  # four rows an expert on average: 16 rows
    found = {rows: card.experts(experts, rows, 4, invariant=True) for rows in (1, 8, 9, 64, 512, 1 << 20)}
    assert [by_rows(card, experts, rows, 4, invariant=True) for rows in found] == [
        "experts_by_8", "experts_by_8", "experts_by_8", "experts_by_16", "experts_by_32", "experts_apart",
    ]  # fmt: skip
    assert [one.joined for one in found.values()] == [True] * 5 + [False]
    prompt = {rows: card.experts(experts, rows, 4) for rows in (64, 256, 257, 1 << 20)}
    assert [by_rows(card, experts, rows, 4) for rows in prompt] == [
        "experts_by_16", "experts_by_32", "experts_dequantized", "experts_dequantized",
    ]  # fmt: skip
    assert [card.plan_experts(experts, rows, 4).dequantizes for rows in prompt] == [False, False, True, True]
    mixed = card.experts([*experts, (gptq(256), gptq(256), gptq(K, k=256))], 1, 4)
    assert (mixed.kernel, mixed.joined) == ("experts_apart", False)
    assert "expert 16 is stored in another format" in mixed.refused[0][1]


@pytest.mark.parametrize("name", known_cards())
def test_long_rows_take_two_tiles_of_experts_on_large_cards(name: str) -> None:
    card, hidden = Card.named(name), 3 * K
    experts = [(exl2(256, k=hidden), exl2(256, k=hidden), exl2(hidden, k=256))] * 8
    found = [by_rows(card, experts, rows, 2) for rows in (3, 4, 20, 21, 128, 129)]  # a row is a quarter an expert
    if name in ("H100", "H200", "B200"):
        assert found[1:5] == ["experts_by_2x8", "experts_by_2x8", "experts_by_2x16", "experts_by_2x16"]
    else:  # an SM of a 5090 has too little shared memory
        assert found[1:5] == ["experts_by_8", "experts_by_8", "experts_by_16", "experts_by_32"]
    assert (found[0], found[5]) == ("experts_by_8", "experts_by_32")


@pytest.mark.parametrize("name", known_cards())
def test_float_experts_share_launches_up_to_prompts(name: str) -> None:
    card = Card.named(name)
    sizes: dict[str, Any] = {"experts": 16, "hidden": K, "width": 256}
    matmuls = [card.float_experts(rows, 4, **sizes, invariant=True) for rows in (1, 8, 9, 112, 113, 1 << 20)]
    many = [16, 16, 16] if Card.named(name).code < 80 else [32, 32, 64]
    for one, by in zip(matmuls, (8, 8, *many, many[-1]), strict=True):
        assert one.kernel.split(" + ")[1:3] == [f"experts_float_gate_up_{by}", f"experts_float_down_{by}"]
        assert one.joined
    prompt = card.float_experts(1 << 20, 4, **sizes)
    assert (prompt.kernel, prompt.joined) == ("experts_sorted", True)
    refused = card.float_experts(1, 1, experts=2, hidden=K + 4, width=256)
    assert (refused.kernel, refused.refused) == (
        "experts_apart", (("shared launches", f"{K + 4} hidden features, no multiple of 8"),)
    )  # fmt: skip


@pytest.mark.parametrize("name", known_cards())
def test_a_router_norms_and_routes_or_leaves_both_to_torch(name: str) -> None:
    def found(rows: int = 1, **changes: Any) -> tuple[str, bool, bool]:
        plan = Card.named(name).plan_router(rows, **{"hidden": K, "experts": 128, "chosen": 8, "rms": K, **changes})
        assert plan.routes == (plan.refused is None)
        return plan.kernel, plan.routes, plan.norms

    assert found() == found(sparse=True, chosen=2) == ("experts_route", True, True)
    assert found(200) == ("experts_route_many", True, True)
    assert found(rms=None) == found(rms=2 * K) == ("experts_route", True, False)
    for refused in ({"hidden": 1028}, {"hidden": 1 << 15}, {"experts": 1025}, {"chosen": 129}, {"quantized": True}):
        assert found(**refused) == ("topk", False, False)
        assert found(**refused, sparse=True) == ("sparse_mixture", False, False)


@pytest.mark.parametrize("name", known_cards())
@pytest.mark.parametrize(("count", "chosen", "width"), [(2, 1, 256), (12, 4, 384), (40, 8, 128)])
def test_scratch_memory_of_experts_is_within_the_bound_of_load_plans(
    name: str, count: int, chosen: int, width: int
) -> None:
    """Gate and up with orders of their own need the most."""
    card, most = Card.named(name), _native.CudaExperts.most_pairs // chosen
    made = (exl2(width), exl2(width, torch.arange(K).flip(0)), exl2(K, k=width))
    for rows in (1, 8, 9, 33, 64, 128, most):
        bound = most_scratch_bytes(rows=rows, chosen=chosen, experts=count, hidden=K, width=width)
        assert bound // 8 < card.plan_experts([made] * count, rows, chosen).scratch_bytes <= bound, rows
    split = card.plan_experts([made] * count, 3 * most + 1, chosen)
    assert split.scratch_bytes == card.plan_experts([made] * count, most, chosen).scratch_bytes, "of one launch"
    for rows in (most - 1, most, most + 1):
        assert card.plan_experts([made] * count, rows, chosen, invariant=True).rows == min(rows, most)


def test_attention_by_card_cache_and_shape() -> None:
    def kernel(card: str, kind: str = "fp16", dim: int = 128, batch: int = 1, tokens: int = 1, **options: float) -> str:
        found = Card.named(card)
        plan = found.attention(kind, dim, 32, 8, batch=batch, tokens=tokens, keys=512, **options)  # type: ignore[arg-type]
        return plan.kernel

    assert kernel("H100") == "attention_fp16_f16_128_few1"
    assert kernel("H100", kind="q4") == "attention_q4_f16_128_few1"
    assert kernel("4090") == "attention_fp16_f16_128_teams1"
    assert kernel("H100", softcap=30.0) == kernel("H100")
    assert kernel("H100", window=128) == kernel("H100", dim=72) == "attention_fp16_128_decode1"
    assert kernel("H100", dim=96) == "attention_fp16_f16_padded_few1"
    assert kernel("4090", dim=80) == "attention_fp16_f16_padded_teams1"
    assert kernel("H100", dim=256) == "attention_fp16_f16_256_few1"
    assert kernel("H100", tokens=512) == "attention_fp16_128_wide"
    assert kernel("A100", tokens=512) == "attention_fp16_128_prefill"
    assert kernel("5090") == kernel("B200") == kernel("4090")
    assert kernel("4090", dim=256, tokens=512) == "attention_fp16_256_small_prefill"
    assert kernel("2080 Ti", tokens=512) == "attention_fp16_128_small_prefill"
    with pytest.raises(ValueError, match="cache kind"):
        kernel("H100", kind="q5")
    with pytest.raises(ValueError, match="query heads"):
        Card.named("H100").attention("fp16", 128, 32, 5, batch=1, tokens=1, keys=1)


def test_attention_says_why_no_faster_kernel_runs() -> None:
    def why(card: str, dim: int = 128, **options: int) -> dict[str, str]:
        given: dict[str, Any] = {"batch": 1, "tokens": 1, "keys": 512, **options}
        return dict(Card.named(card).attention("fp16", dim, 32, 8, **given).refused)

    assert why("H100") == why("H100", rotated=128) == why("H100", tokens=512) == {}
    assert why("2080 Ti").keys() == {"attention_few", "attention_long", "attention_teams"}
    for card in ("3090", "5090", "B200"):
        assert why(card).keys() == {"attention_few", "attention_long"}
    assert "wgmma" in why("A100", tokens=512)["attention_wide"]
    assert "shared memory" in why("2080 Ti", dim=256, tokens=512)["attention_prefill"]
    assert "rotations" in why("H100", rotated=96)["attention_few"]
    assert "all keys" in why("H100", window=128)["attention_long"]


@pytest.mark.parametrize(("tokens", "says"), [(2, "it is faster from 64 on"), (16, "do not fill 82 SMs")])
def test_attention_of_a_prompt_on_decode_blocks_says_why(tokens: int, says: str) -> None:
    card = selection.Card.named("3090")
    found = card.attention("fp16", 128, 32, 8, batch=1, tokens=tokens, keys=16384)
    assert "_decode" in found.kernel
    assert any(why.startswith("attention_prefill: ") and says in why for why in found.reasons)


def test_keys_of_many_tokens_are_stored_by_a_block_each() -> None:
    many = rope_store_kernel("fp16", 128, tokens=64, rotated=128)
    assert (many.kernel, many.refused) == ("rope_store_many", ())
    assert rope_store_kernel("fp16", 128, tokens=63, rotated=128) == Selection("rope_store_f16", True, ())
    packed = rope_store_kernel("q4", 128, tokens=64, rotated=128)
    assert packed.refused == (("rope_store_many", "it takes float16 pages"),)
    with pytest.raises(ValueError, match="cache kind"):
        rope_store_kernel("q5", 128, tokens=1, rotated=128)


def test_settings_decide_how_tokens_are_sampled() -> None:
    def found(options: dict[str, Any], **row: Any) -> Selection:
        return Card.named("4090").sampling(Plan(32000, **options), 4, 32064, **row)

    few, every, passes = "sample_shape + sample_choose", "sample_shape + sample_sums + sample_choose", " + sample_wide"
    assert found({"greedy": True}) == Selection(few, True, ())
    assert found({}) == Selection(every, True, (("sample_choose", "a row without top-k needs the sum of all weights"),))
    for options, row, kernels, why in (
        ({"top_k": 50, "top_p": 0.8}, {}, few + passes, "its table holds 2048 candidates"),
        ({"min_p": 0.1}, {}, every + passes, "its table holds 2048 candidates"),
        ({}, {"top_n": 5}, every + passes, "its table holds 2048 candidates"),
        ({"top_k": 4096}, {}, few + passes, "a top-k of at most 2048"),
        ({"top_k": 50, "typical": 0.5}, {}, few + passes, "without a typical cut"),
        ({"tfs": 0.5}, {"mirostat": True}, few + passes, "no tail-free cut"),
        ({}, {"top_n": selection.MOST_REPORTED + 1}, "CPU", "reports at most 64 candidates"),
    ):
        selected = found(options, **row)
        assert selected.kernel == kernels, (options, row)
        assert why in selected.reasons[-1], (options, row)
    mixed = found({"greedy": True, "cfg_scale": 1.5}, negative=True)
    assert mixed.kernel == f"sample_mix_maxima + sample_mix_sums + sample_mix + {few}"
    assert mixed.reasons == ("sample_shape: classifier-free guidance mixes the log-probabilities of two rows",)


@pytest.mark.parametrize("wrong", [{"rows": -1}, {"width": -1}, {"top_n": -1}], ids=str)
def test_a_negative_number_of_rows_to_sample_is_refused(wrong: dict[str, int]) -> None:
    asked = {"rows": 4, "width": 32064, "top_n": 0} | wrong
    with pytest.raises(ShapeError, match="-1"):
        Card.named("4090").sampling(Plan(32000), rows=asked["rows"], width=asked["width"], top_n=asked["top_n"])


def test_a_shape_of_tensors_that_do_not_fit_names_the_matrix() -> None:
    with pytest.raises(FormatError, match="made"):
        exl2(512, perm=torch.zeros(K))


def test_no_other_module_defines_a_limit() -> None:
    """A limit that is written down twice could differ, so modules import it from `exl_kernels.selection`."""
    limits = {name for name in selection.__all__ if name.isupper()}
    packages, found = Path(__file__).parents[2] / "packages", []
    for path in packages.glob("*/src/**/*.py"):
        if path.parts[-2:] == ("exl_kernels", "selection.py"):  # the tests may run against an installed copy
            continue
        text = path.read_text(encoding="utf-8")
        if not any(limit in text for limit in limits):
            continue
        for statement in ast.parse(text).body:
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            found += [(path.name, t.id) for t in targets if isinstance(t, ast.Name) and t.id in limits]
    assert not found


def test_type_checkers_know_the_activations_of_the_kernels() -> None:
    assert get_args(Activation) == selection.FUSED_ACTIVATIONS


def test_limits_of_rows_follow_from_one_another() -> None:
    """Blocks are launches of packed rows where no kernel takes a block at once, and captured steps are whole blocks."""
    assert selection.LIMITS.gemv_rows < selection.FEW_ROWS < selection.PACKED_ROWS
    assert selection.BLOCK_ROWS % selection.PACKED_ROWS == 0
    assert selection.STEP_ROWS % selection.BLOCK_ROWS == 0


def test_steps_of_few_tokens_are_decode_steps() -> None:
    most = selection.DECODE_TOKENS
    assert [selection.is_decode_step(tokens) for tokens in (1, most, most + 1)] == [True, True, False]


def test_selections_keep_to_the_limits() -> None:
    card, shape = Card.named("3090"), exl2(512)
    kernels = [card.matmul(shape, rows).kernel for rows in (selection.PACKED_ROWS, selection.PACKED_ROWS + 1)]
    assert kernels == ["gemm_batch", "gemm_large"]
    many = selection.BLOCK_ROWS + 1  # in two blocks, where rows are batch-invariant
    hopper = Card.named("H200")
    block = hopper.plan([shape, shape], many, activation=True)
    assert (block.kernel, block.joined) == ("gemm_batch", True)
    assert [hopper.matmul(shape, many, invariant=invariant).kernel for invariant in (True, False)] == [
        "gemm_batch", "gemm_large",
    ]  # fmt: skip
