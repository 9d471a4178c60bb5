"""Images in a conversation, for models with an image encoder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exl_core import ExLlamaV2VisionTower
from exl_core.device import out_of_memory_as_error
from exl_core.embeddings import ExLlamaV2MMEmbedding
from exl_core.errors import DeviceError
from exl_core.image_files import open_image
from exl_core.tokenizer.conversation import image_spelling
from exl_generate.cli.models import Loaded

__all__ = ["Images"]


class Images:
    """The image encoder of a model, loaded with the first image, and the images of a conversation.

    An image is in a message as its alias, a text that `ExLlamaV2Tokenizer.encode` replaces by the image's ids.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._tower: ExLlamaV2VisionTower | None = None
        self._known: list[tuple[Path, ExLlamaV2MMEmbedding]] = []

    def check(self, file: Path) -> None:
        """Raise UnsupportedError for a model without an image encoder, InputError for a file that is no image; no
        weights are needed."""
        self._encoder()
        open_image(file)

    def add(self, file: Path) -> tuple[str, str]:
        """Encode an image; its text in a message, and a description for people. Raises as `check`, and DeviceError
        where memory is missing."""
        tower = self._encoder()
        with _memory_for(file):
            image = open_image(file)
            tower.load()
            made = tower.get_image_embeddings(self._loaded.model, self._loaded.tokenizer, image)
        self._known.append((file, made))
        spelling = image_spelling(self._loaded.tokenizer)
        around = "" if spelling is None else spelling[1]
        width, height = image.size
        return f"{around}{made.text_alias}{around}", f"{file.name}: {width} x {height} pixels, {made.length} tokens"

    def of(self, prompt: str) -> list[ExLlamaV2MMEmbedding]:
        """The images whose aliases are in a prompt."""
        return [made for _, made in self._known if made.text_alias in prompt]

    def readable(self, text: str) -> str:
        """A message with file names in place of aliases."""
        for file, made in self._known:
            text = text.replace(made.text_alias, f"[image {file}]")
        return text

    def _encoder(self) -> ExLlamaV2VisionTower:
        if self._tower is None:
            self._tower = ExLlamaV2VisionTower(self._loaded.config)
        return self._tower


@contextmanager
def _memory_for(file: Path) -> Iterator[None]:
    """Convert what torch and Python raise for missing memory, on a GPU or not, into DeviceError."""
    try:
        with out_of_memory_as_error(f"encode {file}"):
            yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
            raise DeviceError(f"not enough memory to encode {file}: use a smaller image") from error
        raise
