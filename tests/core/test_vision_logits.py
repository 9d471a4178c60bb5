"""Language models after images: logits are those of transformers however the prompt is cut, and text is only text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from exl_core import (
    AttentionParams,
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Cache_TP,
    ExLlamaV2Config,
    ExLlamaV2MMEmbedding,
    PagedParams,
    errors,
)
from exl_core.axes import grid_axes, marks_of
from exl_core.device import GIB, devices
from exl_core.loading.plan import plan_modules

transformers = pytest.importorskip("transformers")
from vision_models import END, FAMILIES, IMAGE, QWEN, START, VIDEO, VOCAB, Pair, error, make_pair, picture  # noqa: E402

pytestmark = [pytest.mark.covers("core: images", "core: multimodal-other", "generators: embeddings-mrope")]

TOLERANCE = 2e-3
FIRST, MIDDLE, LAST = [1, 20, 21], [30, 31, 32], [40, 41, 42, 43, 44, 45, 46, 47]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def images(pair: Pair) -> list[ExLlamaV2MMEmbedding]:
    """Two images: a wide one, and one that is nearly square."""
    encode = pair.tower.get_image_embeddings
    return [encode(pair.ours, pair.tokenizer, picture(*size)) for size in ((60, 24), (37, 41))]


@pytest.fixture(scope="module")
def prompt(images: list[ExLlamaV2MMEmbedding]) -> Tensor:
    one, other = images
    return torch.tensor([FIRST + one.get_ids() + MIDDLE + other.get_ids() + LAST])


@pytest.fixture(scope="module")
def expected(pair: Pair) -> Tensor:
    """transformers' logits of the same prompt, from its own pixels on."""
    pictures = [pair.tower.encoder.preprocess(picture(*size)) for size in ((60, 24), (37, 41))]
    ids: list[int] = []
    for text, one in zip((FIRST, MIDDLE), pictures, strict=True):
        rows, columns = pair.tower.encoder.side(one.grid)
        ids += [*text, START, *[IMAGE] * (rows * columns), END]
    tokens = torch.tensor([ids + LAST])
    kinds = (tokens == IMAGE).long()
    with torch.no_grad():
        if pair.qwen:
            given: dict[str, Any] = {"image_grid_thw": torch.tensor([p.grid for p in pictures])}
            given |= {"pixel_values": torch.cat([p.pixels for p in pictures]), "mm_token_type_ids": kinds}
        else:
            given = {"pixel_values": torch.stack([p.pixels for p in pictures]), "token_type_ids": kinds}
        logits: Tensor = pair.theirs(input_ids=tokens, **given).logits
    return logits


def cut(found: Tensor) -> Tensor:
    return found[..., :VOCAB]


def test_the_whole_prompt(pair: Pair, images: list[Any], prompt: Tensor, expected: Tensor) -> None:
    found = pair.ours.forward(prompt, indexed_embeddings=images)
    assert error(cut(found), expected) < TOLERANCE
    assert pair.qwen == (images[0].positions_taken < images[0].length)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("step", [1, 7, 40])
def test_in_chunks(pair: Pair, images: list[Any], prompt: Tensor, expected: Tensor, step: int) -> None:
    """Chunks are bitwise equal to the whole. A picture whose rows see each other is not cut by the limit."""
    whole = pair.ours.forward(prompt, indexed_embeddings=images)
    cache = ExLlamaV2Cache(pair.ours, max_seq_len=256)
    limit = pair.ours.config.max_input_len
    pair.ours.config.max_input_len = step
    try:
        found = pair.ours.forward(prompt, cache, indexed_embeddings=images)
    finally:
        pair.ours.config.max_input_len = limit
    assert cache.current_seq_len == prompt.shape[1]
    assert torch.equal(found, whole)
    assert error(cut(found), expected) < TOLERANCE


def test_token_by_token_and_back(pair: Pair, images: list[Any], prompt: Tensor, expected: Tensor) -> None:
    """Decoding after images; then the same again from before the second image, and from the beginning."""
    cache = ExLlamaV2Cache(pair.ours, max_seq_len=256)
    begin = prompt.shape[1] - len(LAST)
    between = begin - images[1].length - 1  # inside the text between the images
    for start in (0, between, 0):
        cache.current_seq_len = start
        pair.ours.forward(prompt[:, start:begin], cache, preprocess_only=True, indexed_embeddings=images)
        parts = [pair.ours.forward(prompt[:, i : i + 1], cache) for i in range(begin, prompt.shape[1])]
        assert error(cut(torch.cat(parts, 1)), expected[:, begin:]) < TOLERANCE
    other = cache.clone()
    other.current_seq_len = cache.current_seq_len = begin
    assert torch.equal(pair.ours.forward(prompt[:, begin:], cache), pair.ours.forward(prompt[:, begin:], other))


@pytest.mark.parametrize("made", [ExLlamaV2Cache, ExLlamaV2Cache_TP])
def test_a_clone_continues_after_its_images(pair: Pair, images: list[Any], prompt: Tensor, made: Any) -> None:
    cache = made(pair.ours, max_seq_len=256)
    begin = prompt.shape[1] - len(LAST)
    pair.ours.forward(prompt[:, :begin], cache, preprocess_only=True, indexed_embeddings=images)
    other = cache.clone()
    expected = pair.ours.forward(prompt[:, begin:], cache)
    assert torch.equal(pair.ours.forward(prompt[:, begin:], other), expected)


def test_a_copied_row_continues_after_its_images(pair: Pair, images: list[Any], prompt: Tensor) -> None:
    """Positions are not places: what the source knows of that goes along."""
    begin = prompt.shape[1] - len(LAST)
    whole = pair.ours.forward(prompt, indexed_embeddings=images)[:, begin:]
    one = ExLlamaV2Cache(pair.ours, max_seq_len=256)
    pair.ours.forward(prompt[:, :begin], one, preprocess_only=True, indexed_embeddings=images)
    two = ExLlamaV2Cache(pair.ours, batch_size=2, max_seq_len=256)
    pair.ours.forward(torch.full((2, begin), 7), two, preprocess_only=True)
    one.copy_states(two, 0, begin, 0, begin, 0, 1, 0, 2)
    two.current_seq_len = begin
    assert torch.equal(pair.ours.forward(prompt[:, begin:].expand(2, -1), two), whole.expand(2, -1, -1))


def test_text_in_place_of_images_forgets_them(pair: Pair, images: list[Any], prompt: Tensor) -> None:
    cache = ExLlamaV2Cache(pair.ours, max_seq_len=256)
    pair.ours.forward(prompt, cache, preprocess_only=True, indexed_embeddings=images)
    text = torch.tensor([[5 + i % 80 for i in range(prompt.shape[1] + 9)]])
    cache.current_seq_len = 0
    parts = [pair.ours.forward(text[:, a : a + 50], cache) for a in range(0, text.shape[1], 50)]
    assert torch.equal(torch.cat(parts, 1), pair.ours.forward(text))
    cache.reset()
    assert torch.equal(pair.ours.forward(text, cache), pair.ours.forward(text))


@pytest.mark.parametrize("kind", [ExLlamaV2Cache, ExLlamaV2Cache_Q8])
def test_pages_and_batches(pair: Pair, images: list[Any], prompt: Tensor, expected: Tensor, kind: Any) -> None:
    """Over pages in odd order: a row with two images and one without, prompt in chunks, then tokens together."""
    cache = kind(pair.ours, max_seq_len=512)
    table = torch.tensor([[7, 2, 5, 0, 9, 11, 4], [1, 3, 6, 8, 10, 12, 13]], dtype=torch.int32)
    text = torch.tensor([[5 + i % 80 for i in range(30)]])
    begin = prompt.shape[1] - len(LAST)
    marks = marks_of(prompt[0].numpy(), images)

    def run(ids: Tensor, rows: list[int], past: list[int], offsets: list[int], **more: Any) -> Tensor:
        params = PagedParams(
            batch_size=len(rows),
            block_index=table[rows],
            cache_seqlens=torch.tensor(past, dtype=torch.int32),
            max_cache_seqlen=max(past),
            page_size=32,
            rope_offsets=torch.tensor(offsets, dtype=torch.int32),
        )
        logits: Tensor = pair.ours.forward_chunk(ids, cache, attn_params=params, **more)["logits"]
        return logits

    middle = len(FIRST) + images[0].length + 1
    offset = marks[0][1] if marks else 0
    run(prompt[:, :middle], [0], [0], [0], indexed_embeddings=images)
    run(prompt[:, middle:begin], [0], [middle], [offset], indexed_embeddings=images)
    offset = marks[1][1] if marks else 0
    run(text[:, :22], [1], [0], [0])
    parts = [
        run(
            torch.cat([prompt[:, begin + i : begin + i + 1], text[:, 22 + i : 23 + i]]),
            [0, 1],
            [begin + i, 22 + i],
            [offset, 0],
        )
        for i in range(8)
    ]
    found = torch.cat(parts, 1)
    loose = TOLERANCE if kind is ExLlamaV2Cache else 0.1  # eight bits a value
    assert error(cut(found[:1]), expected[:, begin:]) < loose
    plain = pair.ours.forward(text)[:, 22:30]
    assert error(cut(found[1:]), cut(plain)) < loose
    if kind is ExLlamaV2Cache:
        assert torch.equal(found[1:], plain)


def test_padded_rows(pair: Pair, images: list[Any], prompt: Tensor, expected: Tensor) -> None:
    """A short text, padded on the left, batched with the images; and the images padded to a longer text."""
    short = torch.tensor([[50, 51, 52, 53]])
    for longer in (prompt, torch.tensor([[5 + i % 80 for i in range(prompt.shape[1] + 6)]])):
        rows = [short, prompt] if longer is prompt else [longer, prompt]
        width = longer.shape[1]
        pads = [width - row.shape[1] for row in rows]
        ids = torch.cat([torch.nn.functional.pad(row, (pad, 0)) for row, pad in zip(rows, pads, strict=True)])
        mask = torch.zeros(2, width)
        for row, pad in enumerate(pads):
            mask[row, :pad] = -torch.inf
        shift = -torch.tensor(pads, dtype=torch.int32)[:, None]
        found = pair.ours.forward(ids, input_mask=mask, position_offsets=shift, indexed_embeddings=images)
        assert error(cut(found[1:, pads[1] :]), expected) < TOLERANCE
        assert error(cut(found[:1, pads[0] :]), cut(pair.ours.forward(rows[0]))) < TOLERANCE


def test_offsets_by_hand(pair: Pair, images: list[Any], prompt: Tensor) -> None:
    """AttentionParams' rope_offsets replace what the cache remembers."""
    begin = prompt.shape[1] - len(LAST)
    marks = marks_of(prompt[0].numpy(), images)
    found = []
    for forget in (False, True):
        cache = ExLlamaV2Cache(pair.ours, max_seq_len=256)
        pair.ours.forward(prompt[:, :begin], cache, preprocess_only=True, indexed_embeddings=images)
        params = AttentionParams(1, len(LAST), begin)
        if forget:
            cache.rope_offsets.clear()
            params.rope_offsets = torch.tensor([[marks[-1][1] if marks else 0]], dtype=torch.int32)
        found.append(pair.ours.forward_chunk(prompt[:, begin:], cache, attn_params=params)["logits"])
    assert torch.equal(*found)


def over_two(pair: Pair, how: str) -> ExLlamaV2:
    """The same folder over two logical CPUs: by layers, or its matrices cut."""
    config = ExLlamaV2Config(pair.ours.config.model_dir)
    config.cpu_matmul = "exact"
    config.max_input_len = 64
    model = ExLlamaV2(config)
    if how == "heads":
        model.load_tp([8.0, 8.0])
        assert model.tp_context is not None
        return model
    found = plan_modules(model.config, model.modules, devices(), None, [64.0], None, True).devices[0]
    model.load([(found.weights / 2 * 1.2 + found.tables + found.scratch) / GIB] * 2)
    assert len(set(model.cache_map.values())) == 2
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["layers", "heads"])
def test_over_two_devices(
    pair: Pair, images: list[Any], prompt: Tensor, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two devices give bitwise the results of one."""
    monkeypatch.setenv("EXL_DEVICE", "cpu:0,cpu:1")
    model = over_two(pair, how)
    own = [
        ExLlamaV2MMEmbedding(
            model, e.embeddings, thw_grid=e.thw_grid, pre_tokens=e.pre_tokens, post_tokens=e.post_tokens
        )
        for e in images
    ]
    ids = torch.tensor([FIRST + own[0].get_ids() + MIDDLE + own[1].get_ids() + LAST])
    cache = (ExLlamaV2Cache_TP if how == "heads" else ExLlamaV2Cache)(model, max_seq_len=256)
    twin = ExLlamaV2Cache(pair.ours, max_seq_len=256)
    for begin, end in ((0, ids.shape[1] - 2), (ids.shape[1] - 2, ids.shape[1])):
        found = model.forward(ids[:, begin:end], cache, indexed_embeddings=own)
        assert torch.equal(found, pair.ours.forward(prompt[:, begin:end], twin, indexed_embeddings=images))


@pytest.mark.parametrize("pair", QWEN, indirect=True)
@torch.no_grad()
def test_a_video(pair: Pair) -> None:
    """Four moments of frames so large that height and width reach further than time: there transformers (5.23) goes
    on after height and width alone, we after the largest position used, as the models' own code does."""
    frames = [picture(80, 24, seed=i) for i in range(7)]
    made = pair.tower.get_video_embeddings(pair.ours, pair.tokenizer, frames)
    given = pair.tower.encoder.preprocess_video(frames)
    assert made.time_step == (2.0 if pair.family == "Qwen2_5_VL" else 1.0)
    tokens = torch.tensor([[*FIRST, START, *[VIDEO] * (made.length - 2), END, *LAST]])
    expected = pair.theirs(
        input_ids=tokens,
        pixel_values_videos=given.pixels,
        video_grid_thw=torch.tensor([given.grid]),
        mm_token_type_ids=(tokens == VIDEO).long() * 2,
    ).logits
    found = pair.ours.forward(torch.tensor([FIRST + made.get_ids() + LAST]), indexed_embeddings=[made])
    assert error(cut(found), expected) < TOLERANCE


def test_positions_follow_the_definition() -> None:
    """Compute the three position axes step by step."""
    for grid, step in (((1, 3, 5), 1.0), ((4, 2, 3), 1.0), ((3, 2, 2), 2.0), ((3, 1, 2), 1.5), ((2, 2, 2), 0.25)):
        t, h, w = grid
        wanted = [[int(k // (h * w) % t * step), k // w % h, k % w] for k in range(t * h * w)]
        assert grid_axes(grid, step).T.tolist() == wanted


def test_a_picture_in_pieces_is_refused(pair: Pair, images: list[Any], prompt: Tensor) -> None:
    one = images[0]
    ids = one.get_ids()
    with pytest.raises(errors.InputError, match="follow each other"):
        pair.ours.forward(torch.tensor([FIRST + ids[:4] + MIDDLE + ids[4:]]), indexed_embeddings=images)
    with pytest.raises(errors.InputError, match="follow each other"):
        pair.ours.forward(torch.tensor([FIRST + ids[5:] + MIDDLE]), indexed_embeddings=images)
    if not pair.qwen:
        cache = ExLlamaV2Cache(pair.ours, max_seq_len=256)
        with pytest.raises(errors.InputError, match="ends at row 7"):
            pair.ours.forward(prompt[:, : len(FIRST) + 8], cache, indexed_embeddings=images)
        assert cache.current_seq_len == 0


def test_rows_that_are_no_picture_are_causal(pair: Pair, images: list[Any]) -> None:
    """The same rows without a grid stand like text: later rows change nothing before them."""
    rows = images[0].embeddings[1:-1]
    plain = ExLlamaV2MMEmbedding(pair.ours, rows)
    changed = rows.clone()
    changed[-1] += 1
    other = ExLlamaV2MMEmbedding(pair.ours, changed)
    found = [pair.ours.forward(torch.tensor([FIRST + e.get_ids()]), indexed_embeddings=[e]) for e in (plain, other)]
    assert torch.equal(found[0][:, :-1], found[1][:, :-1])
    assert not torch.equal(found[0][:, -1], found[1][:, -1])
    assert plain.positions_taken == plain.length


def test_wrong_grids_are_refused(pair: Pair, images: list[Any]) -> None:
    rows = images[0].embeddings
    for grid in ((1, 2, 3), (1, 0, 4), (1, 2), "abc"):
        with pytest.raises(errors.InputError, match="thw_grid"):
            ExLlamaV2MMEmbedding(pair.ours, rows, thw_grid=grid, pre_tokens=1, post_tokens=1)  # type: ignore[arg-type]
    with pytest.raises(errors.InputError, match="rope_offsets"):
        AttentionParams(2, 3, 0, rope_offsets=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(errors.UnsupportedError, match="alt_rope_embed"):
        AttentionParams(2, 3, 0, alt_rope_embed=(np.zeros(1), np.zeros(1)))


@pytest.mark.parametrize("pair", QWEN, indirect=True)
def test_sections_that_do_not_fit_are_refused(pair: Pair, images: list[Any], prompt: Tensor) -> None:
    section = pair.ours.config.mrope_section
    pair.ours.config.mrope_section = [2, 3]
    try:
        with pytest.raises(errors.ConfigError, match="share the 8 frequencies"):
            pair.ours.forward(prompt, indexed_embeddings=images)
    finally:
        pair.ours.config.mrope_section = section
