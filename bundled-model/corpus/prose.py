"""Plain prose: how things work, scenes in the present tense, letters, diaries, recipes, small rhymes."""

# ruff: noqa: E501 (one template a line reads best)
from __future__ import annotations

import random

from . import lexicon as lex
from .animals import ANIMALS
from .chat_facts import about
from .engine import Page, article, fill
from .facts import JOBS, USED_FOR, WEATHER_ADVICE, WHY
from .splits import Split

_RHYMES = [
    ("day", "play"),
    ("night", "light"),
    ("tree", "bee"),
    ("sky", "fly"),
    ("moon", "soon"),
    ("sun", "fun"),
    ("rain", "again"),
    ("snow", "slow"),
    ("star", "far"),
    ("sea", "me"),
    ("house", "mouse"),
    ("boat", "float"),
    ("cat", "hat"),
    ("bed", "red"),
    ("ring", "sing"),
    ("hill", "still"),
    ("blue", "you"),
    ("green", "seen"),
    ("king", "spring"),
    ("bell", "well"),
]
_LINES = {
    "day": "it is {a fine} and sunny day",
    "play": "come out, come out, and let us play",
    "night": "the world is quiet in the night",
    "light": "the window shows a little light",
    "tree": "there is a nest high in the tree",
    "bee": "and in the garden hums a bee",
    "sky": "a cloud goes slowly through the sky",
    "fly": "I wish that I could learn to fly",
    "moon": "above the roof there hangs the moon",
    "soon": "the morning will be coming soon",
    "sun": "the {animal} is lying in the sun",
    "fun": "and every game is full of fun",
    "rain": "I hear the drip, drip of the rain",
    "again": "tomorrow we will play again",
    "snow": "the {animal} walks gently through the snow",
    "slow": "the winter days are long and slow",
    "star": "I see a small and silver star",
    "far": "my friend has gone away so far",
    "sea": "a ship is sailing on the sea",
    "me": "and brings {a colour} shell to me",
    "house": "there is {a colour} little house",
    "mouse": "and in it lives a little mouse",
    "boat": "I made myself {a colour} boat",
    "float": "and on the pond I let it float",
    "cat": "I know a very clever cat",
    "hat": "that likes to wear {a colour} hat",
    "bed": "the {animal} is sleeping in its bed",
    "red": "the evening sky is turning red",
    "ring": "I hear the bells begin to ring",
    "sing": "and all the birds begin to sing",
    "hill": "the {animal} is sitting on the hill",
    "still": "the wind has stopped, the air is still",
    "blue": "the lake is deep, the lake is blue",
    "you": "I picked {a colour} flower for you",
    "green": "the fields are wide, the fields are green",
    "seen": "the best that I have ever seen",
    "king": "the {animal} is dancing like a king",
    "spring": "because at last it now is spring",
    "bell": "I hear the ringing of a bell",
    "well": "good night, my friend, and sleep you well",
}


def rhyme(rng: random.Random, animal: str | None = None) -> str:
    """Return four lines in couplets, about the animal if one is given."""
    slots: dict[str, object] = {"animal": animal or rng.choice([a.kind for a in ANIMALS if 2 <= a.size <= 8])}
    pairs = rng.sample(_RHYMES, 2)
    while animal and not any("{animal}" in _LINES[word] for word in pairs[0]):
        pairs = rng.sample(_RHYMES, 2)
    lines = [fill(rng, _LINES[word], slots) for pair in pairs for word in pair]
    return f"{lines[0]},\n{lines[1]}.\n{lines[2]},\n{lines[3]}."


def recipe(rng: random.Random) -> tuple[str, str]:
    """Return a dish and how to make it, in steps."""
    a, b = rng.sample([f for f in lex.FOODS if f.kind in ("fruit", "vegetable")], 2)
    dish, verb, end = rng.choice(
        (
            ("salad", "cut", "add a little salt and mix everything"),
            ("soup", "cook", "add salt and water and let it boil for {n} minutes"),
            ("pie", "put the dough over", "bake it for {n} minutes"),
        )
    )
    minutes = rng.choice((10, 15, 20, 25, 30, 40))
    steps = [
        f"Wash the {a.many} and the {b.many}.",
        f"{verb[0].upper() + verb[1:]} the {a.many} and the {b.many}.",
        f"{end[0].upper() + end[1:].format(n=minutes)}.",
        rng.choice(("Serve it warm.", "Enjoy your meal.", "Share it with a friend.")),
    ]
    name = f"{a.name} and {b.name} {dish}"
    return name, "\n".join(f"{i}. {s}" for i, s in enumerate(steps, 1))


def scene(rng: random.Random) -> str:
    """Return a scene in the present tense."""
    place = rng.choice(lex.PLACES)
    who, other = rng.sample(lex.GIRLS, 1) + rng.sample(lex.BOYS, 1)
    page = Page(
        rng,
        {
            "a": who,
            "b": other,
            "place": place,
            "thing": rng.choice(lex.THINGS),
            "col": rng.choice(lex.COLOURS),
            "sight": rng.choice(place.sights),
            "spot": rng.choice(place.spots),
            "food": rng.choice(lex.SNACKS),
            "an": rng.choice([x for x in ANIMALS if x.size <= 5]),
        },
    )
    page.say(
        "it is [early morning|noon|a warm afternoon|evening|a cold {day}].",
        "it is {day} {place.at}.",
        "today the sky is [blue|grey|clear].",
    )
    page.say(
        "{a} and {b} are {place.at}.",
        "{a} is sitting {spot}. {b} is beside her.",
        "{a} is walking {place.at} with {b}.",
    )
    page.say(
        "they look at {sight}.",
        "everything is quiet.",
        "the air smells of {flower}s.",
        "somewhere, {a an} is making a noise.",
    )
    page.say("{b} has {a col} {thing}.", "{b} sees {a an} {spot}.", "{a} has {food.some} in her bag.")
    page.say(
        '"what are you doing?" asks {a}. "I am [looking at|listening to] the {an}," says {b}.',
        '"are you hungry?" {a} asks. {b} nods, and they share {food.some}.',
        '"can you hear it?" {b} whispers. {a} holds her breath and listens.',
    )
    page.say(
        "then the wind comes up, and leaves fly through the air.",
        "a small {an} comes closer and closer.",
        "suddenly it begins to rain, and they run under a roof.",
        "they sit and say nothing for a while.",
    )
    page.say(
        "it is a moment that they will not forget.",
        "they laugh and go home.",
        "soon it will be dark.",
        "tomorrow they will come again.",
        "they are {happy}.",
    )
    return page.text()


def letter(rng: random.Random) -> str:
    """Return a letter or a diary entry."""
    place = rng.choice(lex.PLACES)
    page = Page(
        rng,
        {
            "place": place,
            "thing": rng.choice(lex.THINGS),
            "col": rng.choice(lex.COLOURS),
            "sight": rng.choice(place.sights),
            "food": rng.choice(lex.SNACKS),
            "f": rng.choice(lex.GIRLS + lex.BOYS),
            "an": rng.choice(ANIMALS),
        },
    )
    page.say(
        "[how are you|I hope you are well]? I am {happy}.",
        "today I was {place.at}.",
        "today was {a fine} day.",
        "I have so much to tell you.",
    )
    page.say(
        "I saw {sight}.",
        "we ate {food.many} and drank [milk|tea|water].",
        "{f} gave me {a col} {thing}.",
        "it [rained|snowed|was sunny] all day.",
    )
    page.say(
        "yesterday we saw {a an}.",
        "in the morning we went to {place}.",
        "I learned how to [swim|bake bread|row a boat|whistle].",
        "I met {f} there, and we played for hours.",
    )
    page.say(
        "tomorrow we will [go to {place}|make a cake|build a tree house|stay at home].",
        "next week I will [visit {f}|start school again|have a birthday].",
        "I wish that you were here.",
    )
    if rng.random() < 0.5:
        page.say("please write soon.", "I miss you.", "see you soon.")
        to, by = rng.choice((rng.choice(lex.GIRLS + lex.BOYS), "Grandmother", "Mum")), rng.choice(lex.GIRLS + lex.BOYS)
        return f"Dear {to},\n\n{page.text()}\n\n{rng.choice(('Love', 'Yours', 'Your friend'))},\n{by}"
    return f"Dear diary,\n\n{page.text()}"


def weather(rng: random.Random) -> str:
    """Return a little weather report."""
    now, later = rng.sample(["sunny", "rainy", "windy", "snowy", "cloudy", "foggy", "cold", "warm"], 2)
    page = Page(
        rng,
        {
            "now": now,
            "later": later,
            "n": rng.randint(-5, 30),
            "place": rng.choice(lex.PLACES),
            "wear": WEATHER_ADVICE.get(now, "a jacket"),
        },
    )
    page.say("the weather today is {now}.", "today it is {now}.", "it is {now} today.", "on {day}, it will be {now}.")
    page.say(
        "it is {n} degrees {place.at}.",
        "the wind comes from the [north|south|east|west].",
        "there are [no|a few|many] clouds in the sky.",
        "you should wear {wear}.",
    )
    page.say("tomorrow it will be {later}.", "in the evening it will be {later}.", "the next days will be {later}.")
    return page.text()


def plain(rng: random.Random, split: Split) -> str:
    """Return one piece of prose."""
    luck = rng.random()
    if luck < 0.08:
        return weather(rng)
    if luck < 0.3:
        return scene(rng)
    if luck < 0.5:
        return letter(rng)
    if luck < 0.65:
        a = rng.choice(ANIMALS)
        return rng.choice((f"About {a.many}\n\n", f"{a.many[0].upper() + a.many[1:]}\n\n", "")) + about(rng, a)
    if luck < 0.75:
        question, answer = rng.choice(list(WHY.items()))
        return f"{question[0].upper() + question[1:]}?\n\n{answer}"
    if luck < 0.85:
        name, steps = recipe(rng)
        return f"Recipe: {name[0].upper() + name[1:]}\n\n{steps}"
    if luck < 0.93:
        return rhyme(rng)
    job, does = rng.choice(list(JOBS.items()))
    thing, use = rng.choice(list(USED_FOR.items()))
    return fill(
        rng,
        f"{article(job)} {does}. {rng.choice(lex.GIRLS)} is {article(job)}. [she loves her work|she works every day|she gets up early]. in her bag there is [{'some ' + thing if thing in ('scissors', 'glue', 'soap') else article(thing)}]. it is for {use}."
        if thing != "scissors"
        else f"{article(job)} {does}.",
    )


def request(rng: random.Random) -> tuple[str, str]:
    """Return a chat request for prose and the answer."""
    luck = rng.random()
    if luck < 0.12:
        a = rng.choice([x for x in ANIMALS if 2 <= x.size <= 8])
        ask = f"[write|tell me|make] [a poem|a rhyme|a short poem|me a poem] about [{article(a.kind)}|{a.many}]."
        return fill(rng, ask), rhyme(rng, a.kind)
    if luck < 0.25:
        return fill(rng, "[write|tell me|make] [a poem|a rhyme|a short poem]."), rhyme(rng)
    if luck < 0.45:
        name, steps = recipe(rng)
        return fill(rng, f"[how do I make|how do you make|give me a recipe for] {article(name)}?"), steps
    if luck < 0.6:
        return fill(rng, "[write|make up] [a letter|a letter to a friend|a short letter]."), letter_text(rng)
    if luck < 0.75:
        return fill(rng, "[describe a scene|write a short scene|describe a place]."), scene(rng)
    a = rng.choice(ANIMALS)
    return fill(rng, f"[write|tell me] [a few sentences|something|a short text] about {a.many}."), about(rng, a)


def letter_text(rng: random.Random) -> str:
    """Return a letter (not a diary entry)."""
    text = letter(rng)
    while text.startswith("Dear diary"):
        text = letter(rng)
    return text
