"""ExLlamaV2VisionTower: the image encoder of a multimodal model, and embeddings of images."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..architectures.base import Vision
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

__all__ = ["ENCODERS", "ExLlamaV2VisionTower"]


def _pixtral(config: ExLlamaV2Config, folder: Path, vision: Vision) -> Encoder:
    settings = read_settings(folder, config.architecture, config.norm_eps, merges=vision.merges)
    return PixtralEncoder(settings, config.hidden_size)


def _qwen(config: ExLlamaV2Config, folder: Path, vision: Vision) -> Encoder:
    return QwenEncoder(read_qwen_settings(folder, gated=vision.gated), config.hidden_size)


def _siglip(config: ExLlamaV2Config, folder: Path, vision: Vision) -> Encoder:
    return SiglipEncoder(read_siglip_settings(folder), config.hidden_size)


ENCODERS: Mapping[str, Callable[[ExLlamaV2Config, Path, Vision], Encoder]] = {
    "pixtral": _pixtral,
    "qwen": _qwen,
    "siglip": _siglip,
}
"""Makers of encoders by the architecture's `Vision.encoder`."""

DEFAULT_FPS = 2.0  # frames a second that the published processors sample


class ExLlamaV2VisionTower:
    """The image encoder that belongs to the language model of `config`.

    Supported are Pixtral (Llava, Mistral 3), Qwen2-VL, Qwen2.5-VL, and SigLIP (Gemma 3).

    Args:
        config: a prepared configuration.

    Raises:
        UnsupportedError: the model has no tower, or an option is not supported.
        ConfigError: a file is invalid.
        ModelStateError: the config was prepared without tensors.
    """

    def __init__(self, config: ExLlamaV2Config) -> None:
        vision = config.arch.vision
        if vision is None:
            raise UnsupportedError(f"{config.architecture} has no vision tower")
        if config.model_dir is None or config.checkpoint is None:
            raise ModelStateError("the config was prepared with no_tensors=True: call config.prepare() first")
        self.config = config
        self.encoder = ENCODERS[vision.encoder](config, Path(config.model_dir), vision)

    @property
    def settings(self) -> Any:
        """The settings of the tower in the model's files; frozen."""
        return self.encoder.settings

    # ------------------------------------------------------------------------------------------------------- loading

    def load(self, gpu_split: Sequence[float] | None = None, lazy: bool = False, progress: bool = False) -> None:
        """Load the weights, float32, on the default device.

        Args:
            gpu_split: accepted as by `ExLlamaV2.load`, without effect.
            lazy: do not load.
            progress: accepted without effect.

        Raises:
            FormatError, MissingTensorError: the weights are broken or incomplete.
            DeviceError: the GPU has too little memory.
        """
        for _ in self.load_gen(gpu_split, lazy, progress):
            pass

    def load_gen(
        self, gpu_split: Sequence[float] | None = None, lazy: bool = False, progress: bool = False
    ) -> Iterator[None]:
        """Load as `load`, as a generator that must be exhausted.

        `gpu_split`, `lazy` and `progress`, and the errors, are those of `load`.
        """
        if not lazy and not self.encoder.loaded:
            assert self.config.checkpoint is not None
            with out_of_memory_as_error("load the vision tower"):
                self.encoder.load(TensorReader(self.config.checkpoint), default_device())
        yield

    def load_tp(self, *args: Any, **kwargs: Any) -> None:
        """Raise UnsupportedError whatever `args` and `kwargs` are: a vision tower is loaded whole."""
        raise UnsupportedError("a vision tower loads whole: use load()")

    load_autosplit = load_autosplit_gen = load_tp_gen = load_tp

    def unload(self) -> None:
        """Drop the weights."""
        self.encoder.unload()

    # -------------------------------------------------------------------------------------------------------- images

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Raise UnsupportedError whatever `args` and `kwargs` are: use `process` or `get_image_embeddings`."""
        raise UnsupportedError("a vision tower takes images: use process() or get_image_embeddings()")

    forward_chunk = forward

    def process(
        self,
        hidden_states: Tensor,
        patches_size: tuple[int, int] | None = None,
        abort_event: Event | None = None,
        thw_grid: Grid | None = None,
    ) -> Tensor | None:
        """Encode the output of the image processor.

        Args:
            hidden_states: pixels float32 [3, H, W] (Pixtral, SigLIP), or for Qwen's towers patches
                [T * H * W, numbers of a patch].
            patches_size: (columns, rows) of the output; only checked.
            abort_event: when set, the result is None.
            thw_grid: (T, H, W) of the patches, for Qwen's towers.

        Returns:
            float32 [rows, hidden size of the language model], or None.

        Raises:
            InputError: sizes do not fit the tower.
            ModelStateError: the tower is not loaded.
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
        """Return the rows of a PIL image with their framing rows.

        Pixtral: an [IMG_BREAK] after each row of patches and an [IMG_END] after the last. Others: one token before and
            one after.

        Args:
            model: the loaded language model.
            tokenizer: its tokenizer.
            image: a PIL image.
            text_alias: text that represents the image; default a generated one.
            embeddings_cpu: keep the rows on the CPU.

        Returns:
            The embedding. Its metadata has original_size and preprocessed_size (width, height), patches_size (columns,
            rows).

        Raises:
            InputError: the image cannot be used.
            ModelStateError: the tower or the model is not loaded.
        """
        picture = self.encoder.preprocess(image)
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
        """Return the rows of a video with their framing rows (Qwen's towers).

        The last frame is repeated where the frames do not fill whole patches of time.

        Args:
            model: the loaded language model.
            tokenizer: its tokenizer.
            video: PIL images of one size.
            text_alias: text that represents the video; default a generated one.
            embeddings_cpu: keep the rows on the CPU.
            fps: frames a second of `video`.

        Raises:
            UnsupportedError: the tower takes images only.
            InputError: the frames cannot be used.
        """
        if not isinstance(fps, (int, float)) or not (math.isfinite(fps) and fps > 0):
            raise InputError(f"fps is {fps!r}, must be a positive number of frames a second")
        picture = self.encoder.preprocess_video(video)
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
            self.encoder.reported_grid(picture.grid),
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
        """Return the language model's embeddings of the two framing tokens, float32 [2, hidden]."""
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
