"""Compare the tokenizers of a model and of its draft model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exl_generate.errors import RequestError

if TYPE_CHECKING:
    from exl_core.tokenizer import TextTokenizer

__all__ = ["check_draft_tokenizer"]


def check_draft_tokenizer(tokenizer: TextTokenizer, draft_tokenizer: TextTokenizer) -> None:
    """Raise `RequestError` unless each id that is text in both vocabularies is the same text.

    Vocabularies of one family may differ in size, by padding and added tokens, and in the names of special tokens.
    """
    mine, theirs = (t.get_id_to_bytes_list() for t in (tokenizer, draft_tokenizer))
    pairs = [(i, one, other) for i, (one, other) in enumerate(zip(mine, theirs, strict=False)) if one and other]
    differing = [pair for pair in pairs if pair[1] != pair[2]]
    if not pairs:
        raise RequestError("no id is text in both the model's and the draft model's vocabulary")
    if differing:
        token, one, other = differing[0]
        raise RequestError(
            f"{len(differing)} of {len(pairs)} ids are other text in the draft model's vocabulary (id {token}: "
            f"{_shown(other)}, in the model's {_shown(one)}); take a draft model that shares the tokenizer"
        )


def _shown(piece: bytes) -> str:
    return repr(piece[:24].decode("utf-8", "replace"))
