"""Short English documents that cannot be predicted without long-range recall.

Each document introduces villagers by trade and name ("the baker Lily"), talks about other things, and comes back to
them. Behind a trade always stands the name introduced with it, so a model that remembers the introduction knows the
name, and one that looks at nearby tokens only can do no better than to guess among a few dozen.
"""

from collections.abc import Iterator
from random import Random
from typing import Protocol

__all__ = ["Tokenizer", "recall_documents", "recall_prompts"]


class Tokenizer(Protocol):
    """The interface of a tokenizer that `recall_prompts` needs; every transformers tokenizer has it."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words("""
    Lily Tim Tom Ben Sue Max Mia Anna Sam Lucy Jack Sara Timmy Billy Bob Jane Amy Emma Jill Leo Ella Zoe
    Kate Nick Pete Rosie Daisy Molly Joe Bella Toby Mark Fred Jim Dan Ann Bill Spot Buddy Mary
""")
TRADES = _words("""
    baker farmer doctor teacher king queen driver cook painter singer dancer hunter pilot sailor nurse judge knight
    wizard princess prince clown guard gardener fisherman captain soldier tailor miller shepherd builder writer
    dentist barber butcher potter
""")

INTRODUCTIONS = (
    "In the village lived the {}.",
    "Once upon a time, there was the {}.",
    "Next door lived the {}.",
    "Everyone knew the {}.",
    "Up on the hill lived the {}.",
    "There was also the {}.",
)
MEETINGS = (
    "The {} met the {}.",
    "The {} smiled at the {}.",
    "Then the {} said hello to the {}.",
    "The {} gave a gift to the {}.",
    "One day, the {} and the {} went for a walk.",
)
QUESTIONS = ("Who came to help? It was the {}.", "Who laughed? It was the {}.", "Who was there? It was the {}.")

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
DEEDS = ("play", "sing", "dance", "rest", "go home", "run around", "look up", "sit down", "tell a story", "help")


def recall_documents(
    count: int, seed: int, filler_words: tuple[int, int] = (20, 240), villagers: tuple[int, int] = (4, 9)
) -> list[str]:
    """Documents that introduce villagers and name each of them again, after filler, two or three times.

    Args:
        count: How many documents.
        seed: The same seed gives the same documents.
        filler_words: Fewest and most words of filler in a document.
        villagers: Fewest and most villagers in a document.
    """
    rng = Random(seed)
    return [_document(rng, rng.randint(*filler_words), _villagers(rng, rng.randint(*villagers))) for _ in range(count)]


def recall_prompts(count: int, distance_tokens: int, tokenizer: Tokenizer, seed: int) -> list[tuple[str, str]]:
    """Prompts with the one name that continues each, told about ``distance_tokens`` tokens before and not since.

    The prompt ends without a space: the answer's first token carries it.
    """
    rng = Random(seed)
    return [_prompt(rng, distance_tokens, tokenizer) for _ in range(count)]


def _document(rng: Random, filler_words: int, villagers: list[str]) -> str:
    early_words = rng.randint(0, filler_words)
    sentences = _introduced(rng, villagers)
    for words in (early_words, filler_words - early_words):
        sentences += _filler(rng, words)
        order = rng.sample(villagers, len(villagers))
        while order:
            form = rng.choice(MEETINGS) if len(order) > 1 and rng.random() < 0.7 else rng.choice(QUESTIONS)
            sentences.append(form.format(*(order.pop() for _ in range(form.count("{}")))))
    return " ".join(sentences)


def _prompt(rng: Random, distance_tokens: int, tokenizer: Tokenizer) -> tuple[str, str]:
    def length(text: str) -> int:
        return len(tokenizer.encode(" " + text, add_special_tokens=False))

    villagers = _villagers(rng, rng.randint(4, 9))
    asked = rng.randrange(len(villagers))
    trade, name = villagers[asked].split()
    question = rng.choice(QUESTIONS).partition("{}")[0] + trade
    sentences = _introduced(rng, villagers)
    distance = length(question) + sum(length(sentence) for sentence in sentences[asked + 1 :])
    for sentence in _endless_filler(rng):
        extra = length(sentence)
        if distance + extra / 2 > distance_tokens:
            break
        sentences.append(sentence)
        distance += extra
    return " ".join([*sentences, question]), name


def _villagers(rng: Random, count: int) -> list[str]:
    pairs = zip(rng.sample(TRADES, count), rng.sample(NAMES, count), strict=True)
    return [f"{trade} {name}" for trade, name in pairs]


def _introduced(rng: Random, villagers: list[str]) -> list[str]:
    return [rng.choice(INTRODUCTIONS).format(villager) for villager in villagers]


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
