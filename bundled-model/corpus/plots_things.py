"""Plots about things: lost, broken, wanted by two, made, given away, found by luck."""

from __future__ import annotations

from .cast import introduce, weather_line
from .engine import Page


def lost_thing(p: Page) -> None:
    """The hero loses a thing, searches, and somebody helps to find it."""
    introduce(p)
    p.say(
        "{h} had {a col} {thing}.",
        "{h.p} [favourite|most loved] thing was {a col} {thing}.",
        "{e} had given {h.o} {a col} {thing}.",
        "for {h.p} birthday, {h.s} got {a col} {thing}.",
    )
    p.say(
        "{h.s} [loved|liked] to {thing.use} [every day|all the time|in the morning|after breakfast].",
        "{h.s} took it [everywhere|wherever {h.s} went].",
        "{h.s} never [went anywhere|left home] without it.",
    )
    p.paragraph(0.7)
    p.say("one {time}, {h} took the {thing} to {place}.", "one {day}, {h} went to {place} and took the {thing} along.")
    p.maybe(
        0.5,
        "{h.s} looked at {sight} and forgot about it for a while.",
        "{h.s} [ran|played|sang] and had a {fine} time.",
    )
    p.say(
        "when {h.s} wanted to go home, the {thing} was gone.",
        "then {h.s} looked down. The {thing} was [not there|gone]!",
        "suddenly {h.s} saw that the {col} {thing} was missing.",
    )
    p.say(
        "{h} was very {sad}.",
        "{h} felt {sad}. [Tears came to {h.p} eyes.|A tear ran down {h.p} face.|]",
        '"Oh no! Where is my {thing}?" cried {h}.',
    )
    p.paragraph(0.4)
    p.say("{h.s} looked {spot1}, but it was not there.", "first {h.s} looked {spot1}. There was nothing there.")
    p.say(
        "{h.s} looked {spot2}, but [it was not there either|there were only leaves|saw only a snail].",
        "then {h.s} looked {spot2}. It was not there either.",
    )
    p.say(
        "just then, {f} came [along|by|down the path].",
        "{h.p} friend {f} saw {h.o} and came [closer|over].",
        "{f} the {f.kind} heard {h.o} and came to see.",
    )
    p.say(
        '"what is wrong?" asked {f}. "I lost my {col} {thing}," said {h}.',
        '"why are you so {sad}, {h.called}?" {f} asked. "My {thing} is gone," {h} [said|answered].',
    )
    p.say(
        '"do not worry. I will help you," said {f}.',
        '"let us look for it together," {f} said.',
        '"two can look better than one," said {f}.',
    )
    p.paragraph(0.5)
    p.say(
        "together they looked {spot3}, and there it was!",
        "{f} looked {spot3}. There was the {col} {thing}!",
        "at last, {f} found the {thing} {spot3}.",
    )
    p.say(
        '"thank you, {f.called}! You are a [true|good|real] friend," said {h}.',
        "{h} hugged {f} and said thank you.",
        '{h} jumped for joy. "You found it! Thank you!"',
    )
    p.say(
        "from that day on, {h} took good care of the {thing}.",
        "{h} and {f} played until the sun went down.",
        "{h} held the {thing} [tightly|close] all the way home.",
        "they went home together, [tired but {happy}|laughing and talking].",
    )
    p.maybe(
        0.4,
        "it is easier to find something when a friend helps.",
        "{h} learned that a friend is worth more than any {thing}.",
    )


def two_want_one(p: Page) -> None:
    """Two friends want the same thing, quarrel, and learn to take turns."""
    introduce(p)
    p.say(
        "one {time}, {h} and {f} [were playing|played] {place.at}.",
        "{h} and {h.p} friend {f} met {place.at} [every {day}|one {time}].",
    )
    p.say("there they found {a col} {thing} {spot1}.", "{h} saw {a col} {thing} lying {spot1}. {f} saw it too.")
    p.say(
        '"it is mine!" said {h}. "I saw it first!"',
        '"I want to {thing.use}," said {h}. "No, I want to!" said {f}.',
        '"give it to me!" {h} [said|cried].',
    )
    p.say(
        '"no, it is mine!" {f} [answered|said].',
        "{f} took hold of it too.",
        '"that is not fair," said {f}, and pulled at the {thing}.',
    )
    p.say(
        "{h} pulled on one side and {f} pulled on the other.",
        "they pulled and pulled, and neither wanted to let go.",
        "both of them got very [angry|cross].",
    )
    if p.rng.random() < 0.5:
        p.say("then there was a loud [crack|snap]. The {thing} was broken.", "snap! the {thing} broke in two.")
        p.say(
            "{h} and {f} looked at the pieces. They were both {sad}.",
            "now [no one|nobody] had {a thing}.",
            "it was very quiet. Neither of them said a word.",
        )
        p.paragraph(0.6)
        p.say(
            '"I am sorry," said {h}. "I am sorry too," said {f}.',
            'at last {h} said, "I am sorry. I should have shared." "So should I," said {f}.',
        )
        p.say(
            "they took the pieces to {e}, who [had some glue|knew how to mend things].",
            "they carried the pieces to {e} and asked for help.",
        )
        p.say(
            "together they [mended it|put it back together|glued the pieces together].",
            "it took a long time, but in the end the {thing} was whole again.",
        )
    else:
        p.say(
            "then {f} fell and began to cry.",
            "the {thing} flew out of their hands and landed in the mud.",
            "then they both fell over into the grass.",
        )
        p.say("{h} stopped [at once|pulling] and felt {sad}.", "{h} was ashamed.", "{h} looked at {f} and felt sorry.")
        p.paragraph(0.6)
        p.say(
            '"I am sorry, {f.called}. Let us take turns," said {h}.',
            '"we can share it," said {h}. "You may go first."',
            '{h} had an idea. "You can have it today, and I can have it tomorrow."',
        )
        p.say(
            '"that is a {fine} idea," {f} said.',
            "{f} [smiled|nodded] and dried {f.p} eyes.",
            '"yes, let us share," said {f}.',
        )
    p.say(
        "after that, they took turns with the {col} {thing}.",
        "from then on, they shared the {thing}.",
        "first {f} had a turn, and then {h} had a turn.",
    )
    p.say(
        "sharing was much more fun than fighting.",
        "and they both learned that sharing is better than winning.",
        "they never [fought|quarrelled] about it again.",
        "{h} learned that a friend is more important than {a thing}.",
        "they laughed and played until {e} called {h.o} home.",
    )


def broken_and_honest(p: Page) -> None:
    """The hero breaks something, hides it, and tells the truth."""
    p.slots["broken"] = p.rng.choice(
        ("cup", "vase", "lamp", "plate", "teapot", "mirror", "window", "flower pot", "clock", "jar")
    )
    introduce(p)
    p.say(
        "one {time}, {h} was playing with {a col} {thing} in the house.",
        "it was raining, so {h} played inside with {h.p} {thing}.",
        "{h} was running through the house with {a thing}.",
    )
    p.maybe(0.6, '"please be careful," {e} had said.', "{e} had told {h.o} [not to run inside|to be careful].")
    p.say(
        "suddenly there was a loud crash. The {broken} was broken!",
        "crash! {h} bumped into the table, and the {broken} fell down and broke.",
        "the {broken} fell to the floor and broke into many pieces.",
    )
    p.say(
        "it was {e.ns} [favourite|best] {broken}.",
        "{e} loved that {broken} very much.",
        "{h} knew that {e} would be {sad}.",
    )
    p.say(
        "{h} was {afraid}. {h.s} hid the pieces [under the bed|behind the door|in a box|under the rug].",
        "quickly, {h} pushed the pieces [under the bed|behind a chair] and ran to {h.p} room.",
    )
    p.paragraph(0.6)
    p.say(
        'later, {e} came in. "Where is my {broken}?" {e.s} asked.',
        '"have you seen my {broken}?" asked {e}.',
        '{e} looked around. "My {broken} is gone," {e.s} said.',
    )
    p.say(
        '"I do not know," said {h} [quietly|in a small voice].',
        '"maybe the [cat|dog|wind] took it," said {h}.',
        "{h} shook {h.p} head and said nothing.",
    )
    p.say(
        "but {h.s} felt bad. {h.p} tummy hurt.",
        "but {h} could not [eat|sleep|play] anymore.",
        "all {time} long, {h} thought about the {broken}.",
    )
    p.say(
        "{h} knew what {h.s} had to do.",
        "at last, {h} went to {e}.",
        "in the end, {h} took a deep breath and went to {e}.",
    )
    p.say(
        '"I broke the {broken}," said {h}. "I am so sorry."',
        '"it was me," {h} said. "I broke your {broken}, and I was {afraid} to tell you."',
    )
    p.paragraph(0.4)
    p.say(
        "{e} was quiet for a moment. Then {e.s} [smiled|hugged {h.o}|took {h.p} hand].",
        "{e} looked at {h.n} and was not angry.",
    )
    p.say(
        '"thank you for telling the truth," {e.s} said. "That was brave."',
        '"{a broken} can be replaced," {e.s} said. "But the truth is worth more."',
        '"I am glad that you told me," said {e}. "We all make mistakes."',
    )
    p.say(
        "together they swept up the pieces.",
        "then they cleaned up together.",
        "the next day, they went to the market and [bought|chose] a new {broken}.",
    )
    p.say(
        "{h} felt [light|much better|{happy}] again.",
        "after that, {h} always told the truth.",
        "that night, {h} slept very well.",
        "{h} learned that it is best to be honest.",
    )


def build_something(p: Page) -> None:
    """The hero builds something, it fails for a reason, and the second try holds."""
    made, part, cause, fix = p.rng.choice(
        (
            ("kite", "paper and string", "the wind tore the paper", "stronger paper"),
            ("boat", "wood and cloth", "water came in through a hole", "some wax to close the hole"),
            ("tower", "wooden blocks", "it was too thin and fell over", "a wider base"),
            ("snowman", "snow and two sticks", "the head rolled off", "a smaller head"),
            ("tree house", "old boards", "a board was too weak and cracked", "thick, strong boards"),
            ("cart", "a box and four wheels", "a wheel came off", "a longer nail"),
            ("sandcastle", "sand and shells", "a wave washed it away", "a wall of stones"),
            ("bridge", "sticks", "it broke in the middle", "a strong log"),
            ("nest box", "small boards", "the roof let the rain in", "a better roof"),
            ("swing", "a board and a rope", "the old rope broke", "a new rope"),
            ("tent", "a blanket and sticks", "the wind blew it over", "heavy stones on the corners"),
            ("raft", "logs", "the knots came loose", "tighter knots"),
            ("robot", "old boxes", "its arm fell off", "more glue"),
            ("lantern", "paper and wire", "the paper got wet", "a glass jar"),
        )
    )
    p.slots.update(made=made, part=part, cause=cause, fix=fix)
    introduce(p)
    weather_line(p)
    p.say(
        "{h} wanted to build {a made}.",
        '"today I will [make|build] {a made}," said {h}.',
        "{h} had an idea. {h.s} wanted to [make|build] {a made} all by {h.r}.",
    )
    p.say("{h.s} found {part} {spot1}.", "{h.s} [took|gathered] {part} and went to {place}.", "{e} gave {h.o} {part}.")
    p.say(
        "{h.s} worked [hard|all {time}|for hours].",
        "{h.s} worked until {h.p} hands were tired.",
        "bit by bit, the {made} grew.",
    )
    p.say(
        "at last the {made} was ready.",
        "when it was done, {h} was very proud.",
        '"look at my {made}!" {h} said to {f}.',
    )
    p.say("but then {cause}.", "but soon {cause}.", "it looked {fine}, but then {cause}.")
    p.say(
        "{h} was {sad}. [{h.s} wanted to give up.|]",
        '"it is no use," said {h}. "I cannot do it."',
        "{h} sat down [in the grass |on the ground |]and sighed.",
    )
    p.paragraph(0.6)
    p.say("{f} came and looked at the {made}.", "{f} sat down beside {h.n}.", "{h.p} friend {f} had seen everything.")
    p.say(
        '"you can try again," said {f}. "What you need is {fix}."',
        '"do you know what it needs?" {f} asked. "It needs {fix}."',
        '"everyone fails [sometimes|at first]," said {f}. "Let us use {fix}."',
    )
    p.say(
        "{h} thought about it and [nodded|smiled].",
        '"yes!" said {h}. "Will you help me?"',
        "{h} wiped {h.p} face and stood up.",
    )
    p.say(
        "so they worked together, and this time they used {fix}.",
        "{h} and {f} got {fix} and began again.",
        "this time, with {fix}, the work went well.",
    )
    p.say(
        "the new {made} was [strong|even better than the first one].",
        "now the {made} held.",
        "the second {made} was the best that anyone had ever seen.",
    )
    p.say(
        '"we did it!" they [cried|shouted].',
        '"thank you for your help," said {h}.',
        "they were so {happy} that they danced.",
    )
    p.say(
        "{h} learned that it is good to try again.",
        "{h} was glad that {h.s} had not given up.",
        "and that is how {h} learned never to give up.",
        "they played with the {made} until it got dark.",
    )


def a_gift(p: Page) -> None:
    """The hero prepares a gift for a birthday; something goes wrong, and it is still right."""
    introduce(p)
    p.say(
        "tomorrow was the birthday of {f}.",
        "{f} had a birthday, and {h} wanted to give {f.o} something special.",
        "it was almost {f.ns} birthday.",
    )
    p.say(
        '"what can I give {f.called}?" {h} [wondered|asked {e}].',
        "{h} had no money, so {h.s} wanted to make a gift.",
        "{h} thought about it for a long time.",
    )
    p.say(
        "{f} liked {food.many}, so {h} baked a [cake|pie] with {food.many}.",
        "{h} decided to make {a col} {thing} for {f.o}.",
        "{h} painted {a thing} {col}, because {col} was {f.ns} favourite colour.",
    )
    p.say("{h.s} worked on it all {time}.", "it was not easy, but {h} did not stop.", "{e} showed {h.o} how to do it.")
    p.say(
        "{h.s} put it in a box with {a col2} ribbon.",
        "{h.s} wrapped it in {col2} paper.",
        "when it was ready, {h.s} wrapped it up.",
    )
    p.paragraph(0.6)
    p.say(
        "on the way to {f.ns} home, {h} [slipped|fell] in the mud, and the box [fell down|got dirty].",
        "but on the way, it began to rain, and the box got wet.",
        "on the way, a strong wind blew the box out of {h.p} hands.",
    )
    p.say(
        '"now it is [spoiled|ruined]," said {h} and began to cry.',
        "{h} looked at the box and felt {sad}.",
        '"what will {f.called} say?" {h} thought.',
    )
    p.say(
        "at the party, everyone gave {f} big gifts. {h} waited until the end.",
        "{h} came to the door and did not want to go in.",
        "{h} held the box behind {h.p} back.",
    )
    p.say(
        '"I made something for you," said {h}, "but it is not pretty anymore."',
        '"I am sorry. My gift is [wet|dirty|broken]," {h} said.',
    )
    p.say("{f} opened the box and smiled.", "{f} looked inside, and {f.p} eyes grew [wide|bright].")
    p.say(
        '"you made this for me?" said {f}. "It is the best gift of all."',
        '"it is perfect," said {f}, "because you made it."',
        '"I love it," {f} said and hugged {h.n}.',
    )
    p.say(
        "{h} was very {happy}.",
        "then they all ate cake and danced.",
        "a gift from the heart is always a good gift.",
        "it was the best birthday ever.",
        "the two friends sat together until the stars came out.",
    )


def magic_wish(p: Page) -> None:
    """A magic thing grants a wish, the wish goes wrong, and the hero wishes it back."""
    wish, result, trouble = p.rng.choice(
        (
            (
                "to be as big as a house",
                "grew and grew until {h.s} was as big as a house",
                "could not go through the door anymore",
            ),
            ("to fly", "rose up into the air like a balloon", "could not come down again"),
            (
                "that everything would be made of sweets",
                "saw that all the trees were made of sugar",
                "could not find any water to drink",
            ),
            (
                "to be invisible",
                "could not see {h.p} own feet anymore",
                "had no one to talk to, because nobody could see {h.o}",
            ),
            (
                "for a hundred {food.many}",
                "was sitting in the middle of a hundred {food.many}",
                "ate so many that {h.p} tummy hurt",
            ),
            (
                "that it would never be night",
                "saw that the sun stayed in the sky",
                "was very tired but could not sleep",
            ),
            ("to be the strongest of all", "could lift a tree with one hand", "broke everything that {h.s} touched"),
            ("for snow in summer", "saw thick snow falling on the flowers", "was cold, and all the flowers were sad"),
            (
                "to understand all animals",
                "could hear every ant and every bird talk",
                "could not sleep because of all the talking",
            ),
            ("to be as small as an ant", "became smaller and smaller", "was almost stepped on by a cow"),
        )
    )
    for key, value in (("wish", wish), ("result", result), ("trouble", trouble)):
        p.slots[key] = (
            value.replace("{h.s}", p.slots["h"].s)
            .replace("{h.p}", p.slots["h"].p)
            .replace("{h.o}", p.slots["h"].o)
            .replace("{food.many}", p.slots["food"].many)
        )
    introduce(p)
    p.say(
        "one {time}, {h} found {a look} {thing} {spot1} {place.at}.",
        "while walking {place.at}, {h} saw {a col} {thing} {spot1}.",
        "{place.at}, {h} found an old {thing}.",
    )
    p.say(
        "when {h.s} picked it up, it began to [shine|glow].",
        "it was warm and it glowed in the dark.",
        "it [shone|glowed] like a small star.",
    )
    p.say(
        '"I am a magic {thing}," it said. "You may make one wish."',
        'a soft voice said, "Make a wish, {h.called}."',
        'a tiny [fairy|old man] jumped out. "You have one wish," said a small voice.',
    )
    p.say(
        "{h} did not think for long. {h.s} wished {wish}.",
        "{h} closed {h.p} eyes and wished {wish}.",
        "{h} wished {wish}.",
    )
    p.say("there was a flash of {col2} light, and {h} {result}.", "at once, {h} {result}.", "puff! {h} {result}.")
    p.maybe(
        0.6, "at first, it was [fun|wonderful].", '"this is {fine}!" {h} [shouted|said].', "{h} laughed and laughed."
    )
    p.paragraph(0.6)
    p.say("but soon, {h} {trouble}.", "but after a while, {h} {trouble}.")
    p.say(
        '"this is not what I wanted," {h} said.',
        '"oh, I was so foolish," said {h}.',
        "{h} was {sad} and wanted to go home.",
    )
    p.say("{f} heard {h.o} and came to help.", "just then {f} came by.", "{h} called for {f}.")
    p.say(
        '"ask the {thing} to take the wish back," said {f}.',
        '"say that you are sorry, and wish it all back," {f} said.',
    )
    p.say(
        '"please, dear {thing}, make everything as it was before," said {h}.',
        "{h} held the {thing} and wished that everything was as before.",
    )
    p.say(
        "the {thing} glowed once more, and everything was [normal|as before] again.",
        "there was a flash, and all was well again.",
    )
    p.say(
        "{h} [put|left] the {thing} back {spot1} and went home with {f}.",
        "{h} thanked {f} and never made a foolish wish again.",
        "after that, {h} was happy with what {h.s} had.",
        "{h} learned to think before making a wish.",
    )


def found_coin(p: Page) -> None:
    """The hero finds something that belongs to somebody else and gives it back."""
    p.slots["lost"] = p.rng.choice(
        (
            "purse",
            "gold ring",
            "silver watch",
            "golden key",
            "small bag of coins",
            "letter",
            "necklace",
            "pair of glasses",
        )
    )
    introduce(p)
    p.say(
        "one {time}, {h} was walking {place.at}.",
        "{h} went to {place} to buy some {food.many}."
        if p.slots["place"].name == "the market"
        else "{h} was on the way to {place2}.",
    )
    weather_line(p)
    p.say("{spot1}, {h.s} saw something [shine|on the ground].", "something was lying {spot1}.")
    p.say("it was {a lost}.", "{h} picked it up. It was {a lost}!")
    p.say(
        '"what luck!" thought {h}. "Now I can [buy {a col} {thing}|keep it]."',
        "{h} thought of all the {food.many} that {h.s} could buy.",
        "{h} looked around, but nobody was there.",
    )
    p.say(
        "then {h} thought about the one who had lost it.",
        '"but it is not mine," {h} thought.',
        '"somebody must be looking for this," said {h}.',
    )
    p.paragraph(0.6)
    p.say(
        '{h} went from door to door and asked, "Have you lost {a lost}?"',
        "so {h} went to {place2} and asked everyone about it.",
    )
    p.say(
        "the baker said no. The farmer said no too.",
        '"not I," said the baker. "Not I," said the postman.',
        "but nobody had lost it.",
    )
    p.say(
        "at last, {h} met an old woman who was crying.",
        "in the end, {h} came to a small house where an old man sat on the steps.",
        "then {h} saw {f}, who was looking for something in the grass.",
    )
    p.say('"did you lose {a lost}?" asked {h}. "Yes!" was the answer. "I have looked for it all day."')
    p.say("{h} [gave it back|held it out] with a smile.", '"here it is," said {h}.')
    p.say(
        '"you are an honest {h.kind}," was the reply. "Take this {food} as a thank you."',
        "as a thank you, {h} got {a col} {thing}.",
        '"thank you, thank you! You could have kept it, but you did not."',
    )
    p.say(
        "{h} went home with a [light|happy|warm] heart.",
        "{h} felt better than with all the gold in the world.",
        "and when {h} told {e} about it, {e.s} was very proud.",
        "being honest made {h.n} {happy}.",
    )
