"""model.forward and forward_chunk: every parameter, every form of result, and what they refuse."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from exl_core import (
    AttentionParams,
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Config,
    PagedParams,
    errors,
)
from exl_core.layers import Attention, Embedding, Linear

pytestmark = pytest.mark.covers("core: forward", "core: attention")


@pytest.fixture(scope="module")
def model(lab: Any) -> ExLlamaV2:
    loaded: ExLlamaV2 = lab.load(lab.write(architectures=["MistralForCausalLM"], sliding_window=20))
    return loaded


@pytest.fixture(scope="module")
def ids(lab: Any) -> torch.Tensor:
    made: torch.Tensor = lab.ids(2, 30)
    return made


def cache_for(model: ExLlamaV2, batch: int = 2) -> ExLlamaV2Cache:
    return ExLlamaV2Cache(model, batch_size=batch, max_seq_len=64)


def test_modules_and_their_places(model: ExLlamaV2) -> None:
    assert [type(m).__name__ for m in model.modules] == [
        "Embedding",
        *("Attention", "GatedMLP") * 2,
        "RMSNorm",
        "Head",
    ]
    assert model.last_kv_layer_idx == 3
    assert model.head_layer_idx == 6
    assert model.cache_map == {0: "cpu", 1: "cpu"}
    assert model.get_cache_devices() == ["cpu"]
    assert "model.layers.1.mlp.down_proj" in model.modules_dict
    assert "model.embed_tokens" in model.modules_dict
    head = model.modules_dict["lm_head"]
    assert isinstance(head, Linear)
    assert head.get_weight_tensor_dq().shape == (64, 90)
    assert not model.is_quant()


@pytest.mark.covers("core: head-float32")
def test_logits_are_float32_with_padding_columns(model: ExLlamaV2, ids: torch.Tensor) -> None:
    logits = model.forward(ids, cache_for(model))
    assert logits.shape == (2, 30, 96)
    assert logits.dtype == torch.float32
    assert logits.device.type == "cpu"
    assert (logits[..., 90:] == -65504).all()
    assert (logits[..., :90].abs() < 1000).all()


def test_preprocess_only_then_last_id(model: ExLlamaV2, ids: torch.Tensor) -> None:
    whole = model.forward(ids, cache_for(model))
    cache = cache_for(model)
    assert model.forward(ids[:, :-1], cache, preprocess_only=True) is None
    assert cache.current_seq_len == 29
    last = model.forward(ids[:, -1:], cache, last_id_only=True)
    assert last.shape == (2, 1, 96)
    torch.testing.assert_close(last, whole[:, -1:])


def test_last_id_only_is_the_last_row(model: ExLlamaV2, ids: torch.Tensor) -> None:
    whole = model.forward(ids, cache_for(model))
    torch.testing.assert_close(model.forward(ids, cache_for(model), last_id_only=True), whole[:, -1:])


def test_last_state(lab: Any, ids: torch.Tensor) -> None:
    model = lab.load(lab.write(), max_input_len=16, max_batch_size=2)
    whole, state = model.forward(ids, cache_for(model), return_last_state=True)
    assert whole.shape == (2, 30, 96)
    assert state.shape == (2, 14, 64)  # the final chunk: 30 = 16 + 14
    norm, head = model.modules[-2], model.modules[-1]
    again = head.forward(norm.forward(state.reshape(-1, 64)))
    torch.testing.assert_close(again.view(2, 14, 96), whole[:, 16:])
    nothing, state2 = model.forward(ids, cache_for(model), return_last_state=True, preprocess_only=True)
    assert nothing is None
    assert torch.equal(state, state2)
    last, state3 = model.forward(ids, cache_for(model), return_last_state=True, last_id_only=True)
    assert last.shape == (2, 1, 96)
    assert torch.equal(state, state3)


@pytest.mark.covers("core: causal")
def test_a_future_token_changes_nothing_before_it(model: ExLlamaV2, ids: torch.Tensor) -> None:
    changed = ids.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 90
    for mask in (None, torch.zeros(2, 30)):
        a, b = (model.forward(x, cache_for(model), input_mask=mask) for x in (ids, changed))
        assert torch.equal(a[:, :20], b[:, :20])
        assert not torch.equal(a[:, 20:], b[:, 20:])


@pytest.mark.covers("core: padding")
def test_masked_keys_are_not_seen(model: ExLlamaV2, ids: torch.Tensor) -> None:
    changed = ids.clone()
    changed[0, :4] = 7
    mask = torch.zeros(2, 30, dtype=torch.half)
    mask[0, :4] = float("-inf")
    a, b = (model.forward(x, cache_for(model), input_mask=mask) for x in (ids, changed))
    assert torch.equal(a[0, 4:], b[0, 4:])
    assert torch.isfinite(a).all()


@pytest.mark.covers("core: padding")
def test_the_mask_of_a_prompt_serves_for_the_tokens_after_it(model: ExLlamaV2, ids: torch.Tensor) -> None:
    """Keys after the mask's last column are attended to, in decode steps and in chunks."""
    mask = torch.zeros(2, 20)
    mask[0, :4] = float("-inf")
    offsets = torch.tensor([[-4], [0]], dtype=torch.int32)
    whole = torch.cat([mask, torch.zeros(2, 10)], dim=1)
    want = model.forward(ids, cache_for(model), input_mask=whole, position_offsets=offsets)
    cache = cache_for(model)
    found = [
        model.forward(ids[:, begin:end], cache, input_mask=mask, position_offsets=offsets)
        for begin, end in ((0, 20), (20, 21), (21, 22), (22, 30))
    ]
    assert torch.equal(torch.cat(found, dim=1), want)


def test_position_offsets_shift_the_rotation(lab: Any, ids: torch.Tensor) -> None:
    """Attention sees only differences of positions: shifting a whole row changes rounding and nothing else."""
    model = lab.load(lab.write())
    plain = model.forward(ids, cache_for(model))
    shifted = model.forward(ids, cache_for(model), position_offsets=torch.tensor([[100], [0]], dtype=torch.int32))
    torch.testing.assert_close(shifted, plain, atol=0.05, rtol=0.05)
    assert not torch.equal(shifted[0], plain[0])
    assert torch.equal(shifted[1], plain[1])


def test_chunk_sizes_follow_the_limits(lab: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lab.load(lab.write(), max_input_len=8, max_batch_size=3)
    sizes: list[int] = []
    original = Attention.forward

    def spy(self: Attention, x: torch.Tensor, step: Any) -> torch.Tensor:
        if self.layer_idx == 0:
            sizes.append(step.q_len)
        return original(self, x, step)

    monkeypatch.setattr(Attention, "forward", spy)
    model.forward(ids, cache_for(model))
    assert sizes == [12, 12, 6]  # 8 * 3 // 2
    sizes.clear()
    model.config.max_attention_size = 100
    for one in ("no_flash_attn", "no_xformers"):  # the other is left
        model.config.no_flash_attn, model.config.no_xformers = one == "no_flash_attn", one == "no_xformers"
        model.forward(ids[:1], cache_for(model))
    assert sizes == [24, 6] * 2
    sizes.clear()
    model.config.no_flash_attn = model.config.no_xformers = True
    model.forward(ids[:1], cache_for(model))
    # (sqrt(past^2 + 400) - past) / 2: 10 at 0, 6 at 10, 4 at 16, ...; the tail fits as soon as (past + q) * q <= 100
    assert sizes[:3] == [10, 6, 4]
    assert sum(sizes) == 30


def test_without_cache_one_chunk_only(lab: Any, ids: torch.Tensor) -> None:
    model = lab.load(lab.write(), max_input_len=20)
    with pytest.raises(errors.SequenceTooLongError, match="max_input_len 20"):
        model.forward(ids)
    fresh = model.forward(ids[:, :10])
    torch.testing.assert_close(fresh, model.forward(ids[:, :10], cache_for(model)))


def test_max_output_len(lab: Any, ids: torch.Tensor) -> None:
    model = lab.load(lab.write(), max_output_len=10)
    with pytest.raises(errors.SequenceTooLongError, match="max_output_len is 10"):
        model.forward(ids, cache_for(model))
    assert model.forward(ids, cache_for(model), last_id_only=True).shape == (2, 1, 96)
    assert model.forward(ids, cache_for(model), preprocess_only=True) is None


@pytest.mark.covers("core: forward-checks")
def test_abort(lab: Any, ids: torch.Tensor) -> None:
    model = lab.load(lab.write(), max_input_len=10, max_batch_size=2)
    event = threading.Event()
    cache = cache_for(model)
    original = model.modules[2].forward
    calls = []

    def set_in_second_chunk(x: torch.Tensor, step: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            event.set()
        return original(x, step)

    model.modules[2].forward = set_in_second_chunk
    assert model.forward(ids, cache, abort_event=event) is None
    assert cache.current_seq_len == 10
    assert model.forward_chunk(ids[:, :3], cache, abort_event=event) == {"aborted": True}
    assert cache.current_seq_len == 10
    event.clear()
    rest = model.forward(ids[:, 10:], cache, abort_event=event)
    whole = model.forward(ids, cache_for(model))
    torch.testing.assert_close(rest, whole[:, 10:])


@pytest.mark.covers("core: forward-checks")
def test_int32_ids_and_pad_ids(model: ExLlamaV2, ids: torch.Tensor) -> None:
    assert torch.equal(model.forward(ids.int()), model.forward(ids))
    padded = ids.clone()
    padded[0, 0] = -1
    zero = ids.clone()
    zero[0, 0] = 0
    assert torch.equal(model.forward(padded), model.forward(zero))


def test_forward_chunk_contiguous(model: ExLlamaV2, ids: torch.Tensor) -> None:
    whole = model.forward(ids, cache_for(model))
    cache = cache_for(model)
    model.forward(ids[:, :10], cache)
    cache.current_seq_len = 3  # attn_params decide
    result = model.forward_chunk(
        ids[:, 10:], cache, attn_params=AttentionParams(batch_size=2, seq_len=20, past_len=10), return_last_state=True
    )
    torch.testing.assert_close(result["logits"], whole[:, 10:])
    assert result["last_state"].shape == (2, 20, 64)
    again = model.forward_chunk(ids, cache, attn_params=AttentionParams(batch_size=2, past_len=0))
    assert torch.equal(again["logits"], whole)
    assert cache.current_seq_len == 30


def test_extract_states(model: ExLlamaV2, ids: torch.Tensor) -> None:
    result = model.forward_chunk(ids, extract_state_indices=[1, 5], preprocess_only=True)
    assert set(result) == {"states"}
    states = result["states"]
    assert set(states) == {1, 5}
    first = model.modules[0]
    assert isinstance(first, Embedding)
    embedding = first.forward(ids.reshape(-1)).view(2, 30, 64)
    assert torch.equal(states[1], embedding)
    assert not torch.equal(states[5], embedding)


def paged(model: ExLlamaV2, cache: ExLlamaV2Cache, ids: torch.Tensor, pages: list[list[int]], past: list[int]) -> Any:
    params = PagedParams(
        batch_size=ids.shape[0],
        block_index=torch.tensor(pages, dtype=torch.int32),
        cache_seqlens=torch.tensor(past, dtype=torch.int32),
        max_cache_seqlen=max(past),
        page_size=16,
        q_len=ids.shape[1],
    )
    return model.forward_chunk(ids, cache=cache, attn_params=params)


@pytest.mark.parametrize(
    ("lengths", "extra", "error"),
    [
        ([3, 4], {}, errors.InputError("their sum")),
        ([8, 0], {}, errors.InputError("their sum")),
        ([5], {}, errors.InputError("batch_size = 2")),
        ([3, 50], {"last_id_only": True}, errors.InputError("do not fit")),
        ([3, 50], {}, errors.InputError("do not fit")),
    ],
)
def test_rows_of_unequal_steps_are_checked(
    model: ExLlamaV2, lengths: list[int], extra: dict[str, Any], error: Exception
) -> None:
    cache = ExLlamaV2Cache(model, max_seq_len=16 * 8)
    table, past = torch.tensor([[5, 2, 7], [0, 6, 1]], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    tokens = torch.zeros((1, 53 if lengths == [3, 50] else 8), dtype=torch.int64)

    def run() -> None:
        params = PagedParams(2, table, past, 0, 16, q_lens=torch.tensor(lengths, dtype=torch.int32))
        model.forward_chunk(tokens, cache=cache, attn_params=params, **extra)

    with pytest.raises(type(error), match=str(error)):
        run()


def test_rows_of_unequal_steps_are_a_tensor_of_one_number_a_row(model: ExLlamaV2) -> None:
    cache, ids = ExLlamaV2Cache(model, max_seq_len=16 * 8), torch.zeros((1, 8), dtype=torch.int64)
    table, past = torch.zeros((2, 1), dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(errors.InputError, match="q_lens is a list"):
        PagedParams(2, table, past, 0, 16, q_lens=[4, 4])  # type: ignore[arg-type]
    params = PagedParams(2, table, past, 0, 16)
    for later in ([4, 4], torch.tensor([8], dtype=torch.int32), torch.tensor([[4, 4]], dtype=torch.int32)):
        params.q_lens = later  # type: ignore[assignment]
        with pytest.raises(errors.InputError, match="q_lens"):
            model.forward_chunk(ids, cache=cache, attn_params=params)


def test_paged_batch_of_unequal_lengths(model: ExLlamaV2, ids: torch.Tensor) -> None:
    """Two sequences of 30 and 21 tokens on scattered pages, then one decode step of both together."""
    expected = [model.forward(ids[:1])[0], model.forward(ids[1:, :22])[0]]
    cache = ExLlamaV2Cache(model, max_seq_len=16 * 8)
    table = [[5, 2, 7], [0, 6, 1]]
    for row, length in ((0, 29), (1, 21)):
        for begin in range(0, length, 10):
            end = min(begin + 10, length)
            out = paged(model, cache, ids[row : row + 1, begin:end], [table[row]], [begin])
            torch.testing.assert_close(out["logits"][0], expected[row][begin:end])
    step = paged(model, cache, torch.stack([ids[0, 29:30], ids[1, 21:22]]), table, [29, 21])
    torch.testing.assert_close(step["logits"][:, 0], torch.stack([expected[0][29], expected[1][21]]))


def test_block_table_entries_after_the_end_are_not_read(model: ExLlamaV2, ids: torch.Tensor) -> None:
    cache = ExLlamaV2Cache(model, max_seq_len=64)
    a = paged(model, cache, ids[:1, :10], [[2, -1, 99]], [0])
    b = paged(model, cache, ids[:1, :10], [[2]], [0])
    assert torch.equal(a["logits"], b["logits"])


# ------------------------------------------------------------------------------------------------------------ refusals


def test_not_loaded(lab: Any, ids: torch.Tensor) -> None:
    model = ExLlamaV2(ExLlamaV2Config(lab.write()))
    head = model.modules_dict["lm_head"]
    assert isinstance(head, Linear)
    with pytest.raises(errors.ModelStateError, match="load"):
        model.forward(ids)
    with pytest.raises(errors.ModelStateError, match="lm_head is not loaded"):
        head.get_weight_tensor_dq()


@pytest.mark.covers("core: forward-checks")
@pytest.mark.parametrize("bad", [90, 95, 10**9, -2, -(2**40)])
def test_token_ids_out_of_range(model: ExLlamaV2, ids: torch.Tensor, bad: int) -> None:
    cache = cache_for(model)
    wrong = ids.clone()
    wrong[1, 3] = bad
    with pytest.raises(errors.TokenIdError, match=str(bad)):
        model.forward(wrong, cache)
    assert cache.current_seq_len == 0


@pytest.mark.parametrize(
    "bad",
    [
        [[1, 2]],
        None,
        torch.zeros(2, 0, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(1, 2),
        torch.zeros(1, 1, 1),
    ],
)
def test_malformed_ids(model: ExLlamaV2, bad: torch.Tensor) -> None:
    with pytest.raises(errors.InputError, match="input_ids"):
        model.forward(bad)


@pytest.mark.covers("core: rope-tables", "core: forward-checks")
def test_too_long_for_the_cache_and_the_model(lab: Any, model: ExLlamaV2) -> None:
    cache = cache_for(model, batch=1)
    model.forward(lab.ids(1, 60), cache)
    with pytest.raises(errors.SequenceTooLongError, match=r"60 \+ 5 tokens, the cache holds 64"):
        model.forward(lab.ids(1, 5), cache)
    assert cache.current_seq_len == 60
    assert model.forward(lab.ids(1, 4), cache).shape[1] == 4
    chunked = lab.load(lab.write(), max_input_len=10)
    small = ExLlamaV2Cache(chunked, max_seq_len=32)
    with pytest.raises(errors.SequenceTooLongError, match=r"0 \+ 33 tokens, the cache holds 32"):
        chunked.forward(lab.ids(1, 33), small)
    assert not any(t.any() for t in small.all_tensors())  # not even the first chunks
    short = lab.load(lab.write(), max_seq_len=32, max_input_len=10)
    roomy = ExLlamaV2Cache(short, max_seq_len=64)
    with pytest.raises(errors.SequenceTooLongError, match="max_seq_len of 32"):
        short.forward(lab.ids(1, 33), roomy)
    assert roomy.current_seq_len == 0
    assert not any(t.any() for t in roomy.all_tensors())
    with pytest.raises(errors.SequenceTooLongError, match="max_seq_len of 32"):
        paged(short, roomy, lab.ids(1, 2), [[0, 1, 2]], [31])


@pytest.mark.covers("core: forward-checks")
def test_wrong_batch(model: ExLlamaV2, ids: torch.Tensor) -> None:
    with pytest.raises(errors.InputError, match="batch_size 1"):
        model.forward(ids, cache_for(model, batch=1))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"loras": [object()]}, "loras"),
        ({"indexed_embeddings": [object()]}, "indexed_embeddings"),
        ({"indexed_embeddings": object()}, "indexed_embeddings"),
        ({"cache": 3}, "cache"),
        ({"cache": "fp16"}, "cache"),
        ({"input_mask": [[0.0] * 30]}, "input_mask"),
        ({"input_mask": torch.zeros(2, 30, dtype=torch.bool)}, "input_mask"),
        ({"input_mask": torch.zeros(2, 29)}, "covers 29 keys, 30"),
        ({"position_offsets": [0, 0]}, "position_offsets"),
        ({"position_offsets": torch.zeros(2, 1)}, "position_offsets"),
        ({"position_offsets": torch.zeros(2, 2, dtype=torch.int32)}, "position_offsets"),
        ({"abort_event": 1}, "abort_event"),
    ],
)
def test_wrong_arguments_are_named(model: ExLlamaV2, ids: torch.Tensor, arguments: dict[str, Any], named: str) -> None:
    for call in (model.forward, model.forward_chunk):
        with pytest.raises(errors.InputError, match=named):
            call(ids, **arguments)
    assert model.forward(ids, loras=[], indexed_embeddings=[]) is not None


@pytest.mark.parametrize("bad", [[[1]], "text", 1, None, torch.zeros(1, 2), torch.zeros(3, dtype=torch.int64)])
def test_ids_of_the_wrong_type_or_shape(model: ExLlamaV2, bad: Any) -> None:
    for call in (model.forward, model.forward_chunk):
        with pytest.raises(errors.InputError, match="input_ids"):
            call(bad)


@pytest.mark.parametrize("bad", [[99], [-99], [True], ["0"], [1.0]])
def test_states_of_modules_that_do_not_exist(model: ExLlamaV2, ids: torch.Tensor, bad: list[Any]) -> None:
    with pytest.raises(errors.InputError, match="extract_state_indices"):
        model.forward_chunk(ids, extract_state_indices=bad)
    last = len(model.modules) - 1
    found = model.forward_chunk(ids, extract_state_indices=[-1, 0])["states"]
    assert sorted(found) == [0, last]


@pytest.mark.covers("core: lists-of-lengths")
def test_attn_params_of_the_wrong_kind(model: ExLlamaV2, ids: torch.Tensor) -> None:
    with pytest.raises(errors.InputError, match="attn_params"):
        model.forward_chunk(ids, attn_params=object())  # type: ignore[arg-type]
    with pytest.raises(errors.InputError, match="past_len"):
        model.forward_chunk(ids, cache_for(model), attn_params=AttentionParams(2, 30, -1))
    with pytest.raises(errors.UnsupportedError, match="list of past lengths"):  # pages do that
        AttentionParams(2, 30, [0, 4])  # type: ignore[arg-type]
    paged = PagedParams(1, torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 0, 16, 10)
    paddings: list[dict[str, Any]] = [
        {"input_mask": torch.zeros(1, 10)},
        {"position_offsets": torch.zeros(1, 1, dtype=torch.int32)},
    ]
    for padding in paddings:
        with pytest.raises(errors.UnsupportedError, match="pages need no padding"):
            model.forward_chunk(ids[:1, :10], ExLlamaV2Cache(model, max_seq_len=64), attn_params=paged, **padding)


class OtherCache:
    """A cache of a class of its own."""

    def __init__(self, cache: ExLlamaV2Cache) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def test_an_object_with_the_members_of_a_cache_is_a_cache(model: ExLlamaV2, ids: torch.Tensor) -> None:
    want = model.forward(ids, ExLlamaV2Cache(model, max_seq_len=64, batch_size=len(ids)))
    other: Any = OtherCache(ExLlamaV2Cache(model, max_seq_len=64, batch_size=len(ids)))
    assert torch.equal(model.forward(ids, other), want)
    no_caches: list[Any] = [model, 3]
    for wrong in no_caches:
        with pytest.raises(errors.InputError, match=r"cache is a \w+, which has no .*contracts\.Cache"):
            model.forward(ids, wrong)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"pages": [[4]]}, errors.InputError, "page 4"),
        ({"pages": [[-1]]}, errors.InputError, "page -1"),
        ({"past": [7]}, errors.SequenceTooLongError, "17 tokens"),
        ({"past": [-1]}, errors.SequenceTooLongError, "pages"),
        ({"pages": [[0], [1]], "past": [0, 0]}, errors.InputError, "ids are 1 x 10"),
        ({"page_size": 24}, errors.InputError, "multiple of the page size"),
        ({"page_size": 0}, errors.InputError, "page_size"),
        ({"q_len": 9}, errors.InputError, "q_len 9"),
        ({"batch": 2}, errors.InputError, "block_index"),
    ],
)
def test_bad_paged_params(
    model: ExLlamaV2, ids: torch.Tensor, changes: dict[str, Any], error: type[Exception], named: str
) -> None:
    pages, past = changes.get("pages", [[0]]), changes.get("past", [0])
    cache = ExLlamaV2Cache_Q4(model, max_seq_len=64)

    def call() -> None:
        params = PagedParams(
            changes.get("batch", len(pages)),
            torch.tensor(pages, dtype=torch.int32),
            torch.tensor(past, dtype=torch.int32),
            0,
            changes.get("page_size", 16),
            changes.get("q_len", 10),
        )
        model.forward_chunk(ids[:1, :10], cache=cache, attn_params=params)

    with pytest.raises(error, match=named):
        call()
    assert all(not t.any() for t in cache.all_tensors())


def test_paged_needs_a_cache_of_one_row(model: ExLlamaV2, ids: torch.Tensor) -> None:
    params = PagedParams(1, torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 0, 16, 10)
    with pytest.raises(errors.InputError, match="needs a cache"):
        model.forward_chunk(ids[:1, :10], attn_params=params)
    with pytest.raises(errors.InputError, match="batch_size 1"):
        model.forward_chunk(ids[:1, :10], cache=cache_for(model), attn_params=params)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"input_mask": torch.zeros(2, 1, 30)}, "input_mask"),
        ({"input_mask": torch.zeros(3, 30)}, "input_mask"),
        ({"input_mask": torch.full((2, 30), float("nan"))}, "NaN"),
        ({"position_offsets": torch.zeros(3, 1, dtype=torch.int32)}, "position_offsets"),
        ({"position_offsets": torch.full((2, 1), 10**6)}, "position_offsets"),
        ({"position_offsets": torch.full((2, 1), 2**62)}, "position_offsets"),
    ],
)
def test_bad_masks_and_offsets(model: ExLlamaV2, ids: torch.Tensor, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(errors.InputError, match=named):
        model.forward(ids, cache_for(model), **arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"input_mask": torch.zeros(2, 29)}, "covers 29 keys, 30"),
        ({"return_last_state": "last"}, "return_last_state"),
    ],
)
def test_errors_come_before_the_first_chunk_is_stored(lab: Any, ids: torch.Tensor, arguments: Any, named: str) -> None:
    model = lab.load(lab.write(), max_input_len=8, max_batch_size=2)
    cache = cache_for(model)
    with pytest.raises(errors.InputError, match=named):
        model.forward(ids, cache, **arguments)
    assert cache.current_seq_len == 0


@pytest.mark.covers("core: forward-checks")
def test_the_hidden_state_after_the_final_norm(lab: Any) -> None:
    """return_last_state="normed": what the head reads, with logits, without them and with the last ones alone."""
    model = lab.load(lab.write())
    ids = lab.ids(2, 9)
    whole, state = model.forward(ids, return_last_state=True)
    logits, normed = model.forward(ids, return_last_state="normed")
    assert torch.equal(logits, whole)
    assert torch.equal(normed, model.modules[-2].forward(state.view(18, -1)).view_as(state))
    assert torch.equal(model.modules[-1].forward(normed.view(18, -1)).view_as(logits), logits)
    nothing, again = model.forward(ids, ExLlamaV2Cache(model, batch_size=2), None, True, False, None, "normed")
    assert nothing is None
    assert torch.equal(again, normed)
    last, all_of_it = model.forward(ids, last_id_only=True, return_last_state="normed")
    assert torch.equal(all_of_it, normed)
    assert torch.equal(last, whole[:, -1:])
    with pytest.raises(errors.InputError, match="return_last_state is 'other'"):
        model.forward(ids, return_last_state="other")
