"""Chat about numbers and letters: sums under twenty, counting, comparing, spelling, word games."""

# ruff: noqa: E501 (one template a line reads best)
from __future__ import annotations

import random

from . import lexicon as lex
from .animals import ANIMALS
from .chat_facts import Topic, Turn
from .engine import article, fill
from .splits import Split, draw

WORDS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SPELLED = sorted(
    {
        w
        for w in [a.kind for a in ANIMALS]
        + [t.name for t in lex.THINGS]
        + [f.name for f in lex.FOODS]
        + lex.COLOURS
        + [x.lower() for x in lex.GIRLS + lex.BOYS]
        + [
            "house",
            "tree",
            "water",
            "sun",
            "moon",
            "star",
            "friend",
            "school",
            "happy",
            "garden",
            "winter",
            "summer",
            "window",
            "table",
            "apple",
            "river",
            "night",
            "bread",
            "letter",
        ]
        if " " not in w and "-" not in w and len(w) <= 8
    }
)
SHAPES = {"triangle": 3, "square": 4, "rectangle": 4, "pentagon": 5, "hexagon": 6}


def _sum(rng: random.Random, split: Split) -> tuple[int, str, int, int]:
    def make(rng: random.Random) -> tuple[int, str, int, int]:
        sign = rng.choice(("plus", "plus", "minus", "times"))
        if sign == "plus":
            a = rng.randint(0, 20)
            b = rng.randint(0, 20 - a)
            return a, sign, b, a + b
        if sign == "minus":
            a = rng.randint(0, 20)
            b = rng.randint(0, a)
            return a, sign, b, a - b
        a = rng.randint(1, 10)
        b = rng.randint(1, max(1, 20 // a))
        return a, sign, b, a * b

    return draw(rng, split, make, lambda x: x[:3])


def sums(rng: random.Random, split: Split) -> list[Turn]:
    """One to three sums, in figures or words."""
    turns: list[Turn] = []
    for index in range(rng.choice((1, 1, 1, 2, 3))):
        a, sign, b, c = _sum(rng, split)
        if rng.random() < 0.3:
            shown = (WORDS[a], sign, WORDS[b], WORDS[c])
        else:
            shown = (
                str(a),
                sign if rng.random() < 0.4 else {"plus": "+", "minus": "-", "times": "x"}[sign],
                str(b),
                str(c),
            )
        left = " ".join(shown[:3])
        if shown[1] in "+-x" and rng.random() < 0.4:  # as people type it: 3+4
            left = left.replace("x", rng.choice("x*")).replace(" ", "" if rng.random() < 0.8 else " ")
        ask = (
            f"[what is {left}|how much is {left}|{left} is|{left} =|{left}=|{left}|can you tell me what {left} is]"
            if index == 0
            else f"[and {left}|what about {left}|and what is {left}|{left}|what is {left}]"
        )
        said = f"{shown[0]} {sign if shown[1] in '+-x' and rng.random() < 0.5 else shown[1]} {shown[2]}"
        turns.append(
            (
                fill(rng, ask) + rng.choice(("?", "?", "")),
                fill(rng, f"[{said} is {shown[3]}.|{shown[3]}.|that is {shown[3]}.|the answer is {shown[3]}.]"),
            )
        )
    return turns


def too_big(rng: random.Random, split: Split) -> list[Turn]:
    """Sums beyond what the model can do."""
    a, b = rng.randint(16, 999), rng.randint(16, 999)
    sign = rng.choice(("plus", "+", "minus", "-", "times", "x", "divided by"))
    ask = fill(rng, f"[what is|how much is|can you tell me what] {a} {sign} {b}")
    if sign in "+-x" and rng.random() < 0.4:
        ask = ask.replace(f" {sign} ", sign)
    if "can you" in ask.lower():
        ask += " is"
    answer = "[that is too big for me. I can only count to twenty.|I am sorry, I can only do sums up to twenty.|I do not know. Such big numbers are too hard for me.]"
    return [(ask + rng.choice(("?", "?", "")), fill(rng, answer))]


def word_problem(rng: random.Random, split: Split) -> list[Turn]:
    """Apples given and eaten."""
    a = rng.randint(2, 12)
    food = rng.choice([f for f in lex.FOODS if f.name != f.many])
    who = rng.choice(lex.GIRLS + lex.BOYS)
    if rng.random() < 0.5:
        b = rng.randint(1, a - 1)
        text, result, how = (
            rng.choice(
                (
                    f"{who} has {a} {food.many} and eats {b}.",
                    f"there are {a} {food.many} on the table. {who} takes {b}.",
                    f"{who} has {a} {food.many} and gives {b} to a friend.",
                )
            ),
            a - b,
            f"{a} minus {b} is {a - b}",
        )
        ask = "how many are left?"
    else:
        b = rng.randint(1, 20 - a)
        text, result, how = (
            rng.choice(
                (
                    f"{who} has {a} {food.many} and gets {b} more.",
                    f"{who} has {a} {food.many}. A friend brings {b} more.",
                    f"there are {a} {food.many} in a basket. {who} puts in {b} more.",
                )
            ),
            a + b,
            f"{a} plus {b} is {a + b}",
        )
        ask = rng.choice(("how many are there now?", f"how many {food.many} are there now?"))
    verb = "is" if result == 1 else "are"
    noun = food.name if result == 1 else food.many
    return [
        (
            fill(rng, f"{text} {ask}"),
            fill(
                rng,
                f"[{how}. there {verb} {result} {noun}{' left' if 'left' in ask else ' now'}.|there {verb} {result} {noun}{' left' if 'left' in ask else ' now'}.|{how}.]",
            ),
        )
    ]


def counting(rng: random.Random, split: Split) -> list[Turn]:
    """Count up, down, what comes next, which is more, even or odd."""
    kind = rng.randrange(6)
    n = rng.randint(0, 19)
    if kind == 0:
        a = rng.randint(0, 12)
        b = a + rng.randint(3, 8)
        back = rng.random() < 0.3
        numbers = range(b, a - 1, -1) if back else range(a, b + 1)
        words = b <= 20 and rng.random() < 0.4
        if rng.random() < 0.35:
            b = rng.randint(3, 20)
            up = ", ".join(str(x) for x in range(1, b + 1)) + "."
            down = ", ".join(str(x) for x in range(b, 0, -1)) + "."
            ask = fill(rng, f"[count|please count|can you count] to {rng.choice((WORDS[b], str(b)))}.")
            more = [(rng.choice(("Now backwards.", "And backwards?", "now backwards", "Now count back.")), down)]
            return [(ask, up), *(more if rng.random() < 0.5 else [])]
        if rng.random() < 0.25:
            up = ", ".join(str(x) for x in range(a, b + 1)) + "."
            down = ", ".join(str(x) for x in range(b, a - 1, -1)) + "."
            return [
                (f"Count from {a} to {b}.", up),
                (rng.choice(("Now backwards.", "And backwards?", "now backwards")), down),
            ]
        return [
            (
                f"Count from {b if back else a} to {a if back else b}.",
                fill(rng, ", ".join(WORDS[x] if words else str(x) for x in numbers) + "."),
            )
        ]
    if kind == 1:
        return [(f"What number comes after {n}?", f"{n + 1} comes after {n}." if rng.random() < 0.6 else f"{n + 1}.")]
    if kind == 2:
        return [(f"What number comes before {n + 1}?", f"{n} comes before {n + 1}.")]
    if kind == 3:
        a, b = draw(rng, split, lambda r: r.sample(range(21), 2), lambda x: ("more", *x))
        return [
            (
                fill(rng, f"[which is more|what is more|which number is bigger], {a} or {b}?"),
                f"{max(a, b)} is {'bigger' if rng.random() < 0.5 else 'more'} than {min(a, b)}.",
            )
        ]
    if kind == 4:
        return [(f"Is {n} even or odd?", f"{n} is {'odd' if n % 2 else 'even'}.")]
    shape, sides = rng.choice(list(SHAPES.items()))
    return [
        (
            fill(rng, f"how many [sides|corners] does {article(shape)} have?"),
            fill(rng, f"{article(shape)} has {WORDS[sides]} sides and {WORDS[sides]} corners."),
        )
    ]


def letters(rng: random.Random, split: Split) -> list[Turn]:
    """Spelling and the alphabet."""
    kind = rng.randrange(6)
    word = draw(rng, split, lambda r: r.choice(SPELLED), lambda w: ("spell", w))
    if kind <= 1:
        return [
            (
                fill(rng, f"[how do you spell {word}|spell {word}|can you spell the word {word}|spell the word {word}]")
                + rng.choice(("?", ".", "")),
                fill(rng, f"[{'-'.join(word.upper())}.|{word} is spelled {'-'.join(word.upper())}.]"),
            )
        ]
    if kind == 2:
        i = rng.randrange(25)
        if rng.random() < 0.5:
            return [(f"What letter comes after {LETTERS[i]}?", f"{LETTERS[i + 1]} comes after {LETTERS[i]}.")]
        return [(f"What letter comes before {LETTERS[i + 1]}?", f"{LETTERS[i]} comes before {LETTERS[i + 1]}.")]
    if kind == 3:
        return [(f"What is the first letter of {word}?", f"The first letter of {word} is {word[0].upper()}.")]
    if kind == 4:
        return [
            (
                f"How many letters does the word {word} have?",
                fill(rng, f"the word {word} has {WORDS[len(word)]} letters: {'-'.join(word.upper())}."),
            )
        ]
    return [("Say the alphabet.", "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z.")]


def word_games(rng: random.Random, split: Split) -> list[Turn]:
    """Repeat, first and last of a list, sentences with a word."""
    pool = [a.kind for a in ANIMALS] + [t.name for t in lex.THINGS] + [f.name for f in lex.FOODS]
    items = rng.sample(pool, rng.randint(2, 4))
    kind = rng.randrange(6)
    if kind == 0:
        text = fill(
            rng,
            "[the {a} is {col}|I like {b}|hello {n}|my {a} and my {b}|a {a}, a {b}|{n} has {a a}]",
            {"a": items[0], "b": items[1], "col": rng.choice(lex.COLOURS), "n": rng.choice(lex.GIRLS + lex.BOYS)},
        )
        return [
            (
                rng.choice(("Say: ", "Repeat: ", "Repeat after me: ", "Please say: ")) + text,
                text + ("" if text.endswith(".") else "."),
            )
        ]
    if kind == 1:
        which = rng.choice(("first", "last"))
        return [
            (
                f"What is the {which} word in this list: {', '.join(items)}?",
                f"The {which} word is {items[0] if which == 'first' else items[-1]}.",
            )
        ]
    if kind == 2:
        return [
            (
                f"How many words are in this list: {', '.join(items)}?",
                f"There are {WORDS[len(items)]} words in the list.",
            )
        ]
    if kind == 3:
        return [(f"Say this list backwards: {', '.join(items)}.", fill(rng, ", ".join(reversed(items)) + "."))]
    who = rng.choice(lex.GIRLS + lex.BOYS)
    a = items[0]
    if kind == 4:
        sentence = fill(
            rng,
            "[{n} has {a col} {a}.|the {a} is {spot} {place}.|yesterday, {n} saw {a a} {place}.|there is {a a} {place}.|{n} is looking for {a a}.]".replace(
                "{spot} ", ""
            ),
            {"n": who, "a": a, "col": rng.choice(lex.COLOURS), "place": rng.choice(lex.PLACES).at},
        )
        return [
            (
                fill(
                    rng,
                    f'[use the word {a} in a sentence|make a sentence with {a}|write a sentence with the word "{a}"|write a sentence about {article(a)}].',
                ),
                sentence,
            )
        ]
    colour = rng.choice(lex.COLOURS)
    return [
        (f"I have {article(colour)} {a}. What colour is my {a}?", f"Your {a} is {colour}."),
        *([("And what do I have?", f"You have {article(colour)} {a}.")] if rng.random() < 0.4 else []),
    ]


def remember(rng: random.Random, split: Split) -> list[Turn]:
    """Facts the user gave, asked for later."""
    who, what = (
        rng.choice(lex.GIRLS + lex.BOYS + [lex.made_up_name(rng)]),
        rng.choice(lex.ANIMAL_NAMES) if rng.random() < 0.5 else lex.made_up_name(rng),
    )
    a = rng.choice(ANIMALS)
    kind = rng.randrange(4)
    if kind == 0:
        return [
            (
                f"My {a.kind} is called {what}.",
                fill(rng, f"[what {{a fine}} name|that is {{a fine}} name] for {article(a.kind)}!"),
            ),
            (f"What is the name of my {a.kind}?", f"Your {a.kind} is called {what}."),
        ]
    if kind == 1:
        age = rng.randint(4, 12)
        return [
            (f"{who} is {age} years old. How old is {who}?", f"{who} is {age} years old."),
            *(
                [(f"How old will {who} be next year?", f"Next year, {who} will be {age + 1} years old.")]
                if rng.random() < 0.6
                else []
            ),
        ]
    if kind == 2:
        colour = rng.choice(lex.COLOURS)
        return [
            (f"My favourite colour is {colour}.", fill(rng, f"{colour} is {{a fine}} colour.")),
            (fill(rng, "what is my favourite colour?"), f"Your favourite colour is {colour}."),
        ]
    things = rng.sample([t.name for t in lex.THINGS], 2)
    return [
        (
            f"I have {article(things[0])} and {article(things[1])}. What do I have?",
            f"You have {article(things[0])} and {article(things[1])}.",
        ),
        *([("What did I say first?", f"First you said {article(things[0])}.")] if rng.random() < 0.3 else []),
    ]


TOPICS: list[tuple[Topic, float]] = [
    (sums, 5.0),
    (too_big, 0.7),
    (word_problem, 1.5),
    (counting, 2.0),
    (letters, 1.5),
    (word_games, 1.8),
    (remember, 1.5),
]
