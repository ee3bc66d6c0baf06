"""Associative recall: pairs are told, then asked for, and what is right stands nowhere but in the context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import batches
from dofla.data.words import one_token_words, pieces
from dofla.display import Part, Result, table
from dofla.errors import DoflaError
from dofla.evaluation.generation import check_room, last_logits
from dofla.evaluation.sides import counted, of_both

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where in a context something was told: 0 is first, 1 is last. Figures are given for the nearest of these."""


@dataclass(frozen=True)
class Question:
    """A question somewhere in a recall prompt, with its answer.

    Attributes:
        position: of the token after which the answer stands.
        answer: the right token.
        choices: all tokens that answer some question of this context, the right one among them.
        depth: where the answer stands in the context, from 0 (first of all) to 1 (last).
    """

    position: int
    answer: int
    choices: tuple[int, ...]
    depth: float


@dataclass(frozen=True)
class RecallPrompt:
    """Tokens, and the questions in them."""

    ids: list[int]
    questions: list[Question]


class RecallText(Protocol):
    """A source of recall prompts."""

    name: str

    def prompts(self, length: int, count: int, seed: int) -> list[RecallPrompt]:
        """``count`` prompts of about ``length`` tokens; the same seed gives the same prompts."""
        ...


class WordPairs:
    """Multi-query associative recall for any tokenizer: ``- river: stone``, line after line, then some keys again.

    The task is MQAR (Arora et al. 2023, arXiv 2312.04927), with lines that a pretrained model takes for a list.
    All keys and values of a prompt are different words of one token each. Answers stay in the text, so the first
    questions of a prompt show how the later ones are meant.

    Args:
        tokenizer: whose vocabulary marks beginnings of words by a space (byte-level BPE, SentencePiece).
        questions: keys asked for per prompt, at most.

    Raises:
        DoflaError: if the vocabulary has too few words.
    """

    name = "word pairs"
    # The very first are function words, which models write out of habit; the rare ones, fragments of words.
    _WORDS = slice(200, 2200)

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, questions: int = 8) -> None:
        words = list(one_token_words(tokenizer).values())
        self.words = words[self._WORDS]
        if len(self.words) < 4:
            raise DoflaError(f"the tokenizer has {len(words)} words of one token: recall of word pairs needs many more")
        self.questions = questions
        self._start = tokenizer.encode("")[:1]
        self._dash, self._colon, self._newline = (pieces(tokenizer, mark) for mark in ("-", ":", "\n"))

    def prompts(self, length: int, count: int, seed: int) -> list[RecallPrompt]:
        line = 2 + len(self._dash + self._colon + self._newline)
        lines = (length - len(self._start)) // line
        asked = min(self.questions, lines // 2)
        pairs = lines - asked
        if pairs < 2 or 2 * pairs > len(self.words):
            least, most = 3 * line, (len(self.words) // 2 + asked) * line
            raise DoflaError(f"length {length} does not suit word pairs: give {least} to {most} tokens")
        rng = Random(seed)
        return [self._prompt(rng, pairs, asked) for _ in range(count)]

    def _prompt(self, rng: Random, pairs: int, asked: int) -> RecallPrompt:
        words = rng.sample(self.words, 2 * pairs)
        keys, values = words[:pairs], words[pairs:]
        ids, questions = list(self._start), []
        for key, value in zip(keys, values, strict=True):
            ids += [*self._dash, key, *self._colon, value, *self._newline]
        for n in rng.sample(range(pairs), asked):
            ids += [*self._dash, keys[n], *self._colon]
            questions.append(Question(len(ids) - 1, values[n], tuple(values), n / (pairs - 1)))
            ids += [values[n], *self._newline]
        return RecallPrompt(ids[: questions[-1].position + 1], questions)


@dataclass(frozen=True)
class Answers:
    """Figures of one model's answers to recall questions.

    Attributes:
        accuracy: share of questions whose right answer is the likeliest of the choices.
        loss: of the right answer, nats; of a pass key, nats per token.
        greedy: share of questions whose right answer greedy decoding would write.
    """

    accuracy: float
    loss: float
    greedy: float


@dataclass(frozen=True)
class RecallRow:
    """Questions about one depth of contexts of one length.

    Attributes:
        length: of the prompt, in tokens.
        depth: where the answer was told, from 0, the beginning, to 1, just before the question.
        n: questions.
        chance: accuracy of guessing among the choices.
        teacher, student: their answers.
    """

    length: int
    depth: float
    n: int
    chance: float
    teacher: Answers
    student: Answers

    @classmethod
    def of(cls, length: int, depth: float, scores: list[tuple[float, ...]]) -> RecallRow:
        """Means over questions of (chance, teacher's accuracy, loss, greedy, and the same of the student)."""
        chance, *means = torch.tensor(scores, dtype=torch.float64).mean(dim=0).tolist()
        return cls(length, depth, len(scores), chance, Answers(*means[:3]), Answers(*means[3:]))


@dataclass(frozen=True)
class Recall(Result):
    """Recall by length and depth: ``text`` is the name of what was asked about, ``records`` are the rows."""

    text: str
    records: list[RecallRow]

    def parts(self) -> Iterator[Part]:
        """Right among the choices, written by greedy decoding, loss of the right answer."""
        yield f"Recall, {self.text}: right among the choices, written greedily, loss in nats"
        each = ("right", "written", "loss")
        heads = [f"{who if n == 0 else ''}\n{name}" for who in ("teacher", "student") for n, name in enumerate(each)]
        shown = table("\nlength", "\ndepth", "\nn", "\nchance", *heads)
        for row in self.records:
            cells = []
            for found in (row.teacher, row.student):
                cells += [f"{found.accuracy:.0%}", f"{found.greedy:.0%}", f"{found.loss:.2f}"]
            shown.add_row(str(row.length), f"{row.depth:.2f}", str(row.n), f"{row.chance:.0%}", *cells)
        yield shown


@torch.inference_mode()
def recall_figures(
    student: PreTrainedModel,
    source: RecallText,
    *,
    lengths: Sequence[int] = (128, 256, 512),
    count: int = 32,
    batch_size: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Recall:
    """Measure how well teacher and student answer from the context, by its length and the depth of the answer.

    Args:
        student: a linearized causal language model; it is its own teacher.
        source: of the prompts: :class:`WordPairs`, or any other :class:`RecallText`.
        lengths: of the prompts, in tokens.
        count: prompts per length.
        batch_size: prompts per forward pass, padded on the right, where causal attention does not look.
        seed: of the prompts.
        progress: called with (done, total) batches.

    Returns:
        A row for each length and each of :data:`DEPTHS` that was asked about.

    Raises:
        DoflaError: if the model is no causal language model or has no positions for so long a prompt, or if nothing
            is asked.
    """
    check_asked(lengths, count)
    work = [(length, source.prompts(length, count, seed)) for length in lengths]
    check_room(student, max(len(prompt.ids) for _, prompts in work for prompt in prompts))
    parts = [(length, [prompts[n] for n in part]) for length, prompts in work for part in batches(prompts, batch_size)]
    seen: dict[tuple[int, float], list[tuple[float, ...]]] = {}
    for length, prompts in counted(parts, progress):
        both = of_both(student, _answers, prompts)
        questions = [question for prompt in prompts for question in prompt.questions]
        for question, *scores in zip(questions, *both, strict=True):
            depth = min(DEPTHS, key=lambda depth: abs(depth - question.depth))
            seen.setdefault((length, depth), []).append((1 / len(question.choices), *scores[0], *scores[1]))
    return Recall(source.name, [RecallRow.of(*place, scores) for place, scores in sorted(seen.items())])


def check_asked(lengths: Sequence[int], count: int) -> None:
    """DoflaError unless there is a length and a prompt."""
    if not lengths or count < 1:
        raise DoflaError(f"lengths: {list(lengths)}, count: {count}; give one length and one prompt at least")


def _answers(model: PreTrainedModel, prompts: list[RecallPrompt]) -> list[tuple[float, float, float]]:
    """(accuracy, loss, greedy) of each question of each prompt, in order."""
    length = max(len(prompt.ids) for prompt in prompts)
    keep = length - min(question.position for prompt in prompts for question in prompt.questions)
    ids, mask = (torch.zeros(len(prompts), length, dtype=torch.int64) for _ in range(2))
    for n, prompt in enumerate(prompts):
        ids[n, : len(prompt.ids)] = torch.tensor(prompt.ids)
        mask[n, : len(prompt.ids)] = 1
    options = {} if mask.all() else {"attention_mask": mask.to(model.device)}
    logits = last_logits(model, ids.to(model.device), keep, use_cache=False, **options)
    return [
        _score(row[question.position - length + keep].log_softmax(dim=-1).cpu(), question)
        for row, prompt in zip(logits, prompts, strict=True)
        for question in prompt.questions
    ]


def _score(log_probs: Tensor, question: Question) -> tuple[float, float, float]:
    best = question.choices[int(log_probs[list(question.choices)].argmax())]
    right, written = best == question.answer, int(log_probs.argmax()) == question.answer
    return float(right), -log_probs[question.answer].item(), float(written)
