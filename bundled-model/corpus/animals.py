"""Animals and the plain facts that chat and prose use about them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Animal:
    """One kind of animal; `size` ranks it from 1 (ant) to 10 (whale)."""

    kind: str
    many: str
    young: str
    home: str
    eats: tuple[str, ...]
    sound: str
    legs: int
    colour: str
    cover: str
    can: tuple[str, ...]
    size: int
    group: str

    def __str__(self) -> str:
        return self.kind


# kind / plural / young / home / eats / sound it makes / legs / colour / covering / can / size / group
_TABLE = """fox/foxes/cub/in a den in the forest/mice and berries/bark/4/red/fur/run, dig/4/mammal
dog/dogs/puppy/in a house with people/meat and bones/bark/4/brown/fur/run, swim/4/mammal
cat/cats/kitten/in a house with people/fish and mice/meow/4/grey/fur/climb, jump/3/mammal
mouse/mice/pup/in a small hole/seeds and cheese/squeak/4/grey/fur/run, hide/2/mammal
rabbit/rabbits/kit/in a burrow/grass and carrots/squeak/4/brown/fur/hop, dig/3/mammal
bear/bears/cub/in a cave/fish, berries and honey/growl/4/brown/fur/climb, swim/7/mammal
wolf/wolves/pup/in a den in the forest/meat/howl/4/grey/fur/run, howl/5/mammal
horse/horses/foal/in a stable/grass and hay/neigh/4/brown/hair/run, jump/8/mammal
cow/cows/calf/on a farm/grass and hay/moo/4/brown/hair/walk, give milk/8/mammal
pig/pigs/piglet/on a farm/corn and roots/grunt/4/pink/bristles/dig, roll in mud/6/mammal
sheep/sheep/lamb/in a meadow/grass/bleat/4/white/wool/walk, give wool/5/mammal
goat/goats/kid/on a hill/grass and leaves/bleat/4/white/hair/climb, jump/5/mammal
donkey/donkeys/foal/on a farm/grass and hay/bray/4/grey/hair/walk, carry loads/7/mammal
squirrel/squirrels/kit/in a tree/nuts and seeds/chatter/4/red/fur/climb, jump/2/mammal
hedgehog/hedgehogs/hoglet/under a bush/worms and beetles/snuffle/4/brown/spines/curl up, dig/2/mammal
deer/deer/fawn/in the forest/grass and leaves/grunt/4/brown/fur/run, jump/6/mammal
badger/badgers/cub/in a burrow/worms and roots/growl/4/grey/fur/dig, walk/4/mammal
otter/otters/pup/by the river/fish/whistle/4/brown/fur/swim, dive/4/mammal
beaver/beavers/kit/in a lodge on the river/bark and leaves/whine/4/brown/fur/swim, build dams/4/mammal
bat/bats/pup/in a cave/insects/squeak/2/black/fur/fly, hang upside down/2/mammal
lion/lions/cub/on the plains/meat/roar/4/golden/fur/run, jump/7/mammal
tiger/tigers/cub/in the jungle/meat/roar/4/orange/striped fur/swim, jump/7/mammal
elephant/elephants/calf/on the plains/grass and leaves/trumpet/4/grey/thick skin/walk, swim/9/mammal
monkey/monkeys/infant/in the jungle/fruit and leaves/chatter/4/brown/fur/climb, swing/4/mammal
giraffe/giraffes/calf/on the plains/leaves/hum/4/yellow/spotted fur/run, reach high leaves/9/mammal
camel/camels/calf/in the desert/dry grass/grunt/4/brown/hair/walk, carry loads/8/mammal
whale/whales/calf/in the sea/tiny sea animals/song/0/blue/smooth skin/swim, dive/10/mammal
dolphin/dolphins/calf/in the sea/fish/click/0/grey/smooth skin/swim, jump/7/mammal
bird/birds/chick/in a nest/seeds and worms/chirp/2/brown/feathers/fly, sing/2/bird
owl/owls/owlet/in a hollow tree/mice/hoot/2/brown/feathers/fly, see in the dark/3/bird
duck/ducks/duckling/on a pond/plants and snails/quack/2/white/feathers/swim, fly/3/bird
hen/hens/chick/in a hen house/corn and seeds/cluck/2/brown/feathers/walk, lay eggs/3/bird
goose/geese/gosling/on a farm/grass/honk/2/white/feathers/swim, fly/4/bird
crow/crows/chick/in a tall tree/seeds and insects/caw/2/black/feathers/fly, hop/3/bird
penguin/penguins/chick/on the ice/fish/squawk/2/black and white/feathers/swim, dive/4/bird
eagle/eagles/eaglet/on a high cliff/fish and mice/screech/2/brown/feathers/fly, see far/4/bird
swan/swans/cygnet/on a lake/water plants/hiss/2/white/feathers/swim, fly/5/bird
parrot/parrots/chick/in the jungle/fruit and nuts/squawk/2/green/feathers/fly, copy words/3/bird
frog/frogs/tadpole/in a pond/flies and insects/croak/4/green/smooth skin/jump, swim/2/amphibian
turtle/turtles/hatchling/by the water/plants and fish/hiss/4/green/a hard shell/swim, walk slowly/3/reptile
snake/snakes/hatchling/under a rock/mice and eggs/hiss/0/green/scales/slide, climb/4/reptile
lizard/lizards/hatchling/on warm rocks/insects/hiss/4/green/scales/run, climb/2/reptile
crocodile/crocodiles/hatchling/in a warm river/fish and meat/growl/4/green/thick scales/swim, walk/8/reptile
fish/fish/fry/in the water/small plants/bubble/0/silver/scales/swim, dive/2/fish
shark/sharks/pup/in the sea/fish/no sound/0/grey/rough skin/swim, dive/8/fish
bee/bees/larva/in a hive/nectar/buzz/6/yellow and black/fine hair/fly, make honey/1/insect
ant/ants/larva/in an anthill/seeds and crumbs/no sound/6/black/a hard shell/climb, carry big loads/1/insect
butterfly/butterflies/caterpillar/in a meadow/nectar/no sound/6/orange/tiny scales/fly, sip nectar/1/insect
ladybird/ladybirds/larva/on a leaf/tiny insects/no sound/6/red/a hard shell/fly, climb/1/insect
snail/snails/baby snail/in the garden/leaves/no sound/0/brown/a hard shell/climb, crawl slowly/1/mollusc
spider/spiders/spiderling/in a web/flies and insects/no sound/8/black/fine hair/climb, spin webs/1/arachnid"""


def _animal(line: str) -> Animal:
    kind, many, young, home, eats, sound, legs, colour, cover, can, size, group = line.split("/")
    return Animal(
        kind,
        many,
        young,
        home,
        tuple(eats.replace(" and ", ", ").split(", ")),
        sound,
        int(legs),
        colour,
        cover,
        tuple(can.split(", ")),
        int(size),
        group,
    )


ANIMALS = [_animal(line) for line in _TABLE.splitlines()]
BY_KIND = {a.kind: a for a in ANIMALS}
#: Animals that make good heroes of a story.
HEROES = [a for a in ANIMALS if a.kind not in ("shark", "whale", "bird")]
