"""Who is in a story and where: characters with their pronouns, and the setting that all plots share."""

# ruff: noqa: E501 (one template a line reads best)
from __future__ import annotations

import random
from dataclasses import dataclass, replace

from . import lexicon as lex
from .animals import HEROES
from .engine import Page
from .splits import Split, draw

_PRONOUNS = {"f": ("she", "her", "her", "herself"), "m": ("he", "him", "his", "himself")}


@dataclass(frozen=True)
class Character:
    """Somebody in a story. `str()` is the subject form, `n` the object form, `name` what others call them."""

    name: str
    kind: str
    gender: str
    first_person: bool = False

    def __str__(self) -> str:
        return "I" if self.first_person else self.name

    @property
    def n(self) -> str:
        """The name as an object ("me" in the first person)."""
        return "me" if self.first_person else self.name

    @property
    def ns(self) -> str:
        """The name as a possessive."""
        return "my" if self.first_person else self.name + "'s"

    @property
    def s(self) -> str:
        """Subject pronoun."""
        return "I" if self.first_person else _PRONOUNS[self.gender][0]

    @property
    def S(self) -> str:
        """Subject pronoun at the start of a sentence."""
        return self.s.capitalize()

    @property
    def o(self) -> str:
        """Object pronoun."""
        return "me" if self.first_person else _PRONOUNS[self.gender][1]

    @property
    def p(self) -> str:
        """Possessive pronoun."""
        return "my" if self.first_person else _PRONOUNS[self.gender][2]

    @property
    def r(self) -> str:
        """Reflexive pronoun."""
        return "myself" if self.first_person else _PRONOUNS[self.gender][3]

    @property
    def called(self) -> str:
        """How one addresses this character, capitalised as a name."""
        return self.name.removeprefix("the ")


def child(rng: random.Random, gender: str | None = None) -> Character:
    """Return a girl or boy."""
    gender = gender or rng.choice("fm")
    name = rng.choice(lex.GIRLS if gender == "f" else lex.BOYS) if rng.random() > 0.06 else lex.made_up_name(rng)
    return Character(name, "girl" if gender == "f" else "boy", gender)


def animal(rng: random.Random, gender: str | None = None) -> Character:
    """Return an animal with a name of its own."""
    return Character(rng.choice(lex.ANIMAL_NAMES), rng.choice(HEROES).kind, gender or rng.choice("fm"))


_FEMALE_ROLES = {"queen", "princess", "fairy", "old woman", "witch"}
_MALE_ROLES = {"king", "prince", "wizard", "knight", "fisherman", "postman", "old man", "snowman"}


def role(rng: random.Random, gender: str | None = None) -> Character:
    """Return a baker, a queen, a robot, ... with a name."""
    kind = rng.choice(lex.ROLES)
    gender = "f" if kind in _FEMALE_ROLES else "m" if kind in _MALE_ROLES else gender or rng.choice("fm")
    return Character(rng.choice(lex.GIRLS if gender == "f" else lex.BOYS), kind, gender)


def talking_thing(rng: random.Random) -> Character:
    """Return a star, a cloud, a teapot, ... with a name."""
    return Character(rng.choice(lex.ANIMAL_NAMES), rng.choice(lex.TALKING_THINGS), rng.choice("fm"))


def gender_of(kind: str, otherwise: str) -> str:
    """Return the gender that goes with the kind, if only one does."""
    if kind == "girl" or kind in _FEMALE_ROLES:
        return "f"
    return "m" if kind == "boy" or kind in _MALE_ROLES else otherwise


def family(rng: random.Random, hero: Character) -> Character:
    """Return an older relative of the hero ("her mother", "my uncle")."""
    kind = rng.choice(list(lex.FAMILY))
    return Character(f"{hero.p} {kind}", kind, lex.FAMILY[kind])


def other(gender: str, rng: random.Random) -> str:
    """Return the other gender mostly, so that pronouns stay clear."""
    return {"f": "m", "m": "f"}[gender] if rng.random() < 0.85 else gender


def _hero(rng: random.Random) -> Character:
    luck = rng.random()
    return (
        child(rng) if luck < 0.47 else animal(rng) if luck < 0.84 else role(rng) if luck < 0.95 else talking_thing(rng)
    )


def setting(
    rng: random.Random, split: Split, hero_kind: str | None = None, hero_name: str | None = None
) -> dict[str, object]:
    """Return the slots of a story: hero, friend, elder, places, a thing, a food, the weather."""

    def make(rng: random.Random) -> dict[str, object]:
        hero = _hero(rng)
        if hero_kind:
            hero = replace(hero, kind=hero_kind, gender=gender_of(hero_kind, hero.gender))
        if hero_name:
            hero = replace(hero, name=hero_name)
        friend = (child if hero.kind in ("girl", "boy") else animal)(rng, other(hero.gender, rng))
        while friend.name == hero.name or friend.kind == hero.kind not in ("girl", "boy"):
            friend = (child if hero.kind in ("girl", "boy") else animal)(rng, other(hero.gender, rng))
        return {"h": hero, "f": friend, "thing": rng.choice(lex.THINGS), "food": rng.choice(lex.SNACKS)}

    slots = draw(rng, split, make, lambda s: (s["h"].name, str(s["thing"])))  # type: ignore[attr-defined]
    place, place2 = rng.sample(lex.PLACES, 2)
    spots = rng.sample(place.spots, 3)
    weather = rng.choice(list(lex.WEATHER))
    hero = slots["h"]
    assert isinstance(hero, Character)
    slots.update(
        place=place,
        place2=place2,
        spot1=spots[0],
        spot2=spots[1],
        spot3=spots[2],
        sight=rng.choice(place.sights),
        e=family(rng, hero),
        col=rng.choice(lex.COLOURS),
        col2=rng.choice(lex.COLOURS),
        weather=weather,
        time=rng.choice(("morning", "afternoon", "day", "evening")),
    )
    return slots


def introduce(page: Page) -> None:
    """Open the story: who the hero is, and where and when."""
    hero = page.slots["h"]
    assert isinstance(hero, Character)
    asked_for = page.slots.get("trait")
    trait = page.slots["trait"] = asked_for or page.rng.choice(
        lex.TRAITS if page.rng.random() < 0.7 else lex.MORE_TRAITS
    )
    if hero.first_person:
        _introduce_self(page, hero)
        return
    page.slots["who"] = page.rng.choice(
        (
            f"little {hero.kind}",
            f"{page.slots['trait']} {hero.kind}",
            f"young {hero.kind}",
            hero.kind,
            f"{page.slots['trait']} little {hero.kind}",
        )
    )
    if hero.kind.startswith("old "):
        page.slots["who"] = hero.kind
    elif asked_for:
        page.slots["who"] = page.rng.choice((f"{trait} {hero.kind}", f"{trait} little {hero.kind}"))
    page.slots["lived"] = page.rng.choice(
        (
            "near {place}",
            "in a small house near {place}",
            "not far from {place}",
            "close to {place}",
            "in a little town",
            "in a small village",
        )
    )
    if hero.kind not in ("girl", "boy", *lex.ROLES):
        page.slots["lived"] = page.rng.choice(("near {place}", "close to {place}", "not far from {place}"))
    page.slots["lived"] = str(page.slots["lived"]).replace("{place}", str(page.slots["place"]))
    luck = page.rng.random()
    if luck < 0.1:
        _open_without_name(page)
    elif luck < 0.45:
        page.say(
            "Once upon a time, there was {a who} named {h}.",
            "Once upon a time, there was {a who} named {h} who lived {lived}.",
            "Once upon a time, {a who} named {h} lived {lived}.",
            "Once upon a time, {lived}, there lived {a who} named {h}.",
            "Once upon a time, in a land far away, there lived {a who} named {h}.",
            "Once upon a time, there lived {a who}. [{h.p} name was|everyone called {h.o}] {h}.",
        )
    elif luck < 0.75:
        page.say(
            "There was once {a who} named {h}.",
            "Long ago, there was {a who} named {h} who lived {lived}.",
            "{c lived} lived {a who} named {h}.",
            "{h} was {a who} who lived {lived}.",
            "{h} the {h.kind} lived {lived}.",
            "A long time ago, {a who} [named|called] {h} lived {lived}.",
            "This is the story of {h}, {a who}.",
        )
    else:
        page.say(
            "One {time}, {a who} named {h} [woke up early|went for a walk|was sitting by the window|had nothing to do].",
            "It was a [quiet|fine|cool|calm] {time}. {a who} named {h} was {place.at}.",
            "One [fine|quiet|cool] {time} in {season}, {h} the {h.kind} [set out|got up early|looked around].",
        )
    page.maybe(
        0.5,
        "{h.s} was [very |always |]{trait}.",
        "{h.s} [had|was known for having] a [warm|good|kind] heart.",
        "{h.s} [liked|loved] {sight} and [the quiet|the fresh air|long walks|sweet {food.many}].",
        "everyone [there |]knew {h.o}, because {h.s} was so {trait}.",
        "{h.s} [loved|liked] to [sing|run|laugh|play|explore|learn new things].",
        "{h.s} had a good friend named {f}.",
    )


def _open_without_name(page: Page) -> None:
    """Open with the hour, the weather or the hero's name alone."""
    page.say(
        "in the morning, the sun [came up over {place}|shone on {place}]. {a who} named {h} was already awake.",
        "the sun [was rising|was going down] over {place}. {h} the {h.kind} [looked at the sky|was on the way home].",
        "the {h.kind} [looked around|opened one eye|sat down]. [{h.p} name was {h}.|everyone called {h.o} {h}.]",
        "it was [early|late|a cold {season} {time}], and {h} the {h.kind} was {place.at}.",
        "the wind blew over {place}. {h} the {h.kind} listened.",
        "{h} [went|came] to {place} [every day|every {day}|one {time}].",
        "every {time}, {h} the {h.kind} went to {place}.",
        "on a {col} [bench|door|roof] {place.at} sat {a who} named {h}.",
        "{h} and {f} were {place.at}.",
        "deep in the [forest|valley|night], there was {a who} named {h}.",
        "high on the hill lived {a who} named {h}.",
        "nobody knew where {h} the {h.kind} came from.",
    )


def _introduce_self(page: Page, hero: Character) -> None:
    page.slots["age"] = page.rng.choice(["five", "six", "seven", "eight", "nine", "ten"])
    page.say(
        f"My name is {hero.name}. I am {{age}} years old.",
        f"I am {hero.name}, and this is [my story|what happened to me].",
        "[Last {day}|Yesterday|Last week|One day last {season}], something [strange|funny|wonderful|special] happened to me.",
        f"When I was {{age}}, I [lived|stayed] [near {{place}}|close to {{place}}]. Everyone called me {hero.name}.",
        "Let me tell you what happened [last {day}|yesterday|last {season}|one {time}].",
    )


def weather_line(page: Page) -> None:
    """Say what the weather is."""
    page.say(*lex.WEATHER[str(page.slots["weather"])])
