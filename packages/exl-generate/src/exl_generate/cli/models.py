"""From a folder to a generator: what every command that runs a model begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl_core import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Config,
    ExLlamaV2Lora,
    ExLlamaV2Tokenizer,
)
from exl_generate.dynamic import PAGED_PAGE_SIZE, ExLlamaV2DynamicGenerator
from exl_generate.errors import RequestError

from .progress import loading_bar

__all__ = ["CACHES", "Loaded", "load", "model_folder"]

CACHES: dict[str, Any] = {
    "fp16": ExLlamaV2Cache,
    "fp8": ExLlamaV2Cache_8bit,
    "q8": ExLlamaV2Cache_Q8,
    "q6": ExLlamaV2Cache_Q6,
    "q4": ExLlamaV2Cache_Q4,
}


@dataclass
class Loaded:
    """A model that is ready to generate; the generator is made once the needed cache length is known."""

    config: ExLlamaV2Config
    model: ExLlamaV2
    tokenizer: ExLlamaV2Tokenizer

    def generator(self, cache: str, tokens: int, draft: str | None = None, **kwargs: Any) -> ExLlamaV2DynamicGenerator:
        """With a cache of at least `tokens` tokens, in whole pages; `draft`: folder of a draft model, or "bundled"."""
        length = -(-tokens // PAGED_PAGE_SIZE) * PAGED_PAGE_SIZE
        if draft is not None:
            small = _load_model(_draft_folder(draft))
            kwargs |= {"draft_model": small, "draft_cache": CACHES[cache](small, max_seq_len=length)}
        kv = CACHES[cache](self.model, max_seq_len=length)
        return ExLlamaV2DynamicGenerator(self.model, kv, self.tokenizer, **kwargs)

    def adapters(self, folders: Sequence[Path]) -> list[ExLlamaV2Lora]:
        """The adapters in these folders."""
        return [ExLlamaV2Lora.from_directory(self.model, str(folder)) for folder in folders]

    def stop_ids(self) -> list[int]:
        """Every id that ends a text of this model."""
        ids = [*self.config.eos_token_ids, self.tokenizer.eos_token_id]
        return sorted({i for i in ids if i is not None and i >= 0})


def load(folder: Path | None) -> Loaded:
    """Load the model of a folder, or the bundled one."""
    model = _load_model(model_folder(folder))
    return Loaded(model.config, model, ExLlamaV2Tokenizer(model.config))


def _load_model(folder: Path) -> ExLlamaV2:
    model = ExLlamaV2(ExLlamaV2Config(folder))
    with loading_bar(folder.name) as report:
        model.load(callback=report)
    return model


def _draft_folder(name: str) -> Path:
    if name != "bundled":
        return Path(name)
    from exl_generate import bundled

    return Path(bundled.draft_model_dir())


def model_folder(folder: Path | None) -> Path:
    """`folder`, or the bundled model's."""
    if folder is not None:
        return folder
    try:
        from exl_generate import bundled
    except ImportError:
        raise RequestError("this installation carries no bundled model; name a model folder with -m DIR") from None
    return Path(bundled.default_model_dir())


def special_ids(tokenizer: ExLlamaV2Tokenizer, pieces: Sequence[str]) -> list[int]:
    """Ids of those of `pieces` that are special tokens of this vocabulary."""
    known = {piece: i for i, piece in tokenizer.extended_id_to_piece.items()}
    return [known[piece] for piece in pieces if piece in known]
