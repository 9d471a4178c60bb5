"""Chat about the small world: animals, food, colours, opposites, days, weather, what things are for."""

# ruff: noqa: E501 (one template a line reads best)
from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from . import lexicon as lex
from .animals import ANIMALS, Animal
from .engine import article, fill, join
from .facts import COLOUR_OF, DAYS, JOBS, MADE_OF, MIXES, MONTHS, OPPOSITES, USED_FOR, WEATHER_ADVICE, WHY
from .splits import Split, draw

Turn = tuple[str, str]
Topic = Callable[[random.Random, Split], list[Turn]]

_REVERSE = {b: a for a, b in OPPOSITES.items()}


def _animal_turn(rng: random.Random, a: Animal, pronoun: bool) -> Turn:
    """Return one question about the animal; with `pronoun` it is called "it"."""
    s = {
        "k": "it" if pronoun else article(a.kind),
        "ks": "they" if pronoun else a.many,
        "n": article(a.kind),
        "many": a.many,
        "eats": join(a.eats),
        "home": a.home,
        "young": a.young,
        "legs": ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")[a.legs],
        "colour": a.colour,
        "cover": a.cover,
        "can": join(a.can),
        "group": a.group,
        "sound": a.sound,
    }
    kinds = ["eat", "live", "young", "legs", "colour", "cover", "can", "group"] + (
        [] if a.sound in ("no sound", "song", "bubble") else ["sound"]
    )
    question, answer = {
        "eat": (
            "[what does {k} eat|what do {ks} eat|what do {ks} like to eat]?",
            "[{many} eat {eats}.|{n} eats {eats}.]",
        ),
        "live": (
            "[where does {k} live|where do {ks} live|where can I find {ks}]?",
            "[{n} lives {home}.|{many} live {home}.]",
        ),
        "young": (
            "[what is a baby {b} called|what do you call a young {b}|what is the young of {n} called]?".replace(
                "{b}", a.kind
            ),
            "[a baby {kind} is called {a young}.|it is called {a young}.]",
        ),
        "legs": (
            "[how many legs does {k} have|how many legs do {ks} have]?",
            "[{n} has {legs} legs.|{many} have {legs} legs.]",
        ),
        "colour": (
            "[what colour is {k}|what colour are {ks}]?",
            "[{n} is often {colour}.|most {many} are {colour}.|it is usually {colour}.]",
        ),
        "cover": (
            "[what covers the body of {k}|what is the body of {k} covered with]?",
            "[the body of {n} is covered with {cover}.|{many} have {cover}.]",
        ),
        "can": (
            "[what can {k} do|what can {ks} do|what are {ks} good at]?",
            "[{n} can {can}.|{many} can {can}.|it can {can}.]",
        ),
        "group": ("[what kind of animal is {k}|is {k} a mammal]?", "{n} is {a group}."),
        "sound": (
            "[what sound does {k} make|what sound do {ks} make]?",
            "[{n} can {sound}.|{many} {sound}.]" if not a.sound.startswith("no") else "{n} makes no sound.",
        ),
    }[rng.choice(kinds)]
    s["kind"] = a.kind
    question, answer = fill(rng, question, s), fill(rng, answer, s)
    if "Is " in question[:3]:
        answer = ("Yes, " if a.group == "mammal" else "No, ") + answer[0].lower() + answer[1:]
    return question, answer


def animal(rng: random.Random, split: Split) -> list[Turn]:
    """Questions about one animal, then "it", then perhaps "and a ..."."""
    a = (
        draw(rng, split, lambda r: r.choice(ANIMALS), lambda x: ("animal", x.kind))
        if split == "train" and rng.random() < 0.3
        else rng.choice(ANIMALS)
    )
    if rng.random() < 0.25:
        turns = [
            (
                fill(
                    rng,
                    "[tell me about {many}|what do you know about {many}|tell me something about {n}|what is {n}]"
                    + rng.choice((".", "?", "")),
                    {"many": a.many, "n": article(a.kind)},
                ),
                about(rng, a),
            )
        ]
    else:
        turns = [_animal_turn(rng, a, False)]
    while rng.random() < 0.45 and len(turns) < 4:
        turns.append(_follow_up(rng, a) if rng.random() < 0.2 else _with_and(rng, _animal_turn(rng, a, True)))
    if rng.random() < 0.3:
        b = rng.choice(ANIMALS)
        what, ask = rng.choice(
            (("eat", "what does {0} eat?"), ("live", "where does {0} live?"), ("legs", "how many legs does {0} have?"))
        )
        answers: dict[str, Callable[[Any], str]] = {
            "eat": lambda x: f"{article(x.kind)} eats {join(x.eats)}.",
            "live": lambda x: f"{article(x.kind)} lives {x.home}.",
            "legs": lambda x: (
                f"{article(x.kind)} has {('no', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight')[x.legs]} legs."
            ),
        }
        answer = answers[what]
        turns += [
            (fill(rng, ask.format(article(a.kind))), fill(rng, answer(a))),
            (fill(rng, "[and|what about] " + article(b.kind) + "?"), fill(rng, answer(b))),
        ]
    return turns


def _with_and(rng: random.Random, turn: Turn) -> Turn:
    question, answer = turn
    return ("And " + question[0].lower() + question[1:] if rng.random() < 0.3 else question), answer


def _follow_up(rng: random.Random, a: Animal) -> Turn:
    """Compare the animal just named with another one, or ask for more."""
    b = rng.choice([x for x in ANIMALS if x.size != a.size])
    if rng.random() < 0.3:
        return rng.choice(
            ("Tell me more.", "What else do you know?", "Tell me more about it.", "More, please.")
        ), about(rng, a)
    word = "bigger" if a.size > b.size else "smaller"
    if rng.random() < 0.5:
        question = f"[is it|are they] bigger than [{article(b.kind)}|{b.many}]?"
    else:
        question = f"[is it|are they] smaller than [{article(b.kind)}|{b.many}]?"
    yes = ("bigger" in question) == (word == "bigger")
    return fill(rng, question), f"{'Yes' if yes else 'No'}, {article(a.kind)} is {word} than {article(b.kind)}."


def about(rng: random.Random, a: Animal) -> str:
    """Return two to four sentences about an animal."""
    lines = [
        f"{article(a.kind)} is {article(a.group)}." if rng.random() < 0.6 else f"{a.many} live {a.home}.",
        f"{'it' if rng.random() < 0.5 else article(a.kind)} eats {join(a.eats)}.",
        f"it has {a.cover}."
        if a.legs == 0
        else f"it has {('no', '', 'two', '', 'four', '', 'six', '', 'eight')[a.legs]} legs and {a.cover}.",
        f"it can {join(a.can)}.",
        f"a young one is called {article(a.young)}.",
    ]
    return " ".join(
        fill(rng, x) for x in [lines[0], *sorted(rng.sample(lines[1:], rng.randint(1, 3)), key=lines.index)]
    )


def compare(rng: random.Random, split: Split) -> list[Turn]:
    """Which animal is bigger; can an animal do something."""
    if rng.random() < 0.5:
        a, b = draw(rng, split, lambda r: r.sample(ANIMALS, 2), lambda x: (x[0].kind, x[1].kind))
        if a.size == b.size:
            return [
                (
                    fill(rng, f"[which is bigger|what is bigger], {article(a.kind)} or {article(b.kind)}?"),
                    fill(rng, f"{article(a.kind)} and {article(b.kind)} are about the same size."),
                )
            ]
        big, small = (a, b) if a.size > b.size else (b, a)
        if rng.random() < 0.5:
            return [
                (
                    fill(
                        rng, f"[which is bigger|what is bigger|who is bigger], {article(a.kind)} or {article(b.kind)}?"
                    ),
                    fill(rng, f"{article(big.kind)} is bigger than {article(small.kind)}."),
                )
            ]
        answer = "Yes, " if big is a else "No, "
        return [
            (
                fill(rng, f"is {article(a.kind)} bigger than {article(b.kind)}?"),
                answer + f"{article(a.kind)} is {'bigger' if big is a else 'smaller'} than {article(b.kind)}.",
            )
        ]
    a = rng.choice(ANIMALS)
    skill = rng.choice(("fly", "swim", "climb", "jump", "dig", "run"))
    able = skill in a.can or (skill == "swim" and "dive" in a.can)
    name = article(a.kind)
    if not able and rng.random() < 0.5:
        return [
            (
                f"Can {name} {rng.choice(('fly', 'read a book', 'drive a car', 'cook soup'))}?"
                if "fly" not in a.can
                else f"Can {name} drive a car?",
                f"No, {name} cannot do that. It can {join(a.can)}.",
            )
        ]
    if able:
        return [(f"Can {name} {skill}?", f"Yes, {name} can {skill}.")]
    return [(f"What can {name} do?", f"{name[0].upper() + name[1:]} can {join(a.can)}.")]


def opposites(rng: random.Random, split: Split) -> list[Turn]:
    """The opposite of a word, perhaps two."""
    turns: list[Turn] = []
    for index in range(rng.choice((1, 1, 2, 3))):
        word, answer = rng.choice(list(OPPOSITES.items()))
        if rng.random() < 0.4 and answer in _REVERSE and answer not in OPPOSITES:
            word, answer = answer, word
        ask = (
            "[what is the opposite of {w}|tell me the opposite of {w}|opposite of {w}]?"
            if index == 0
            else "[and of {w}|and the opposite of {w}|what about {w}]?"
        )
        turns.append(
            (
                fill(rng, ask, {"w": word}),
                fill(rng, "[the opposite of {w} is {o}.|{o}.|it is {o}.]", {"w": word, "o": answer}),
            )
        )
    return turns


def calendar(rng: random.Random, split: Split) -> list[Turn]:
    """Days, months, seasons."""
    names, what = (DAYS, "day") if rng.random() < 0.6 else (MONTHS, "month")
    i = rng.randrange(len(names))
    before, here, after = names[i - 1], names[i], names[(i + 1) % len(names)]
    kind = rng.randrange(7)
    if kind == 6:
        other = rng.choice(names)
        j = names.index(other)
        return [
            (f"What {what} comes after {here}?", f"{after} comes after {here}."),
            (
                fill(rng, f"[and|and what {what} comes|what {what} comes] before {other}?"),
                f"{names[j - 1]} comes before {other}.",
            ),
        ]
    if kind == 0:
        return [
            (f"What {what} comes after {here}?", f"{after} comes after {here}."),
            *(
                [(f"And after {after}?", f"After {after} comes {names[(i + 2) % len(names)]}.")]
                if rng.random() < 0.4
                else []
            ),
        ]
    if kind == 1:
        return [(f"What {what} comes before {here}?", f"{before} comes before {here}.")]
    if kind == 2:
        return [
            (f"Today is {DAYS[i % 7]}. What day is tomorrow?", f"Tomorrow is {DAYS[(i + 1) % 7]}."),
            *([("And what day was yesterday?", f"Yesterday was {DAYS[i % 7 - 1]}.")] if rng.random() < 0.5 else []),
        ]
    if kind == 3:
        return [
            rng.choice(
                (
                    ("How many days are in a week?", "There are seven days in a week."),
                    ("How many months are in a year?", "There are twelve months in a year."),
                    ("What are the days of the week?", "The days of the week are " + join(DAYS) + "."),
                    ("Name the seasons.", "The seasons are spring, summer, autumn and winter."),
                    ("How many hours are in a day?", "There are 24 hours in a day."),
                    ("How many minutes are in an hour?", "There are 60 minutes in an hour."),
                    ("What are the months of the year?", "The months are " + join(MONTHS) + "."),
                    ("How many seasons are there?", "There are four seasons: spring, summer, autumn and winter."),
                )
            )
        ]
    seasons = ["spring", "summer", "autumn", "winter"]
    j = rng.randrange(4)
    if kind == 4:
        return [(f"Which season comes after {seasons[j]}?", f"After {seasons[j]} comes {seasons[(j + 1) % 4]}.")]
    what_happens = {
        "spring": "the flowers bloom and the days get longer",
        "summer": "it is warm and the days are long",
        "autumn": "the leaves turn red and fall",
        "winter": "it is cold and it may snow",
    }
    return [
        (
            fill(rng, f"[what happens in {seasons[j]}|what is {seasons[j]} like|tell me about {seasons[j]}]?"),
            f"In {seasons[j]}, {what_happens[seasons[j]]}.",
        )
    ]


def colours(rng: random.Random, split: Split) -> list[Turn]:
    """Colours of things and mixes."""
    if rng.random() < 0.35:
        (a, b), mixed = rng.choice(list(MIXES.items()))
        a, b = (a, b) if rng.random() < 0.5 else (b, a)
        return [
            (
                fill(rng, f"[what colour do you get|what do you get] when you mix {a} and {b}?"),
                f"When you mix {a} and {b}, you get {mixed}.",
            )
        ]
    if rng.random() < 0.5:
        thing, colour = rng.choice(list(COLOUR_OF.items()))
    else:
        food = rng.choice(lex.FOODS)
        thing, colour = food.some.removeprefix("some "), food.colour
    return [(f"What colour is {thing}?", fill(rng, f"[{thing} is {colour}.|it is {colour}.]"))]


def food(rng: random.Random, split: Split) -> list[Turn]:
    """What kind of food something is and how it tastes."""
    f = rng.choice(lex.FOODS)
    one = f.some.removeprefix("some ")
    kind = rng.randrange(4)
    if kind == 0:
        return [
            (
                f"Is {one} a fruit?",
                f"Yes, {one} is a fruit." if f.kind == "fruit" else f"No, {one} is {article(f.kind)}.",
            )
        ]
    if kind == 1:
        return [
            (f"How does {one} taste?", fill(rng, f"{one} tastes {f.taste}.")),
            *([("What colour is it?", f"It is {f.colour}.")] if rng.random() < 0.5 else []),
        ]
    if kind == 2:
        return [
            (
                f"What is {one}?",
                fill(rng, f"{one} is {article(f.kind)}. [it is {f.colour} and tastes {f.taste}.|it tastes {f.taste}.]"),
            )
        ]
    many = [x.many for x in lex.FOODS if x.kind == f.kind]
    if len(many) < 4:
        return [(f"Do you like {f.many}?", fill(rng, f"I cannot eat, but many people like {f.many}."))]
    count = rng.choice((2, 3, 3, 4))
    plural = {"baked food": "baked foods"}.get(f.kind, f.kind + "s")
    picked = rng.sample(many, min(count, len(many)))
    return [
        (
            fill(rng, f"[name|tell me|give me] {('two', 'three', 'four')[len(picked) - 2]} {plural}."),
            fill(rng, join(picked) + "."),
        )
    ]


def name_some(rng: random.Random, split: Split) -> list[Turn]:
    """Lists of things, in a sentence or numbered."""
    pool, label = rng.choice(
        [
            ([a.many for a in ANIMALS], "animals"),
            (lex.COLOURS, "colours"),
            ([f.many for f in lex.FOODS if f.kind == "fruit"], "fruits"),
            ([t.name for t in lex.THINGS], "toys or things"),
            ([a.many for a in ANIMALS if a.group == "bird"], "birds"),
            ([a.many for a in ANIMALS if a.group == "insect"], "insects"),
            ([a.many for a in ANIMALS if "on a farm" in a.home], "farm animals"),
            (lex.GIRLS, "names for girls"),
            (lex.BOYS, "names for boys"),
            ([f.many for f in lex.FOODS if f.kind == "vegetable"], "vegetables"),
            ([a.many for a in ANIMALS if "swim" in a.can], "animals that can swim"),
            ([a.many for a in ANIMALS if "fly" in a.can], "animals that can fly"),
            (lex.ROLES[:11], "jobs"),
            (["spring", "summer", "autumn", "winter"], "seasons"),
            (DAYS, "days"),
            (MONTHS, "months"),
        ]
    )
    count = min(rng.randint(2, 5), len(pool))
    picked = rng.sample(list(pool), count)
    word = ("", "", "two", "three", "four", "five")[count]
    if rng.random() < 0.35:
        return [
            (
                fill(rng, f"[list|make a list of|write a list of] {word} {label}."),
                "\n".join(f"{i}. {x[0].upper() + x[1:]}" for i, x in enumerate(picked, 1)),
            )
        ]
    turns = [
        (fill(rng, f"[name|tell me|give me] {rng.choice((word, str(count)))} {label}."), fill(rng, join(picked) + "."))
    ]
    if rng.random() < 0.15:
        again = rng.sample(lex.COLOURS if label != "colours" else [f.many for f in lex.FOODS if f.kind == "fruit"], 3)
        ask = fill(rng, f"[and|now] [three|3] {'fruits' if label == 'colours' else 'colours'}") + rng.choice(
            (".", "?", "")
        )
        turns.append((ask, fill(rng, join(again) + ".")))
    elif count < len(pool) and rng.random() < 0.25:
        more = rng.choice([x for x in pool if x not in picked])
        turns.append(
            (rng.choice(("One more, please.", "And another one?", "Can you name one more?")), fill(rng, f"{more}."))
        )
    return turns


def uses(rng: random.Random, split: Split) -> list[Turn]:
    """What things are for and made of, what people do, what to wear."""
    kind = rng.randrange(5)
    if kind == 0:
        thing, use = rng.choice(list(USED_FOR.items()))
        if thing in ("scissors", "glue", "soap"):
            return [
                (
                    f"What {'are' if thing == 'scissors' else 'is'} {thing} for?",
                    fill(rng, f"{thing} {'are' if thing == 'scissors' else 'is'} for {use}."),
                )
            ]
        return [
            (
                fill(
                    rng,
                    f"[what is {article(thing)} for|what do you use {article(thing)} for|what do we need {article(thing)} for]?",
                ),
                fill(rng, f"[{article(thing)} is for {use}.|you use {article(thing)} for {use}.]"),
            )
        ]
    if kind == 1:
        thing, material = rng.choice(list(MADE_OF.items()))
        return [(f"What is {thing} made of?", fill(rng, f"{thing} is made of {material}."))]
    if kind == 2:
        job, does = rng.choice(list(JOBS.items()))
        if rng.random() < 0.35:
            return [(f"Who {does}?", fill(rng, f"{article(job)} {does}."))]
        return [(f"What does {article(job)} do?", fill(rng, f"{article(job)} {does}."))]
    if kind == 3:
        day, wear = rng.choice(list(WEATHER_ADVICE.items()))
        return [
            (
                fill(
                    rng,
                    f"[what should I wear|what do I wear|what can I wear] [on {article(day)} day|when it is {day}]?",
                ),
                fill(rng, f"[on {article(day)} day, you should wear {wear}.|wear {wear}.]"),
            )
        ]
    question, answer = rng.choice(list(WHY.items()))
    return [(question[0].upper() + question[1:] + rng.choice(("?", "?", "")), answer)]


TOPICS: list[tuple[Topic, float]] = [
    (animal, 3.0),
    (compare, 1.5),
    (opposites, 1.2),
    (calendar, 1.2),
    (colours, 1.0),
    (food, 1.2),
    (name_some, 1.5),
    (uses, 2.5),
]
