"""Whole conversations: an optional system message and a walk through the topics."""

# ruff: noqa: E501 (one template a line reads best)
from __future__ import annotations

import random

from . import chat_facts, chat_numbers, chat_social, lexicon, prose, records, stories
from .animals import HEROES
from .chat_facts import Topic, Turn
from .engine import article, fill
from .splits import Split

Message = tuple[str, str]
SYSTEM = (
    "You are a helpful assistant.",
    "You are Fable, a small and friendly assistant.",
    "You are a small assistant. Answer briefly.",
    "You are a friendly assistant who likes stories.",
    "Be kind and answer in simple words.",
    "You are a helpful, friendly assistant.",
    "You answer simple questions and tell short stories.",
)
_ASK = "[tell me a story|tell me a short story|write a story|can you tell me a story|write a short story|please tell me a story|I want to hear a story|tell a story]"


def story(rng: random.Random, split: Split) -> list[Turn]:
    """A story on request, perhaps with a question about it or another one."""
    luck = rng.random()
    if luck < 0.2:
        told = stories.tell(rng, split, narrator=False)
        ask = fill(rng, _ASK)
    elif luck < 0.5:
        kind = (
            rng.choice(HEROES).kind
            if rng.random() < 0.6
            else rng.choice(["girl", "boy", *lexicon.ROLES, *lexicon.TALKING_THINGS])
        )
        trait = rng.choice(lexicon.MORE_TRAITS) if rng.random() < 0.3 and not kind.startswith("old ") else None
        name = (
            None
            if rng.random() < 0.7
            else lexicon.made_up_name(rng)
            if rng.random() < 0.4
            else rng.choice(lexicon.ANIMAL_NAMES)
        )
        told = stories.tell(rng, split, kind, name, narrator=False, trait=trait)
        ask = (
            fill(rng, _ASK)
            + f" about {article(f'{trait} {kind}' if trait else kind)}"
            + (f" [named|called] {name}" if name else "")
        )
        ask = fill(rng, ask)
    else:
        told = stories.tell(rng, split, narrator=False)
        ask = fill(rng, _ASK) + " about " + rng.choice(told.topics)
    turns = [
        (
            ask[0].upper() + ask[1:] + rng.choice((".", ".", "?" if ask.lower().startswith("can") else ".", "")),
            told.text,
        )
    ]
    luck = rng.random()
    if luck < 0.15:
        turns.append(
            rng.choice(
                (
                    ("What was the name of the hero?", f"The hero was called {told.hero.name}."),
                    (
                        f"What was the name of the {told.hero.kind}?",
                        f"The {told.hero.kind} was called {told.hero.name}.",
                    ),
                    (f"What was the {told.hero.kind}'s name?", f"The {told.hero.kind} was called {told.hero.name}."),
                    ("Who was the story about?", f"The story was about {told.hero.name}, {article(told.hero.kind)}."),
                )
            )
        )
    elif luck < 0.2:
        turns.append(
            (
                rng.choice(("What is a good title for this story?", "Give the story a title.")),
                f'A good title is "{told.title}".',
            )
        )
    elif luck < 0.3:
        turns.append(
            (
                rng.choice(
                    ("Another one, please.", "Tell me another story.", "One more story!", "Another story, please.")
                ),
                stories.tell(rng, split, narrator=False).text,
            )
        )
    return turns


def offered(rng: random.Random, split: Split) -> list[Turn]:
    """The assistant offers a story, and the user takes it or not."""
    lead = fill(rng, "[I am bored|I feel bored|I am sad|I have nothing to do|ok|what can you do|help me]") + rng.choice(
        (".", "", "!")
    )
    offer = fill(
        rng, "[shall I tell you a story?|do you want to hear a story?|I can tell you a story. Would you like that?]"
    )
    if rng.random() < 0.2:
        no = fill(rng, "[no|no, thank you|not now]") + rng.choice((".", ""))
        return [
            (lead, offer),
            (no, fill(rng, "[all right. What would you like to talk about?|that is fine. What can I do for you?]")),
        ]
    yes = fill(rng, "[yes|yes, please|yes please|sure|of course|please do|ok|go on]") + rng.choice((".", "", "!"))
    return [(lead, offer), (yes, stories.tell(rng, split, narrator=False).text)]


def why(rng: random.Random, split: Split) -> list[Turn]:
    """A fact, then "why?", which the model cannot go deeper into."""
    first = rng.choice((chat_facts.uses, chat_facts.colours, chat_facts.opposites))(rng, split)[:1]
    ask = rng.choice(("Why?", "why", "Why is that?", "Why so?", "How do you know?", "Are you sure?"))
    answer = "[I do not know why. I know only simple things.|I do not know more about that.|that is how I learned it. I do not know more.]"
    return [*first, (ask, fill(rng, answer))]


def explain(rng: random.Random, split: Split) -> list[Turn]:
    """A short piece of plain prose on request."""
    ask, text = prose.request(rng)
    return [(ask, text)]


_TOPICS: list[tuple[Topic, float]] = [
    *chat_facts.TOPICS,
    *chat_numbers.TOPICS,
    *chat_social.TOPICS,
    (story, 9.0),
    (records.request, 7.0),
    (explain, 2.0),
    (offered, 1.2),
    (why, 0.5),
]
_MAKERS = [t for t, _ in _TOPICS]
_WEIGHTS = [w for _, w in _TOPICS]


_COMMANDS = (
    "tell",
    "give",
    "name",
    "write",
    "list",
    "count",
    "spell",
    "say",
    "show",
    "make",
    "use",
    "can you",
    "describe",
)


def _roughen(rng: random.Random, text: str) -> str:
    """Return the user's words as people type them: sometimes without capitals, stop or with "please"."""
    if text.lower().startswith(_COMMANDS) and text[-1] in ".?" and rng.random() < 0.1 and "lease" not in text:
        text = text[:-1] + ", please" + text[-1]
    if rng.random() < 0.1 and text[-1] in ".?" and len(text) > 4:
        text = text[:-1]
    if "JSON" in text and rng.random() < 0.2:
        return text.replace("JSON", rng.choice(("json", "Json")))
    if rng.random() < 0.12:
        text = text.lower() if '"' not in text and "SON" not in text else text
    return text[0].upper() + text[1:] if text[0].islower() and rng.random() < 0.75 else text


def conversation(rng: random.Random, split: Split) -> list[Message]:
    """Return the (role, text) messages of a conversation of one to seven turns."""
    messages: list[Message] = []
    turns: list[Turn] = []
    if rng.random() < 0.28:
        if rng.random() < 0.3:
            me = rng.choice(lexicon.GIRLS + lexicon.BOYS + lexicon.ANIMAL_NAMES)
            messages.append(
                ("system", f"You are {me}, a {rng.choice(('friendly', 'helpful', 'small', 'cheerful'))} assistant.")
            )
            if rng.random() < 0.7:
                turns += chat_social.identity(rng, split, me)
        else:
            messages.append(("system", rng.choice(SYSTEM)))
    if rng.random() < 0.22:
        turns = chat_social.greeting(rng, split) + turns
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        turns += rng.choices(_MAKERS, _WEIGHTS)[0](rng, split)
    if rng.random() < 0.12:
        turns += chat_social.thanks(rng, split)
    if rng.random() < 0.1:
        turns += chat_social.goodbye(rng, split)
    for user, assistant in turns:
        messages += [
            ("user", _roughen(rng, user)),
            ("assistant", assistant[0].upper() + assistant[1:] if assistant[0].islower() else assistant),
        ]
    return messages
