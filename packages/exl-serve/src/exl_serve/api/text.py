"""Tokenizer and chat template of a model folder, as the API workers use them: without torch."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from exl_core.errors import ChatTemplateError, InputError, TokenizerError
from exl_core.tokenizer import TextTokenizer
from exl_core.tokenizer.backend import LONG_TEXT
from exl_core.tokenizer.conversation import conversation_ids, template_source
from exl_serve.errors import ServeError

__all__ = ["FolderText"]

_DEVELOPER = re.compile(r"""["']developer["']""")
"""How a template that knows the role names it."""
_renderers = ThreadPoolExecutor(4, thread_name_prefix="exl-render")
"""Threads that wait for the template processes, and tokenize: the tokenizers library releases the GIL."""


class FolderText:
    """Tokenizer and chat template of a model folder, as a `TextCodec`.

    Args:
        folder: The model folder.
        template: Text of a chat template instead of the folder's.

    Raises:
        TokenizerError: the folder has no usable tokenizer.
    """

    def __init__(self, folder: str, template: str | None = None) -> None:
        self._tokenizer = TextTokenizer.from_folder(folder)
        self._template = template
        self._pieces = self._tokenizer.get_id_to_bytes_list(True)
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.special: Mapping[str, int] = {text: i for text, i in self._tokenizer.extended_piece_to_id.items() if text}

    @property
    def template(self) -> str | None:
        """The text of the chat template; None where the model has none."""
        if self._template is not None:
            return self._template
        known = self._tokenizer.chat_templates.templates
        return known.get("tool_use") or known.get("default") or next(iter(known.values()), None)

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """Return the token ids of a text. `special`: spellings of special tokens become their ids; `bos`: add the
        BOS.
        """
        return self._tokenizer.encode_ids(text, special, None if bos else False)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids. `special`: special tokens have their spelling."""
        return self._tokenizer.decode_ids(ids, special)

    def piece(self, id: int) -> bytes:
        """Return the bytes of one token; b"" for an unknown id."""
        return self._pieces[id] if 0 <= id < len(self._pieces) else b""

    async def encode_long(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """Encode a text without blocking the event loop."""
        if len(text) <= LONG_TEXT:
            return self.encode(text, special=special, bos=bos)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_renderers, lambda: self.encode(text, special=special, bos=bos))

    async def decode_long(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Decode ids without blocking the event loop."""
        if len(ids) <= LONG_TEXT:
            return self.decode(ids, special=special)
        return await asyncio.get_running_loop().run_in_executor(_renderers, lambda: self.decode(ids, special=special))

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> tuple[str, list[int]]:
        """Render a conversation as a prompt; returns (text, ids). Raises ServeError 400."""
        if self.template is None and "chat_template" not in options:
            raise ServeError.invalid(
                "this model has no chat template: use /v1/completions, or name one in the server's configuration",
                "messages",
                "chat_template",
            )
        values = dict(options)
        parse = bool(values.pop("parse_special_in_content", False))
        if self._template is not None:
            values.setdefault("chat_template", self._template)
        values["tools"] = tools

        known = values.pop("known_variables", ())

        def work() -> tuple[str, list[int]]:
            source = template_source(self._tokenizer, values)
            _check_variables(source, known)
            if values.get("documents") and "documents" not in source:
                raise ServeError.unsupported(
                    "documents", "this model's chat template takes no documents: put their texts in a message"
                )
            said = messages if _DEVELOPER.search(source) else [_as_system(one) for one in messages]
            return conversation_ids(self._tokenizer, said, parse_special=parse, **values)

        try:
            return await asyncio.get_running_loop().run_in_executor(_renderers, work)
        except ChatTemplateError as error:
            raise ServeError.invalid(str(error), "messages", "chat_template") from error
        except (TokenizerError, InputError) as error:  # the latter: a variable's name, a lone surrogate
            raise ServeError.invalid(str(error), "messages") from error


def _as_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message in which the role developer is system."""
    return message if message["role"] != "developer" else {**message, "role": "system"}


def _check_variables(source: str, names: Iterable[str]) -> None:
    """Raise ServeError 400 for a variable that the source of a chat template does not name."""
    for name in names:
        if not re.search(rf"\b{re.escape(name)}\b", source):
            raise ServeError.unsupported(name, f"this model's chat template has no variable {name}: leave it out")
