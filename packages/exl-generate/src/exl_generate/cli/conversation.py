"""A conversation with a model: messages, the jobs that answer them, files that keep it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from exl_core.embeddings import ExLlamaV2MMEmbedding
from exl_generate.cli.constraints import Constraints
from exl_generate.cli.images import Images
from exl_generate.cli.interrupt import interruptible
from exl_generate.cli.models import Loaded, special_ids
from exl_generate.dynamic import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exl_generate.errors import CapacityError, RequestError
from exl_generate.sampling import Settings

__all__ = ["DEFAULT_TOKENS", "Conversation"]

#: Tokens of an answer when nobody says how many.
DEFAULT_TOKENS = 400

#: End-of-turn markers of the common templates, for models whose EOS list misses them.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>", "</s>", "<|endoftext|>")


class Conversation:
    """Messages so far and the generator that continues them. Its prefix cache keeps the K/V of earlier turns.

    settings, max_tokens and seed may be changed between answers.
    """

    def __init__(
        self,
        loaded: Loaded,
        generator: ExLlamaV2DynamicGenerator,
        settings: Settings,
        max_tokens: int,
        system: str | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        loras: Sequence[Any] = (),
        template: str | None = None,
        constraints: Constraints | None = None,
    ) -> None:
        self._loaded = loaded
        self._template = template
        self._generator = generator
        self._stop: list[int | str] = [*loaded.stop_ids(), *special_ids(loaded.tokenizer, END_OF_TURN), *stop]
        self._loras = list(loras)
        self._constraints = constraints or Constraints(loaded, None, None)
        self.images = Images(loaded)
        self.settings = settings
        self.max_tokens = max_tokens
        #: of the first answer; each further message adds 1. None: another one for each answer
        self.seed = seed
        self.system = system
        self.messages: list[dict[str, str]] = []
        #: oldest messages that did not fit into the last prompt
        self.dropped = 0
        #: tokens that the context left for the last answer, if fewer than `max_tokens`
        self.cut_to: int | None = None
        #: the last `keep` failed
        self.unsaved = False
        #: the last result of the last answer
        self.last: dict[str, Any] = {}
        #: names what the last answer lacks for its constraints; None: it is complete
        self.incomplete: str | None = None

    @property
    def longest(self) -> int:
        """Tokens that a conversation with its answer may have."""
        return min(self._generator.max_seq_len, self._generator.max_total_tokens)

    def answer(self, text: str, show: Callable[[str], None]) -> str:
        """Add a message and stream the answer to `show(chunk)`. Ctrl-C ends the answer, which stays as far as it
        came. Raises CapacityError, with nothing added, for a message that leaves no room for an answer."""
        self.messages.append({"role": "user", "content": text})
        try:
            answer, written = self._run(show)
        except BaseException:
            self.messages.pop()
            raise
        cut = self.last["eos_reason"] == "max_new_tokens"
        self.incomplete = self._constraints.what if cut and not self._constraints.complete(written) else None
        self.messages.append({"role": "assistant", "content": answer.strip()})
        return answer

    def _run(self, show: Callable[[str], None]) -> tuple[str, list[int]]:
        """Answer the last message; text and tokens of the answer."""
        answer = ""
        written: list[int] = []
        with interruptible() as interrupted:
            job = self._job()
            self._generator.enqueue(job)
            while self._generator.num_remaining_jobs():
                if interrupted.is_set() and not job.is_finished:
                    self._generator.cancel(job)
                for result in self._generator.iterate():
                    if "exception" in result:
                        raise result["exception"]
                    answer += result.get("text", "")
                    show(result.get("text", ""))
                    if "token_ids" in result:
                        written += result["token_ids"].flatten().tolist()
                    self.last = result
        return answer, written

    def _job(self) -> ExLlamaV2DynamicJob:
        """The job that answers the last message. Raises CapacityError."""
        ids, images = self._prompt()
        room = self.longest - ids.shape[1]
        if room < 1:
            self.dropped = 0
            raise CapacityError(
                f"the message alone makes a prompt of {ids.shape[1]} tokens; {self.longest} is the limit of model and "
                "cache, answer included: shorten it"
            )
        self.cut_to = room if room < self.max_tokens else None
        return ExLlamaV2DynamicJob(
            ids,
            min(self.max_tokens, room),
            gen_settings=self.settings,
            seed=None if self.seed is None else self.seed + len(self.messages),
            stop_conditions=self._stop,
            filters=list(self._constraints.filters),
            loras=self._loras,
            embeddings=images,
        )

    def retry(self) -> str | None:
        """Take the last exchange back; returns the message to answer again."""
        if len(self.messages) < 2:
            return None
        self.messages.pop()
        return self.messages.pop()["content"]

    def reset(self, system: str | None = None) -> None:
        """Forget the messages; `system`: the new system message, if not None."""
        self.messages.clear()
        self.system = system if system is not None else self.system

    def load(self, file: Path) -> None:
        """Go on from the messages in a JSON file: [{"role": ..., "content": ...}, ...]."""
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RequestError(f"{file}: cannot read a conversation from it ({error})") from None
        keys = {"role", "content"}
        if not isinstance(found, list) or not all(
            isinstance(m, dict) and set(m) == keys and all(isinstance(m[k], str) for k in keys) for m in found
        ):
            raise RequestError(f'{file}: a conversation is a list of {{"role": ..., "content": ...}}')
        systems = [m["content"] for m in found if m["role"] == "system"]
        if len(systems) > 1 or (systems and found[0]["role"] != "system"):
            raise RequestError(f"{file}: one system message, in the first place, is all that a conversation has")
        self.system = systems[0] if systems else self.system
        self.messages = [m for m in found if m["role"] != "system"]

    def save(self, file: Path) -> None:
        """Write all messages to a JSON file. One that is there stays as it is until the new one is whole."""
        text = json.dumps(self.whole(), indent=2, ensure_ascii=False) + "\n"
        file = Path(os.path.realpath(file))
        kept = file.exists() and not (file.is_file() and os.access(file, os.W_OK))
        if kept or not os.access(file.parent, os.W_OK):  # a pipe, a read-only file or folder
            file.write_text(text, encoding="utf-8")
            return
        new = file.with_name(f".{file.name[:50]}.{os.getpid()}.new")
        try:
            new.unlink(missing_ok=True)
            new.touch(exist_ok=False)  # a file of our own, not where somebody's link leads
            new.write_text(text, encoding="utf-8")
            if file.exists():
                shutil.copymode(file, new)
            new.replace(file)
        finally:
            new.unlink(missing_ok=True)

    def keep(self, file: Path) -> bool:
        """`save`, where a failure is reported and remembered in `unsaved` and does not end the talk."""
        try:
            self.save(file)
            self.unsaved = False
        except OSError as error:
            self.unsaved = True
            why = error.strerror or error  # one without a number has no such text
            print(f"cannot write the conversation to {file} ({why}); /save FILE writes it elsewhere", file=sys.stderr)
        return not self.unsaved

    def whole(self) -> list[dict[str, str]]:
        """All messages, the system message first, images as the names of their files."""
        told = [message | {"content": self.images.readable(message["content"])} for message in self.messages]
        return ([{"role": "system", "content": self.system}] if self.system else []) + told

    def _prompt(self) -> tuple[Any, list[ExLlamaV2MMEmbedding]]:
        """Ids of the conversation and its images; the oldest exchanges are left out if it no longer fits."""
        limit = self.longest - min(self.max_tokens, 64)
        tokenizer = self._loaded.tokenizer
        self.dropped = 0
        while True:
            head = [{"role": "system", "content": self.system}] if self.system else []
            kept = self.messages[self.dropped :]
            text = tokenizer.apply_chat_template([*head, *kept], chat_template=self._template)
            images = self.images.of(text)
            ids = tokenizer.encode(text, encode_special_tokens=True, embeddings=images or None)
            if ids.shape[1] <= limit or len(kept) <= 1:
                return ids, images
            self.dropped += 2
