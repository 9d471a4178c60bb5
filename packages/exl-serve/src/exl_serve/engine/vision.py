"""Images of requests as rows that the model takes in place of tokens."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from exl_serve.errors import ServeError
from exl_serve.request.internal import MediaRef

if TYPE_CHECKING:
    from exl_core import ExLlamaV2, ExLlamaV2MMEmbedding, ExLlamaV2Tokenizer, ExLlamaV2VisionTower

__all__ = ["Vision", "with_images"]

CACHED_BYTES = 256 << 20
"""Bytes of image rows that are kept, so that later requests need not encode the images again."""


class Vision:
    """The image encoder of one engine. Several threads may call its methods; one image is encoded at a time."""

    def __init__(self, tower: ExLlamaV2VisionTower, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
        self._tower, self._model, self._tokenizer = tower, model, tokenizer
        self._lock = threading.Lock()
        #: by cache salt and digest: otherwise a fast answer would reveal that another tenant has sent the image
        self._kept: OrderedDict[tuple[bytes, bytes], ExLlamaV2MMEmbedding] = OrderedDict()
        self._bytes = 0
        #: a stream other than the engine thread's, whose steps continue while an image is encoded
        self._stream = torch.cuda.Stream() if model.placement.device(0).type == "cuda" else None  # type: ignore[no-untyped-call]

    def embed(self, images: Sequence[MediaRef], salt: bytes = b"") -> list[ExLlamaV2MMEmbedding]:
        """Return the images' rows on the CPU, in order. Equal images of requests with equal cache salts share an
        object.

        Takes up to seconds: do not call it on the engine's thread. Raises ServeError 400, or the library's InputError.
        """
        return [self._one(image, salt) for image in images]

    def _one(self, image: MediaRef, salt: bytes) -> ExLlamaV2MMEmbedding:
        key = salt, image.digest
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
            on_stream = torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()
            with on_stream, torch.inference_mode():
                made = self._tower.get_image_embeddings(self._model, self._tokenizer, _opened(image))
            self._kept[key] = made
            self._bytes += made.get_size_in_bytes()
            while self._bytes > CACHED_BYTES and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].get_size_in_bytes()
            return made


def _opened(image: MediaRef) -> Any:
    from PIL import Image

    data = image.data or Path(image.path).read_bytes()
    if len(data) != 3 * image.width * image.height:
        raise ServeError.invalid(
            f"an image of {image.width} x {image.height} pixels in {len(data)} bytes", "messages", "image_invalid"
        )
    return Image.frombytes("RGB", (image.width, image.height), data)


def with_images(ids: torch.Tensor, embeddings: Sequence[ExLlamaV2MMEmbedding]) -> torch.Tensor:
    """Return int64 [1, n] with the rows' ids in place of -1 - k. Raises ServeError 400 for a missing image."""
    places = (ids[0] < 0).nonzero()[:, 0].tolist()
    if not places:
        return ids
    parts: list[torch.Tensor] = []
    end = 0
    for place in places:
        number = -1 - int(ids[0, place])
        if number >= len(embeddings):
            raise ServeError.invalid(f"the prompt names image {number}; it has {len(embeddings)}", "messages")
        parts += [ids[:, end:place], embeddings[number].get_ids_tensor()]
        end = place + 1
    return torch.cat([*parts, ids[:, end:]], dim=1)
