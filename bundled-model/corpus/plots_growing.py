"""Plots about growing: a seed, a journey, a skill, a cake that needs a neighbour."""

# ruff: noqa: E501 (one template a line reads best)
from __future__ import annotations

from . import lexicon as lex
from .cast import introduce, weather_line
from .engine import Page


def seed(p: Page) -> None:
    """A seed needs patience."""
    plant = p.rng.choice([f for f in lex.FOODS if f.kind in ("fruit", "vegetable")])
    flower = p.rng.random() < 0.35
    p.slots.update(
        plant=p.rng.choice(("sunflower", "rose", "tulip", "lily", "daisy")) if flower else plant.name,
        fruit="a beautiful flower" if flower else f"many {plant.many}",
    )
    introduce(p)
    p.say(
        "one {day} in spring, {e} gave {h.o} a small seed.",
        "{h} found a little seed {spot1} {place.at}.",
        "in spring, {h} got a {plant} seed from {f}.",
    )
    p.say(
        '"what is it?" asked {h}. "You will see," was the answer. "Put it in the ground and wait."',
        '"put it in the ground, and give it water every day," said {e}.',
    )
    p.say(
        "{h} dug a hole in the garden and put the seed in.",
        "{h} planted it [beside the fence|under the window|behind the house].",
        "{h} put it in a {col} pot with soft earth.",
    )
    p.say(
        "every {time2}, {h.s} gave it water.".replace("{time2}", p.rng.choice(("morning", "evening", "day"))),
        "{h.s} watered it every day.",
    )
    p.say(
        "{h} waited one day, two days, three days. Nothing happened.",
        "the next day {h} looked, but there was only brown earth.",
        "a week went by, and there was nothing to see.",
    )
    p.say(
        '"it does not grow," said {h}. {h.s} was {sad}.',
        "{h} wanted to dig it up again.",
        '"maybe it is a stone and not a seed," {h} said.',
    )
    p.paragraph(0.6)
    p.say(
        '"be patient," said {e}. "Good things need time."',
        '"it is growing where you cannot see it," {e} said.',
        '"give it [time|sun and water]," said {e}.',
    )
    p.say("so {h} waited. The sun shone, and the rain fell.", "{h} did not give up and watered it every day.")
    p.say(
        "then, one {time}, there was a tiny green leaf!",
        "one {time}, something small and green came out of the ground.",
    )
    p.say("{h} jumped for joy.", '"it is growing!" {h} shouted.', "{h} called {f} to come and see.")
    p.say(
        "the plant grew and grew, and in summer it had {fruit}.",
        "soon it was as tall as {h}, and it had {fruit}.".replace("as tall as {h}", "as tall as a door"),
    )
    p.say(
        "{h} gave some to {f} and some to {e}." if not flower else "{h} showed it to {f} and {e}.",
        "{h} was proud and {happy}.",
    )
    p.say(
        "now {h} knew that good things need time.",
        "and {h} kept one seed for the next spring.",
        "{h} learned to be patient.",
        '"it was worth waiting for," said {h}.',
    )


def journey(p: Page) -> None:
    """The hero wants to see a far place, meets others on the way, and comes home."""
    far = p.rng.choice(
        (
            "the sea",
            "the top of the mountain",
            "the end of the rainbow",
            "the big city",
            "the other side of the forest",
            "the place where the river begins",
            "the northern lights",
            "the land of snow",
            "the old lighthouse",
            "the moon lake",
        )
    )
    p.slots["far"] = far
    introduce(p)
    p.say(
        "{h} had never seen {far}.",
        "more than anything, {h} wanted to see {far}.",
        '"what is {far} like?" {h} often asked. But nobody knew.',
    )
    p.say(
        '"one day I will go there," said {h}.',
        "so one {time}, {h} packed {food.some} and {a thing} into a bag.",
        "one {time}, {h} said goodbye to {e} and set out.",
    )
    p.say(
        "{h.s} walked and walked, past {place} and past {place2}.",
        "first {h.s} came to {place}, and then to {place2}.",
        "the way was long. It went by {place} and up to {place2}.",
    )
    p.say(
        "{place.at}, {h.s} met {f} the {f.kind}.".replace(" the girl", "").replace(" the boy", ""),
        "on the way, {h.s} met {f}, {a fk}.".replace("{a fk}", "a {f.kind} with {a col} {thing}"),
    )
    p.say(
        '"where are you going?" asked {f}. "I want to see {far}," said {h}.',
        '"I am looking for {far}," {h} said. "Do you know the way?"',
    )
    p.say(
        '"may I come with you?" asked {f}. "Yes! Two are better than one."',
        '"I know the way," said {f}. "Follow me!"',
        '"that is far," said {f}. "But I will come with you."',
    )
    p.paragraph(0.6)
    weather_line(p)
    p.say(
        "at night, they slept {spot1}.",
        "they crossed a river on a fallen tree.",
        "once they got lost, but a kind owl showed them the way.",
        "they shared the {food.many} and told each other stories.",
    )
    p.maybe(
        0.5,
        '"I am so tired," said {h}. "Only a little further," said {f}.',
        "{h} wanted to turn back, but {f} told {h.o} not to give up.",
    )
    p.say(
        "and then, at last, they were there. It was {far}!",
        "on the third day, they saw it: {far}.",
        "finally, they came to {far}.",
    )
    p.say(
        "it was more beautiful than {h} had ever dreamed.",
        "{h} could not say a word.",
        '"oh!" said {h}. It was all that {h.s} could say.',
        "they sat down and looked for a long time.",
    )
    p.say(
        'when {h} came home, {e} asked, "What was the best part?"',
        "after some days, they went home again.",
        "{h} took a small stone home to remember it.",
    )
    p.say(
        '"the best part was the way, because I found a friend," said {h}.',
        "and {h} told the story of {far} to everyone.",
        "it was good to see {far}, and it was good to be home again.",
        "after that, {h} and {f} made many more journeys.",
    )


def learn_skill(p: Page) -> None:
    """The hero wants to learn something and practises until it works."""
    skill = p.rng.choice(
        (
            "swim",
            "whistle",
            "ride a bike",
            "read",
            "dance",
            "climb trees",
            "skate",
            "sing",
            "draw",
            "play the flute",
            "row a boat",
            "tie knots",
            "bake bread",
            "count to a hundred",
            "play chess",
            "write letters",
            "juggle",
            "jump over the brook",
        )
    )
    p.slots["skill"] = skill
    introduce(p)
    p.say(
        "{h} wanted to learn to {skill}.",
        "all the others could {skill}, but {h} could not.",
        "more than anything, {h} wished to {skill}.",
    )
    p.say(
        '"I will never be able to {skill}," said {h}.',
        "{f} could {skill} very well.",
        "{h} tried it once, but it went wrong.",
    )
    p.say(
        '{h} asked {f}, "Can you teach me to {skill}?"',
        "{h} went to {e} and asked for help.",
        '"will you show me how to {skill}?" {h} asked {f}.',
    )
    p.say(
        '"of course. But you have to practise," was the answer.',
        '"yes, if you come every day," was the answer.',
        '"with pleasure," was the answer. "Let us start today."',
    )
    p.paragraph(0.5)
    p.say(
        "on {day}, they met {place.at}. {h} tried and failed.",
        "the first time, it did not work at all.",
        "at first, {h} made many mistakes.",
    )
    p.say(
        "the others laughed, but {h} tried again.", "{h} was {sad} and sat down {spot1}.", '"it is too hard," {h} said.'
    )
    p.say(
        '"nobody can do it the first time," said {f}.',
        '"one more time," {f} said kindly.',
        '"do not think about the others," said {f}.',
    )
    p.say(
        "so {h} tried again, and again, and again.",
        "{h} practised every {time} for {small_number} weeks.",
        "every day it went a little better.",
    )
    p.say("and then one {time}, it worked! {h} could {skill}!", "one {day}, {h} could suddenly {skill}.")
    p.say(
        '"look, I can {skill}!" {h} shouted.',
        "{h} was so {happy} that {h.s} [laughed|danced] all the way home.",
        "{e} clapped and was very proud.",
    )
    p.say(
        "later, {h} taught others to {skill}.",
        "practice makes perfect.",
        "if you keep trying, you will get there.",
        "{h} thanked {f}, and they ate {food.many} together.",
    )


def baking(p: Page) -> None:
    """Something is missing for the cake; trades with neighbours bring it."""
    missing = p.rng.choice(("eggs", "milk", "flour", "butter", "sugar", "honey", "salt"))
    p.slots.update(
        missing=missing,
        dish=p.rng.choice(("cake", "pie", "bread", "soup", "pancakes", "cookies")),
        neighbour=p.rng.choice(lex.ROLES[:10]),
    )
    introduce(p)
    p.say(
        "one {time}, {h} wanted to make {dish} for {f}.".replace("make {dish}", "make some {dish}"),
        "{h} and {e} wanted to [bake|make] some {dish}.",
        "{f} was ill in bed, so {h} wanted to make some {dish} for {f.o}.",
    )
    p.say(
        "{h} put a big bowl on the table.",
        "{h.s} got the [big bowl|spoon|pot] and washed {h.p} hands.",
        "the stove was already warm.",
    )
    p.say(
        'but there was no {missing}! "What shall I do?" said {h}.',
        "then {h} saw that there was no {missing} left.",
        '"oh no, we have no {missing}," said {h}.',
    )
    p.say("{h} went to the {neighbour} and asked for {missing}.", "so {h} ran to the house of the {neighbour}.")
    p.say(
        '"I have {missing}," said the {neighbour}, "but I need {a thing}. Can you lend me yours?"',
        '"I will give you some {missing} if you help me [carry the wood|feed the hens|sweep the yard]," said the {neighbour}.',
        '"of course you can have some," said the {neighbour}. "Neighbours help each other."',
    )
    p.say('"yes, gladly," said {h}.', "{h} was glad to do it.", "{h} said yes [at once|right away].")
    p.paragraph(0.6)
    p.say(
        "with the {missing} in a small {col} bag, {h} ran home.", "soon {h} was back in the kitchen with the {missing}."
    )
    p.say(
        "{h} stirred and stirred, and soon it smelled {fine}.",
        "{h.s} mixed everything and waited by the stove.",
        "everything went into the bowl, and {h} stirred.",
    )
    p.maybe(
        0.5,
        "there was flour on {h.p} nose and on the floor.",
        "{h} licked the spoon.",
        "once, it almost burned, but {h} was quick.",
    )
    p.say(
        "when it was done, {h} called {f} and the {neighbour} to the table.",
        "{h} took some of it to the {neighbour} to say thank you.",
        "{f} came and took a big bite.",
    )
    p.say(
        '"this is the best {dish} that I have ever eaten," said {f}.'.replace(
            "the best {dish} that", "the best thing that"
        ),
        '"mmm!" said {f}. "May I have some more?"',
        "they ate until nothing was left.",
    )
    p.say(
        "it tasted good because everyone had helped.",
        "{h} was tired but {happy}.",
        "and they all laughed and sang until late.",
    )
