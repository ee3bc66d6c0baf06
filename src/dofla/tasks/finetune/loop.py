"""The fine-tuning loop: one for softmax models and students, for all weights and for low-rank ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.display import Part, Result, reports_progress, table
from dofla.errors import DoflaError
from dofla.storage.extras import extra
from dofla.tasks import Task
from dofla.tasks.encode import token_limit
from dofla.tasks.finetune.examples import answers, asked_of, batches_of
from dofla.tasks.finetune.learner import Learner
from dofla.tasks.finetune.weights import in_memory, seeded, training_weights, write_back
from dofla.tasks.scores import METRICS
from dofla.tasks.scoring import score

KEEP = ("best", "last")
MIXED_PRECISION = ("no", "bf16")


@dataclass(frozen=True)
class Epoch:
    """One pass over the training items.

    Attributes:
        loss: nats per answer token, mean over the epoch while it was learning.
        accuracy, accuracy_norm: on the test task after it (None without one); see :mod:`dofla.tasks.scores`.
        train_seconds, test_seconds: wall time.
    """

    loss: float
    accuracy: float | None
    accuracy_norm: float | None
    train_seconds: float
    test_seconds: float


@dataclass(frozen=True)
class FineTuneResult(Result):
    """The outcome of a fine-tuning.

    Attributes:
        epochs: in order.
        kept: number of the epoch, from 1, whose weights the model holds.
        trained: number of weights that were trained.
        steps: of the optimiser.
    """

    epochs: list[Epoch]
    kept: int
    trained: int
    steps: int

    @property
    def accuracy(self) -> float | None:
        """The accuracy of the kept epoch on the test task; None without one."""
        return self.epochs[self.kept - 1].accuracy

    def parts(self) -> Iterator[Part]:
        """Epochs down; the kept one has a star."""
        shown = table("epoch", "loss", "accuracy", "per character", "training", "testing")
        for number, epoch in enumerate(self.epochs, start=1):
            shown.add_row(
                f"{'*' if number == self.kept else ''}{number}",
                f"{epoch.loss:.4f}",
                *("" if share is None else f"{share:.4f}" for share in (epoch.accuracy, epoch.accuracy_norm)),
                f"{epoch.train_seconds:.0f} s",
                f"{epoch.test_seconds:.0f} s",
            )
        yield shown


@reports_progress("finetune")
def finetune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: Task,
    test: Task | None = None,
    *,
    learning_rate: float,
    batch_size: int,
    epochs: int = 3,
    keep: str = "best",
    lora_rank: int | None = None,
    train_feature_maps: bool = False,
    mixed_precision: str = "no",
    forward_batch: int = 16,
    test_batch: int = 16,
    seed: int = 0,
    progress: Callable[[int, int, str], None] | bool = True,
) -> FineTuneResult:
    """Teach a causal language model a task, in place.

    The paper (arXiv 2507.03340) gives rates, batches and epochs but not the loss. Ours is the negative log-likelihood
    of the right choice's text after its context, on the tokens of that text alone, mean over those of a step: what
    the accuracy compares between choices. AdamW without weight decay; the rate rises over the first 6 % of the steps
    and falls linearly to 0; gradients are clipped to norm 1.

    Whether the model has softmax or linear attention makes no difference but this: feature maps stay as they are
    unless ``train_feature_maps``. They were trained at rates up to a thousand times those of weights, so at these
    they hardly move; and frozen, they are still those that were measured and that stand in the adapter.

    Args:
        model: a causal language model, linearised or not. It is left in float32, whatever it was loaded in: in
            bfloat16 most of what was learnt would be rounded away.
        tokenizer: the model's.
        train: items to learn.
        test: items to score after each epoch.
        learning_rate: at its peak.
        batch_size: items per optimiser step.
        epochs: passes over ``train``.
        keep: ``best`` leaves the model with the weights of the first epoch with the highest accuracy, ``last`` with
            those of the last.
        lora_rank: train low-rank updates of this rank of all linear layers instead of the weights, which keep their
            dtype meanwhile; merged into them, in float32, at the end.
        train_feature_maps: train those too, at the same rate.
        mixed_precision: ``bf16`` learns with products in bfloat16, for float32 weights that are rounded in each
            forward pass. Those of a checkpoint in bfloat16 begin on its grid, so a step much shorter than its mesh, a
            256th of a weight, changes nothing until several add up: for short runs at low rates leave it at ``no``.
        forward_batch: items per forward pass; has no effect on the result but for rounding.
        test_batch: likewise, when scoring.
        seed: of order, dropout and low-rank factors. The global generator is left as it was.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (step, steps, text).

    Raises:
        DoflaError: a number out of range; ``best`` without a test task; an item without an answer to learn; a loss
            that is not finite; several processes; accelerate (or peft, for ``lora_rank``) not installed.
    """
    counts = {"epochs": epochs, "batch_size": batch_size, "forward_batch": forward_batch, "test_batch": test_batch}
    _check(learning_rate, keep, mixed_precision, test, counts | ({} if lora_rank is None else {"lora_rank": lora_rank}))
    progress = progress or (lambda step, steps, text: None)
    accelerator = extra("accelerate").Accelerator()
    if accelerator.num_processes > 1:
        raise DoflaError(f"{accelerator.num_processes} processes would each write the result: start one")
    # accelerator.prepare would leave another model.forward behind, and a process can have only one mixed precision of
    # accelerate's; so the model is placed, and autocast entered, by hand.
    model.to(accelerator.device)
    autocast = torch.autocast(accelerator.device.type, torch.bfloat16, enabled=mixed_precision == "bf16")
    rows = answers(train, tokenizer, token_limit(model, tokenizer))
    steps = epochs * math.ceil(len(rows) / batch_size)
    done: list[Epoch] = []

    with seeded(seed), training_weights(model, lora_rank, train_feature_maps) as weights:
        options = {"learning_rate": learning_rate, "steps": steps, "autocast": autocast, "forward_batch": forward_batch}
        learner = Learner(model, weights.values(), accelerator, **options)
        kept, kept_weights = epochs, None
        for epoch in range(1, epochs + 1):
            started, total = time.perf_counter(), 0.0
            model.train()
            for batch in batches_of(rows, batch_size, seed * 1_000_003 + epoch):
                loss = learner.step(batch)
                total += loss * asked_of(batch)
                progress(learner.done, steps, f"epoch {epoch}, loss {loss:.3f}")
            trained = time.perf_counter()
            scores = None if test is None else score(model, tokenizer, test, batch_size=test_batch)
            seconds = trained - started, time.perf_counter() - trained
            accuracies = [None if scores is None else scores.accuracy(metric) for metric in METRICS]
            done.append(Epoch(total / asked_of(rows), *accuracies, *seconds))
            if keep == "best" and all(done[-1].accuracy > earlier.accuracy for earlier in done[:-1]):
                kept, kept_weights = epoch, in_memory(weights)
        if kept < epochs:
            write_back(kept_weights, weights)
        count = sum(weight.numel() for weight in weights.values())
    return FineTuneResult(done, kept, count, steps)


def _check(learning_rate: float, keep: str, mixed_precision: str, test: Task | None, counts: dict[str, int]) -> None:
    if not 0 < learning_rate < math.inf:
        raise DoflaError(f"learning_rate is {learning_rate}: give a positive number")
    for name, value in counts.items():
        if value < 1:
            raise DoflaError(f"{name} is {value}: give 1 or more")
    if keep not in KEEP:
        raise DoflaError(f"unknown keep {keep!r}: choose one of {', '.join(KEEP)}")
    if keep == "best" and test is None:
        raise DoflaError("the best epoch is that of a test task, and there is none: give one, or keep='last'")
    if mixed_precision not in MIXED_PRECISION:
        raise DoflaError(f"unknown mixed_precision {mixed_precision!r}: choose one of {', '.join(MIXED_PRECISION)}")
