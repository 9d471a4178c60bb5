"""ExLlamaV2VisionTower: the image encoder of a multimodal model, and embeddings of images (spec core.md 12.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from .pixtral import PixtralEncoder
from .preprocess import preprocess
from .settings import read_settings

if TYPE_CHECKING:
    from ..model import ExLlamaV2
    from ..tokenizer import ExLlamaV2Tokenizer

__all__ = ["ExLlamaV2VisionTower"]

BREAK, END = "[IMG_BREAK]", "[IMG_END]"


class ExLlamaV2VisionTower:
    """The image encoder that belongs to the language model of `config`: Pixtral (Llava) and Mistral 3.

    Raises UnsupportedError for models without a tower and for towers that are not built; ConfigError for broken files.
    """

    def __init__(self, config: ExLlamaV2Config) -> None:
        if config.arch.vision is None:
            raise UnsupportedError(f"{config.architecture} has no vision tower")
        if config.arch.vision != "Pixtral":
            raise UnsupportedError(
                f"the {config.arch.vision} tower of {config.architecture} is not built in this version; its language "
                "part runs text"
            )
        if config.model_dir is None or config.checkpoint is None:
            raise ModelStateError("the config was prepared with no_tensors=True: call config.prepare() first")
        self.config = config
        self.settings = read_settings(Path(config.model_dir), config.architecture, config.norm_eps)
        self.encoder = PixtralEncoder(self.settings, config.hidden_size)

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
        raise NotImplementedError("a vision tower takes images: use process() or get_image_embeddings()")

    forward_chunk = forward

    def process(self, hidden_states: Tensor, abort_event: Event | None = None) -> Tensor | None:
        """Pixels float32 [3, H, W], sides whole patches times the merge size -> float32 [rows, hidden size of the
        language model]; None if `abort_event` is set."""
        step = self.settings.patch_size * self.settings.merge_size
        t = hidden_states
        if t.dim() != 3 or t.shape[0] != 3 or t.shape[1] % step or t.shape[2] % step or not t.numel():
            raise InputError(f"pixels are {list(t.shape)}, must be [3, height, width], sides multiples of {step}")
        if abort_event is not None and abort_event.is_set():
            return None
        return self.encoder.forward(t.float())

    def get_image_embeddings(
        self,
        model: ExLlamaV2,
        tokenizer: ExLlamaV2Tokenizer,
        image: Any,
        text_alias: str | None = None,
        embeddings_cpu: bool = True,
    ) -> ExLlamaV2MMEmbedding:
        """The rows that stand for a PIL image: after each row of patches an [IMG_BREAK], after the last an [IMG_END].

        embeddings_cpu: keep them on the CPU. metadata: original_size and preprocessed_size (width, height),
        patches_size (columns, rows).
        """
        pixels = preprocess(image, self.settings)
        features = self.process(pixels)
        assert features is not None
        step = self.settings.patch_size * self.settings.merge_size
        rows, columns = pixels.shape[1] // step, pixels.shape[2] // step
        ends = self._framing(model, tokenizer)
        breaks = ends[[0] * (rows - 1) + [1]][:, None].to(features.device)
        framed = torch.cat([features.view(rows, columns, -1), breaks], dim=1).flatten(0, 1)
        made = ExLlamaV2MMEmbedding(model, framed.cpu() if embeddings_cpu else framed, text_alias)
        made.metadata = {
            "original_size": image.size,
            "preprocessed_size": (pixels.shape[2], pixels.shape[1]),
            "patches_size": (columns, rows),
        }
        return made

    def get_video_embeddings(self, *args: Any, **kwargs: Any) -> ExLlamaV2MMEmbedding:
        raise UnsupportedError(f"{self.config.architecture} takes images only, no video")

    def _framing(self, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> Tensor:
        """Embeddings float32 [2, hidden] of [IMG_BREAK] and [IMG_END]."""
        ids = []
        for piece in (BREAK, END):
            token = tokenizer.single_id(piece)
            if token is None:
                raise TokenizerError(f"the tokenizer has no token {piece}, which frames images of this model")
            ids.append(token)
        embedding = model.modules[0]
        if not embedding.loaded:
            raise ModelStateError("the language model is not loaded: its embeddings frame the image")
        device = model.device or torch.device("cpu")
        return embedding.forward(torch.tensor(ids, device=device), None).float()  # type: ignore[arg-type]
