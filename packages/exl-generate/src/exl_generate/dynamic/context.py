"""The state that all jobs of a generator share: model, tokenizer, pages, defaults, names of cached content."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from exl_core.config.vocabulary import padded_vocabulary
from exl_generate.dynamic.pages import PageTable, namespace_digest

if TYPE_CHECKING:
    from exl_generate.contracts import Cache, Model, RequestAdapter, Tokenizer
    from exl_generate.dynamic.draft_length import Acceptance

__all__ = ["JobContext"]


class JobContext:
    """The part of a generator that its jobs use.

    Args:
        model: As the generator's.
        cache: As the generator's.
        tokenizer: As the generator's.
        page_table: The pages of `cache`.
        num_draft_tokens: Most tokens drafted in a step; 0 without drafting.
        new_acceptance: Makes the draft statistics of a job that has drafted nothing yet.
    """

    def __init__(
        self,
        model: Model,
        cache: Cache,
        tokenizer: Tokenizer,
        page_table: PageTable,
        num_draft_tokens: int,
        new_acceptance: Callable[[], Acceptance],
    ) -> None:
        self.model = model
        self.cache = cache
        self.tokenizer = tokenizer
        self.page_table = page_table
        self.num_draft_tokens = num_draft_tokens
        self.new_acceptance = new_acceptance
        #: columns of the logits
        self.padded_vocab_size = padded_vocabulary(model.config.vocab_size)
        #: adapters of jobs that name none of their own
        self.current_loras: list[RequestAdapter] = []
        #: how often a module of the model was replaced, wrapped in an `Intervention` or taken out of one
        self.arrangements = 0
        self._arrangement = model.arrangement
        self._private_token = secrets.token_hex(16)

    def update_arrangement(self) -> bool:
        """Return whether a module of the model was replaced since the last call.

        Pages named before get names that no new job uses.
        """
        now = self.model.arrangement
        if now is self._arrangement:
            return False
        self._arrangement, self.arrangements = now, self.arrangements + 1
        return True

    def namespace_of(self, loras: Sequence[RequestAdapter]) -> bytes:
        """Return the digest that precedes the first page of every sequence under these adapters, 16 bytes.

        It is equal in every process with the same model, settings, adapters, cache format and kind of device. After a
        module was replaced it is unique to this generator, since earlier K/V may be stored under the earlier names.
        """
        model, device = self.model, self.model.device
        own = [f"modules {self.arrangements} of {self._private_token}"] if self.arrangements else []
        cache = f"{type(self.cache).__name__} {self.cache.kind}"  # a cache split over devices has its parts' kind
        parts = [model.content_digest.hex(), "cpu" if device is None else device.type, cache]
        return namespace_digest([*parts, *own, *map(_name_of, loras)])


def _name_of(lora: RequestAdapter) -> str:
    """Return the name of an adapter's effect, the same in every process.

    The order of adapters counts: their results are added in that order, and the first replacement of a matrix wins.
    """
    return f"adapter {lora.content_digest.hex()} x {lora.lora_scaling!r}"
