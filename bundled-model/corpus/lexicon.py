"""The words of the small world: names, places, things, foods, weather, feelings."""

# ruff: noqa: E501 (tables)
from __future__ import annotations

import random
from dataclasses import dataclass

from .engine import LISTS as LISTS

GIRLS = [
    "Mia",
    "Lily",
    "Anna",
    "Rosa",
    "Ella",
    "Nora",
    "Ada",
    "Zoe",
    "Ruby",
    "Lucy",
    "Eva",
    "Mina",
    "Tess",
    "Ivy",
    "Hana",
    "Sara",
    "Lena",
    "Maya",
    "Nina",
    "Cora",
    "Elsa",
    "Freya",
    "Gina",
    "Holly",
    "Iris",
    "Jade",
    "Kira",
    "Leila",
    "Molly",
    "Nell",
    "Olive",
    "Petra",
    "Rina",
    "Sofia",
    "Tara",
    "Uma",
    "Vera",
    "Wendy",
    "Yara",
    "Amy",
    "Bella",
    "Clara",
    "Daisy",
    "Emma",
    "Fay",
    "Grace",
    "Hazel",
    "Ines",
    "Julia",
    "Kate",
    "Luna",
    "Mary",
    "Naomi",
    "Opal",
    "Pearl",
    "Rose",
    "Stella",
    "Tilda",
    "Willa",
]
BOYS = [
    "Tom",
    "Ben",
    "Max",
    "Leo",
    "Sam",
    "Finn",
    "Omar",
    "Jack",
    "Noah",
    "Eli",
    "Hugo",
    "Ivan",
    "Kai",
    "Luca",
    "Milo",
    "Nico",
    "Otto",
    "Paul",
    "Ravi",
    "Theo",
    "Adam",
    "Bruno",
    "Carl",
    "Dan",
    "Emil",
    "Felix",
    "Gus",
    "Henry",
    "Ian",
    "Jonas",
    "Karl",
    "Liam",
    "Mark",
    "Nils",
    "Oscar",
    "Peter",
    "Rob",
    "Simon",
    "Tim",
    "Victor",
    "Will",
    "Yusuf",
    "Zack",
    "Alex",
    "Bo",
    "Colin",
    "David",
    "Erik",
    "Fred",
    "George",
    "Harry",
    "Jim",
    "Ken",
    "Lars",
    "Matt",
    "Ned",
    "Owen",
    "Pablo",
    "Rory",
    "Seth",
    "Toby",
]
ANIMAL_NAMES = [
    "Pip",
    "Bo",
    "Dot",
    "Fizz",
    "Tuff",
    "Moss",
    "Fern",
    "Biscuit",
    "Pepper",
    "Button",
    "Clover",
    "Nutmeg",
    "Rusty",
    "Sandy",
    "Smudge",
    "Snowy",
    "Sunny",
    "Twig",
    "Waffle",
    "Whisker",
    "Ziggy",
    "Bramble",
    "Bubbles",
    "Cinnamon",
    "Copper",
    "Daisy",
    "Dusty",
    "Fluff",
    "Ginger",
    "Hazel",
    "Honey",
    "Jingle",
    "Lulu",
    "Maple",
    "Misty",
    "Momo",
    "Muffin",
    "Olive",
    "Patch",
    "Pebble",
    "Plum",
    "Poppy",
    "Pudding",
    "Rolo",
    "Scout",
    "Shadow",
    "Socks",
    "Sparky",
    "Spot",
    "Star",
    "Teddy",
    "Tiny",
    "Toffee",
    "Velvet",
    "Willow",
    "Bean",
    "Coco",
    "Echo",
    "Juniper",
    "Kiki",
]

_ONSETS = [
    "B",
    "Br",
    "D",
    "Dr",
    "F",
    "Fl",
    "G",
    "Gr",
    "H",
    "J",
    "K",
    "Kl",
    "L",
    "M",
    "N",
    "P",
    "Pr",
    "Qu",
    "R",
    "S",
    "Sk",
    "T",
    "Tr",
    "V",
    "W",
    "Z",
]
_MIDDLES = ["a", "e", "i", "o", "u", "ai", "ee", "oo", "ar", "en", "il", "or", "am", "el"]
_ENDS = [
    "b",
    "n",
    "l",
    "m",
    "r",
    "k",
    "ta",
    "lo",
    "ra",
    "mi",
    "no",
    "vi",
    "ster",
    "dy",
    "ka",
    "bo",
    "lin",
    "dor",
    "ny",
    "sha",
    "wen",
]


def made_up_name(rng: random.Random) -> str:
    """Return a name of no language, so that the model learns to copy a word that it has never seen."""
    if rng.random() < 0.3:
        letters = "".join(rng.choice("aeiou") + rng.choice("bcdfghklmnprstvxz") for _ in range(rng.randint(1, 3)))
        return (rng.choice("BCDFGHJKLMNPRSTVWXZ") + letters).title()
    middle = rng.choice(_MIDDLES)
    return rng.choice(_ONSETS) + middle + rng.choice(_ENDS) + (rng.choice(_MIDDLES) if rng.random() < 0.25 else "")


@dataclass(frozen=True)
class Place:
    """Somewhere a story happens: `at` is where one is, `to` where one goes, `spots` are places inside it."""

    name: str
    at: str
    spots: tuple[str, ...]
    sights: tuple[str, ...]

    @property
    def to(self) -> str:
        """The place as a destination."""
        return self.name

    def __str__(self) -> str:
        return self.name


def _place(name: str, preposition: str, spots: str, sights: str) -> Place:
    return Place(name, f"{preposition} {name}", tuple(spots.split(", ")), tuple(sights.split(", ")))


PLACES = [
    _place(
        "the park",
        "in",
        "under the bench, behind the big tree, near the pond, beside the swings, in the long grass",
        "the tall trees, the ducks on the pond, the children on the swings",
    ),
    _place(
        "the forest",
        "in",
        "under a bush, behind a mossy log, beside the stream, between two roots, in a hollow tree",
        "the tall trees, the mushrooms, the birds in the branches",
    ),
    _place(
        "the garden",
        "in",
        "under the apple tree, behind the shed, among the flowers, beside the fence, near the watering can",
        "the roses, the bees, the red apples on the tree",
    ),
    _place(
        "the beach",
        "at",
        "behind a rock, under a towel, beside a sandcastle, near the water, in a heap of seaweed",
        "the blue waves, the white shells, the gulls in the sky",
    ),
    _place(
        "the farm",
        "on",
        "behind the barn, in the hay, under the old cart, beside the well, near the hen house",
        "the cows in the field, the hens in the yard, the big red barn",
    ),
    _place(
        "the market",
        "at",
        "under a table, behind a stall, beside the fountain, near the baker's cart, in an empty basket",
        "the baskets of fruit, the colourful stalls, the busy people",
    ),
    _place(
        "the school",
        "at",
        "under a desk, behind the door, in the cupboard, beside the blackboard, near the coats",
        "the pictures on the wall, the rows of desks, the children in the yard",
    ),
    _place(
        "the meadow",
        "in",
        "in the tall grass, behind a stone, under a clover leaf, beside the path, near the old fence",
        "the yellow flowers, the butterflies, the soft green grass",
    ),
    _place(
        "the river",
        "by",
        "behind a rock, under the bridge, beside the reeds, in the mud, near a fallen tree",
        "the clear water, the little fish, the old stone bridge",
    ),
    _place(
        "the hill",
        "on",
        "behind a rock, under the lonely tree, in the tall grass, beside the path, near the top",
        "the village far below, the clouds, the sheep on the slope",
    ),
    _place(
        "the village",
        "in",
        "behind the well, under the stairs, beside the bakery, near the church, in a flower pot",
        "the small houses, the smoke from the chimneys, the old clock",
    ),
    _place(
        "the library",
        "in",
        "under a chair, behind a shelf, between two books, beside the window, near the lamp",
        "the tall shelves, the quiet readers, the hundreds of books",
    ),
    _place(
        "the lake",
        "at",
        "behind the boats, under the dock, beside the reeds, near the shore, in the soft sand",
        "the still water, the swans, the little boats",
    ),
    _place(
        "the castle",
        "in",
        "behind the throne, under the stairs, in the tower, beside the gate, near the well",
        "the high walls, the flags, the long hall",
    ),
    _place(
        "the kitchen",
        "in",
        "under the table, behind the stove, in the basket, beside the sink, near the bread box",
        "the shining pots, the warm stove, the bowl of fruit",
    ),
    _place(
        "the valley",
        "in",
        "under a bush, behind a boulder, beside the brook, near the old mill, in the ferns",
        "the green slopes, the little brook, the old mill",
    ),
    _place(
        "the harbour",
        "at",
        "behind the nets, under a boat, beside the lighthouse, near the ropes, in a wooden box",
        "the fishing boats, the tall lighthouse, the gulls on the wall",
    ),
    _place(
        "the orchard",
        "in",
        "under a ladder, behind a basket, beside the wall, in the fallen leaves, near the oldest tree",
        "the rows of trees, the ripe pears, the ladders",
    ),
]


@dataclass(frozen=True)
class Thing:
    """Something to own: `fragile` may break, `use` is what one does with it."""

    name: str
    use: str
    fragile: bool = False
    flies: bool = False

    def __str__(self) -> str:
        return self.name


def _things(text: str, *, fragile: bool = False, flies: bool = False) -> list[Thing]:
    pairs = (entry.strip().split(": ") for entry in text.split(";"))
    return [Thing(name, use, fragile, flies) for name, use in pairs]


THINGS = [
    *_things("kite: fly it; balloon: hold it by its string; paper plane: throw it", flies=True),
    *_things(
        "cup: drink from it; vase: put flowers in it; lamp: read by its light; mirror: look into it; jar: keep sweets in it; "
        "plate: eat from it; glass bird: look at it; teapot: pour tea from it; lantern: carry it at night",
        fragile=True,
    ),
    *_things(
        "ball: play with it; doll: hug it; book: read it; hat: wear it; scarf: wear it; drum: play it; toy boat: sail it; "
        "toy train: play with it; teddy bear: hug it; basket: carry things in it; whistle: blow it; bell: ring it; "
        "blanket: sleep under it; umbrella: walk in the rain with it; wagon: pull it; coat: wear it; ring: wear it; "
        "map: look at it; key: open a box with it; coin: look at it; flute: play it; puzzle: solve it; rope: skip with it; "
        "bucket: fill it with sand; shovel: dig with it; pencil: draw with it; paintbrush: paint with it; bag: carry it; "
        "spoon: stir with it; feather: look at it; shell: listen to it; stone: hold it; toy car: play with it; "
        "spinning top: spin it; yo-yo: play with it; pillow: rest on it; ribbon: wear it; button: look at it; "
        "watch: look at it; necklace: wear it; toy rocket: play with it; music box: listen to it; jumper: wear it"
    ),
]

COLOURS = [
    "red",
    "blue",
    "green",
    "yellow",
    "orange",
    "purple",
    "pink",
    "brown",
    "black",
    "white",
    "grey",
    "golden",
    "silver",
]
LISTS.update(
    colour=COLOURS,
    size=["little", "small", "tiny", "big", "large"],
    nice=[
        "kind",
        "gentle",
        "cheerful",
        "friendly",
        "brave",
        "clever",
        "curious",
        "quiet",
        "patient",
        "honest",
        "playful",
        "polite",
        "happy",
    ],
    flaw=[
        "shy",
        "proud",
        "lazy",
        "stubborn",
        "greedy",
        "grumpy",
        "careless",
        "selfish",
        "bossy",
        "impatient",
        "nervous",
    ],
    look=[
        "shiny",
        "old",
        "new",
        "pretty",
        "soft",
        "round",
        "bright",
        "strange",
        "wooden",
        "lovely",
        "simple",
        "striped",
    ],
    happy=["happy", "glad", "proud", "cheerful", "pleased", "delighted", "joyful"],
    sad=["sad", "unhappy", "upset", "gloomy"],
    afraid=["afraid", "scared", "frightened"],
    fine=["good", "nice", "great", "wonderful", "lovely", "fine", "splendid"],
    day=["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"],
    season=["spring", "summer", "autumn", "winter"],
    small_number=["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"],
    tree=["oak", "pine", "apple", "pear", "cherry", "willow", "birch", "maple"],
    flower=["rose", "daisy", "tulip", "sunflower", "lily", "poppy", "violet", "buttercup"],
)
LISTS["quickly"] = ("quickly", "at once", "right away", "in a hurry", "without waiting")

WEATHER = {
    "sunny": (
        "The sun was [shining|bright|warm].",
        "The sky was [clear and blue|blue|bright].",
        "It was a [warm|sunny|bright] day.",
    ),
    "rainy": (
        "It was raining.",
        "Rain fell from the grey sky.",
        "The rain [tapped on|ran down] the windows.",
        "It was a wet day.",
    ),
    "windy": ("The wind was [strong|blowing hard].", "A strong wind shook the trees.", "It was a windy day."),
    "snowy": (
        "Snow [covered the ground|was falling|lay on the roofs].",
        "Everything was white with snow.",
        "It was cold and snowy.",
    ),
    "cloudy": ("The sky was grey.", "[Big|Soft|Grey] clouds [hung in|filled] the sky.", "It was a cloudy day."),
    "foggy": ("The fog was thick.", "A grey fog lay over everything.", "It was hard to see in the fog."),
}


@dataclass(frozen=True)
class Food:
    """Something to eat: its plural or mass form, kind, colour and taste."""

    name: str
    many: str
    kind: str
    colour: str
    taste: str

    @property
    def some(self) -> str:
        """One helping of it, with its article or measure."""
        if self.name == self.many:
            return "some " + self.name
        return ("an " if self.name[0] in "aeiou" else "a ") + self.name

    def __str__(self) -> str:
        return self.name


FOODS = [
    Food(*line.strip().split(","))
    for line in """apple,apples,fruit,red,sweet;pear,pears,fruit,green,sweet;plum,plums,fruit,purple,sweet
banana,bananas,fruit,yellow,sweet;lemon,lemons,fruit,yellow,sour;orange,oranges,fruit,orange,sweet;cherry,cherries,fruit,red,sweet
strawberry,strawberries,fruit,red,sweet;grape,grapes,fruit,purple,sweet;peach,peaches,fruit,orange,sweet;lime,limes,fruit,green,sour
carrot,carrots,vegetable,orange,sweet;potato,potatoes,vegetable,brown,plain;tomato,tomatoes,vegetable,red,fresh
onion,onions,vegetable,brown,sharp;cucumber,cucumbers,vegetable,green,fresh;pea,peas,vegetable,green,sweet
cabbage,cabbages,vegetable,green,plain;pumpkin,pumpkins,vegetable,orange,sweet;bean,beans,vegetable,green,plain
cake,cakes,dessert,brown,sweet;cookie,cookies,dessert,brown,sweet;pancake,pancakes,dessert,golden,sweet
pie,pies,dessert,golden,sweet;muffin,muffins,dessert,brown,sweet;bun,buns,dessert,brown,sweet
bread,bread,baked food,brown,plain;rice,rice,grain,white,plain;soup,soup,meal,orange,salty;cheese,cheese,dairy food,yellow,salty
honey,honey,sweet food,golden,sweet;milk,milk,drink,white,plain;tea,tea,drink,brown,bitter;butter,butter,dairy food,yellow,salty
egg,eggs,food,white,plain;nut,nuts,food,brown,plain;sandwich,sandwiches,meal,brown,salty;pizza,pizzas,meal,red,salty""".replace(
        "\n", ";"
    ).split(";")
]
SNACKS = [f for f in FOODS if f.kind in ("fruit", "dessert") or f.name in ("sandwich", "carrot", "bread", "cheese")]

ROLES = [
    "baker",
    "farmer",
    "teacher",
    "fisherman",
    "gardener",
    "painter",
    "shepherd",
    "sailor",
    "carpenter",
    "doctor",
    "tailor",
    "king",
    "queen",
    "knight",
    "wizard",
    "princess",
    "prince",
    "robot",
    "giant",
    "dragon",
    "fairy",
    "miller",
    "clown",
    "pilot",
    "cook",
    "singer",
    "dancer",
    "nurse",
    "postman",
    "inventor",
]
FAMILY = {
    "mother": "f",
    "father": "m",
    "grandmother": "f",
    "grandfather": "m",
    "aunt": "f",
    "uncle": "m",
    "big sister": "f",
    "big brother": "m",
}
ROLES += ["old man", "old woman", "magician", "hunter", "pirate", "ghost", "witch", "astronaut", "snowman"]
#: Things that can be the hero of a story.
TALKING_THINGS = [
    "star",
    "cloud",
    "boat",
    "tree",
    "train",
    "teapot",
    "raindrop",
    "snowflake",
    "lamp",
    "stone",
    "car",
    "flower",
]
TRAITS = ["kind", "curious", "brave", "clever", "cheerful", "quiet", "playful", "shy", "gentle"]
MORE_TRAITS = [
    *TRAITS,
    "lonely",
    "lazy",
    "hungry",
    "sad",
    "happy",
    "funny",
    "proud",
    "sleepy",
    "friendly",
    "wise",
    "strange",
]
LISTS["role"] = ROLES
