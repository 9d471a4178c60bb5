"""Towers of Qwen2-VL, Qwen2.5-VL and Gemma 3: rows are those of transformers, images are prepared as it does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from exl_core import errors
from exl_core.vision.qwen_images import patches_of

transformers = pytest.importorskip("transformers")
from vision_models import FAMILIES, GEMMA_PROCESSOR, QWEN, QWEN_PROCESSOR, Pair, error, make_pair, picture  # noqa: E402

pytestmark = [pytest.mark.covers("core: architecture-details", "core: images", "core: multimodal-other")]

# Both sides compute in float32, in other orders; logits may differ by 2e-3, rows come far closer.
TOLERANCE = 2e-5
SIZES = [(48, 32), (47, 33), (100, 37), (9, 8), (200, 20), (20, 260), (31, 64), (1, 3)]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp(request.param))


def their_processor(family: str) -> Any:
    """transformers' image processor without torchvision, made of the same settings."""
    models = transformers.models
    if family == "Gemma3":
        made = models.gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil
        return made(size=GEMMA_PROCESSOR["size"])
    keys = ("patch_size", "merge_size", "temporal_patch_size", "min_pixels", "max_pixels")
    made = models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil
    return made(**{key: QWEN_PROCESSOR[key] for key in keys})


def their_pixels(pair: Pair, image: Image.Image) -> tuple[torch.Tensor, tuple[int, int, int]]:
    made = their_processor(pair.family)(image, return_tensors="np")
    pixels = torch.as_tensor(np.asarray(made["pixel_values"])).float()
    if pair.family == "Gemma3":
        side = pixels.shape[-1] // 4
        return pixels[0], (1, side, side)
    return pixels, tuple(int(n) for n in made["image_grid_thw"][0])  # type: ignore[return-value]


@torch.no_grad()
def test_rows_of_an_image(pair: Pair) -> None:
    for size in SIZES:
        picture_ = pair.tower.encoder.preprocess(picture(*size))
        if pair.qwen:
            grid = torch.tensor([picture_.grid])
            expected = pair.theirs.get_image_features(picture_.pixels, image_grid_thw=grid).pooler_output[0]
        else:
            expected = pair.theirs.get_image_features(picture_.pixels[None]).pooler_output[0]
        found = pair.tower.process(picture_.pixels, thw_grid=picture_.grid)
        assert found is not None
        assert found.shape == expected.shape
        assert error(found, expected) < TOLERANCE


@pytest.mark.parametrize("pair", QWEN, indirect=True)
@torch.no_grad()
def test_rows_of_a_video(pair: Pair) -> None:
    frames = [picture(50, 34, seed=i) for i in range(5)]
    made = pair.tower.encoder.preprocess_video(frames)
    assert made.grid[0] == 3
    expected = pair.theirs.get_video_features(made.pixels, torch.tensor([made.grid])).pooler_output[0]
    found = pair.tower.process(made.pixels, thw_grid=made.grid)
    assert found is not None
    assert error(found, expected) < TOLERANCE


@pytest.mark.parametrize("pair", QWEN, indirect=True)
def test_frames_of_a_video_are_cut_as_published(pair: Pair) -> None:
    """Each frame resized as an image is, the last one repeated; patches of two frames in one row, frame by frame."""
    frames = [picture(50, 34, seed=i) for i in range(3)]
    made = pair.tower.encoder.preprocess_video(frames)
    single = [their_pixels(pair, frame)[0] for frame in (*frames, frames[-1])]  # an image is one frame twice
    apart = [one.view(-1, 3, 2, 4, 4)[:, :, 0] for one in single]
    pairs = [torch.stack(apart[i : i + 2], dim=2).flatten(1) for i in (0, 2)]
    torch.testing.assert_close(made.pixels, torch.cat(pairs), atol=1e-5, rtol=0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "CMYK"])
@pytest.mark.parametrize("size", SIZES)
def test_images_are_prepared_as_transformers_does(pair: Pair, size: tuple[int, int], mode: str) -> None:
    """PIL resizes on both sides to the same bytes; scaling and normalising round differently in the last bits of a
    float32 of at most 2.7, hence the tolerance. Modes other than RGB: transformers is given what PIL's own conversion
    makes of them, which is what its `convert_rgb` does."""
    image = picture(*size)
    image = image.quantize(32) if mode == "P" else image.convert(mode)
    expected, grid = their_pixels(pair, image.convert("RGB"))
    found = pair.tower.encoder.preprocess(image)
    assert found.grid == grid
    torch.testing.assert_close(found.pixels, expected.view(found.pixels.shape), atol=1e-5, rtol=0)


@pytest.mark.parametrize("pair", QWEN, indirect=True)
def test_patches_hold_every_pixel_once(pair: Pair) -> None:
    frames = torch.arange(4 * 3 * 16 * 24, dtype=torch.float32).view(4, 3, 16, 24)
    patches, grid = patches_of(frames, pair.tower.settings)
    assert grid == (2, 4, 6)
    assert torch.equal(patches.flatten().sort().values, frames.flatten())


def test_videos_are_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [picture(20, 20)] * 2
    video = pair.tower.get_video_embeddings
    if not pair.qwen:
        with pytest.raises(errors.UnsupportedError, match="no video"):
            video(pair.ours, pair.tokenizer, frames)
        return
    for bad, match in (([], "one at least"), ([*frames, picture(20, 21)], "different sizes"), ("abc", "list of PIL")):
        with pytest.raises(errors.InputError, match=match):
            video(pair.ours, pair.tokenizer, bad)
    monkeypatch.setattr("exl_core.vision.qwen_images.MAX_PATCHES", 1000)
    with pytest.raises(errors.InputError, match="makes 1280 patches, at most 1000"):
        video(pair.ours, pair.tokenizer, [picture(400, 400)] * 10)
    with pytest.raises(errors.InputError, match="4097 frames"):
        video(pair.ours, pair.tokenizer, frames * 2048 + frames[:1])
    with pytest.raises(errors.InputError, match="fps"):
        video(pair.ours, pair.tokenizer, frames, fps=0.0)


def test_pixels_that_do_not_fit_are_refused(pair: Pair) -> None:
    made = pair.tower.encoder.preprocess(picture(40, 40))
    wrong: list[tuple[Any, Any]] = [(made.pixels[:-1], made.grid), (made.pixels, (1, 3, 5)), (made.pixels, (2, 8, 8))]
    for pixels, grid in wrong:
        with pytest.raises(errors.InputError):
            pair.tower.process(pixels, thw_grid=grid)
    with pytest.raises(errors.InputError, match="patches_size"):
        pair.tower.process(made.pixels, (1, 99), thw_grid=made.grid)
    with pytest.raises(errors.InputError, match="tensor"):
        pair.tower.process([1, 2])  # type: ignore[arg-type]
