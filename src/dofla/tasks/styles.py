"""Wordings of items as text: for each choice a context to read, and a continuation whose likelihood is computed.

The wordings are those of lm-evaluation-harness for the seven tasks of arXiv 2507.03340, so that figures compare.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dofla.errors import DoflaError
from dofla.tasks.items import Item


class Request(NamedTuple):
    """The likelihood of ``continuation`` after ``context`` is asked."""

    context: str
    continuation: str


def question(item: Item) -> list[Request]:
    """Question and answer; the choices are not shown."""
    passage = f"{item.context}\n" if item.context else ""
    prompt = f"{passage}Question: {item.question}\nAnswer:"
    return [Request(prompt, f" {choice}") for choice in item.choices]


def passage(item: Item) -> list[Request]:
    """A passage, a question and its lettered choices; the text of each choice is scored (logiQA)."""
    listed = "".join(f"{letter}. {choice}\n" for letter, choice in zip(_LETTERS, item.choices, strict=False))
    prompt = f"Passage: {item.context}\nQuestion: {item.question}\nChoices:\n{listed}Answer:"
    return [Request(prompt, f" {choice}") for choice in item.choices]


def letters(item: Item) -> list[Request]:
    """A question and its lettered choices; the letters are scored (MMLU)."""
    subject = f" about {item.subject.replace('_', ' ')}" if item.subject else ""
    listed = "".join(f"\n{letter}. {choice}" for letter, choice in zip(_LETTERS, item.choices, strict=False))
    prompt = f"The following are multiple choice questions (with answers){subject}.\n\n{item.question}{listed}\nAnswer:"
    return [Request(prompt, f" {letter}") for letter in _LETTERS[: len(item.choices)]]


def blank(item: Item) -> list[Request]:
    """A sentence with the blank ``_``: each choice is put there, and what follows it is scored (Winogrande, WSC)."""
    before, found, after = item.question.partition("_")
    if not found:
        raise DoflaError(f"item {item.id} has no blank: mark it with _ in the question")
    return [Request(before + _fitted(choice, before), f" {after.strip()}") for choice in item.choices]


def _fitted(choice: str, before: str) -> str:
    """The choice without the capital of its first word, if that is an article or the like amid a sentence."""
    first, space, others = choice.partition(" ")
    starts_sentence = not before.strip() or before.rstrip()[-1] in ".!?"
    return choice if starts_sentence or first not in _CAPITALIZED else first.lower() + space + others


def plain(item: Item) -> list[Request]:
    """The question as it stands; each choice is one way for it to go on."""
    return [Request(item.question, f" {choice}") for choice in item.choices]


_CAPITALIZED = {"A", "An", "The", "He", "She", "It", "They", "My", "His", "Her", "Their"}
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

STYLES: dict[str, Callable[[Item], list[Request]]]
STYLES = {style.__name__: style for style in (question, passage, letters, blank, plain)}

KNOWN: dict[str, str] = {
    "piqa": "question",
    "logiqa": "passage",
    "arc_easy": "question",
    "arc_challenge": "question",
    "winogrande": "blank",
    "wsc273": "blank",
    "mmlu": "letters",
}
"""The paper's seven tasks, and their styles."""
BUNDLED = dict.fromkeys(("recall_near", "recall_mid", "recall_far", "continuation", "order"), "plain")
"""The tasks that come with the bundled model."""


def style_of(name: str, questions: Sequence[str]) -> str:
    """The style of a known task; otherwise ``blank`` if all questions have exactly one, else ``question``."""
    if style := (KNOWN | BUNDLED).get(name):
        return style
    return "blank" if all(text.count("_") == 1 for text in questions) else "question"
