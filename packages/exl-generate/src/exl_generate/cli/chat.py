"""`exl chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exl_core.errors import ChatTemplateError
from exl_generate.cli.models import Loaded, load, special_ids
from exl_generate.dynamic import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exl_generate.sampling import Settings

__all__ = ["Conversation", "run"]

HELP = """/help            this list
/reset           forget the conversation
/retry           answer the last message again
/system TEXT     set the system message and forget the conversation
/quit            leave (also Ctrl-D); Ctrl-C interrupts an answer"""

#: End-of-turn markers of the common templates, for models whose EOS list misses them.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>", "</s>", "<|endoftext|>")


class Conversation:
    """Messages so far and the generator that continues them. Its prefix cache keeps the history's K/V."""

    def __init__(
        self,
        loaded: Loaded,
        generator: ExLlamaV2DynamicGenerator,
        settings: Settings,
        max_tokens: int,
        system: str | None = None,
        seed: int | None = None,
        stop: list[str] | None = None,
    ) -> None:
        self._loaded = loaded
        self._generator = generator
        self._settings = settings
        self._max_tokens = max_tokens
        self._seed = seed
        self._stop: list[int | str] = [*loaded.stop_ids(), *special_ids(loaded.tokenizer, END_OF_TURN), *(stop or [])]
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.dropped = 0

    def answer(self, text: str, show: Any) -> str:
        """Add a message and stream the answer to `show(chunk)`. Ctrl-C ends the answer, which stays as far as it
        came."""
        self.messages.append({"role": "user", "content": text})
        ids = self._prompt()
        room = min(self._generator.max_seq_len, self._generator.max_total_tokens) - ids.shape[1]
        job = ExLlamaV2DynamicJob(
            ids,
            min(self._max_tokens, room),
            gen_settings=self._settings,
            seed=None if self._seed is None else self._seed + len(self.messages),
            stop_conditions=self._stop,
        )
        self._generator.enqueue(job)
        answer = ""
        with _interruptible() as interrupted:
            while self._generator.num_remaining_jobs():
                if interrupted.is_set():
                    self._generator.cancel(job)
                    show(" [interrupted]")
                for result in self._generator.iterate():
                    if "exception" in result:
                        raise result["exception"]
                    answer += result.get("text", "")
                    show(result.get("text", ""))
        self.messages.append({"role": "assistant", "content": answer.strip()})
        return answer

    def retry(self) -> str | None:
        """Take the last exchange back; returns the message to answer again."""
        if len(self.messages) < 2:
            return None
        self.messages.pop()
        return self.messages.pop()["content"]

    def reset(self, system: str | None = None) -> None:
        self.messages.clear()
        self.system = system if system is not None else self.system

    def _prompt(self) -> Any:
        """Ids of the conversation; the oldest exchanges are left out, visibly, when it no longer fits."""
        limit = min(self._generator.max_seq_len, self._generator.max_total_tokens) - min(self._max_tokens, 64)
        self.dropped = 0
        while True:
            head = [{"role": "system", "content": self.system}] if self.system else []
            kept = self.messages[self.dropped :]
            text = self._loaded.tokenizer.apply_chat_template([*head, *kept])
            ids = self._loaded.tokenizer.encode(text, encode_special_tokens=True)
            if ids.shape[1] <= limit or len(kept) <= 1:
                return ids
            self.dropped += 2


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event instead of breaking in, so that no page is left half accounted for."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.signal(signal.SIGINT, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def run(
    folder: Path | None,
    system: str | None,
    settings: Settings,
    max_tokens: int,
    seed: int | None,
    stop: list[str],
    cache: str,
    cache_tokens: int | None,
) -> None:
    """Read messages until the end of input; commands begin with a slash."""
    loaded = load(folder)
    generator = loaded.generator(cache, cache_tokens or min(loaded.config.max_seq_len, 8192))
    talk = Conversation(loaded, generator, settings, max_tokens, system, seed, stop)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing for input()
    if sys.stdin.isatty():
        print(f"{Path(loaded.config.model_dir or '').name}: /help lists the commands.", file=sys.stderr)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        if line in ("/quit", "/exit"):
            return
        message = _command(talk, line) if line.startswith("/") else line
        if message:
            _exchange(talk, message)


def _command(talk: Conversation, line: str) -> str | None:
    """Obey a slash command; returns a message to answer, if there is one."""
    name, _, rest = line.partition(" ")
    if name == "/retry":
        message = talk.retry()
        if message is None:
            print("there is nothing to answer again", file=sys.stderr)
        return message
    if name == "/reset":
        talk.reset()
    elif name == "/system":
        talk.reset(rest)
    else:
        print(HELP if name == "/help" else f"unknown command {name}\n{HELP}", file=sys.stderr)
    return None


def _exchange(talk: Conversation, message: str) -> None:
    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        talk.answer(message, show)
    except ChatTemplateError:
        talk.messages.clear()
        raise
    print()
    if talk.dropped:
        print(f"[the oldest {talk.dropped} messages no longer fit and were left out]", file=sys.stderr)
