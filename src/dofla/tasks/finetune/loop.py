"""Fine-tuning by Trainer and peft: softmax models and students, all weights and low-rank ones."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from dofla.display import Part, Result, reports_progress, table
from dofla.errors import DoflaError, check_choice, check_numbers
from dofla.storage.rank import world_size
from dofla.tasks import STYLES, Task
from dofla.tasks.finetune.learner import Learner, OneDevice
from dofla.tasks.finetune.weights import in_memory, seeded, training_weights, write_back
from dofla.tasks.scores import METRICS, TaskScores
from dofla.tasks.scoring import encode, language_model, score

KEEP = ("best", "last")
MIXED_PRECISION = ("no", "bf16")
_WARM_UP = 0.06
_IGNORED = -100  # the label of a token whose prediction does not count


@dataclass(frozen=True)
class Epoch:
    """One pass over the training items.

    Attributes:
        loss: nats per answer token, mean over the steps of the epoch, each before it.
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
        steps: of the optimizer.
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
        model: a causal language model, linearized or not. It is left in float32, whatever it was loaded in: in
            bfloat16 most of what was learned would be rounded away.
        tokenizer: the model's.
        train: items to learn.
        test: items to score after each epoch.
        learning_rate: at its peak.
        batch_size: items per optimizer step.
        epochs: passes over ``train``.
        keep: ``best`` leaves the model with the weights of the first epoch with the highest accuracy, ``last`` with
            those of the last.
        lora_rank: train low-rank updates of this rank of all linear layers instead of the weights, which keep their
            dtype meanwhile; merged into them, in float32, at the end.
        train_feature_maps: train those too, at the same rate.
        mixed_precision: ``bf16`` learns with products in bfloat16, for float32 weights that are rounded in each
            forward pass. Those of a checkpoint in bfloat16 begin on its grid, so a step much shorter than its mesh, a
            256th of a weight, changes nothing until several add up: for short runs at low rates leave it at ``no``.
        forward_batch: items per forward pass at most: the largest divisor of ``batch_size`` up to it is taken. It has
            no effect on the result but for rounding.
        test_batch: choices per forward pass when scoring; likewise.
        seed: of order, dropout and low-rank factors. The global generators are left as they were.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (step, steps, text).

    Raises:
        DoflaError: a number out of range; ``best`` without a test task; an item without an answer to learn; a loss
            that is not finite; several processes; lm-eval (or peft, for ``lora_rank``) not installed.
    """
    counts = {"epochs": epochs, "batch_size": batch_size, "forward_batch": forward_batch, "test_batch": test_batch}
    _check(learning_rate, keep, mixed_precision, test, counts | ({} if lora_rank is None else {"lora_rank": lora_rank}))
    lm = language_model(model, tokenizer)
    rows = _examples(train, lm)
    lm.tokenizer.padding_side = "right"  # where a causal model does not see it
    steps = epochs * math.ceil(len(rows) / batch_size)
    forward_batch = max(n for n in range(1, min(batch_size, forward_batch) + 1) if batch_size % n == 0)
    with tempfile.TemporaryDirectory() as folder, seeded(seed):
        # The rest by default: AdamW without weight decay, a rate that falls linearly to 0, gradients clipped to norm 1.
        arguments = OneDevice(
            folder,
            learning_rate=learning_rate,
            warmup_steps=int(_WARM_UP * steps),
            num_train_epochs=epochs,
            per_device_train_batch_size=forward_batch,
            gradient_accumulation_steps=batch_size // forward_batch,
            train_sampling_strategy="group_by_length",
            seed=seed,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        with training_weights(model, lora_rank, train_feature_maps) as weights:
            record = _Record(
                test=lambda: None if test is None else score(model, tokenizer, test, batch_size=test_batch),
                snapshot=lambda: in_memory(weights) if keep == "best" else {},
                progress=progress,
            )
            trainer = Learner(model, arguments, DataCollatorForSeq2Seq(lm.tokenizer), rows, callbacks=[record])
            trainer.mixed_precision = mixed_precision
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            kept = record.best if keep == "best" else epochs
            if kept < epochs:
                write_back(record.best_weights, weights)
            trained = sum(weight.numel() for weight in weights.values())
    return FineTuneResult(record.epochs, kept, trained, steps)


class _Record(TrainerCallback):
    """Epochs as they end, and a snapshot of the first with the highest accuracy.

    Args:
        test: scores the model, or nothing.
        snapshot: of the weights.
        progress: called with (step, steps, text), if it is a function.
    """

    def __init__(
        self,
        test: Callable[[], TaskScores | None],
        snapshot: Callable[[], dict[str, Tensor]],
        progress: Callable[[int, int, str], None] | bool,
    ) -> None:
        self.test, self.snapshot, self.progress = test, snapshot, progress
        self.epochs: list[Epoch] = []
        self.best, self.highest = 0, -1.0
        self.best_weights: dict[str, Tensor] = {}

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()
        self.losses: list[float] = []

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        loss = given["logs"].get("loss")
        if loss is None:  # the summary at the end
            return
        if not math.isfinite(loss):
            raise DoflaError(
                f"the loss is {loss} at step {state.global_step} of {state.max_steps}: lower learning_rate"
            )
        self.losses.append(loss)
        if callable(self.progress):
            self.progress(state.global_step, state.max_steps, f"epoch {len(self.epochs) + 1}, loss {loss:.3f}")

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        trained = time.perf_counter()
        scores = self.test()
        accuracy, accuracy_norm = (None if scores is None else scores.accuracy(metric) for metric in METRICS)
        seconds = trained - self.started, time.perf_counter() - trained
        self.epochs.append(Epoch(statistics.fmean(self.losses), accuracy, accuracy_norm, *seconds))
        if accuracy is not None and accuracy > self.highest:
            self.best, self.highest, self.best_weights = len(self.epochs), accuracy, self.snapshot()


def _examples(task: Task, lm: Any) -> list[dict[str, list[int]]]:
    """The right choice of each item after its context, encoded as when scored; labels are the answer's tokens alone."""
    examples = []
    for item in task.items:
        given, asked = encode(lm, STYLES[task.style](item)[item.answer], task.name)
        tokens, labels = given + asked, [_IGNORED] * len(given) + asked
        examples.append({"input_ids": tokens[-lm.max_length :], "labels": labels[-lm.max_length :]})
    return examples


def _check(learning_rate: float, keep: str, mixed_precision: str, test: Task | None, counts: dict[str, int]) -> None:
    if not 0 < learning_rate < math.inf:
        raise DoflaError(f"learning_rate is {learning_rate}: give a positive number")
    check_numbers(**counts)
    if world_size() > 1:
        raise DoflaError(f"{world_size()} processes would each write the result: start one")
    check_choice("keep", keep, KEEP)
    if keep == "best" and test is None:
        raise DoflaError("the best epoch is that of a test task, and there is none: give one, or keep='last'")
    check_choice("mixed_precision", mixed_precision, MIXED_PRECISION)
