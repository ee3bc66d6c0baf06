"""Makes the bundled multiple-choice tasks, recall over a distance and the model's own stories: run it when the bundled
model changes.

python scripts/demo/tasks.py
"""

import gzip
import json
import re
from dataclasses import asdict
from random import Random

import torch
from documents import NAMES, recall_prompts
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.errors import DoflaError
from dofla.integration.recorder import evaluation_mode
from dofla.integration.surgery import as_teacher
from dofla.runs.demo import TASKS
from dofla.runs.opening import open_original
from dofla.tasks import Item, Task

RECALL_DISTANCES = {"recall_near": 60, "recall_mid": 150, "recall_far": 350}
"""Tokens between a villager's introduction and the question about them."""

ITEMS = 100
"""Of each task and split."""

_CHOICES = 4
_OPENINGS = ("Once upon a time, there was a little girl named", "One day, a boy named", "Once there was a dog named")
_READ = 4  # sentences of a story that are given
_NEW_TOKENS = 96
_TEMPERATURE = 0.7  # what the small teacher writes at 1 does not always hang together
_SAMPLES_AT_A_TIME = 64
_SPARE = 2.0  # samples per story needed: some are too short, or their sentence is
_ALIKE = 8  # endings of other stories that are nearest in length, of which the wrong ones are drawn
_SEEDS = {"test": 2_000_000, "train": 3_000_000}  # apart from those of the demo's text


def demo_tasks(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, seed: int = 0, *, split: str = "test"
) -> list[Task]:
    """Five tasks of ``count`` items with four choices each, so that chance is one in four.

    ``recall_near``, ``recall_mid``, ``recall_far``: which of the villagers of a document is the one asked about?
    ``continuation``: which two sentences go on with a story, its own or another story's?
    ``order``: in which of four versions of its next sentence have no two words changed places?

    Args:
        model: what the stories are sampled from: the bundled teacher, or a student made of it (its softmax attention
            is used).
        count: items per task.
        seed: the same seed gives the same tasks.
        split: ``test``, or ``train`` for items to fine-tune on; no random number serves both.

    Raises:
        DoflaError: if ``split`` is neither, or the model's samples hold too few stories to make the items of.
    """
    if split not in _SEEDS:
        raise DoflaError(f"unknown split {split!r}: choose test or train")
    seed += _SEEDS[split]
    tasks = [
        Task(name, "plain", _recall(tokenizer, count, distance, seed)) for name, distance in RECALL_DISTANCES.items()
    ]
    stories = _stories(model, tokenizer, count, seed)
    return [
        *tasks,
        Task("continuation", "plain", _continuation(stories, tokenizer, seed)),
        Task("order", "plain", _order(stories, tokenizer, seed)),
    ]


def _recall(tokenizer: PreTrainedTokenizerBase, count: int, distance: int, seed: int) -> list[Item]:
    rng = Random(seed)
    items = []
    for number, (prompt, name) in enumerate(recall_prompts(count, distance, tokenizer, seed + distance)):
        words = re.findall(r"\w+", prompt)
        others = [other for other in NAMES if other in words and other != name]
        items.append(_item(rng, number, tokenizer, prompt, name, rng.sample(others, _CHOICES - 1)))
    return items


def _stories(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> list[list[str]]:
    """Stories of the model's own, as sentences: ``_READ`` to read, and two more that go on."""
    rng = Random(seed)
    wanted = round(_SPARE * count) + _CHOICES
    openings = [f"{tokenizer.bos_token}{rng.choice(_OPENINGS)} {rng.choice(NAMES)}" for _ in range(wanted)]
    stories = []
    for begin in range(0, wanted, _SAMPLES_AT_A_TIME):
        for text in _sampled(model, tokenizer, openings[begin : begin + _SAMPLES_AT_A_TIME], seed + begin):
            sentences = [sentence.strip() for sentence in re.findall(r"[^.!?]+[.!?]+\"?", text)][: _READ + 2]
            if len(sentences) == _READ + 2 and len(_swapped(sentences[_READ])) >= _CHOICES - 1:
                stories.append(sentences)
    if len(stories) < count:
        raise DoflaError(f"{wanted} samples of the model hold {len(stories)} stories, {count} are needed: ask for less")
    return stories[:count]


def _sampled(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, openings: list[str], seed: int) -> list[str]:
    """Continuations of each opening by the softmax model, on one line, the opening included, the start token not."""
    tokens = [tokenizer.encode(opening, add_special_tokens=False) for opening in openings]
    longest = max(map(len, tokens))
    ids = torch.tensor([[tokenizer.eos_token_id] * (longest - len(part)) + part for part in tokens])
    mask = torch.tensor([[0] * (longest - len(part)) + [1] * len(part) for part in tokens])
    with as_teacher(model), evaluation_mode(model), torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(seed)
        out = model.generate(  # type: ignore[operator] # of their GenerationMixin
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            pad_token_id=tokenizer.eos_token_id,
            do_sample=True,
            temperature=_TEMPERATURE,
            top_k=0,
            top_p=1.0,
            max_new_tokens=_NEW_TOKENS,
        )
    return [" ".join(text.split()) for text in tokenizer.batch_decode(out, skip_special_tokens=True)]


def _continuation(stories: list[list[str]], tokenizer: PreTrainedTokenizerBase, seed: int) -> list[Item]:
    rng = Random(seed)
    endings = [" ".join(story[_READ:]) for story in stories]
    items = []
    for number, story in enumerate(stories):
        right = endings[number]
        # Of like length, for a short text is likelier than a long one whatever it says.
        others = set(endings) - {right}
        alike = sorted(others, key=lambda other: (abs(len(other) - len(right)), other))[:_ALIKE]
        if len(alike) < _CHOICES - 1:
            raise DoflaError(f"{len(stories)} stories have too few different endings to choose from: ask for more")
        items.append(_item(rng, number, tokenizer, " ".join(story[:_READ]), right, rng.sample(alike, _CHOICES - 1)))
    return items


def _order(stories: list[list[str]], tokenizer: PreTrainedTokenizerBase, seed: int) -> list[Item]:
    rng = Random(seed + 1)
    items = []
    for number, story in enumerate(stories):
        right = story[_READ]
        wrong = rng.sample(_swapped(right), _CHOICES - 1)
        items.append(_item(rng, number, tokenizer, " ".join(story[:_READ]), right, wrong))
    return items


def _swapped(sentence: str) -> list[str]:
    """The sentence with two neighboring words in each other's place, in all ways that differ from it. The last word
    keeps its place, as its full stop would tell."""
    words = sentence.split()
    ways = [[*words[:n], words[n + 1], words[n], *words[n + 2 :]] for n in range(len(words) - 2)]
    return sorted({" ".join(way) for way in ways} - {sentence})


def _item(
    rng: Random, number: int, tokenizer: PreTrainedTokenizerBase, text: str, right: str, wrong: list[str]
) -> Item:
    choices = [right, *wrong]
    rng.shuffle(choices)
    # Every document the teacher has read began with this token.
    return Item(tokenizer.bos_token + text, tuple(choices), choices.index(right), id=number)


def main() -> None:
    model, tokenizer = open_original("demo", "float32")
    for split in _SEEDS:
        for task in demo_tasks(model, tokenizer, ITEMS, split=split):
            lines = [json.dumps({k: v for k, v in asdict(item).items() if v is not None}) for item in task.items]
            path = TASKS / f"{task.name}-{split}.jsonl.gz"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0))
            print(path)


if __name__ == "__main__":
    main()
