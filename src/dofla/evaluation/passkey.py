"""Passkey retrieval: a number is told once in a long text about nothing, and asked for at the end."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import batches
from dofla.data.words import pieces
from dofla.errors import DoflaError
from dofla.evaluation.generation import check_room, decode
from dofla.evaluation.position import finite
from dofla.evaluation.recall import DEPTHS, Recall, RecallRow, check_asked
from dofla.evaluation.sides import counted, of_both
from dofla.integration.cache import CACHE_ARGUMENT
from dofla.serving.prompt_state import read_prompt

HEAD = "A pass key is hidden in this text. Find it and remember it.\n\n"
NEEDLE = " The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "\n\nWhat is the pass key? The pass key is"
FILLER = (
    " The street was quiet in the morning.",
    " A light wind came from the sea.",
    " Some people were already at work.",
    " The shop on the corner was still closed.",
    " A dog slept in front of the door.",
    " Far away one could hear a train.",
    " The clouds moved slowly to the east.",
    " Later the children went to school.",
    " There was nothing new in the paper.",
    " The coffee was hot and the bread was fresh.",
    " An old man walked along the river.",
    " Nobody was in a hurry that day.",
)
_DRAWN = 512


@dataclass(frozen=True)
class PasskeyPrompt:
    """``ids`` end where the key is to follow; ``choices`` are keys of equally many tokens, the right one first."""

    ids: list[int]
    choices: list[list[int]]


class PasskeyText:
    """Passkey prompts for a tokenizer.

    Args:
        tokenizer: any.
        choices: keys to choose from, the right one included; 2 or more.
        digits: of a key.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, choices: int = 8, digits: int = 5) -> None:
        if not 2 <= choices <= _DRAWN // 4:
            raise DoflaError(f"choices: {choices}; give 2 to {_DRAWN // 4}")
        self.tokenizer, self.choices = tokenizer, choices
        self._head = tokenizer.encode("")[:1] + tokenizer.encode(HEAD, add_special_tokens=False)
        self._question = pieces(tokenizer, QUESTION)
        self._filler = [pieces(tokenizer, sentence) for sentence in FILLER]
        # Keys whose tokens are equally many, so that their likelihoods compare and prompts make a rectangle.
        shapes: dict[tuple[int, int], list[str]] = defaultdict(list)
        for number in Random(0).sample(range(10 ** (digits - 1), 10**digits), min(_DRAWN, 9 * 10 ** (digits - 1))):
            key = str(number)
            shapes[len(self._needle(key)), len(self._answer(key))].append(key)
        self.keys = max(shapes.values(), key=len)
        if len(self.keys) < choices:
            raise DoflaError(f"digits: {digits}; {len(self.keys)} such keys have equally many tokens: give more digits")

    def prompts(self, length: int, depth: float, count: int, seed: int) -> list[PasskeyPrompt]:
        """``count`` prompts, all of one length: ``length`` tokens, or less by no more than a sentence.

        Args:
            length: tokens of a prompt.
            depth: where among the filler sentences the key stands, from 0 (before all) to 1 (after all).
            count: how many prompts.
            seed: of the keys and of the order of the filler.

        Raises:
            DoflaError: if not even the question fits, or the depth is not between 0 and 1.
        """
        if not 0 <= depth <= 1:
            raise DoflaError(f"depth: {depth}; give a number from 0 to 1")
        least = len(self._head) + len(self._needle(self.keys[0])) + len(self._question)
        if length < least:
            raise DoflaError(f"length {length} is too short for a passkey prompt: give {least} tokens or more")
        filler, room = [], length - least
        for sentence in cycle(self._filler):
            room -= len(sentence)
            if room < 0:
                break
            filler.append(sentence)
        rng = Random(f"{seed} {length} {depth}")
        return [self._prompt(rng, filler, round(depth * len(filler))) for _ in range(count)]

    def _prompt(self, rng: Random, filler: list[list[int]], before: int) -> PasskeyPrompt:
        keys = rng.sample(self.keys, self.choices)
        sentences = rng.sample(filler, len(filler))
        sentences.insert(before, self._needle(keys[0]))
        ids = [*self._head, *(token for sentence in sentences for token in sentence), *self._question]
        return PasskeyPrompt(ids, [self._answer(key) for key in keys])

    def _needle(self, key: str) -> list[int]:
        return pieces(self.tokenizer, NEEDLE.format(key=key))

    def _answer(self, key: str) -> list[int]:
        return pieces(self.tokenizer, f" {key}")


@torch.inference_mode()
def passkey_figures(
    student: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    lengths: Sequence[int] = (256, 512, 1024),
    depths: Sequence[float] = DEPTHS,
    count: int = 16,
    choices: int = 8,
    digits: int = 5,
    batch_size: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Recall:
    """Recall of a key by teacher and student, by length of the text and depth of the key in it.

    Each prompt is read once; keys are scored, and one is written, from copies of what the model then remembers.

    Args:
        student: a linearized causal language model; it is its own teacher.
        tokenizer: the model's.
        lengths: of the prompts, in tokens.
        depths: where the key stands, from 0 (the beginning) to 1 (just before the question).
        count: prompts per length and depth.
        choices: keys to choose from by likelihood, the right one and others that the text does not hold.
        digits: of a key.
        batch_size: prompts per forward pass.
        seed: of the prompts.
        progress: called with (done, total) batches.

    Returns:
        A row for each length and depth, in which ``loss`` is per token, and ``greedy`` asks for exactly the key.

    Raises:
        DoflaError: if the model is no causal language model or has too few positions, or for numbers out of range.
    """
    check_asked(lengths, count)
    if not depths:
        raise DoflaError("depths: none; give one depth at least, from 0 to 1")
    text = PasskeyText(tokenizer, choices=choices, digits=digits)
    cells = [(length, depth, text.prompts(length, depth, count, seed)) for length in lengths for depth in depths]
    check_room(student, max(len(p[0].ids) + len(p[0].choices[0]) for _, _, p in cells))
    parts = [(n, [cell[2][k] for k in part]) for n, cell in enumerate(cells) for part in batches(cell[2], batch_size)]
    scores: list[list[tuple[float, ...]]] = [[] for _ in cells]
    for n, prompts in counted(parts, progress):
        ids = torch.tensor([prompt.ids for prompt in prompts], device=student.device)
        keys = torch.tensor([prompt.choices for prompt in prompts], device=student.device)
        both = torch.cat(of_both(student, _answers, ids, keys), dim=1).tolist()
        scores[n] += [(1 / choices, *row) for row in both]
    rows = [RecallRow.of(length, depth, own) for (length, depth, _), own in zip(cells, scores, strict=True)]
    return Recall("pass key", rows)


def _answers(model: PreTrainedModel, ids: Tensor, keys: Tensor) -> Tensor:
    """(accuracy, loss, greedy) [B, 3] for prompts [B, L] and keys [B, choices, T], the right ones first."""
    cache, last = read_prompt(model, ids[:, :-1]), ids[:, -1:]
    of_each = []
    for key in keys.unbind(dim=1):
        # One key at a time, from a copy: a state cannot be rolled back, and all keys at once would need as many caches.
        tokens = torch.cat([last, key[:, :-1]], dim=1)
        logits = finite(model(tokens, use_cache=True, **{CACHE_ARGUMENT: copy.deepcopy(cache)}).logits)
        of_each.append(-logits.log_softmax(dim=-1).gather(-1, key.unsqueeze(-1))[..., 0].mean(dim=1))
    written = decode(model, cache, last, keys.shape[2])
    losses = torch.stack(of_each, dim=1)
    greedy = (written == keys[:, 0]).all(dim=1)
    return torch.stack([(losses.argmin(dim=1) == 0).double(), losses[:, 0].double(), greedy.double()], dim=1).cpu()
