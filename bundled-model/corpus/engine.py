"""Sentence templates: `[a|b]` chooses, `{slot}` fills in, `{a slot}` adds the article, `{c slot}` capitalises."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

Slots = Mapping[str, object]
_Node = Callable[[random.Random, Slots], str]

_TOKEN = re.compile(r"\[|\]|\||\{[^{}]*\}|[^\[\]|{}]+")
_SENTENCE_START = re.compile(r"(^|[.!?] |\n|\.\" |(?:^|(?<=\s))\")([a-z])")
_VOWEL_SOUND = re.compile(r"(?!uni|use|one\b|eu)(?:[aeiou]|hour|honest)", re.IGNORECASE)

_I_FIRST = re.compile(r"\bI and (my big [a-z]+|my friend [A-Z][a-z]+|my [a-z]+|[A-Z][a-z]+)")
_I_SAID = re.compile(r"\b(said|asked|cried|whispered|shouted) I\b")
_WE = {"they": "we", "They": "We", "them": "us", "their": "our", "Their": "Our"}
_THEY = re.compile(r"\b(?:they|They|them|their|Their)\b")

#: Word lists that any template may name; the subject files add to it.
LISTS: dict[str, Sequence[str]] = {}


def article(noun: str) -> str:
    """Return the noun phrase with "a" or "an" before it."""
    return ("an " if _VOWEL_SOUND.match(noun) else "a ") + noun


def join(items: Sequence[str]) -> str:
    """Return the items as an English list: "a, b and c"."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def tidy(text: str) -> str:
    """Capitalise what begins a sentence or a quotation."""
    return _SENTENCE_START.sub(lambda m: m.group(1) + m.group(2).upper(), text)


def _lookup(rng: random.Random, slots: Slots, key: str) -> str:
    name, _, attribute = key.partition(".")
    if name in slots:
        value = slots[name]
        if attribute:
            value = getattr(value, attribute)
        return value if isinstance(value, str) else str(value)
    return rng.choice(LISTS[name])


def _slot(body: str) -> _Node:
    word, _, rest = body.partition(" ")
    if rest and word == "a":
        return lambda rng, slots: article(_lookup(rng, slots, rest))
    if rest and word == "c":
        return lambda rng, slots: _lookup(rng, slots, rest)[:1].upper() + _lookup(rng, slots, rest)[1:]
    return lambda rng, slots: _lookup(rng, slots, body)


def _sequence(parts: list[_Node | str]) -> _Node:
    if len(parts) == 1 and isinstance(parts[0], str):
        text = parts[0]
        return lambda rng, slots: text
    fixed = tuple(parts)
    return lambda rng, slots: "".join(p if isinstance(p, str) else p(rng, slots) for p in fixed)


def _alternatives(options: list[_Node]) -> _Node:
    fixed = tuple(options)
    count = len(fixed)
    return lambda rng, slots: fixed[int(rng.random() * count)](rng, slots)


def _parse(tokens: list[str], position: int, inner: bool) -> tuple[list[_Node], int]:
    options: list[_Node] = []
    parts: list[_Node | str] = []
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if token == "[":
            nested, position = _parse(tokens, position, True)
            parts.append(_alternatives(nested))
        elif token == "]" and inner:
            break
        elif token == "|" and inner:
            options.append(_sequence(parts or [""]))
            parts = []
        elif token[0] == "{":
            parts.append(_slot(token[1:-1]))
        else:
            parts.append(token)
    options.append(_sequence(parts or [""]))
    return options, position


@cache
def compiled(template: str) -> _Node:
    """Return the template as a function of a random source and slots."""
    options, _ = _parse(_TOKEN.findall(template), 0, False)
    return options[0]


def fill(rng: random.Random, template: str, slots: Slots | None = None) -> str:
    """Return one rendering of the template, tidied."""
    return tidy(compiled(template)(rng, slots or {}))


class Page:
    """A text under construction: sentences, grouped into paragraphs."""

    def __init__(self, rng: random.Random, slots: dict[str, Any]) -> None:
        self.rng = rng
        self.slots = slots
        self._paragraphs: list[list[str]] = [[]]

    def say(self, *templates: str) -> None:
        """Add one of the templates, rendered."""
        template = templates[0] if len(templates) == 1 else self.rng.choice(templates)
        self._paragraphs[-1].append(fill(self.rng, template, self.slots).strip())

    def maybe(self, chance: float, *templates: str) -> None:
        """Add one of the templates with this chance."""
        if self.rng.random() < chance:
            self.say(*templates)

    def paragraph(self, chance: float = 1.0) -> None:
        """Begin a new paragraph, with this chance."""
        if self._paragraphs[-1] and self.rng.random() < chance:
            self._paragraphs.append([])

    def text(self) -> str:
        """Return the whole text."""
        return "\n\n".join(" ".join(p) for p in self._paragraphs if p)


def first_person(text: str) -> str:
    """Return a told-by-the-hero text with "we" for "they" and "I said" for "said I", quotations left alone."""
    text = _I_SAID.sub(r"I \1", _I_FIRST.sub(r"\1 and I", text))
    pieces = text.split('"')
    pieces[::2] = [_THEY.sub(lambda m: _WE[m.group(0)], piece) for piece in pieces[::2]]
    return tidy('"'.join(pieces))
