"""ExLlamaV2VisionTower: the image encoder of a multimodal model, and embeddings of images."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..config import ExLlamaV2Config
from ..device import default_device, out_of_memory_as_error
from ..embeddings import ExLlamaV2MMEmbedding
from ..errors import InputError, ModelStateError, TokenizerError, UnsupportedError
from ..loading.checkpoint import TensorReader
from .encoder import Encoder, Grid, Picture
from .pixtral import PixtralEncoder
from .qwen import QwenEncoder
from .qwen_settings import read_qwen_settings
from .settings import read_settings
from .siglip import SiglipEncoder, read_siglip_settings

if TYPE_CHECKING:
    from ..language_model import LanguageModel
    from ..tokenizer import ExLlamaV2Tokenizer

__all__ = ["BUILT_TOWERS", "ExLlamaV2VisionTower"]


def _pixtral(config: ExLlamaV2Config, folder: Path) -> Encoder:
    return PixtralEncoder(read_settings(folder, config.architecture, config.norm_eps), config.hidden_size)


BUILT_TOWERS: Mapping[str, Callable[[ExLlamaV2Config, Path], Encoder]] = {
    "Pixtral": _pixtral,
    "Qwen2-VL": lambda config, folder: QwenEncoder(read_qwen_settings(folder, gated=False), config.hidden_size),
    "Qwen2.5-VL": lambda config, folder: QwenEncoder(read_qwen_settings(folder, gated=True), config.hidden_size),
    "SigLIP": lambda config, folder: SiglipEncoder(read_siglip_settings(folder), config.hidden_size),
}
"""By the architecture's `vision`."""

DEFAULT_FPS = 2.0  # frames a second that the published processors sample


class ExLlamaV2VisionTower:
    """The image encoder that belongs to the language model of `config`: Pixtral (Llava, Mistral 3), Qwen2-VL,
    Qwen2.5-VL, or SigLIP (Gemma 3).

    Raises UnsupportedError for models without a tower and switches that are not built, ConfigError for broken files.
    """

    def __init__(self, config: ExLlamaV2Config) -> None:
        if config.arch.vision is None:
            raise UnsupportedError(f"{config.architecture} has no vision tower")
        if config.model_dir is None or config.checkpoint is None:
            raise ModelStateError("the config was prepared with no_tensors=True: call config.prepare() first")
        self.config = config
        self.encoder = BUILT_TOWERS[config.arch.vision](config, Path(config.model_dir))

    @property
    def settings(self) -> Any:
        """What the model's files say about the tower; frozen."""
        return self.encoder.settings  # type: ignore[attr-defined]

    # ------------------------------------------------------------------------------------------------------- loading

    def load(self, gpu_split: Sequence[float] | None = None, lazy: bool = False, progress: bool = False) -> None:
        """Load the weights, float32, onto the default device; the arguments are those of `ExLlamaV2.load`."""
        for _ in self.load_gen(gpu_split, lazy, progress):
            pass

    def load_gen(
        self, gpu_split: Sequence[float] | None = None, lazy: bool = False, progress: bool = False
    ) -> Iterator[None]:
        """As `load`, as a generator that must be exhausted."""
        if not lazy and not self.encoder.loaded:
            assert self.config.checkpoint is not None
            with out_of_memory_as_error("load the vision tower"):
                self.encoder.load(TensorReader(self.config.checkpoint), default_device())
        yield

    def load_tp(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError("a vision tower loads whole: use load()")

    load_autosplit = load_autosplit_gen = load_tp_gen = load_tp

    def unload(self) -> None:
        """Drop the weights."""
        self.encoder.unload()

    # -------------------------------------------------------------------------------------------------------- images

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError("a vision tower takes images: use process() or get_image_embeddings()")

    forward_chunk = forward

    def process(
        self,
        hidden_states: Tensor,
        patches_size: tuple[int, int] | None = None,
        abort_event: Event | None = None,
        thw_grid: Grid | None = None,
    ) -> Tensor | None:
        """What the image processor makes -> float32 [rows, hidden size of the language model]; None if `abort_event`
        is set.

        hidden_states: pixels float32 [3, H, W] (Pixtral, SigLIP), or for Qwen's towers patches [T * H * W, numbers of
        a patch] with thw_grid = (T, H, W). patches_size: (columns, rows) of the output; only checked. Raises
        InputError for sizes that the tower does not take.
        """
        if not isinstance(hidden_states, Tensor):
            raise InputError(f"hidden_states is a {type(hidden_states).__name__}, must be a tensor of pixels")
        grid = self.encoder.check(hidden_states, None if thw_grid is None else tuple(thw_grid))  # type: ignore[arg-type]
        if patches_size is not None and tuple(patches_size) != self.encoder.side(grid)[::-1]:
            raise InputError(f"patches_size is {patches_size}, the pixels make {self.encoder.side(grid)[::-1]}")
        if abort_event is not None and abort_event.is_set():
            return None
        with out_of_memory_as_error("encode an image"):
            return self.encoder.forward(hidden_states, grid)

    def get_image_embeddings(
        self,
        model: LanguageModel,
        tokenizer: ExLlamaV2Tokenizer,
        image: Any,
        text_alias: str | None = None,
        embeddings_cpu: bool = True,
    ) -> ExLlamaV2MMEmbedding:
        """The rows that stand for a PIL image, with those that frame it.

        Pixtral: after each row of patches an [IMG_BREAK], after the last an [IMG_END]. Others: one token before and one
        behind. embeddings_cpu: keep them on the CPU. metadata: original_size and preprocessed_size (width, height),
        patches_size (columns, rows). Raises InputError for what is no image that can be used.
        """
        picture = self.encoder.prepare(image)
        return self._embedding(model, tokenizer, picture, image.size, text_alias, embeddings_cpu)

    def get_video_embeddings(
        self,
        model: LanguageModel,
        tokenizer: ExLlamaV2Tokenizer,
        video: Sequence[Any],
        text_alias: str | None = None,
        embeddings_cpu: bool = True,
        *,
        fps: float = DEFAULT_FPS,
    ) -> ExLlamaV2MMEmbedding:
        """As for an image, of a list of PIL images of one size that show `fps` moments a second (Qwen's towers).

        The last one is repeated where they do not fill whole patches of time. Raises UnsupportedError for towers that
        take images only.
        """
        if not isinstance(fps, (int, float)) or not (math.isfinite(fps) and fps > 0):
            raise InputError(f"fps is {fps!r}, must be a positive number of frames a second")
        picture = self.encoder.prepare_video(video)
        step = self.encoder.time_step(fps)
        return self._embedding(model, tokenizer, picture, video[0].size, text_alias, embeddings_cpu, step)

    @torch.inference_mode(False)  # an image is kept over many requests
    def _embedding(
        self,
        model: LanguageModel,
        tokenizer: ExLlamaV2Tokenizer,
        picture: Picture,
        size: tuple[int, int],
        text_alias: str | None,
        embeddings_cpu: bool,
        time_step: float = 1.0,
    ) -> ExLlamaV2MMEmbedding:
        rows = self.process(picture.pixels, thw_grid=picture.grid)
        assert rows is not None
        ends = self._framing(model, tokenizer).to(rows.device)
        framed = self.encoder.frame(rows, picture.grid, ends)
        made = ExLlamaV2MMEmbedding(
            model,
            framed.rows.cpu() if embeddings_cpu else framed.rows,
            text_alias,
            self.encoder.told_grid(picture.grid),
            framed.pre_tokens,
            framed.post_tokens,
            time_step=time_step,
        )
        made.metadata = {
            "original_size": size,
            "preprocessed_size": picture.size,
            "patches_size": self.encoder.side(picture.grid)[::-1],
        }
        return made

    def _framing(self, model: LanguageModel, tokenizer: ExLlamaV2Tokenizer) -> Tensor:
        """Embeddings float32 [2, hidden] of the two framing tokens, as the language model embeds them."""
        ids = []
        for piece in self.encoder.pieces:
            token = tokenizer.single_id(piece)
            if token is None:
                raise TokenizerError(f"the tokenizer has no token {piece}, which frames images of this model")
            ids.append(token)
        embedding = model.modules[0]
        if not embedding.loaded:
            raise ModelStateError("the language model is not loaded: its embeddings frame the image")
        device = model.placement.device(0) if model.loaded else torch.device("cpu")
        return embedding.forward(torch.tensor(ids, device=device), None).float()  # type: ignore[arg-type]
