"""Fine-tuning on a multiple-choice task as in arXiv 2507.03340, by transformers' Trainer and peft."""

import math
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

from dofla.errors import DoflaError, check_numbers
from dofla.integration.attaching import AttachedLayer
from dofla.integration.lora import low_rank
from dofla.integration.positions import positions_of
from dofla.paper.published import FINETUNING, TASKS
from dofla.tasks import STYLES, Request, Task, score

_WARMUP, _FORWARD_BATCH, _IGNORED = 0.06, 16, -100


def settings_for(model: PreTrainedModel, task: str, lora: bool = False) -> dict[str, Any]:
    """Learning rate, batch size and epochs: the paper's for its models and tasks, defaults for others. LoRA, whose
    factors have a product of zero at first, takes ten times the paper's rate."""
    settings = {"learning_rate": 1e-3 if lora else 1e-5, "batch_size": 16, "epochs": 1 if task == "mmlu" else 3}
    shape = tuple(getattr(model.config, key, None) for key in ("model_type", "hidden_size", "num_hidden_layers"))
    if task in TASKS and shape in FINETUNING:
        rate, size = (values[TASKS.index(task)] for values in FINETUNING[shape])
        settings |= {"learning_rate": rate * (10 if lora else 1), "batch_size": size}
    return settings


def finetune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: Task,
    test: Task,
    *,
    learning_rate: float,
    batch_size: int,
    epochs: int,
    lora_rank: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[float]:
    """Train a causal language model, linearized or not, in place; returns its accuracy after each epoch.

    The loss, of which the paper says nothing, is that of the right choice's tokens after their context. AdamW without
    weight decay; the rate rises over the first 6 % of the steps and falls linearly to 0. Feature maps are frozen. LoRA
    is taken off at the end.

    Raises:
        DoflaError: a number out of range; a loss that is not finite; lm-eval or peft is not installed.
    """
    if not 0 < learning_rate < math.inf:
        raise DoflaError(f"learning_rate is {learning_rate}: give a positive number")
    check_numbers(epochs=epochs, batch_size=batch_size)
    tokenizer = deepcopy(tokenizer)  # which gets what a batch needs
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.pad_token or tokenizer.eos_token, "right"
    rows = [_row(STYLES[train.style](x)[x.answer], tokenizer, positions_of(model) or 0) for x in train.items]
    part = math.gcd(batch_size, _FORWARD_BATCH)
    record = _Epochs(lambda: score(model, tokenizer, [test])[0].metrics["acc"].value, progress)
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        torch.manual_seed(seed)
        if lora_rank is None:
            model.float().requires_grad_(True)  # AdamW's small steps would be lost in the 8 bits of bfloat16
        with nullcontext() if lora_rank is None else low_rank(model, lora_rank):
            maps = (module for module in model.modules() if isinstance(module, AttachedLayer))
            torch.nn.ModuleList(maps).requires_grad_(False)
            arguments = _OneDevice(
                folder,
                learning_rate=learning_rate,
                warmup_steps=int(_WARMUP * epochs * math.ceil(len(rows) / batch_size)),
                num_train_epochs=epochs,
                per_device_train_batch_size=part,
                gradient_accumulation_steps=batch_size // part,
                train_sampling_strategy="group_by_length",
                logging_steps=1,
                logging_nan_inf_filter=False,
                save_strategy="no",
                disable_tqdm=True,
                dataloader_pin_memory=False,
                use_cpu=model.device.type == "cpu",
                seed=seed,
            )
            pad = transformers.DataCollatorForSeq2Seq(tokenizer)
            trainer = transformers.Trainer(model, arguments, pad, rows, callbacks=[record])
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train()
    return record.accuracies


def _row(request: Request, tokenizer: PreTrainedTokenizerBase, most: int) -> dict[str, list[int]]:
    """A context and the right choice after it, whose tokens alone are labels; the last ``most``, or all for 0."""
    given, ids = tokenizer.encode(request.context.rstrip()), tokenizer.encode("".join(request))
    return {"input_ids": ids[-most:], "labels": ([_IGNORED] * len(given) + ids[len(given) :])[-most:]}


class _OneDevice(TrainingArguments):
    n_gpu = 1  # type: ignore[assignment] # whatever a machine has: a batch is as large as it says


class _Epochs(TrainerCallback):
    """Accuracy after each epoch, and progress."""

    def __init__(self, test: Callable[[], float], progress: Callable[[int, int, str], None] | None) -> None:
        self.test, self.progress, self.accuracies = test, progress, list[float]()

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if not math.isfinite(loss := given["logs"].get("loss", 0.0)):
            raise DoflaError(f"the loss is {loss} at step {state.global_step}: lower learning_rate")
        if self.progress and loss:  # the summary at the end has none
            self.progress(state.global_step, state.max_steps, f"epoch {len(self.accuracies) + 1}, loss {loss:.3f}")

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.accuracies.append(self.test())
