"""`exl chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from exl_core.errors import ChatTemplateError
from exl_generate.cli.chat_commands import Session, attach, completions, obey
from exl_generate.cli.chat_templates import NamedTemplate, find_template, known_names
from exl_generate.cli.constraints import Constraints, read_schema
from exl_generate.cli.conversation import DEFAULT_TOKENS, Conversation
from exl_generate.cli.images import Images
from exl_generate.cli.lines import Lines, open_lines
from exl_generate.cli.models import Loaded, load
from exl_generate.cli.statistics import answer_line
from exl_generate.cli.terminal import Screen, silent_keys
from exl_generate.errors import CapacityError, RequestError
from exl_generate.sampling import Settings

__all__ = ["Options", "run"]


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
    input_history: bool
    stats: bool | None
    json_schema: str | None
    regex: str | None
    draft: str | None
    ngram: bool
    images: list[Path]
    loras: list[Path]
    cache: str
    cache_tokens: int | None


def run(options: Options, as_json: bool) -> None:
    """Read messages until the end of input; commands begin with a slash. With `as_json` each answer is one line."""
    if options.history is not None:
        _check_writable(options.history)
    template = None if options.chat_template is None else find_template(options.chat_template)
    schema = None if options.json_schema is None else read_schema(options.json_schema)
    loaded = load(options.model)
    _check_template(loaded, template, options.system)
    constraints = Constraints(loaded, schema, options.regex)  # a wrong one is refused before the weights are read
    if options.images:
        images = Images(loaded)
        for file in options.images:
            images.check(file)
    talk = _conversation(loaded, options, template, constraints)
    if options.history is not None and options.history.exists():
        talk.load(options.history)
        if options.system is not None and talk.system != options.system:
            raise RequestError(
                f"--history {options.history} has the system message {talk.system!r}, --system is {options.system!r}: "
                "leave --system out, or name another file"
            )
    screen = Screen()
    session = Session(talk, screen, options.stats)
    if sys.stdin.isatty():
        screen.note(f"{Path(loaded.config.model_dir or '').name}: /help lists the commands.")
    for file in options.images:
        attach(session, file)
    try:
        _talk(session, open_lines(completions, options.input_history, screen.note), options.history, as_json)
    finally:
        if talk.unsaved and options.history is not None and not talk.keep(options.history):
            print(json.dumps(talk.whole(), indent=2, ensure_ascii=False), file=sys.stderr)
    if talk.unsaved:
        raise RequestError(f"{options.history}: the conversation could not be written there; it is printed above")


def _conversation(
    loaded: Loaded, options: Options, template: NamedTemplate | None, constraints: Constraints
) -> Conversation:
    """Load the weights and begin a conversation. Raises CapacityError for more tokens than model or cache have."""
    longest = loaded.config.max_seq_len
    if options.max_tokens is not None and options.max_tokens >= longest:
        raise CapacityError(f"--max-tokens is {options.max_tokens}; the model's limit is {longest}, prompt included")
    tokens = options.cache_tokens or min(longest, 8192)
    generator = loaded.generator(options.cache, tokens, draft=options.draft, ngram=options.ngram)
    room = generator.max_total_tokens
    if options.max_tokens is not None and options.max_tokens >= room:
        raise CapacityError(f"--max-tokens is {options.max_tokens}; the cache has {room} tokens, prompt included")
    return Conversation(
        loaded,
        generator,
        options.settings,
        options.max_tokens or DEFAULT_TOKENS,
        options.system,
        options.seed,
        [*options.stop, *(template.stops if template is not None else ())],
        loaded.adapters(options.loras),
        None if template is None else template.source,
        constraints,
    )


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


def _talk(session: Session, lines: Lines, history: Path | None, as_json: bool) -> None:
    """Read and answer until the end of input or /quit."""
    while not session.over:
        line = lines.read()
        if line is None:
            if sys.stdin.isatty():
                print(file=sys.stderr)  # the shell's prompt begins a line
            return
        before = list(session.talk.messages)
        if line.is_command:
            message = obey(session, line.text)
        else:
            message = "".join([*session.attached, line.text]) if line.text else None
        if message:
            if not _exchange(session, message, as_json):
                session.talk.messages = before
            elif not line.is_command:
                session.attached.clear()
            if history is not None:
                session.talk.keep(history)


def _exchange(session: Session, message: str, as_json: bool) -> bool:
    """Answer a message; False, with what is wrong written, if it cannot be answered."""
    talk, screen = session.talk, session.screen
    screen.begin()
    try:
        with silent_keys():
            answer = talk.answer(message, (lambda text: None) if as_json else screen.write)
    except ChatTemplateError:
        talk.messages.clear()
        raise
    except (CapacityError, RequestError) as error:  # of this message or a setting: the conversation goes on
        if as_json:
            message = talk.images.readable(message)
            print(json.dumps({"message": message, "error": str(error)}), flush=True)
        else:
            screen.error(f"[{error}]")
        return False
    last = talk.last
    if as_json:
        keys = ("eos_reason", "new_tokens", "prompt_tokens", "cached_tokens", "time_prefill", "time_generate")
        message = talk.images.readable(message)
        print(json.dumps({"message": message, "answer": answer, **{key: last[key] for key in keys}}), flush=True)
    else:
        screen.end(" [interrupted]" if last["eos_reason"] == "cancelled" else "")
    if session.shows_stats:
        screen.note(answer_line(last))
    if talk.incomplete is not None:
        screen.error(f"[the answer ends before {talk.incomplete} is complete: /set max_tokens raises its limit]")
    if talk.cut_to is not None and last["eos_reason"] == "max_new_tokens":
        screen.note(f"[the context left {talk.cut_to} tokens for this answer]")
    if talk.dropped:
        screen.note(f"[the oldest {talk.dropped} messages no longer fit and were left out]")
    return True
