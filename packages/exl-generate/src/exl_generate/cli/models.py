"""From a folder to a generator: what every command that runs a model begins with."""

from __future__ import annotations

import secrets
import sys
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
    ExLlamaV2Cache_TP,
    ExLlamaV2Config,
    ExLlamaV2Lora,
    ExLlamaV2Tokenizer,
)
from exl_core.device import device_line, devices
from exl_generate.draft_vocabulary import check_draft_tokenizer
from exl_generate.dynamic import PAGED_PAGE_SIZE, ExLlamaV2DynamicGenerator
from exl_generate.errors import RequestError

from . import processes
from .progress import loading_bar

__all__ = ["CACHES", "Loaded", "load", "model_folder", "note", "say_device", "text_drafts"]

CACHES: dict[str, Any] = {
    "fp16": ExLlamaV2Cache,
    "fp8": ExLlamaV2Cache_8bit,
    "q8": ExLlamaV2Cache_Q8,
    "q6": ExLlamaV2Cache_Q6,
    "q4": ExLlamaV2Cache_Q4,
}


@dataclass
class Loaded:
    """A model whose files are read but for the weights: those are loaded with the first generator, when the length of
    the cache that has to fit in memory with them is known. `tp`: shard every matrix over all devices."""

    config: ExLlamaV2Config
    model: ExLlamaV2
    tokenizer: ExLlamaV2Tokenizer
    tp: bool = False

    def generator(
        self, cache: str, tokens: int, draft: str | None = None, ngram: bool = False, **kwargs: Any
    ) -> ExLlamaV2DynamicGenerator:
        """With a cache of at least `tokens` tokens, in whole pages; `draft`: folder of a draft model, or "bundled";
        `ngram`: draft from the text."""
        length = -(-tokens // PAGED_PAGE_SIZE) * PAGED_PAGE_SIZE
        if not self.model.loaded:
            say_device()
        if draft is not None:
            small = ExLlamaV2(ExLlamaV2Config(_draft_folder(draft)))
            check_draft_tokenizer(self.tokenizer, ExLlamaV2Tokenizer(small.config))
            _load_weights(small)
            kwargs |= {"draft_model": small, "draft_cache": CACHES[cache](small, max_seq_len=length)}
        kv = self._cache(CACHES[cache], length)
        if ngram:
            kwargs |= text_drafts(self.model)
        return ExLlamaV2DynamicGenerator(self.model, kv, self.tokenizer, **kwargs)

    def _cache(self, kind: Any, length: int) -> Any:
        """A cache of the loaded model. With several devices both fill them in order, or each has a part of all."""
        if self.tp:
            if not self.model.loaded:
                exchange = processes.exchange()
                with loading_bar(_name(self.model)) as report:
                    self.model.load_tp(
                        callback=report, expect_cache_tokens=length, expect_cache_base=kind, exchange=exchange
                    )
            return ExLlamaV2Cache_TP(self.model, kind, max_seq_len=length)
        if self.model.loaded or len(devices()) == 1:
            _load_weights(self.model)
            return kind(self.model, max_seq_len=length)
        cache = kind(self.model, max_seq_len=length, lazy=True)
        with loading_bar(_name(self.model)) as report:
            self.model.load_autosplit(cache, callback=report)
        return cache

    def adapters(self, folders: Sequence[Path]) -> list[ExLlamaV2Lora]:
        """The adapters in these folders."""
        return [ExLlamaV2Lora.from_directory(self.model, str(folder)) for folder in folders]

    def seed(self, asked: int | None) -> int | None:
        """The seed of a job: `asked`, or where several processes run one model, one that all of them draw."""
        context = self.model.tp_context
        if asked is not None or context is None or context.exchange.whole:
            return asked
        return context.exchange.agree(secrets.randbits(31))

    def stop_ids(self) -> list[int]:
        """Every id that ends a text of this model."""
        ids = [*self.config.eos_token_ids, self.tokenizer.eos_token_id]
        return sorted({i for i in ids if i is not None and i >= 0})


def load(folder: Path | None, tp: bool = False) -> Loaded:
    """Read configuration and tokenizer of a folder, or of the bundled model.

    Raises RequestError where `tp` asks for several devices and there is one.
    """
    if tp and len(devices()) < 2:
        raise RequestError(
            f"--tp shards a model over several devices, this run has one ({devices()[0].name}): name them, as in "
            "--device cuda:0,cuda:1"
        )
    if tp:
        processes.mute()
    config = ExLlamaV2Config(model_folder(folder))
    return Loaded(config, ExLlamaV2(config), ExLlamaV2Tokenizer(config), tp)


def _load_weights(model: ExLlamaV2) -> None:
    if not model.loaded:
        with loading_bar(_name(model)) as report:
            model.load(callback=report)


def _name(model: ExLlamaV2) -> str:
    return Path(model.config.model_dir or "").name


def note(text: str) -> None:
    """Write one line about this run to standard error."""
    print(f"exl: {text}", file=sys.stderr)


def say_device() -> None:
    """Say which device was chosen, unless the caller named it."""
    line = device_line()
    if line is not None:
        note(line)


def text_drafts(model: ExLlamaV2) -> dict[str, Any]:
    """Return the generator's options to draft from text with a loaded model.

    Long matches cost no more than short ones. Rows of a step are cheap on a GPU.
    """
    on_gpu = model.device is not None and model.device.type == "cuda"
    return {"use_ngram_draft": True, "max_ngram": 32, "num_draft_tokens": 7 if on_gpu else 4}


def _draft_folder(name: str) -> Path:
    if name != "bundled":
        return Path(name)
    from exl_generate import bundled

    return Path(bundled.draft_model_dir())


def model_folder(folder: Path | None) -> Path:
    """`folder`, or that of the bundled model, which is named on standard error."""
    if folder is not None:
        return folder
    try:
        from exl_generate import bundled
    except ImportError:
        raise RequestError("this installation carries no bundled model; name a model folder with -m DIR") from None
    place = Path(bundled.default_model_dir())
    note(f"no model folder given (-m DIR): using the bundled model {place.name}")
    return place


def special_ids(tokenizer: ExLlamaV2Tokenizer, pieces: Sequence[str]) -> list[int]:
    """Ids of those of `pieces` that are special tokens of this vocabulary."""
    known = {piece: i for i, piece in tokenizer.extended_id_to_piece.items()}
    return [known[piece] for piece in pieces if piece in known]
