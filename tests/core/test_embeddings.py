"""Indexed embeddings and Interventions: rows of the caller's own in the place of tokens, hooks between modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Config,
    ExLlamaV2MMEmbedding,
    ExLlamaV2Tokenizer,
    Intervention,
    errors,
)
from exl_core.embeddings import EMBEDDING_INDEX
from exl_core.layers import Embedding

pytestmark = pytest.mark.covers("core: embedding-norms", "core: helpers")

DATA = Path(__file__).parents[1] / "golden" / "data"


@pytest.fixture(scope="module")
def model(lab: Any) -> ExLlamaV2:
    return lab.load(lab.write(architectures=["MiniCPMForCausalLM"], scale_emb=3.0))


@pytest.fixture
def ids(lab: Any) -> Tensor:
    return lab.ids(2, 20)


def with_embedding(model: ExLlamaV2, ids: Tensor, at: int, n: int, factor: float = 3.0) -> tuple[Tensor, Any]:
    """The ids with n of row 0 replaced by an embedding that holds what the model would have looked up."""
    first = model.modules[0]
    assert isinstance(first, Embedding)
    assert first.weight is not None
    rows = first.weight[ids[0, at : at + n]].float() * factor
    embedding = ExLlamaV2MMEmbedding(model, rows)
    mixed = ids.clone()
    mixed[0, at : at + n] = embedding.get_ids_tensor()[0]
    return mixed, embedding


def test_rows_enter_unscaled_in_the_place_of_their_ids(model: ExLlamaV2, ids: Tensor) -> None:
    mixed, embedding = with_embedding(model, ids, 4, 7)
    expected = model.forward(ids)
    assert torch.equal(model.forward(mixed, indexed_embeddings=[embedding]), expected)
    other, second = with_embedding(model, mixed.flip(0), 0, 3)
    both = other.flip(0)
    assert torch.equal(model.forward(both, indexed_embeddings=[second, embedding]), expected)
    different = ExLlamaV2MMEmbedding(model, embedding.embeddings * 1.5)
    changed = mixed + (different.first_index - embedding.first_index) * (mixed >= EMBEDDING_INDEX)
    assert not torch.equal(model.forward(changed, indexed_embeddings=[different])[0], expected[0])
    assert torch.equal(model.forward(changed, indexed_embeddings=[different])[1], expected[1])


def test_chunks_and_single_steps(lab: Any, ids: Tensor) -> None:
    model = lab.load(lab.write(), max_input_len=6)
    mixed, embedding = with_embedding(model, ids[:1], 3, 9, factor=1.0)
    cache, again = ExLlamaV2Cache(model), ExLlamaV2Cache(model)
    expected = model.forward(ids[:1], cache)
    assert torch.equal(model.forward(mixed, again, indexed_embeddings=[embedding]), expected)
    single = ExLlamaV2Cache(model)
    parts = [model.forward_chunk(mixed[:, i : i + 1], single, indexed_embeddings=[embedding]) for i in range(20)]
    assert torch.equal(torch.cat([p["logits"] for p in parts], dim=1), expected)


def test_results_have_no_gradients(model: ExLlamaV2, ids: Tensor) -> None:
    mixed, embedding = with_embedding(model, ids, 4, 7)
    wanted = ExLlamaV2MMEmbedding(model, embedding.embeddings.clone().requires_grad_())
    mixed += (wanted.first_index - embedding.first_index) * (mixed >= EMBEDDING_INDEX)
    assert torch.is_grad_enabled()
    result = model.forward_chunk(mixed, indexed_embeddings=[wanted], return_last_state=True)
    assert not result["logits"].requires_grad
    assert not result["last_state"].requires_grad
    assert not model.forward(mixed, indexed_embeddings=[wanted]).requires_grad


def test_ids_without_their_embedding(model: ExLlamaV2, ids: Tensor) -> None:
    mixed, embedding = with_embedding(model, ids, 4, 7)
    other = ExLlamaV2MMEmbedding(model, embedding.embeddings)
    for call in (model.forward, model.forward_chunk):
        for given in (None, [], [other]):
            with pytest.raises(errors.TokenIdError, match=r"embedding|outside the vocabulary"):
                call(mixed, indexed_embeddings=given)
    with pytest.raises(errors.TokenIdError, match="token id 90"):
        model.forward(torch.where(mixed == mixed[1, 0], 90, mixed), indexed_embeddings=[embedding])


def test_facts_of_an_embedding(model: ExLlamaV2) -> None:
    first = ExLlamaV2MMEmbedding(model, torch.zeros(5, 64), pre_tokens=1, post_tokens=2, thw_grid=(1, 5, 1))
    second = ExLlamaV2MMEmbedding(model, torch.zeros(3, 64, dtype=torch.half), text_alias="<image>")
    assert second.first_index >= first.first_index + first.length == first.first_index + 5
    assert first.get_ids() == list(range(first.first_index, first.first_index + 5))
    assert first.get_ids_tensor().tolist() == [first.get_ids()]
    assert first.get_vision_token_range() == (first.first_index + 1, first.first_index + 3)
    assert (first.text_alias, second.text_alias) == (f"<$EMB_{first.first_index}$>", "<image>")
    assert second.get_size_in_bytes() == 3 * 64 * 2
    assert first.thw_grid == (1, 5, 1)
    assert first.metadata == {}


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (torch.zeros(5, 63), {}),
        (torch.zeros(64), {}),
        (torch.zeros(0, 64), {}),
        (torch.zeros(5, 64, dtype=torch.int32), {}),
        (torch.full((5, 64), float("nan")), {}),
        ("rows", {}),
        (torch.zeros(5, 64), {"pre_tokens": 3, "post_tokens": 3}),
        (torch.zeros(5, 64), {"pre_tokens": -1}),
        (torch.zeros(5, 64), {"text_alias": ""}),
    ],
)
def test_embeddings_that_do_not_fit(model: ExLlamaV2, rows: Any, options: dict[str, Any]) -> None:
    with pytest.raises(errors.InputError):
        ExLlamaV2MMEmbedding(model, rows, **options)


def test_another_model_s_embedding(lab: Any, model: ExLlamaV2, ids: Tensor) -> None:
    wide = lab.load(lab.write(hidden_size=128))
    with pytest.raises(errors.InputError, match="rows of 128"):
        model.forward(ids, indexed_embeddings=[ExLlamaV2MMEmbedding(wide, torch.zeros(1, 128))])


def test_aliases_in_a_text(model: ExLlamaV2) -> None:
    config = ExLlamaV2Config()
    config.model_dir = str(DATA / "pylib-4m-fp16")
    config.prepare(no_tensors=True)
    tokenizer = ExLlamaV2Tokenizer(config)
    one = ExLlamaV2MMEmbedding(model, torch.zeros(2, 64), text_alias="<im>")
    two = ExLlamaV2MMEmbedding(model, torch.zeros(3, 64), text_alias="<im>+")
    ids = tokenizer.encode("import <im>+ and<im>", embeddings=[one, two], add_bos=True)
    middle = tokenizer.encode(" and")[0].tolist()
    start = tokenizer.encode("import ", add_bos=True)[0].tolist()
    assert ids.tolist() == [[*start, *two.get_ids(), *middle, *one.get_ids()]]
    assert tokenizer.encode(["<im>", "x"], embeddings=[one])[0].tolist() == one.get_ids()
    with pytest.raises(errors.InputError, match="same text_alias"):
        tokenizer.encode("x", embeddings=[one, one])


# ------------------------------------------------------------------------------------------------------- Intervention


def test_hooks_see_and_change_the_state(lab: Any, ids: Tensor) -> None:
    model = lab.load(lab.write())
    plain = model.forward(ids)
    states = model.forward_chunk(ids, extract_state_indices=range(len(model.modules)))["states"]
    seen: list[Tensor] = []

    def keep(state: Tensor, step: Any) -> Tensor:
        assert (step.batch_size, step.q_len) == (2, 20)
        seen.append(state)
        return state

    inner = model.modules[2]
    model.modules[2] = Intervention(inner, pre_forward=keep, post_forward=keep)
    assert torch.equal(model.forward(ids), plain)
    assert torch.equal(seen[0], states[2])
    assert torch.equal(seen[1], states[3])
    model.modules[2] = Intervention(inner, post_forward=lambda state, step: state * 1.01)
    changed = model.forward(ids)
    assert not torch.equal(changed, plain)
    model.modules[2] = Intervention(inner, pre_forward=lambda state, step: state * 2)
    model.modules[3] = Intervention(model.modules[3], pre_forward=lambda state, step: states[3].double())
    assert torch.equal(model.forward(ids), plain)
    assert model.modules[2].loaded
    assert model.modules[2].layer_idx == 0
    assert model.weight_bytes() == lab.load(lab.write()).weight_bytes()
    model.unload()
    assert not inner.loaded
    model.load()
    assert torch.equal(model.forward(ids), plain)


def test_hooks_around_attention_embedding_and_head(lab: Any, ids: Tensor) -> None:
    model = lab.load(lab.write())
    plain = model.forward(ids, ExLlamaV2Cache(model, batch_size=2))
    shapes: dict[int, list[list[int]]] = {}
    for i, module in enumerate(list(model.modules)):

        def note(state: Tensor, step: Any, i: int = i) -> Tensor:
            shapes.setdefault(i, []).append(list(state.shape))
            return state

        model.modules[i] = Intervention(module, pre_forward=note, post_forward=note)
    assert torch.equal(model.forward(ids, ExLlamaV2Cache(model, batch_size=2)), plain)
    assert shapes[0] == [[2, 20], [2, 20, 64]]
    assert shapes[1] == [[2, 20, 64]] * 2
    assert shapes[6] == [[2, 20, 64], [2, 20, 96]]
    assert torch.equal(model.forward(ids, last_id_only=True)[:, 0], plain[:, -1])


def test_hooks_that_break_the_rules(lab: Any, ids: Tensor) -> None:
    model = lab.load(lab.write())
    inner = model.modules[1]
    wrong: list[Any] = [lambda s, step: None, lambda s, step: s[:, 1:], lambda s, step: s.view(-1)]
    for bad in wrong:
        model.modules[1] = Intervention(inner, post_forward=bad)
        with pytest.raises(errors.InputError, match="post_forward"):
            model.forward(ids)
    with pytest.raises(errors.InputError, match="pre_forward"):
        Intervention(inner, pre_forward=3)  # type: ignore[arg-type]
    with pytest.raises(errors.InputError, match="Intervention"):
        Intervention(object())  # type: ignore[arg-type]
