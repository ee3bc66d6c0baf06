"""Short English documents that cannot be predicted without long-range recall.

Each document states facts about a few children, talks about other things, and then asks for the facts. A model
that looks at nearby tokens only can do no better than to guess among the few dozen values of the relation.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Protocol

__all__ = ["Tokenizer", "recall_documents", "recall_prompts"]


class Tokenizer(Protocol):
    """What `recall_prompts` needs of a tokenizer; every transformers tokenizer has it."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


@dataclass(frozen=True)
class Relation:
    """One kind of fact. The statement ends with the value, so that its stem is a prompt for it."""

    stem: str
    question: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Fact:
    name: str
    relation: Relation
    value: str

    @property
    def stem(self) -> str:
        return self.relation.stem.format(name=self.name)

    @property
    def question(self) -> str:
        return self.relation.question.format(name=self.name)

    @property
    def statement(self) -> str:
        return f"{self.stem} {self.value}."


NAMES = _words("""
    Lily Tim Tom Ben Sue Max Mia Anna Sam Lucy Jack Sara Timmy Billy Bob Jane Amy Emma Jill Leo Ella Zoe
    Kate Nick Pete Rosie Daisy Molly Joe Bella Toby Mark
""")

RELATIONS = (
    Relation(
        "{name} fed the",
        "What did {name} feed?",
        _words("""
            dog cat bird fish frog bear fox duck rabbit mouse horse cow pig sheep goat lion tiger monkey turtle
            snake bee butterfly squirrel hen wolf deer whale spider bug worm puppy kitten
        """),
    ),
    Relation(
        "{name} saw the",
        "What did {name} see?",
        _words("""
            park forest lake river beach sea hill mountain farm garden school store market castle tower bridge cave
            field pond island village city church road barn library museum zoo bakery harbor desert valley
        """),
    ),
    Relation(
        "{name} lost the",
        "What did {name} lose?",
        _words("""
            ball kite car truck doll boat book hat cup box key bell drum ring coin stick rope lamp spoon bag shoe
            scarf blanket basket map balloon crown flute bike train clock pencil
        """),
    ),
    Relation(
        "{name} ate",
        "What did {name} eat?",
        _words("""
            cake bread soup cheese rice corn candy pie jam honey nuts grapes pears plums beans carrots potatoes
            cookies pancakes noodles pizza salad toast eggs butter berries cherries bananas peaches lemons melons
            ham
        """),
    ),
    Relation(
        "{name} likes",
        "What does {name} like?",
        _words("""
            red blue green yellow pink purple orange brown black white gray gold silver violet tan lime cream ruby
            rose sky snow mint coral amber
        """),
    ),
    Relation(
        "{name} picked",
        "What did {name} pick?",
        _words("""
            one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
            seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred
        """),
    ),
)

OPENINGS = (
    "Here is what we know about our friends.",
    "Some friends told us about their day.",
    "Listen well, for we will ask you later.",
    "Once upon a time, there were some good friends.",
)
REMINDERS = ("Now let us see what you remember.", "Do you still know it?", "It is time to ask.", "Let us say it again.")
LEAD_INS = ("Yes,", "As we know,", "You see,", "We remember that")

FILLER = (
    "The sun was {mood} and the wind was {other_mood}.",
    "A {mood} {thing} stood by the window.",
    "It was a {mood} day and the children wanted to {deed}.",
    "They began to {deed} until it was late.",
    "Mom said it was time to {deed}.",
    "Dad saw a {mood} {thing} and smiled.",
    "Nobody knew why the {thing} was so {mood}.",
    "After a while, they all felt {mood}.",
    "The little {thing} looked {mood} in the light.",
    "They put the {thing} next to the {other_thing}.",
    "It is good to {deed} when the weather is {mood}.",
    "Then the rain came and everyone had to {deed}.",
)
MOODS = _words("warm quiet happy soft big small new clean funny nice strange cold kind")
THINGS = _words("tree flower chair table stone leaf door wall cloud star bed house")
DEEDS = (
    "play",
    "sing",
    "dance",
    "rest",
    "go home",
    "run around",
    "look up",
    "sit down",
    "tell a story",
    "help each other",
)


def recall_documents(
    count: int, seed: int, filler_words: tuple[int, int] = (20, 240), facts: tuple[int, int] = (4, 9)
) -> list[str]:
    """Documents that state facts early and ask for each of them twice.

    Args:
        count: How many documents.
        seed: The same seed gives the same documents.
        filler_words: Fewest and most words that may stand between the facts and the last round of questions.
        facts: Fewest and most facts in a document.
    """
    rng = Random(seed)
    return [_document(rng, rng.randint(*filler_words), _facts(rng, rng.randint(*facts))) for _ in range(count)]


def recall_prompts(count: int, distance_tokens: int, tokenizer: Tokenizer, seed: int) -> list[tuple[str, str]]:
    """Prompts with the one word that continues each, stated about ``distance_tokens`` tokens before.

    The prompt ends without a space: the answer's first token carries it.
    """
    rng = Random(seed)
    return [_prompt(rng, distance_tokens, tokenizer) for _ in range(count)]


def _document(rng: Random, filler_words: int, facts: list[Fact]) -> str:
    early_words = rng.randint(0, filler_words)
    sentences = [rng.choice(OPENINGS), *(fact.statement for fact in facts)]
    for words in (early_words, filler_words - early_words):
        sentences += _filler(rng, words)
        sentences.append(rng.choice(REMINDERS))
        sentences += (_recollection(rng, fact) for fact in rng.sample(facts, len(facts)))
    return " ".join(sentences)


def _prompt(rng: Random, distance_tokens: int, tokenizer: Tokenizer) -> tuple[str, str]:
    def length(text: str) -> int:
        return len(tokenizer.encode(" " + text, add_special_tokens=False))

    facts = _facts(rng, rng.randint(4, 9))
    reminder = rng.choice(REMINDERS)
    # Facts stated after the asked one count towards the distance, so at a short distance only late facts qualify.
    candidates = []
    for position, fact in enumerate(facts):
        later = sum(length(other.statement) for other in facts[position + 1 :])
        distance = later + length(f"{reminder} {fact.question} {fact.stem}")
        if distance <= distance_tokens or position == len(facts) - 1:
            candidates.append((fact, distance))
    asked, distance = rng.choice(candidates)

    sentences = [rng.choice(OPENINGS), *(fact.statement for fact in facts)]
    for sentence in _endless_filler(rng):
        extra = length(sentence)
        if distance + extra / 2 > distance_tokens:
            break
        sentences.append(sentence)
        distance += extra
    return " ".join([*sentences, reminder, asked.question, asked.stem]), asked.value


def _facts(rng: Random, count: int) -> list[Fact]:
    """Distinct facts of one or two relations. Names share relations, and may share them the other way round."""
    relations = rng.sample(RELATIONS, rng.randint(1, 2))
    names = rng.sample(NAMES, count if len(relations) == 1 else (count + 2) // 2)
    pairs = rng.sample([(name, relation) for name in names for relation in relations], count)
    unused = {relation.stem: rng.sample(relation.values, len(names)) for relation in relations}
    return [Fact(name, relation, unused[relation.stem].pop()) for name, relation in pairs]


def _recollection(rng: Random, fact: Fact) -> str:
    form = rng.random()
    if form < 0.4:
        return f"{fact.question} {fact.statement}"
    if form < 0.6:
        return f"{rng.choice(LEAD_INS)} {fact.statement}"
    return fact.statement


def _filler(rng: Random, words: int) -> Iterator[str]:
    for sentence in _endless_filler(rng):
        words -= len(sentence.split())
        if words < 0:
            return
        yield sentence


def _endless_filler(rng: Random) -> Iterator[str]:
    while True:
        mood, other_mood = rng.sample(MOODS, 2)
        thing, other_thing = rng.sample(THINGS, 2)
        yield rng.choice(FILLER).format(
            mood=mood, other_mood=other_mood, thing=thing, other_thing=other_thing, deed=rng.choice(DEEDS)
        )
