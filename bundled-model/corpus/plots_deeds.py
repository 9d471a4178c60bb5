"""Plots about deeds: helping, sharing, being afraid, making friends, contests, rescues, bad weather."""

# ruff: noqa: E501 (one template a line reads best)
from __future__ import annotations

from .animals import ANIMALS
from .cast import introduce, weather_line
from .engine import Page


def share_food(p: Page) -> None:
    """The hero has food, meets somebody hungry, and shares."""
    introduce(p)
    p.say(
        "one {time}, {e} gave {h.o} {food.some}.",
        "{h} was on the way to {place} with {food.some} in {h.p} bag.",
        "{h} found {food.some} for lunch and was very {happy}.",
    )
    p.say(
        "{h} loved {food.many}.",
        "it [looked|smelled] so good!",
        "{h.s} sat down {spot1} {place.at} and wanted to eat.",
        "there was nothing that {h} liked better.",
    )
    p.say(
        "just then, {f} came by. {f} looked hungry.",
        "then {h.s} saw {f}, who looked tired and hungry.",
        "{f} the {f.kind} came along slowly.",
    )
    p.say(
        '"I have not eaten all day," said {f}.',
        '"that looks good," {f} said quietly. "I have nothing to eat."',
        "{f.p} tummy made a loud noise.",
    )
    p.say(
        "{h} looked at the {food} and did not know what to do.", "{h} was hungry too.", '"but it is mine," {h} thought.'
    )
    p.paragraph(0.6)
    p.say(
        "then {h} thought of how it feels to be hungry.",
        "but {h} saw how {sad} {f} was.",
        "{e} always said that food tastes best when it is shared.",
    )
    p.say(
        '"here, take half of it," said {h}.',
        "{h} broke it in two and gave {f} the bigger part.",
        '"let us share," {h} said with a smile.',
    )
    p.say(
        '"thank you so much!" said {f}.', "{f} ate and felt much better.", "{f} was so {happy} that {f.s} almost cried."
    )
    p.say(
        "they sat side by side and ate.",
        "it tasted better than ever before.",
        "they ate every crumb and told each other stories.",
    )
    p.maybe(
        0.7,
        'the next {day}, {h} had nothing to eat. Then {f} came with {food.some}. "Now it is my turn to share," {f.s} said.',
        "a few days later, {f} came back with a big basket of {food.many} for {h.n}.",
        "later, when {h} was lost in the fog, {f} showed {h.o} the way home.",
    )
    p.say(
        "from that day on, they were best friends.",
        "{h} learned that sharing makes two people happy.",
        "those who share are never alone.",
        "kindness always comes back.",
    )


def afraid_of(p: Page) -> None:
    """The hero fears something, and with help the fear becomes small."""
    what, truth, step = p.rng.choice(
        (
            ("the dark", "the dark is only the day with its eyes closed", "looked up and saw the stars"),
            ("thunder", "thunder is only the clouds bumping together", "counted the seconds after each flash"),
            ("deep water", "the water carries you if you lie still", "put one foot in, and then the other"),
            ("big dogs", "that dog only wants to play", "held out a hand, and the dog licked it"),
            ("high places", "you only need to look ahead and not down", "took one step, and then another"),
            ("the old house", "nobody lives there but a family of mice", "opened the door and saw a tiny mouse"),
            ("spiders", "the spider is more afraid than you are", "watched it spin a beautiful web"),
            ("the wind at night", "it is only the wind singing in the chimney", "listened and began to sing along"),
            ("speaking in front of others", "everyone there is your friend", "looked at one friendly face and began"),
            ("the deep forest", "the trees are old and kind", "walked in slowly and heard the birds sing"),
            ("shadows", "a shadow is only where the light cannot go", "waved, and the shadow waved back"),
            ("the first day of school", "all the others are nervous too", "said hello to the first one at the door"),
        )
    )
    p.slots.update(fear=what, truth=truth, step=step)
    introduce(p)
    p.say(
        "{h} was {afraid} of {fear}.",
        "there was only one problem. {h} was {afraid} of {fear}.",
        "but {h} had a secret: {h.s} was {afraid} of {fear}.",
    )
    p.say(
        "whenever {h.s} thought of it, {h.p} heart beat fast.",
        "{h.s} [hid under the blanket|ran away|closed {h.p} eyes] every time.",
        "the others laughed, and that made it worse.",
    )
    p.say(
        "one {time}, {f} asked {h.o} to come along, but {h} shook {h.p} head.",
        '"I cannot do it," {h} said to {f}.',
        "one {time}, there was no way around it.",
    )
    p.paragraph(0.6)
    p.say('"why are you {afraid}?" asked {e}.', "{e} saw it and sat down beside {h.n}.", "{h} told {e} about it.")
    p.say(
        '"do you know what?" said {e}. "{c truth}."',
        '"I was afraid too when I was little," {e} said. "But {truth}."',
        '{e} smiled. "Listen, {h.called}. {c truth}."',
    )
    p.say(
        '"really?" asked {h}. "Really," said {e}. "Come, I will hold your hand."',
        '"will you stay with me?" asked {h}. "Of course," said {e}.',
        '"try it once," {e} said. "I will be right here."',
    )
    p.say("{h} took a deep breath.", "{h} was still {afraid}, but {h.s} wanted to try.", "{h.p} knees shook a little.")
    p.say("{h.s} {step}.", "then {h.s} {step}.", "slowly, {h} {step}.")
    p.say(
        "it was not so bad at all!",
        "nothing bad happened.",
        '"it is not so bad," said {h}.',
        "and {h.s} was not {afraid} anymore.",
    )
    p.say(
        "{h} was very proud, and {e} was proud too.",
        "from that day on, {h} was not {afraid} of {fear}.",
        "being brave does not mean that you are never afraid. It means that you try.",
        "later, {h} helped others who were {afraid} of {fear}.",
    )


def hurt_animal(p: Page) -> None:
    """The hero helps a small animal in trouble, and it comes back."""
    kind = p.rng.choice([a.kind for a in ANIMALS if a.size <= 4 and a.kind != p.slots["h"].kind])
    trouble, help_ = p.rng.choice(
        (
            ("was caught in a net", "cut the net"),
            ("had a thorn in its foot", "pulled the thorn out"),
            ("was stuck between two stones", "pushed the stone away"),
            ("had fallen into a hole", "put a long stick into the hole"),
            ("was tangled in a string", "untied the string"),
            ("was too weak to move", "gave it some water"),
            ("was cold and wet", "wrapped it in a warm scarf"),
            ("was stuck in the mud", "dug it out of the mud"),
        )
    )
    p.slots.update(small=kind, trouble=trouble, help=help_)
    introduce(p)
    p.say(
        "one {time}, {h} was walking {place.at}.",
        "one {season} {time}, {h} went to {place}.",
        "{h} was looking for {flower}s {place.at}." if p.rng.random() < 0.5 else "{h} was on {h.p} way home.",
    )
    weather_line(p)
    p.say("suddenly {h.s} heard a small sound.", "then {h.s} heard someone cry for help.", "{spot1}, something moved.")
    p.say(
        "it was {a small} that {trouble}.",
        "{h.s} looked closer and saw {a small} that {trouble}.",
        "{a small} lay {spot1}. It {trouble}.",
    )
    p.say(
        '"please help me," said the {small}.',
        "the little {small} looked at {h.n} with big eyes.",
        "the poor {small} was very {afraid}.",
        '"do not be afraid," said {h}. "I will help you."',
    )
    p.paragraph(0.5)
    p.say(
        "{h} was careful and {help}.",
        "gently, {h} {help}.",
        "{h} called {f}, and together they {help2}.".replace("{help2}", help_),
    )
    p.say(
        "the {small} was free!"
        if "stuck" in trouble or "caught" in trouble or "tangled" in trouble or "hole" in trouble
        else "soon the {small} felt better."
    )
    p.say(
        '"thank you," said the {small}. "I will never forget you."',
        "it looked back once and then it was gone.",
        '"I will help you one day," it said. {h} [laughed|smiled]. How could {a small} help?',
    )
    p.paragraph(0.5)
    p.say(
        "some days later, {h} [got lost|lost the way] {place2.at}.",
        "a week later, {h} could not find the way home in the fog.",
        "then one day, {h} dropped {h.p} {thing} into a deep hole.",
    )
    p.say(
        "{h.s} sat down and did not know what to do.",
        '"what can I do now?" {h} said.',
        "it was getting dark, and {h} was {afraid}.",
    )
    p.say(
        'just then, the {small} came. "You helped me. Now I will help you," it said.',
        "then {h.s} saw the little {small}. It had not forgotten {h.o}.",
    )
    p.say(
        "with the help of the {small}, everything was {fine} again.",
        "the {small} called all its friends, and soon all was well.",
        "the small {small} did what no one else could do.",
    )
    p.say(
        "and so they became friends.",
        "even a small friend can be a big help.",
        "{h} learned that no act of kindness is ever lost.",
        "{h} was glad to have such a friend.",
    )


def new_friend(p: Page) -> None:
    """Somebody new is alone; the hero makes the first step."""
    introduce(p)
    p.say(
        "one {day}, {a who2} came to live {place.at}.".replace("{a who2}", "a new {f.kind}"),
        "{f} was new {place.at} and knew nobody.",
        "one {time}, {h} saw a new {f.kind} {place.at}.",
    )
    p.say(
        "the new one sat alone {spot1}.",
        "{f.s} sat {spot1} and looked at the ground.",
        "all the others played, but {f.s} was alone.",
    )
    p.say(
        '"{f.s} looks {sad}," thought {h}.',
        "the others did not want to play with {f.o}.",
        '"{f.s} is different from us," the others said.',
        "{h} remembered how it feels to be alone.",
    )
    p.say(
        "{h} was a little shy, but {h.s} went over.",
        "so {h} took {h.p} {thing} and went over.",
        "{h} thought for a moment and then walked up to {f.o}.",
    )
    p.say(
        '"hello, my name is {h.called}. What is yours?" "I am {f}," was the answer.',
        '"hi! I am {h.called}," said {h}. "My name is {f}," {f.s} said in a soft voice.',
    )
    p.paragraph(0.5)
    p.say(
        '"do you want to play with me?" asked {h}.',
        '"would you like to {thing.use} with me?" {h} asked.'.replace("{thing.use} with me", "see my {thing}"),
        '"do you like {food.many}?" asked {h}. "I have some here."',
    )
    p.say(
        "{f} looked up and smiled for the first time.",
        '"yes, please!" said {f}.',
        '"you want to play with me?" {f} asked. "Of course!" said {h}.',
    )
    p.say(
        "they played until it was dark.",
        "they ran to {place2} and looked at everything.",
        "{f} knew a new game, and it was a lot of fun.",
        "{h} showed {f} the {col} {thing}, and {f} told {h.n} a funny story.",
    )
    p.say(
        "soon the others came and wanted to play too.",
        "the others saw how much fun they had and came over.",
        "{f} could [climb|sing|run|swim] better than anyone, and everyone was surprised.",
    )
    p.say(
        "after that, {f} was never alone again.",
        "{h} and {f} became best friends.",
        '"I am so glad that I met you," said {f}.',
        "a kind word is all it takes to make a friend.",
    )


def race(p: Page) -> None:
    """Somebody boasts, and the steady one wins, or the two make up."""
    contest = p.rng.choice(
        (
            "race around {place}",
            "race to {place}",
            "swimming race",
            "jumping contest",
            "singing contest",
            "climbing contest",
            "cooking contest",
            "boat race",
            "drawing contest",
        )
    )
    p.slots["contest"] = contest.replace("{place}", str(p.slots["place"]))
    introduce(p)
    p.say(
        '{f} the {f.kind} [always said|told everyone], "I am the best {at all}."'.replace("{at all}", "of all")
        .replace(" the girl", "")
        .replace(" the boy", ""),
        '"nobody is as good as I am," {f} liked to say.',
    )
    p.say("{h} was tired of hearing it.", "the others did not like that.", "{h} only smiled and said nothing.")
    p.say(
        "one {day}, there was a {contest}.",
        '"let us have a {contest}," said {h}.',
        "then there was a {contest}, and everyone came to watch.",
    )
    p.say('{f} laughed. "You cannot win, {h.called}!"', '"this will be easy," said {f}.', "{f} did not even practise.")
    p.say(
        "but {h} had practised every day.",
        "{h} practised every {time} until it was dark.",
        '"I will just do my best," said {h}.',
    )
    p.paragraph(0.6)
    p.say(
        "the {contest} began. {f} was ahead at once.",
        "one, two, three, go! {f} was the first.",
        "at the start, {f} was much better.",
    )
    p.say(
        "{f} was so sure of winning that {f.s} stopped for a rest.",
        "{f} stopped to wave at everyone.",
        "halfway, {f} sat down to eat {food.some}.",
    )
    p.say(
        "{h} did not stop. {h.S} went on, step by step."
        if p.rng.random() < 0.5
        else "{h} went on and on and did not look back.",
        "slowly but surely, {h} came closer.",
    )
    p.say(
        "when {f} looked up, it was too late. {h} had won!",
        "in the end, {h} won, and everyone clapped.",
        "{h} won by a very small step.",
    )
    p.say(
        '"how did you do that?" asked {f}. "I just kept going," said {h}.',
        '{f} was {sad}. "I was too proud," {f.s} said.',
        '"well done," said {f}. "You were better today."',
    )
    p.say(
        "{h} shared the prize, a big {food} pie, with {f}.".replace("{food} pie", "basket of {food.many}"),
        'then {h} gave {f} {h.p} hand. "Next time we can practise together," {h.s} said.',
        "after that, {f} never boasted again.",
    )
    p.say(
        "it is better to keep going than to be fast.",
        "practice is worth more than big words.",
        "and from then on they were friends.",
    )


def rescue(p: Page) -> None:
    """Something is stuck high up or far away; two ways fail, the third works."""
    stuck, where, tries, works = p.rng.choice(
        (
            (
                "kite",
                "in a tall tree",
                ("threw a stick at it", "shook the tree", "jumped as high as possible"),
                "got a long ladder",
            ),
            (
                "kitten",
                "on the roof",
                ("called it", "held up a bowl of milk", "climbed on a box"),
                "put a long board against the wall",
            ),
            (
                "ball",
                "in the middle of the pond",
                ("reached for it with a stick", "blew on the water", "threw small stones to make waves"),
                "built a little raft",
            ),
            (
                "hat",
                "on a high branch",
                ("jumped up", "threw a shoe at it", "shook the branch"),
                "sat on the shoulders of a friend",
            ),
            (
                "chick",
                "in a deep hole",
                ("called it", "reached down", "let a rope down"),
                "poured sand into the hole until the chick could step out",
            ),
            (
                "key",
                "behind a heavy stone",
                ("pulled at the stone", "reached in", "used a stick"),
                "used a string with a magnet",
            ),
            (
                "toy boat",
                "far out on the lake",
                ("whistled", "threw a rope", "waited for the wind"),
                "rowed out in a small boat",
            ),
            (
                "balloon",
                "under the high roof of a shed",
                ("jumped up", "stood on a box", "blew at it"),
                "tied two brooms together",
            ),
        )
    )
    first, second = p.rng.sample(tries, 2)
    p.slots.update(stuck=stuck, where=where, try1=first, try2=second, works=works)
    introduce(p)
    p.say("one {time}, {h} and {f} were {place.at}.", "{h} was {place.at} with {f}.")
    weather_line(p)
    p.say(
        "suddenly they saw {a stuck} {where}.",
        '"look!" said {f}. "There is {a stuck} {where}!"',
        "{f} was crying, because {f.p} {stuck} was {where}.",
    )
    p.say(
        '"we must get it back," said {h}.',
        '"how can we get it?" asked {f}.',
        '"do not cry," said {h}. "I will get it."',
    )
    p.paragraph(0.5)
    p.say("first, {h} {try1}. It did not help.", "{h} {try1}, but it did not work.")
    p.say("then {f} {try2}. That did not help either.", "next, {f} {try2}. Still nothing.")
    p.say(
        '"it is no use," {f} said.',
        "they sat down and thought.",
        '"think," said {h}. "There must be a way."',
        "they asked {e}, but {e} was busy.",
    )
    p.say("then {h} had an idea. {h.s} {works}.".replace("{h.s}", "{h.S}"), '"I know!" said {h}. And {h.s} {works}.')
    p.say("and it worked! The {stuck} was safe.", "at last, they had the {stuck}.", '"we have it!" they shouted.')
    p.say(
        '"you are so clever," said {f}.',
        "{f} hugged the {stuck} and danced.",
        '"thank you, {h.called}! I will be more careful now," said {f}.',
    )
    p.say(
        "if one way does not work, try another.",
        "they went home {happy} and hungry.",
        "{h} was {happy} all day long.",
        "and they ate {food.many} to celebrate.",
    )


def bedtime(p: Page) -> None:
    """The hero cannot sleep, follows a sound, and finds something harmless."""
    sound, cause = p.rng.choice(
        (
            ("a knock at the window", "a branch moving in the wind"),
            ("a soft scratching", "a little mouse looking for crumbs"),
            ("a strange song", "{e} singing in the kitchen"),
            ("a drip, drip, drip", "water falling from the roof"),
            ("a rustling in the garden", "a hedgehog in the leaves"),
            ("a loud snore", "the old dog asleep by the fire"),
            ("a tapping on the roof", "the first drops of rain"),
            ("a howl", "the wind in the chimney"),
            ("tiny footsteps", "a kitten that wanted to be warm"),
            ("a hoot", "an owl on the branch outside"),
        )
    )
    p.slots.update(sound=sound, cause=cause.replace("{e}", str(p.slots["e"])))
    introduce(p)
    p.say(
        "one night, {h} could not sleep.",
        "it was late, but {h} was wide awake.",
        "{h} lay in bed and looked at the moon.",
    )
    p.say(
        "{h.s} turned to the left, and {h.s} turned to the right.",
        "{h.s} counted sheep, but it did not help.",
        "everyone else was asleep.",
    )
    p.say("then {h.s} heard {sound}.", "suddenly, there was {sound}.")
    p.say(
        '"what is that?" {h} whispered.',
        "{h} was {afraid} and pulled the blanket over {h.p} head.",
        "{h.p} heart beat fast.",
    )
    p.say("it came again.", "there it was again, a little louder.", "{h} held {h.p} {thing} tight.")
    p.paragraph(0.6)
    p.say(
        "at last, {h} got up and took a lamp.",
        '{h} went to {e} and said, "I heard {sound}." "Let us look together," said {e}.'
        if "singing" not in cause
        else "{h} got out of bed and went down the stairs.",
        "{h} wanted to know what it was, so {h.s} got out of bed.",
    )
    p.say(
        "step by step, {h} walked towards the sound.",
        "the floor was cold, and the house was dark.",
        "slowly, {h} opened the door.",
    )
    p.say(
        "and what was it? It was only {cause}!",
        "{h} had to laugh. It was only {cause}.",
        "there was nothing to fear. It was {cause}.",
    )
    p.say(
        '"so it was you," said {h}.'
        if "mouse" in cause or "kitten" in cause or "hedgehog" in cause or "dog" in cause or "owl" in cause
        else '"so that is all," said {h}.',
        "{h} laughed at {h.r}.",
    )
    p.say(
        "{h} went back to bed and was soon asleep.",
        "{e} gave {h.o} some warm milk, and then {h} slept until morning.",
        "the moon looked in at the window, and {h} slept.",
        "then {h} closed {h.p} eyes and dreamed of {place}.",
    )


def weather_day(p: Page) -> None:
    """The weather spoils a plan and another day turns out as good."""
    p.slots["plan"] = p.rng.choice(("go to {0}", "have a picnic {1}", "play {1}", "meet {2} {1}")).format(
        p.slots["place"], p.slots["place"].at, p.slots["f"]
    )
    bad, after = p.rng.choice(
        (
            ("it rained and rained", "a rainbow stood in the sky"),
            ("a storm came up", "the air smelled fresh and clean"),
            ("thick fog covered everything", "the sun came through"),
            ("it snowed all night", "the whole world was white"),
            ("the wind blew too hard", "the wind was quiet again"),
        )
    )
    p.slots.update(bad=bad, after=after)
    introduce(p)
    p.say("today {h} wanted to {plan}.", "{h} had waited all week to {plan}.", "on {day}, {h} wanted to {plan}.")
    p.say("but {bad}.", "but when {h} looked out of the window, {bad}.")
    p.say("{h} was {sad}.", '"this is the worst day ever," said {h}.', "{h} sat at the window with a long face.")
    p.say('"what can we do now?" asked {h}.', '"do not be {sad}," said {e}.', "then {f} knocked at the door.")
    p.paragraph(0.5)
    p.say(
        '{e} had an idea. "We can [build a tent from blankets|bake a cake|make a puppet show|tell stories by the fire]," {e.s} said.',
        '"let us play inside," said {f}. "We can [be pirates|build a castle|play hide and seek]."',
    )
    p.say(
        "so they did, and it was a lot of fun.",
        "soon {h} forgot all about the weather.",
        "they laughed so much that their tummies hurt.",
    )
    p.say(
        "they ate {food.many} and listened to the [wind|fire|radio].",
        "{h} got {h.p} {thing}, and they played for hours.",
        "they drew pictures of {place} and put them on the wall.",
    )
    p.say("when they looked out again, {after}.", "later, {after}.", "in the end, {after}.")
    p.say('"look how beautiful it is!" said {h}.', "{h} ran outside with {f}.", "they went out and took a deep breath.")
    p.say(
        "it was the best day of the week after all.",
        '"I am glad that we stayed at home," said {h}.',
        "you can have fun in any weather if you have good company.",
        "{h} went to bed {happy}.",
    )
