"""Token ids of untrusted users' conversations: text that users write stays text, and images have places.

A template's own markers become special tokens. A marker that a user or a tool wrote into a message must not forge a
turn or an image. Such spellings are replaced before rendering, and restored as ordinary text in the prompt.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..errors import ChatTemplateError
from .text import TextTokenizer

__all__ = ["conversation_ids", "image_spelling", "template_source"]

UNTRUSTED = ("user", "tool", "function", "ipython")
"""Roles with foreign content. The model's own earlier answers keep their markers, since templates look for them."""

IMAGE_SPELLINGS = (
    ("<|vision_start|><|image_pad|><|vision_end|>", ""),
    ("<start_of_image>", "\n\n"),
    ("[IMG]", ""),
)
"""The spelling of an image in the templates of Qwen-VL, Gemma 3 and Pixtral, and the text that the models' processors
put on either side of it. The framing tokens are part of the image's rows, so the whole spelling is replaced."""
_TOKENS = re.compile(r"<\|?\w+\|?>|\[\w+\]")
_KNOWS_IMAGES = re.compile(r"""['"]image(_url)?['"]""")

Part = tuple[str, bool] | int
Hide = Callable[[str], str]


class Spellings:
    """The spellings of special tokens in a text: whole ones, and one begun at its end, which a text that a template
    writes directly after it could complete.
    """

    def __init__(self, spellings: Sequence[str]) -> None:
        self._whole = re.compile("|".join(map(re.escape, spellings)))
        self._begun = frozenset(one[:size] for one in spellings for size in range(1, len(one)))
        self._longest = max(map(len, self._begun), default=0)

    def occur(self, text: str, *, begun: bool) -> bool:
        """Return whether a spelling occurs in the text, or with `begun` begins at its end."""
        return self._whole.search(text) is not None or (begun and self._begins(text) > 0)

    def hidden(self, text: str, hide: Hide, *, begun: bool) -> str:
        """Return the text with what `hide` gives in place of the spellings that `occur` finds."""
        shown = self._whole.sub(lambda match: hide(match.group()), text)
        size = self._begins(shown) if begun else 0
        return shown[: len(shown) - size] + hide(shown[len(shown) - size :]) if size else shown

    def _begins(self, text: str) -> int:
        """Return the length of the longest end of the text that begins a spelling and does not complete it."""
        sizes = range(min(len(text), self._longest), 0, -1)
        return next((size for size in sizes if text[len(text) - size :] in self._begun), 0)


@lru_cache(maxsize=8)
def _spellings(texts: tuple[str, ...]) -> Spellings:
    return Spellings(sorted(texts, key=len, reverse=True))


def image_spelling(tokenizer: TextTokenizer) -> tuple[str, str] | None:
    """Return (spelling of an image in this model's prompts, text on either side).

    None if the tokenizer has no such tokens.
    """
    known = tokenizer.extended_piece_to_id
    for spelling, around in IMAGE_SPELLINGS:
        if all(token in known for token in _TOKENS.findall(spelling)):
            return spelling, around
    return None


def template_source(tokenizer: TextTokenizer, options: Mapping[str, Any]) -> str:
    """Return the source of the template that `apply_chat_template` renders with these options.

    Raises:
        ChatTemplateError: there is no such template.
    """
    named = options.get("chat_template")
    if named is not None and ("{%" in named or "{{" in named):
        return str(named)
    return tokenizer.chat_templates.select(named, options.get("tools") is not None)


def conversation_ids(
    tokenizer: TextTokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    parse_special: bool = False,
    **options: Any,
) -> tuple[str, list[int]]:
    """Render a conversation and encode it.

    A part `{"type": "image"}` of a message's content is an image: image k of the conversation has the id -1 - k. For
    templates that support only text, the image is put into the text.

    Args:
        tokenizer: the model's tokenizer.
        messages: the conversation.
        parse_special: convert the text of special tokens in any message to these tokens.
        **options: options of `apply_chat_template`. Texts and keys of `documents` are untrusted as well.

    Returns:
        The rendered prompt and its ids.

    Raises:
        ChatTemplateError: the template fails, alters or drops text that has to stay text, or drops an image.
    """
    images = sum(map(_images, messages))
    known = () if parse_special else tuple(filter(None, tokenizer.extended_piece_to_id))
    spellings = _spellings(known) if known else None
    documents = options.get("documents") or ()
    forged = spellings is not None and (
        any(_spells(spellings, message) for message in messages)
        or any(spellings.occur(text, begun=True) for one in documents for text in _strings(one))
    )
    if not images and not forged:
        text = tokenizer.apply_chat_template(messages, **options)
        return text, tokenizer.encode_ids(text, special=True)
    found: list[str] = []
    nonce = "".join(chr(0xE100 + byte) for byte in secrets.token_bytes(8))

    def hide(text: str) -> str:
        found.append(text)
        return f"\ue000{nonce}{len(found) - 1}\ue001"

    shown = messages
    if spellings is not None and forged:
        shown = [_replaced(spellings, hide, message) for message in messages]
        if documents:
            options = options | {"documents": [_hidden(spellings, hide, one) for one in documents]}
    mark = f"\ue002{nonce}\ue003"
    if images and not _KNOWS_IMAGES.search(template_source(tokenizer, options)):
        shown = [_as_text(message, mark) for message in shown]
    rendered = tokenizer.apply_chat_template(shown, **options)
    split = re.split(f"\ue000{nonce}(\\d+)\ue001", rendered)
    if {int(number) for number in split[1::2]} != set(range(len(found))):
        raise _altered(found)
    parts: list[Part] = []
    for at, text in enumerate(split):
        parts += [(found[int(text)], False)] if at % 2 else [(text, True)]
    if images:
        parts = _place_images(tokenizer, parts, mark, images)
    if any(nonce in part[0] for part in parts if isinstance(part, tuple)):
        raise _altered(found)
    prompt = "".join("<image>" if isinstance(part, int) else part[0] for part in parts)
    return prompt, tokenizer.encode_parts(parts)


def _altered(found: Sequence[str]) -> ChatTemplateError:
    what = f"the text of a special token ({found[0]!r})" if found else "an image"
    return ChatTemplateError(
        f"a message or document holds {what}, and the chat template does not keep it as it is: leave it out"
    )


def _place_images(tokenizer: TextTokenizer, parts: Sequence[Part], mark: str, images: int) -> list[Part]:
    """Return the parts with ids in place of the template's images. Raises ChatTemplateError."""
    spelled = image_spelling(tokenizer)
    if spelled is None:
        raise ChatTemplateError("this model's tokenizer has no tokens for images: send text only")
    spelling, around = spelled
    pattern = re.compile(f"{re.escape(spelling)}|{re.escape(mark)}")
    placed: list[Part] = []
    seen = 0
    for part in parts:
        if isinstance(part, int) or not part[1]:
            placed.append(part)
            continue
        texts = pattern.split(part[0])
        for at, text in enumerate(texts):
            if at:
                placed.append(-1 - seen)
                seen += 1
            placed.append(((around if at else "") + text + (around if at + 1 < len(texts) else ""), True))
    if seen != images:
        raise ChatTemplateError(f"the conversation has {images} images, and the chat template writes {seen} of them")
    return placed


def _parts(message: Mapping[str, Any]) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else []


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _images(message: Mapping[str, Any]) -> int:
    return sum(map(_is_image, _parts(message)))


def _as_text(message: Mapping[str, Any], mark: str) -> Mapping[str, Any]:
    """Return the message with one string as its content, `mark` where an image is."""
    if not _parts(message):
        return message
    texts = [mark if _is_image(part) else str(part.get("text", "")) for part in _parts(message)]
    return {**message, "content": "".join(texts)}


def _spells(spellings: Spellings, message: Mapping[str, Any]) -> bool:
    if message.get("role") not in UNTRUSTED:
        return False
    texts = _texts(message.get("content"))
    return any(spellings.occur(text, begun=len(texts) > 1) for text in texts)


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list | tuple) else []
    return [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]


def _strings(document: Any) -> Iterator[str]:
    """Yield the texts of a document: keys, too, since templates may write them."""
    if isinstance(document, str):
        yield document
    elif isinstance(document, Mapping):
        yield from _strings([*document.items()])
    elif isinstance(document, list | tuple):
        for one in document:
            yield from _strings(one)


def _hidden(spellings: Spellings, hide: Hide, document: Any) -> Any:
    """Return a document with the spellings in its texts replaced, at every place that `_strings` looks at."""
    if isinstance(document, str):
        return spellings.hidden(document, hide, begun=True)
    if isinstance(document, Mapping):
        return dict(_hidden(spellings, hide, [*document.items()]))
    if isinstance(document, list | tuple):
        parts = (_hidden(spellings, hide, one) for one in document)
        return list(parts) if isinstance(document, list) else tuple(parts)
    return document


def _replaced(spellings: Spellings, hide: Hide, message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if message.get("role") not in UNTRUSTED or content is None:
        return message
    if isinstance(content, str):
        return {**message, "content": spellings.hidden(content, hide, begun=False)}
    if not isinstance(content, list | tuple):
        return message
    begun = len(_texts(content)) > 1
    parts = [
        {**part, "text": spellings.hidden(part["text"], hide, begun=begun)}
        if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        else part
        for part in content
    ]
    return {**message, "content": parts}
