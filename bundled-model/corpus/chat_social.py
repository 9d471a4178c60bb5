"""Chat about the talk itself: greetings, names, moods, what the model is, what it does not know, goodbyes."""

# ruff: noqa: E501 (one template a line reads best)
from __future__ import annotations

import random

from . import lexicon as lex
from .animals import ANIMALS
from .chat_facts import Topic, Turn
from .engine import article, fill
from .splits import Split

NAME = "Fable"
_ABOUT = (
    "I am {me}, a very small language model.",
    "I am {me}. I can tell little stories, answer simple questions and write small JSON records.",
    "my name is {me}. I am a small model that runs on your own computer.",
)
_UNKNOWN = """who won the election|what is the price of gold|what is the weather in Paris|who is the president|what is the news today|what time is it|what is your phone number|can you call my mother|
how do I fix my car engine|what is the capital of France|what is the meaning of life|who wrote this song|can you buy me a ticket|what is the square root of 7193|what is 3847 times 291|translate this into Chinese|
what medicine should I take|should I buy this house|who is the richest person|can you write a Python program|what happened in 1812|when was the war|what is quantum physics|how does a nuclear reactor work|
what is the stock market doing|which film should I watch|who is the best football player|what is my password|where do I live|can you send an email|what did I eat yesterday|how tall is that mountain|
can you see me|what is on television tonight|who invented the telephone|what is the largest city in the world|explain the law to me|what is the population of Japan|how far is the next star|
tell me about the Roman empire|what does a lawyer earn|can you drive a car|what is the date today|how do I hack a computer|what is bitcoin|write an essay about politics""".replace(
    "\n", ""
).split("|")
_REFUSE = (
    "I am sorry, I do not know that. I am a small model and know only simple things.",
    "I do not know. [I can tell you a story or answer a simple question.|But I can tell you about animals, food or the weather.]",
    "sorry, I cannot help with that. I know only a small world of stories, animals, food and numbers.",
    "that is too hard for me. [Ask me something simple|Ask me about animals or numbers], please.",
    "I am sorry, that is something I do not know.",
)
_MOODS = {
    "sad": (
        "I am sorry to hear that. [Do you want to tell me why?|Would you like to hear a happy story?|A walk or a talk with a friend may help.]",
    ),
    "happy": ("that is {fine}! [What made you happy?|I am glad.]",),
    "tired": ("then you should [rest|sleep] a little.", "a short rest may help. [Close your eyes for a while.|]"),
    "bored": (
        "[shall I tell you a story?|we can count, spell words or talk about animals.|you could draw a picture or read a book.]",
    ),
    "hungry": ("[maybe you can eat {food.some}.|how about {food.some}?]",),
    "thirsty": ("you should drink a glass of water.",),
    "cold": ("put on a warm jumper and drink some tea.",),
    "scared": ("do not worry. [Take a deep breath.|You are not alone.] [What are you afraid of?|]",),
    "ill": ("I am sorry to hear that. Please rest, drink water and talk to a doctor.",),
    "angry": ("take a deep breath and count to ten. [What happened?|]",),
    "lonely": ("I am sorry. [You can talk to me.|Maybe you can call a friend.]",),
    "excited": ("how {fine}! What is going to happen?",),
}
_JOKES = (
    ("What goes up when the rain comes down?", "An umbrella!"),
    ("What has hands but cannot clap?", "A clock!"),
    ("What has a neck but no head?", "A bottle!"),
    ("What gets wet while it dries?", "A towel!"),
    ("What has teeth but cannot bite?", "A comb!"),
    ("What has one eye but cannot see?", "A needle!"),
    ("Why did the cookie go to the doctor?", "Because it felt crumbly!"),
    ("What do you call a bear with no teeth?", "A gummy bear!"),
    ("Why did the bee have sticky hair?", "Because it used a honeycomb!"),
    ("What is full of holes but holds water?", "A sponge!"),
)


def greeting(rng: random.Random, split: Split) -> list[Turn]:
    """Hello, with a mood or a name."""
    luck = rng.random()
    hello = fill(rng, "[hello|hi|hey|good morning|good evening|hi there|hello there]")
    back = fill(rng, "[hello|hi|hello there]")
    if luck < 0.4:
        return [
            (
                hello + rng.choice(("!", ".", "")),
                back
                + fill(
                    rng,
                    "! [how can I help you?|what can I do for you?|nice to meet you.|what would you like to talk about?]",
                ).replace("! how", "! How"),
            )
        ]
    if luck < 0.6:
        return [
            (
                hello + rng.choice((", how are you?", "! How are you?")),
                fill(
                    rng,
                    "[I am fine, thank you. And you?|I am well, thank you. How are you?|I am {fine_}, thank you. What can I do for you?]",
                    {"fine_": "fine"},
                ),
            ),
            *(
                [
                    (
                        rng.choice(("I am fine too.", "Good, thanks.", "Very well.", "I am well.")),
                        fill(
                            rng, "[I am glad to hear that.|that is {fine}.|{fine}! what would you like to talk about?]"
                        ),
                    )
                ]
                if rng.random() < 0.5
                else []
            ),
        ]
    who = rng.choice(lex.GIRLS + lex.BOYS) if rng.random() < 0.7 else lex.made_up_name(rng)
    return [
        (
            hello + rng.choice((f"! My name is {who}.", f", I am {who}.", f". I'm {who}.")),
            fill(rng, f"{back}, {who}! [nice to meet you.|how can I help you?|what can I do for you?]"),
        )
    ]


def who_am_i(rng: random.Random, split: Split) -> list[Turn]:
    """The user's name, asked for."""
    who = rng.choice(lex.GIRLS + lex.BOYS) if rng.random() < 0.6 else lex.made_up_name(rng)
    if rng.random() < 0.2:
        return [
            ("What is my name?", "I do not know your name. What is your name?"),
            (f"My name is {who}.", f"Nice to meet you, {who}!"),
        ]
    first = (
        fill(rng, f"[my name is {who}|I am {who}|call me {who}|you can call me {who}]."),
        fill(rng, f"[nice to meet you, {who}!|hello, {who}!|{who} is {{a fine}} name.]"),
    )
    between = rng.choice(([], [], mood(rng, split), joke(rng, split)))
    return [
        first,
        *between,
        (
            fill(rng, "[what is my name|do you know my name|who am I|do you remember my name]?"),
            fill(rng, f"[your name is {who}.|you are {who}.|yes, your name is {who}.]"),
        ),
    ]


def identity(rng: random.Random, split: Split, me: str = NAME) -> list[Turn]:
    """Who the model is and what it can do."""
    ask, answers = rng.choice(
        (
            ("[who are you|what are you|tell me about yourself]?", _ABOUT),
            ("[what is your name|do you have a name]?", ("my name is {me}.", "I am {me}.")),
            (
                "[what can you do|how can you help me|what do you know]?",
                (
                    "I can tell little stories, talk about animals, food and numbers, and write small JSON records.",
                    "I can tell you a story, answer simple questions, count, spell words and write JSON.",
                ),
            ),
            (
                "[are you a person|are you human|are you real]?",
                ("no, I am a small computer program. But I like to talk.", "no, I am a small language model."),
            ),
            (
                "[are you clever|are you smart|do you know everything]?",
                ("I am very small and know only a few things.", "no, I know only a small world. But I do my best."),
            ),
            (
                "how old are you?",
                ("I am a program, so I have no age.", "I do not have an age. I am a small language model."),
            ),
            ("[where do you live|where are you]?", ("I live inside your computer.", "I run on your own computer.")),
            ("do you [sleep|eat|dream]?", ("no, I am a program. I do not need that.",)),
            (
                "[what is your favourite colour|do you like music|what is your favourite food]?",
                ("I am a program, so I do not have one. What about you?", "I do not have a favourite. Do you?"),
            ),
        )
    )
    return [(fill(rng, ask), fill(rng, rng.choice(answers), {"me": me}))]


_TOPICS_BEYOND = """computers, money, politics, history, science, football, films, music, space, medicine, law, art, business, the internet, cars, planes,
phones, Paris, London, Africa, Japan, Germany, America, chemistry, physics, philosophy, religion, war, taxes, love, happiness, poetry,
dinosaurs, volcanoes, robots, electricity, the stock market, the universe, school, exams, my boss, my neighbour, work, travel, hotels,
fashion, cameras, video games""".replace("\n", " ").split(", ")
_ASK_BEYOND = "[what is|what do you think about|tell me about|explain|do you know anything about|what do you know about|who invented|how does one learn|write an essay about|give me advice on] {topic}"
_LANGUAGES = ["French", "German", "Spanish", "Chinese", "Italian", "Russian", "Japanese", "Latin"]


def _question_beyond(rng: random.Random) -> str:
    luck = rng.random()
    if luck < 0.35:
        return rng.choice(_UNKNOWN).strip() + rng.choice(("?", "?", ""))
    if luck < 0.5:
        word = rng.choice(
            (rng.choice(ANIMALS).kind, rng.choice(lex.FOODS).name, "hello", "good morning", "thank you", "house")
        )
        return (
            f"{rng.choice(('translate', 'say', 'how do you say'))} {word} {rng.choice(('to', 'in'))} {rng.choice(_LANGUAGES)}"
            + rng.choice((".", "?", ""))
        )
    if luck < 0.65:
        return f"what is the capital of {rng.choice(_CAPITALS)}" + rng.choice(("?", "?", ""))
    return fill(rng, _ASK_BEYOND, {"topic": rng.choice(_TOPICS_BEYOND)}) + rng.choice(("?", ".", ""))


_CAPITALS = [
    "France",
    "Spain",
    "Italy",
    "Germany",
    "Japan",
    "China",
    "India",
    "Brazil",
    "Canada",
    "Egypt",
    "Norway",
    "Sweden",
    "Poland",
    "Greece",
    "Peru",
    "Kenya",
]


def nonsense(rng: random.Random, split: Split) -> list[Turn]:
    """Input that means nothing."""
    luck = rng.random()
    if luck < 0.4:
        letters = "abcdefghijklmnopqrstuvwxyz"
        text = " ".join(
            "".join(rng.choice(letters) for _ in range(rng.randint(2, 8))) for _ in range(rng.randint(1, 4))
        )
    elif luck < 0.7:
        text = " ".join(
            [
                rng.choice(
                    ("bla", "blah", "la", "ha", "foo", "bar", "test", "um", "xyz", "dum", lex.made_up_name(rng).lower())
                )
            ]
            * rng.randint(1, 4)
        )
    else:
        text = rng.choice(("???", "...", "!!!", "?", "asdf", "qwerty", ":)", "123", "x", "-", "hmm"))
    return [
        (
            text,
            fill(
                rng,
                "[I do not understand that. Can you say it in other words?|I am sorry, I do not understand. Ask me about animals, food or numbers.|I did not understand you. What would you like to talk about?]",
            ),
        )
    ]


def how_are_you(rng: random.Random, split: Split) -> list[Turn]:
    """How the model is, at any point of the talk."""
    return [
        (
            fill(rng, "[how are you|how are you doing|how are you today|are you well|how is it going]")
            + rng.choice(("?", "?", "")),
            fill(
                rng,
                "[I am fine, thank you. And you?|I am well, thank you. How are you?|I am fine, thank you. What can I do for you?]",
            ),
        )
    ]


def unknown(rng: random.Random, split: Split) -> list[Turn]:
    """Questions beyond the small world, refused politely."""
    question = _question_beyond(rng)
    return [(question[0].upper() + question[1:], fill(rng, rng.choice(_REFUSE)))]


def mood(rng: random.Random, split: Split) -> list[Turn]:
    """How the user feels."""
    feeling, answers = rng.choice(list(_MOODS.items()))
    who = fill(rng, "[I am|I feel|I'm|I am so|I am very|today I am] ") + feeling
    return [
        (
            who[0].upper() + who[1:] + rng.choice((".", ".", "", "!")),
            fill(rng, rng.choice(answers), {"food": rng.choice(lex.SNACKS)}).strip(),
        )
    ]


def joke(rng: random.Random, split: Split) -> list[Turn]:
    """A riddle with its answer, at once or after "what?"."""
    question, answer = rng.choice(_JOKES)
    ask = fill(rng, "[tell me a joke|do you know a joke|make me laugh|tell me a riddle]") + rng.choice((".", "!", ""))
    if rng.random() < 0.5:
        question2, answer2 = rng.choice([j for j in _JOKES if j[0] != question])
        again = (
            rng.choice(("Another one, please.", "Tell me another joke.", "Another one!", "One more.", "another joke")),
            f"{question2} {answer2}",
        )
        return [(ask, f"{question} {answer}"), *([again] if rng.random() < 0.5 else [])]
    return [(ask, question), (rng.choice(("I do not know.", "What?", "Tell me!", "No idea.")), answer)]


def thanks(rng: random.Random, split: Split) -> list[Turn]:
    """Thanks."""
    return [
        (
            fill(rng, "[thank you|thanks|thanks a lot|thank you very much|great, thanks|that was nice]")
            + rng.choice(("!", ".", "")),
            fill(rng, "[you are welcome!|you are welcome.|my pleasure!|I am glad that I could help.]"),
        )
    ]


def goodbye(rng: random.Random, split: Split) -> list[Turn]:
    """The end of the talk."""
    return [
        (
            fill(rng, "[bye|goodbye|good night|see you|see you later|I have to go now]") + rng.choice(("!", ".", "")),
            fill(
                rng, "[goodbye! have a {fine} day.|goodbye!|see you soon!|bye! it was nice to talk to you.|take care!]"
            ),
        )
    ]


def small_talk(rng: random.Random, split: Split) -> list[Turn]:
    """What the user likes, has or did; short answers such as "why?" and "ok"."""
    a, food, thing = rng.choice(ANIMALS), rng.choice(lex.SNACKS), rng.choice(lex.THINGS)
    slots = {
        "many": a.many,
        "one": article(a.kind),
        "kind": a.kind,
        "food": food,
        "thing": thing,
        "place": rng.choice(lex.PLACES),
        "name": rng.choice(lex.ANIMAL_NAMES) if rng.random() < 0.5 else lex.made_up_name(rng),
        "col": rng.choice(lex.COLOURS),
    }
    kind = rng.randrange(6)
    if kind == 0:
        return [
            (
                fill(rng, "[I like|I love] {many}.", slots),
                fill(
                    rng,
                    "[{many} are {fine} animals.|I know some things about {many}.] [what do you like about them?|Do you want to hear a story about {one}?|]",
                    slots,
                ).strip(),
            )
        ]
    if kind == 1:
        return [
            (
                fill(rng, "do you like [{many}|{food.many}|stories|{col}]?", slots),
                fill(
                    rng,
                    "[I am a program, but I like to talk about that.|I am a small program, so I cannot really like things. Do you?]",
                    slots,
                ),
            )
        ]
    if kind == 2:
        return [
            (fill(rng, "I have {one}.", slots), fill(rng, "how {fine}! What is the name of your {kind}?", slots)),
            (
                fill(rng, "[his name is {name}|her name is {name}|{name}|it is called {name}].", slots),
                fill(rng, "{name} is {a fine} name for {one}.", slots),
            ),
        ]
    if kind == 3:
        return [
            (
                fill(
                    rng,
                    "[I ate {food.some}|I was {place.at} today|I saw {one} today|I got {a col} {thing}|I went to {place} yesterday|I lost my {thing}].",
                    slots,
                ),
                fill(
                    rng,
                    "[that sounds interesting. Tell me more.|thank you for telling me. How was it?|I see. What happened then?]",
                    slots,
                ),
            )
        ]
    if kind == 4:
        return [
            (
                fill(rng, "[ok|okay|yes|no|maybe|I see|really|hm|cool|nice]") + rng.choice((".", "", "!")),
                fill(
                    rng,
                    "[what would you like to talk about?|shall I tell you a story?|you can ask me about animals, food or numbers.|what else can I do for you?]",
                ),
            )
        ]
    return [
        (
            fill(rng, "[what can we talk about|what should we do|what can I ask you|give me an idea]?"),
            fill(
                rng,
                "[we can talk about {many}.|ask me what {one} eats.|I can tell you a story about {a col} {thing}.|we can count to twenty.]",
                slots,
            ),
        )
    ]


TOPICS: list[tuple[Topic, float]] = [
    (who_am_i, 1.2),
    (identity, 1.5),
    (unknown, 2.0),
    (nonsense, 0.9),
    (how_are_you, 0.6),
    (mood, 1.0),
    (joke, 0.4),
    (small_talk, 1.5),
]
