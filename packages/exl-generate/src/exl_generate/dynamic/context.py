"""What a job takes from the generator that queues it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from exl_generate.contracts import Model, Tokenizer
    from exl_generate.dynamic.draft_length import Acceptance
    from exl_generate.dynamic.pages import PageTable

__all__ = ["JobContext"]


class JobContext(Protocol):
    """Model, tokenizer, pages and defaults of the generator, as far as its jobs use them."""

    @property
    def model(self) -> Model: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def page_table(self) -> PageTable: ...
    @property
    def padded_vocab_size(self) -> int:
        """Columns of the logits."""
        ...

    @property
    def current_loras(self) -> Sequence[Any]:
        """Adapters of jobs that name none of their own."""
        ...

    @property
    def num_draft_tokens(self) -> int:
        """Most tokens drafted a step; 0 without drafting."""
        ...

    @property
    def arrangements(self) -> int:
        """How often a module of the model was replaced, or wrapped in an `Intervention`, or taken out of one."""
        ...

    def namespace_of(self, loras: Sequence[Any]) -> bytes:
        """The hash before the first page of every sequence under these adapters."""
        ...

    def new_acceptance(self) -> Acceptance:
        """The acceptance of a job that has drafted nothing yet."""
        ...
