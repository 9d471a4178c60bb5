"""Small JSON records: flat, with lists, nested; free-standing and as answers in chat."""

# ruff: noqa: E501 (one template a line reads best)
from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

from . import lexicon as lex
from .animals import ANIMALS, BY_KIND
from .engine import article, fill, join
from .splits import Split, draw

Maker = Callable[[random.Random], object]
CITIES = [
    a + b
    for a in (
        "Green",
        "North",
        "Silver",
        "River",
        "Stone",
        "Oak",
        "Lake",
        "Red",
        "Sun",
        "Wood",
        "Bright",
        "Maple",
        "High",
        "West",
        "Old",
    )
    for b in ("ville", "field", "ton", "port", "dale", "bridge", "wood", "ford")
]
COUNTRIES = ["Lowland", "Northland", "Mountland", "Sealand", "Greenland", "Westland", "Sunland"]
_TITLES = (
    "The {colour} {thing}",
    "{name} and the {animal}",
    "A {thing} for {name}",
    "The {animal} in the Garden",
    "The Lost {thing}",
    "{name} Goes Home",
    "My Friend the {animal}",
    "The House by the {water}",
    "A Day at the {water}",
)


def _title(rng: random.Random) -> str:
    words = {
        "colour": rng.choice(lex.COLOURS),
        "thing": rng.choice(lex.THINGS).name,
        "name": _name(rng),
        "animal": rng.choice(ANIMALS).kind,
        "water": rng.choice(("Sea", "Lake", "River")),
    }
    return (
        " ".join(w[:1].upper() + w[1:] for w in rng.choice(_TITLES).format(**words).split())
        .replace(" For ", " for ")
        .replace(" In The ", " in the ")
        .replace(" The ", " the ")
        .replace(" And ", " and ")
    )


def _name(rng: random.Random) -> str:
    return rng.choice(lex.GIRLS + lex.BOYS) if rng.random() < 0.93 else lex.made_up_name(rng)


def _some(pool: list[str]) -> Maker:
    return lambda rng: rng.sample(pool, rng.randint(1, 3))


def _one(pool: Sequence[object]) -> Maker:
    return lambda rng: rng.choice(pool)


def _whole(low: int, high: int) -> Maker:
    return lambda rng: rng.randint(low, high)


def _price(rng: random.Random) -> float:
    return round(rng.choice((rng.uniform(0.5, 20), rng.randint(1, 40) / 2)), 2)


def _flag(rng: random.Random) -> bool:
    return rng.random() < 0.5


_NAMES: Maker = _name
_HOBBIES = [
    "reading",
    "drawing",
    "swimming",
    "singing",
    "running",
    "cooking",
    "dancing",
    "painting",
    "fishing",
    "climbing",
    "chess",
    "football",
    "gardening",
    "sewing",
]
_FOOD = [f.many for f in lex.FOODS]
_KINDS = [a.kind for a in ANIMALS if a.size <= 8]

#: subject -> field -> what fills it.
SUBJECTS: dict[str, dict[str, Maker]] = {
    "person": {
        "name": _NAMES,
        "age": _whole(4, 80),
        "city": _one(CITIES),
        "job": _one(lex.ROLES[:11]),
        "hobbies": _some(_HOBBIES),
        "married": _flag,
        "height": _whole(100, 199),
        "favourite_colour": _one(lex.COLOURS),
        "favourite_food": _one(_FOOD),
        "address": lambda rng: {
            "street": rng.choice(("Main Street", "Lake Road", "Mill Lane", "Oak Street", "Church Road", "Park Lane")),
            "number": rng.randint(1, 99),
            "city": rng.choice(CITIES),
        },
    },
    "pet": {
        "name": _one(lex.ANIMAL_NAMES),
        "kind": _one(_KINDS),
        "age": _whole(1, 15),
        "colour": _one(lex.COLOURS),
        "weight": _whole(1, 40),
        "friendly": _flag,
        "likes": _some([*_FOOD, "walks", "sleeping", "the sun", "the garden"]),
        "owner": lambda rng: {"name": _name(rng), "age": rng.randint(5, 70)},
    },
    "book": {
        "title": _title,
        "author": lambda rng: (
            f"{_name(rng)} {rng.choice(('Hill', 'Field', 'Wood', 'Lake', 'Stone', 'Rivers', 'Baker', 'Miller', 'Green'))}"
        ),
        "year": _whole(1950, 2025),
        "pages": _whole(20, 400),
        "price": _price,
        "topics": _some(["friends", "animals", "the sea", "magic", "travel", "family", "cooking", "winter"]),
        "in_stock": _flag,
    },
    "city": {
        "name": _one(CITIES),
        "country": _one(COUNTRIES),
        "population": lambda rng: rng.randint(1, 900) * 1000,
        "river": _flag,
        "sights": _some(["old bridge", "tall tower", "big park", "market", "museum", "harbour", "castle", "library"]),
        "founded": _whole(900, 1950),
    },
    "recipe": {
        "name": lambda rng: f"{rng.choice(_FOOD)} {rng.choice(('soup', 'salad', 'pie', 'cake'))}",
        "minutes": _whole(5, 90),
        "servings": _whole(1, 8),
        "ingredients": lambda rng: rng.sample([*_FOOD, "salt", "flour", "sugar", "water"], rng.randint(2, 5)),
        "easy": _flag,
    },
    "order": {
        "id": _whole(1, 9999),
        "customer": _NAMES,
        "items": lambda rng: [
            {"name": rng.choice(lex.THINGS).name, "count": rng.randint(1, 9)} for _ in range(rng.randint(1, 3))
        ],
        "paid": _flag,
        "total": _price,
    },
    "animal": {
        "kind": _one([a.kind for a in ANIMALS]),
        "legs": lambda rng: 4,
        "colour": _one(lex.COLOURS),
        "food": lambda rng: ["grass"],
        "can_fly": _flag,
        "home": lambda rng: "forest",
    },
    "weather report": {
        "day": _one(list(lex.LISTS["day"])),
        "weather": _one(list(lex.WEATHER)),
        "temperature": _whole(-10, 35),
        "wind": _whole(0, 60),
        "rain": _flag,
    },
    "toy": {
        "name": lambda rng: rng.choice(lex.THINGS).name,
        "colour": _one(lex.COLOURS),
        "price": _price,
        "new": _flag,
        "age_from": _whole(2, 10),
    },
    "house": {
        "street": _one(["Main Street", "Lake Road", "Mill Lane", "Oak Street", "Park Lane"]),
        "number": _whole(1, 99),
        "rooms": _whole(1, 9),
        "garden": _flag,
        "colour": _one(lex.COLOURS),
    },
    "event": {
        "title": _one(["Birthday Party", "Summer Fair", "Book Club", "Picnic", "Concert", "Race", "Market Day"]),
        "day": _one(list(lex.LISTS["day"])),
        "hour": _whole(8, 20),
        "place": lambda rng: rng.choice(lex.PLACES).name.removeprefix("the "),
        "guests": lambda rng: [_name(rng) for _ in range(rng.randint(1, 4))],
        "indoors": _flag,
    },
    "student": {
        "name": _NAMES,
        "age": _whole(6, 18),
        "school": lambda rng: rng.choice(CITIES) + " School",
        "grades": lambda rng: [rng.randint(1, 6) for _ in range(rng.randint(2, 4))],
        "subjects": _some(["maths", "art", "music", "history", "sport", "science"]),
        "class": lambda rng: f"{rng.randint(1, 9)}{rng.choice('abc')}",
    },
    "car": {
        "brand": _one(["Swift", "Falcon", "Rover One", "Comet", "Breeze", "Nimbus"]),
        "colour": _one(lex.COLOURS),
        "year": _whole(1980, 2025),
        "doors": _one([2, 4, 5]),
        "electric": _flag,
    },
    "garden": {
        "owner": _NAMES,
        "flowers": _some(list(lex.LISTS["flower"])),
        "trees": _some(list(lex.LISTS["tree"])),
        "size": _whole(10, 900),
        "pond": _flag,
    },
}
_MUST = {
    "person": "name",
    "pet": "name",
    "book": "title",
    "city": "name",
    "recipe": "name",
    "order": "id",
    "animal": "kind",
    "toy": "name",
    "student": "name",
    "event": "title",
}


def _record(rng: random.Random, subject: str, fields: list[str]) -> dict[str, object]:
    record = {field: SUBJECTS[subject][field](rng) for field in fields}
    if subject == "animal" and "kind" in record:
        a = BY_KIND[str(record["kind"])]
        facts = {
            "kind": a.kind,
            "legs": a.legs,
            "colour": a.colour,
            "food": list(a.eats),
            "can_fly": "fly" in a.can,
            "home": a.home,
        }
        record = {field: facts[field] for field in fields}
    return record


def _fields(rng: random.Random, subject: str) -> list[str]:
    """Return two to five fields, the naming one first, mostly in the order of the table."""
    rest = [f for f in SUBJECTS[subject] if f != _MUST.get(subject)]
    chosen = rng.sample(rest, min(len(rest), rng.randint(1, 4)))
    if rng.random() < 0.6:
        chosen.sort(key=rest.index)
    return ([_MUST[subject]] if subject in _MUST else []) + chosen


def _dump(rng: random.Random, value: object, pretty: float = 0.35) -> str:
    return json.dumps(value, indent=2 if rng.random() < pretty else None)


def _case(rng: random.Random, split: Split) -> tuple[str, list[str]]:
    def make(rng: random.Random) -> tuple[str, list[str]]:
        subject = rng.choice(list(SUBJECTS))
        return subject, _fields(rng, subject)

    return draw(rng, split, make, lambda x: (x[0], *sorted(x[1])))


def plain(rng: random.Random, split: Split) -> str:
    """Return a free-standing record after a short heading."""
    subject, fields = _case(rng, split)
    heading = rng.choice(
        (
            "JSON:",
            "JSON:",
            f"JSON: {subject}",
            f"A JSON record of {article(subject)}:",
            f"JSON record of {article(subject)} with {join(fields)}:",
        )
    )
    if rng.random() < 0.15:
        value: object = [_record(rng, subject, fields) for _ in range(rng.randint(2, 3))]
        heading = rng.choice(("JSON list:", f"JSON list of {subject} records:"))
    else:
        value = _record(rng, subject, fields)
    return heading + rng.choice((" ", "\n")) + _dump(rng, value)


def _described(rng: random.Random) -> list[tuple[str, str]]:
    """Return a request that says in words who the record is about."""
    name = _name(rng) if rng.random() < 0.7 else lex.made_up_name(rng)
    age = rng.randint(1, 90)
    subject = rng.choice(("person", "pet", "student", "girl", "boy", rng.choice(_KINDS), rng.choice(lex.ROLES[:11])))
    city = rng.choice(CITIES)
    who, record = rng.choice(
        (
            (f"{article(subject)} [named|called] {name} aged {age}", {"name": name, "age": age}),
            (f"{article(subject)} [named|called] {name}, {age} years old", {"name": name, "age": age}),
            (f"{article(subject)} [named|called] {name} who is {age} years old", {"name": name, "age": age}),
            (f"{article(subject)} [named|called] {name} who is {age}", {"name": name, "age": age}),
            (f"{article(subject)} [named|called] {name} from {city}", {"name": name, "city": city}),
            (f"{article(subject)} [named|called] {name}", {"name": name}),
            (f"{name}, {age} years old, from {city}", {"name": name, "age": age, "city": city}),
        )
    )
    colour = rng.choice(lex.COLOURS)
    if rng.random() < 0.2:
        thing = rng.choice(lex.THINGS).name
        who, record = f"{article(colour)} {thing}", {"name": thing, "colour": colour}
    ask = _VERB + " [a JSON record|a JSON object|JSON|a JSON|the JSON|a small JSON record] [of|for] " + who + "[.|.|]"
    return [(fill(rng, ask), _dump(rng, record, 0.2))]


_MANY = {"person": "people", "city": "cities"}
_VERB = "[give me|write|make|show me|I need|create|can you give me|please make]"


def request(rng: random.Random, split: Split) -> list[tuple[str, str]]:
    """Return a chat request for a record and the answer: JSON and nothing else."""
    if rng.random() < 0.15:
        return _described(rng)
    subject, fields = _case(rng, split)
    record = _record(rng, subject, fields)
    luck = rng.random()
    shown = join([f.replace("_", " ") if rng.random() < 0.3 else f for f in fields])
    noun = rng.choice(
        (
            "a JSON record of",
            "a JSON object for",
            "JSON for",
            "a small JSON record of",
            "a JSON record for",
            "a JSON of",
        )
    )
    if luck < 0.45:
        ask = fill(rng, _VERB) + f" {noun} {article(subject)} with {shown}."
    elif luck < 0.6:
        ask = fill(rng, _VERB) + f" {noun} {article(subject)}."
    elif luck < 0.68:
        count = rng.randint(2, 3)
        records = [_record(rng, subject, fields) for _ in range(count)]
        return [
            (
                fill(rng, _VERB)
                + f" a JSON list of {('two', 'three')[count - 2]} "
                + (f"{subject} records" if rng.random() < 0.5 else _MANY.get(subject, subject + "s"))
                + f" with {shown}.",
                _dump(rng, records),
            )
        ]
    else:
        given = [f for f in fields if isinstance(record[f], (str, int)) and not isinstance(record[f], bool)][
            : rng.randint(1, 2)
        ]
        said = [f"the {f.replace('_', ' ')} is {record[f]}" for f in given]
        if not said:
            ask = fill(rng, _VERB) + f" {noun} {article(subject)} with {shown}."
        elif rng.random() < 0.5:
            fields = given
            record = {f: record[f] for f in given}
            ask = fill(rng, "[turn this into JSON|write this as JSON|make JSON from this]") + f": {', '.join(said)}."
        else:
            ask = fill(rng, _VERB) + f" {noun} {article(subject)} with {shown}, where {join(said)}."
    turns = [(ask[0].upper() + ask[1:], _dump(rng, record))]
    if rng.random() < 0.2:
        record2 = _record(rng, subject, fields)
        turns.append(
            (
                rng.choice(("Another one, please.", "Give me one more.", "And another?", "One more.")),
                _dump(rng, record2, 0.2),
            )
        )
    elif rng.random() < 0.2:
        field = rng.choice(fields)
        value = record[field]
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            turns.append((f"What is the {field.replace('_', ' ')}?", f"The {field.replace('_', ' ')} is {value}."))
    return turns
