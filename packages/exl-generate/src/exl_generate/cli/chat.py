"""`exl chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl_core.errors import ChatTemplateError
from exl_generate.cli.chat_templates import NamedTemplate, find_template, known_names
from exl_generate.cli.interrupt import interruptible
from exl_generate.cli.models import Loaded, load, special_ids
from exl_generate.dynamic import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exl_generate.errors import CapacityError, RequestError
from exl_generate.sampling import Settings

__all__ = ["Conversation", "Options", "run"]

HELP = """/help            this list
/history         show the conversation
/reset           forget the conversation
/retry           answer the last message again
/save FILE       write the conversation to a JSON file
/load FILE       go on from a conversation in a JSON file
/system TEXT     set the system message and forget the conversation
/quit            leave (also Ctrl-D); Ctrl-C interrupts an answer"""

#: Tokens of an answer when nobody says how many.
DEFAULT_TOKENS = 400

#: End-of-turn markers of the common templates, for models whose EOS list misses them.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>", "</s>", "<|endoftext|>")


@dataclass(frozen=True)
class Options:
    """The parsed arguments."""

    model: Path | None
    system: str | None
    chat_template: str | None
    settings: Settings
    max_tokens: int | None
    seed: int | None
    stop: list[str]
    history: Path | None
    loras: list[Path]
    cache: str
    cache_tokens: int | None


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
        loras: Sequence[Any] = (),
        template: str | None = None,
    ) -> None:
        self._loaded = loaded
        self._template = template
        self._generator = generator
        self._settings = settings
        self._max_tokens = max_tokens
        self._seed = seed
        self._stop: list[int | str] = [*loaded.stop_ids(), *special_ids(loaded.tokenizer, END_OF_TURN), *(stop or [])]
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.dropped = 0
        #: tokens that the context left for the last answer, where that were fewer than asked for
        self.cut_to: int | None = None
        #: the last `keep` failed
        self.unsaved = False
        #: the last result of the last answer
        self.last: dict[str, Any] = {}
        self._loras = list(loras)

    @property
    def longest(self) -> int:
        """Tokens that a conversation with its answer may have."""
        return min(self._generator.max_seq_len, self._generator.max_total_tokens)

    def answer(self, text: str, show: Callable[[str], None]) -> str:
        """Add a message and stream the answer to `show(chunk)`. Ctrl-C ends the answer, which stays as far as it
        came. Raises CapacityError, with nothing added, for a message that leaves no room for an answer."""
        self.messages.append({"role": "user", "content": text})
        ids = self._prompt()
        room = self.longest - ids.shape[1]
        if room < 1:
            self.messages.pop()
            self.dropped = 0
            raise CapacityError(
                f"the message alone makes a prompt of {ids.shape[1]} tokens; {self.longest} is the limit of model and "
                "cache, answer included: shorten it"
            )
        self.cut_to = room if room < self._max_tokens else None
        job = ExLlamaV2DynamicJob(
            ids,
            min(self._max_tokens, room),
            gen_settings=self._settings,
            seed=None if self._seed is None else self._seed + len(self.messages),
            stop_conditions=self._stop,
            loras=self._loras,
        )
        self._generator.enqueue(job)
        answer = ""
        with interruptible() as interrupted:
            while self._generator.num_remaining_jobs():
                if interrupted.is_set() and not job.is_finished:
                    self._generator.cancel(job)
                for result in self._generator.iterate():
                    if "exception" in result:
                        raise result["exception"]
                    answer += result.get("text", "")
                    show(result.get("text", ""))
                    self.last = result
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
        if kept or not os.access(file.parent, os.W_OK):  # a pipe, a file that is not to be written; no room beside it
            file.write_text(text, encoding="utf-8")
            return
        beside = file.with_name(f".{file.name[:50]}.{os.getpid()}.new")
        try:
            beside.unlink(missing_ok=True)
            beside.touch(exist_ok=False)  # a file of our own, not where somebody's link leads
            beside.write_text(text, encoding="utf-8")
            if file.exists():
                shutil.copymode(file, beside)
            beside.replace(file)
        finally:
            beside.unlink(missing_ok=True)

    def keep(self, file: Path) -> bool:
        """`save`, where a failure is told and remembered in `unsaved` and does not end the talk."""
        try:
            self.save(file)
            self.unsaved = False
        except OSError as error:
            self.unsaved = True
            why = error.strerror or error  # one without a number has no such text
            print(f"cannot write the conversation to {file} ({why}); /save FILE writes it elsewhere", file=sys.stderr)
        return not self.unsaved

    def whole(self) -> list[dict[str, str]]:
        """All messages, the system message first."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.messages

    def _prompt(self) -> Any:
        """Ids of the conversation; the oldest exchanges are left out, visibly, when it no longer fits."""
        limit = self.longest - min(self._max_tokens, 64)
        self.dropped = 0
        while True:
            head = [{"role": "system", "content": self.system}] if self.system else []
            kept = self.messages[self.dropped :]
            text = self._loaded.tokenizer.apply_chat_template([*head, *kept], chat_template=self._template)
            ids = self._loaded.tokenizer.encode(text, encode_special_tokens=True)
            if ids.shape[1] <= limit or len(kept) <= 1:
                return ids
            self.dropped += 2


def run(options: Options, as_json: bool) -> None:
    """Read messages until the end of input; commands begin with a slash. With `as_json` each answer is one line."""
    if options.history is not None:
        _check_writable(options.history)
    template = None if options.chat_template is None else find_template(options.chat_template)
    loaded = load(options.model)
    _check_template(loaded, template, options.system)
    longest = loaded.config.max_seq_len
    if options.max_tokens is not None and options.max_tokens >= longest:
        raise CapacityError(f"--max-tokens is {options.max_tokens}; the model's limit is {longest}, prompt included")
    generator = loaded.generator(options.cache, options.cache_tokens or min(longest, 8192))
    room = generator.max_total_tokens
    if options.max_tokens is not None and options.max_tokens >= room:
        raise CapacityError(f"--max-tokens is {options.max_tokens}; the cache has {room} tokens, prompt included")
    talk = Conversation(
        loaded,
        generator,
        options.settings,
        options.max_tokens or DEFAULT_TOKENS,
        options.system,
        options.seed,
        [*options.stop, *(template.stops if template is not None else ())],
        loaded.adapters(options.loras),
        None if template is None else template.source,
    )
    if options.history is not None and options.history.exists():
        talk.load(options.history)
        if options.system is not None and talk.system != options.system:
            raise RequestError(
                f"--history {options.history} has the system message {talk.system!r}, --system is {options.system!r}: "
                "leave --system out, or name another file"
            )
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing for input()
    if sys.stdin.isatty():
        print(f"{Path(loaded.config.model_dir or '').name}: /help lists the commands.", file=sys.stderr)
    try:
        _talk(talk, options.history, as_json)
    finally:
        if talk.unsaved and options.history is not None and not talk.keep(options.history):
            print(json.dumps(talk.whole(), indent=2, ensure_ascii=False), file=sys.stderr)
    if talk.unsaved:
        raise RequestError(f"{options.history}: the conversation could not be written there; it is printed above")


def _check_template(loaded: Loaded, template: NamedTemplate | None, system: str | None) -> None:
    """Refuse a model whose conversations cannot be written, before its weights are read."""
    head = [{"role": "system", "content": system}] if system else []
    messages = [*head, {"role": "user", "content": "Hello"}]
    if template is None and not loaded.tokenizer.chat_templates.templates:
        raise ChatTemplateError(
            f"{loaded.config.model_dir} has no chat template: give --chat-template, {known_names()}"
        )
    try:
        loaded.tokenizer.apply_chat_template(messages, chat_template=None if template is None else template.source)
    except ChatTemplateError as error:
        whose = f"of {loaded.config.model_dir}" if template is None else "of --chat-template"
        raise ChatTemplateError(f"{error} (the template {whose}, tried before the model is loaded)") from None


def _check_writable(file: Path) -> None:
    """Refuse a history file that could not be written when the talk is over."""
    if file.is_dir():
        raise RequestError(f"--history {file} is a folder: name a file in it")
    if not file.exists() and not file.parent.is_dir():
        raise RequestError(f"--history {file}: there is no folder {file.parent}: make it first, or name another file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise RequestError(f"--history {file}: not writable: name a file that can be written")


def _talk(talk: Conversation, history: Path | None, as_json: bool) -> None:
    """Read and answer until the end of input or /quit."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            if sys.stdin.isatty():
                print(file=sys.stderr)  # the shell's prompt begins a line
            return
        if line in ("/quit", "/exit"):
            return
        message = _command(talk, line) if line.startswith("/") else line
        if message:
            _exchange(talk, message, as_json)
            if history is not None:
                talk.keep(history)


def _command(talk: Conversation, line: str) -> str | None:
    """Obey a slash command; returns a message to answer, if there is one."""
    name, _, rest = line.partition(" ")
    if name == "/retry":
        again = talk.retry()
        if again is None:
            print("there is nothing to answer again", file=sys.stderr)
        return again
    if name == "/reset":
        talk.reset()
    elif name == "/system":
        talk.reset(rest)
    elif name == "/history":
        for message in talk.whole():
            print(f"{message['role']}: {message['content']}")
    elif name in ("/save", "/load") and rest:
        try:
            talk.save(Path(rest)) if name == "/save" else talk.load(Path(rest))
        except OSError as error:
            print(f"{rest}: cannot write the conversation to it ({error.strerror or error})", file=sys.stderr)
        except RequestError as error:
            print(error, file=sys.stderr)
    else:
        print(HELP if name == "/help" else f"unknown command {name}\n{HELP}", file=sys.stderr)
    return None


def _exchange(talk: Conversation, message: str, as_json: bool) -> None:
    def show(text: str) -> None:
        if not as_json:
            sys.stdout.write(text)
            sys.stdout.flush()

    try:
        answer = talk.answer(message, show)
    except ChatTemplateError:
        talk.messages.clear()
        raise
    except CapacityError as error:  # of this message: the conversation goes on
        if as_json:
            print(json.dumps({"message": message, "error": str(error)}), flush=True)
        else:
            print(f"[{error}]", file=sys.stderr)
        return
    last = talk.last
    if as_json:
        keys = ("eos_reason", "new_tokens", "prompt_tokens", "cached_tokens", "time_prefill", "time_generate")
        print(json.dumps({"message": message, "answer": answer, **{key: last[key] for key in keys}}), flush=True)
    else:
        print(" [interrupted]" if last["eos_reason"] == "cancelled" else "")
    if talk.cut_to is not None and last["eos_reason"] == "max_new_tokens":
        print(f"[the context left {talk.cut_to} tokens for this answer]", file=sys.stderr)
    if talk.dropped:
        print(f"[the oldest {talk.dropped} messages no longer fit and were left out]", file=sys.stderr)
