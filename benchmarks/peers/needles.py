"""Contexts with things to look up in them, and questions about these, of the kinds of RULER (Hsieh et al. 2024, arXiv
2404.06654): needles in a haystack, one and one of several, variables to track, common words.

A kind has a few templates, since small models understand one and not another. Keys and values are drawn; words
are those of the text that are one token each. Questions of one context share it, and it is read once.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from itertools import cycle, islice, pairwise
from random import Random

from questions import Context, Question, Task
from transformers import PreTrainedTokenizerBase

from dofla.data.facts import one_token_words, pieces
from dofla.errors import DoflaError

NOISE = (" The grass is green.", " The sky is blue.", " The sun is yellow.", " Here we go.", " There and back again.")
NEEDLES, HOPS, COMMON = 4, 4, 10
"""Needles of *multi-key*, assignments of *variables* after the first, words to be found in *common words*."""
LEAST = 200
"""Words there must be."""
# Template → what comes first, a needle, a question.
NEEDLE = {
    "magic numbers": (
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the numbers afterwards.\n",
        " One of the special magic numbers for {key} is: {value}.",
        "\nWhat is the special magic number for {key} mentioned in the provided text? The special magic number for "
        "{key} mentioned in the provided text is",
    ),
    "pass codes": (
        "Pass codes are hidden in this text. Find and remember them.\n\n",
        " The pass code of the {key} is {value}.",
        "\n\nWhat is the pass code of the {key}? The pass code of the {key} is",
    ),
}
# Template → whether a solved example comes first.
EXAMPLE = {"as it is": False, "after an example": True}
VARIABLES = (
    "Memorize and track the chain of variable assignment hidden in the following text.\n\n",
    "\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to the "
    "chain of variable assignment in the text above, {count} variables are assigned the value {value}, they are:",
)
COMMON_WORDS = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n",
    "\nQuestion: What are the {count} most common words in the above list? Answer: The top {count} words that appear "
    "most often in the list are:",
)


class Writer:
    """Writes contexts of some number of tokens for one tokenizer; ``text`` [T] is the haystack of *multi-key*, and says
    which tokens are whole words."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: Sequence[int]) -> None:
        self.tokenizer, self.text = tokenizer, list(text)
        self.words = sorted(one_token_words(tokenizer).keys() & set(re.findall("[a-z]+", tokenizer.decode(self.text))))
        if len(self.words) < LEAST:
            raise DoflaError(f"the text has {len(self.words)} words that are one token: give one with {LEAST} or more")

    def pieces(self, text: str) -> list[int]:
        return pieces(self.tokenizer, text)

    def start(self, text: str) -> list[int]:
        """The beginning of a context."""
        return self.tokenizer.encode("")[:1] + self.tokenizer.encode(text, add_special_tokens=False)

    def question(self, text: str, answers: Sequence[str], spare: int) -> Question:
        """Room for the answers, what may stand between them, and ``spare`` tokens."""
        room = len(self.pieces(" " + ", ".join(answers))) + spare
        return Question(self.pieces(text), list(answers), room)

    def hide(self, rng: Random, needles: list[list[int]], hay: list[list[int]]) -> list[int]:
        """The tokens of a haystack with the needles at places that are drawn, in their order."""
        places = sorted(rng.randrange(len(hay) + 1) for _ in needles)
        for place, needle in reversed(list(zip(places, needles, strict=True))):
            hay.insert(place, needle)
        return [token for part in hay for token in part]

    def noise(self, room: int) -> list[list[int]]:
        """Sentences about nothing, ``room`` tokens or a few less."""
        hay = []
        for sentence in cycle(map(self.pieces, NOISE)):
            room -= len(sentence)
            if room < 0:
                return hay
            hay.append(sentence)
        raise AssertionError

    def prose(self, rng: Random, room: int) -> list[list[int]]:
        """So many tokens of the text from a place that is drawn, in sentences."""
        if len(self.text) < room:
            raise DoflaError(f"the text has {len(self.text)} tokens: give one of {room} or more")
        first = rng.randrange(len(self.text) - room + 1)
        hay, ends = [[]], set(".!?")
        for token in self.text[first : first + room]:
            hay[-1].append(token)
            if self.tokenizer.decode([token])[-1:] in ends:
                hay.append([])
        return hay

    def single(self, rng: Random, length: int, template: str) -> Context:
        """One needle, in sentences about nothing."""
        return self._needles(rng, length, template, 1, lambda room: self.noise(room))

    def multi_key(self, rng: Random, length: int, template: str) -> Context:
        """Several needles in prose, of which each is asked for."""
        return self._needles(rng, length, template, NEEDLES, lambda room: self.prose(rng, room))

    def _needles(
        self, rng: Random, length: int, template: str, count: int, hay: Callable[[int], list[list[int]]]
    ) -> Context:
        head, needle, question = NEEDLE[template]
        told = {key: str(rng.randrange(10**6, 10**7)) for key in rng.sample(self.words, count)}
        needles = [self.pieces(needle.format(key=key, value=value)) for key, value in told.items()]
        asked = [self.question(question.format(key=key), [value], 4) for key, value in told.items()]
        first = self.start(head)
        room = length - len(first) - sum(map(len, needles)) - max(len(x.ids) + x.room for x in asked)
        return Context(first + self.hide(rng, needles, hay(_room(room, length))), asked)

    def variables(self, rng: Random, length: int, template: str) -> Context:
        """A value, and variables that are set to it one from the other, in sentences about nothing."""
        head, ask = VARIABLES

        def chain() -> tuple[list[str], list[list[int]], str]:
            names = ["".join(rng.sample(string.ascii_uppercase, 5)) for _ in range(HOPS + 1)]
            value = str(rng.randrange(10_000, 100_000))
            lines = [f" VAR {names[0]} = {value}."]
            lines += [f" VAR {name} = VAR {before}." for before, name in pairwise(names)]
            return names, [self.pieces(line) for line in lines], ask.format(value=value, count=len(names))

        first = self.start(head)
        if EXAMPLE[template]:
            names, lines, question = chain()
            first += self.hide(rng, lines, self.noise(60)) + self.pieces(f"{question} {' '.join(names)}\n\n{head}")
        names, lines, question = chain()
        asked = self.question(question, names, 8)
        room = length - len(first) - sum(map(len, lines)) - len(asked.ids) - asked.room
        return Context(first + self.hide(rng, lines, self.noise(_room(room, length))), [asked])

    def common_words(self, rng: Random, length: int, template: str) -> Context:
        """A numbered list, half of it some words that stand often and half others that stand once."""
        head, ask = COMMON_WORDS[0], COMMON_WORDS[1].format(count=COMMON)

        def listed(room: int) -> tuple[list[str], list[int]]:
            words = rng.sample(self.words, len(self.words))
            count = room // len(self.pieces(" 100. word"))
            common, rest = words[:COMMON], words[COMMON:]
            others = rest[: count // 2]
            all_of = [*others, *islice(cycle(common), count - len(others))]
            rng.shuffle(all_of)
            return common, self.pieces("".join(f" {n}. {word}" for n, word in enumerate(all_of, start=1)))

        first = self.start(head)
        if EXAMPLE[template]:
            common, ids = listed(300)
            answer = "".join(f" {n}. {word}" for n, word in enumerate(common, start=1))
            first += ids + self.pieces(f"{ask}{answer}\n\n{head}")
        spare = len(self.pieces(ask)) + 7 * COMMON
        common, ids = listed(_room(length - len(first) - spare, length))
        return Context(first + ids, [self.question(ask, common, 3 * COMMON)])

    def contexts(self, kind: str, template: str, length: int, count: int, seed: int) -> list[Context]:
        """``count`` contexts of at most ``length`` tokens with the longest question and its answer."""
        rng = Random(f"{seed} {kind} {length}")
        return [KINDS[kind][0](self, rng, length, template) for _ in range(count)]

    def task(self, kind: str, template: str, length: int, count: int, seed: int) -> Task:
        """Of such contexts."""
        return Task(kind, template, length, self.contexts(kind, template, length, count, seed))


KINDS: dict[str, tuple[Callable[[Writer, Random, int, str], Context], list[str]]] = {
    "single": (Writer.single, list(NEEDLE)),
    "multi-key": (Writer.multi_key, list(NEEDLE)),
    "variables": (Writer.variables, list(EXAMPLE)),
    "common words": (Writer.common_words, list(EXAMPLE)),
}
"""Name → what writes a context, and its templates."""


def _room(room: int, length: int) -> int:
    if room < 1:
        raise DoflaError(f"length {length} leaves {room} tokens beside what is told and asked: give a greater length")
    return room
