"""Whole stories: a plot on a setting, with the phrases by which somebody could have asked for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from . import plots_deeds as deeds
from . import plots_growing as growing
from . import plots_things as things
from .cast import Character, setting
from .engine import Page, article, first_person
from .splits import Split

Plot = Callable[[Page], None]

#: Each plot with the words for what it is about.
PLOTS: list[tuple[Plot, tuple[str, ...]]] = [
    (
        things.lost_thing,
        (
            "a lost {thing}",
            "losing a {thing}",
            "friends who help",
            "a missing {thing}",
            "the lost {thing}",
            "who loses a {thing}",
            "who looks for a {thing}",
        ),
    ),
    (
        things.two_want_one,
        ("sharing", "a quarrel", "taking turns", "two friends and a {thing}", "two friends", "who learns to share"),
    ),
    (
        things.broken_and_honest,
        (
            "honesty",
            "telling the truth",
            "a broken {broken}",
            "a mistake",
            "the broken {broken}",
            "who breaks a {broken}",
            "who tells the truth",
        ),
    ),
    (
        things.build_something,
        (
            "building a {made}",
            "a {made}",
            "not giving up",
            "trying again",
            "the {made}",
            "who builds a {made}",
            "who wants to build a {made}",
        ),
    ),
    (things.a_gift, ("a birthday", "a gift", "a present", "a birthday party", "the birthday", "who makes a gift")),
    (
        things.magic_wish,
        (
            "magic",
            "a wish",
            "a magic {thing}",
            "a foolish wish",
            "the magic {thing}",
            "who makes a wish",
            "who finds a magic {thing}",
        ),
    ),
    (
        things.found_coin,
        ("an honest finder", "a lost {lost}", "honesty", "finding a {lost}", "the lost {lost}", "who finds a {lost}"),
    ),
    (
        deeds.share_food,
        ("sharing", "kindness", "being hungry", "a {food}", "sharing food", "who shares a {food}", "a hungry friend"),
    ),
    (deeds.afraid_of, ("courage", "being brave", "being afraid of {fear}", "fear", "who is afraid of {fear}")),
    (
        deeds.hurt_animal,
        (
            "helping others",
            "kindness",
            "a {small} in trouble",
            "a {small}",
            "who helps a {small}",
            "the little {small}",
        ),
    ),
    (
        deeds.new_friend,
        (
            "friendship",
            "a new friend",
            "being alone",
            "making friends",
            "who finds a friend",
            "the new friend",
            "two friends",
        ),
    ),
    (
        growing.seed,
        ("a seed", "patience", "a garden", "growing a {plant}", "waiting", "the little seed", "who plants a seed"),
    ),
    (growing.journey, ("a journey", "an adventure", "{far}", "a long way", "the long way", "who wants to see {far}")),
    (deeds.race, ("a race", "a contest", "being proud", "practice", "the contest", "who wins a contest")),
    (deeds.rescue, ("a rescue", "a clever idea", "a {stuck}", "solving a problem", "the rescue", "the {stuck}")),
    (
        growing.baking,
        ("baking", "cooking", "a good neighbour", "making {dish}", "the good neighbour", "who makes {dish}"),
    ),
    (
        deeds.bedtime,
        ("the night", "a strange sound", "bedtime", "not being able to sleep", "the strange sound", "who cannot sleep"),
    ),
    (
        growing.learn_skill,
        (
            "learning to {skill}",
            "practice",
            "learning something new",
            "not giving up",
            "who learns to {skill}",
            "who wants to {skill}",
            "who cannot {skill}",
        ),
    ),
    (deeds.weather_day, ("the weather", "a rainy day", "a day at home", "a storm", "the rainy day")),
]


@dataclass(frozen=True)
class Story:
    """A story, what it could be called, and what one could ask for to get it."""

    text: str
    title: str
    topics: tuple[str, ...]
    hero: Character


def tell(
    rng: random.Random,
    split: Split,
    hero_kind: str | None = None,
    hero_name: str | None = None,
    narrator: bool | None = None,
    trait: str | None = None,
) -> Story:
    """Return a story; the hero's kind, name and trait may be given, `narrator` makes the hero tell it."""
    slots = setting(rng, split, hero_kind, hero_name)
    if trait:
        slots["trait"] = trait
    hero = slots["h"]
    assert isinstance(hero, Character)
    if narrator is None:
        narrator = hero_kind is None and hero.kind in ("girl", "boy") and rng.random() < 0.2
    if narrator:
        hero = replace(hero, first_person=True)
        elder = slots["e"]
        assert isinstance(elder, Character)
        slots["h"], slots["e"] = hero, replace(elder, name=f"my {elder.kind}")
    page = Page(rng, slots)
    plot, themes = rng.choice(PLOTS)
    plot(page)
    text = first_person(page.text()) if narrator else page.text()
    known = {key: str(value) for key, value in slots.items()}
    thing = known["thing"] if known["thing"] in text else rng.choice(themes).format(**known)
    subject = hero.kind if rng.random() < 0.6 else f"{hero.kind} named {hero.name}"
    theme = _mend_article(rng.choice(themes).format(**known))
    if theme.startswith("who "):
        theme = f"{article(subject)} {_mend_articles(theme)}"
    topics = (
        article(subject),
        theme,
        theme if " who " in theme or theme[:4] == "the " else f"{article(subject)} and {theme}",
        f"{article(known['thing'])}" if thing == known["thing"] else theme,
    )
    named = [t for t in themes if t.startswith(("the ", "a "))]
    heading = f"{hero.name} the {hero.kind}" if hero.kind not in ("girl", "boy") else hero.name
    title = rng.choice(
        (
            f"{hero.name} and the {known['thing']}" if thing == known["thing"] else heading,
            f"{hero.name} and {known['f']}" if known["f"] in text else heading,
            _mend_article(rng.choice(named).format(**known)) if named else heading,
            f"The {hero.kind}" if hero.kind not in ("girl", "boy") else heading,
        )
    )
    return Story(text, _titled(title), topics, hero)


def _mend_article(phrase: str) -> str:
    if phrase.startswith("a "):
        return article(phrase[2:])
    return phrase


def _mend_articles(phrase: str) -> str:
    head, found, tail = phrase.partition(" a ")
    return f"{head} {article(tail)}" if found else phrase


def _titled(text: str) -> str:
    small = {"a", "an", "the", "and", "of", "to", "in"}
    words = text.split()
    return " ".join(w if w in small and i else w[:1].upper() + w[1:] for i, w in enumerate(words))


def plain(rng: random.Random, split: Split) -> str:
    """Return a story as a document of its own, mostly without a heading."""
    story = tell(rng, split)
    luck = rng.random()
    if luck < 0.6:
        return story.text
    if luck < 0.8:
        return f"{story.title}\n\n{story.text}"
    if luck < 0.9:
        return f"Story: {story.title}\n\n{story.text}\n\nThe end."
    return f"{story.text}\n\nThe end."
