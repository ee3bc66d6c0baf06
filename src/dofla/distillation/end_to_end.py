"""End-to-end distillation: the whole linearized model trained towards the teacher's next-token distribution."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import Images, TokenWindows
from dofla.display import Bar
from dofla.distillation.calibrate import calibrate
from dofla.distillation.checkpoint import Checkpoint
from dofla.distillation.descent import Descent, checked_rate
from dofla.distillation.distributed import add_gradients, gather, to_device
from dofla.distillation.history import History
from dofla.distillation.objective import Objective
from dofla.distillation.steps import Batches
from dofla.distillation.trainable import layers_made_again, trainable
from dofla.errors import DoflaError, check_choice, check_numbers
from dofla.integration.checkpoint import refuse_trained, write_lora
from dofla.integration.converted import Converted
from dofla.integration.offload import check_in_memory
from dofla.integration.placement import context_of
from dofla.integration.reading import windows_for
from dofla.integration.recorder import evaluation_mode
from dofla.integration.wrapped import takes_model
from dofla.storage.rank import is_main_process, rank, world_size

PRECISIONS = (None, "bf16")
_RATES = {"lora": {"maps": 2e-3, "weights": 1e-4}, "maps": {"maps": 2e-3}}
_LONGEST_GRADIENT = 1.0


@takes_model("distill end to end", Bar.losses)
def distill_end_to_end(
    student: PreTrainedModel,
    windows: TokenWindows | Images | Tensor | Mapping[str, Tensor],
    *,
    steps: int = 50,
    batch_size: int = 2,
    accumulate: int = 1,
    weights: str = "lora",
    lora_rank: int = 16,
    learning_rates: Mapping[str, float] | None = None,
    precision: str | None = None,
    gradient_checkpointing: bool = False,
    context: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    checkpoint_every: int = 25,
    progress: Callable[[int, int, dict[str, float]], None] | bool = True,
) -> History:
    """Train a whole student towards its teacher, after :func:`dofla.linear.distill` has trained it layer by layer.

    The teacher is the student itself with softmax attention and the weights it had. The loss is KL(teacher ‖ student)
    of the next-token distributions, in nats per real token predicted; of models that predict none (encoders), the
    squared error of the last hidden states relative to the teacher's variance, plus 1 − the cosine of their means.
    Adam, gradients clipped to norm 1, dropout off. Layers that keep tokens and sum up none (:func:`dofla.compress`)
    answer as ever, and gradients pass them as they would pass softmax attention.

    Afterwards the student is a stock model of the dtypes it had: low-rank updates are merged into its weights, in
    float32, and rounded to them; in bfloat16 that loses updates of less than a 512th of a weight. The original weights
    stay beside the new ones in memory, so that :func:`dofla.original` and all comparisons still take the teacher, and
    :func:`dofla.restore` gives it back. :func:`dofla.save_adapter` saves what was learned with the feature maps;
    ``save_pretrained`` saves the new weights alone, and a student opened from there takes *them* for its teacher's.

    A run that fails leaves the student as it was. In several processes (``torchrun``, ``accelerate launch``) each takes
    its share of the batches of every step, and all end with the student that one process makes when it accumulates as
    many times as much. The main process alone writes and shows progress.

    Args:
        student: a linearized model.
        windows: to train on, N of L tokens.
        steps: of the optimizer.
        batch_size: windows per forward pass, and process.
        accumulate: forward passes per step, and process.
        weights: what trains beside the feature maps: ``lora``, low-rank factors of every linear layer but the output
            layer; ``maps``, nothing.
        lora_rank: of the factors.
        learning_rates: of ``maps`` (default 2e-3) and ``weights`` (default 1e-4); they fall to 0 along a cosine.
        precision: ``bf16`` computes products in bfloat16; what trains is float32 in any case.
        gradient_checkpointing: compute the layers again for the backward pass, instead of keeping their activations.
        context: read the windows as if they began anywhere among so many positions; as for
            :func:`dofla.linear.distill`.
        seed: of the order of the windows, and the factors. The global generator is left as it was.
        folder: where checkpoints, the curve and (for ``lora``) the folder ``lora`` go, which
            :func:`dofla.linear.merge_lora` reads. A run of the same settings that stopped there goes on, and ends with
            the same numbers as if it had not stopped; one that ended is opened.
        checkpoint_every: steps between checkpoints.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (step, steps, {name of the loss: its value}) after each step.

    Returns:
        The history, whose one column is ``kl`` or ``embedding``; the loss of each step is that before it.

    Raises:
        DoflaError: not linearized, or trained end to end already; a number or name out of range; nothing to train;
            fewer windows than one step takes; a loss that is not finite, naming the step; a folder holding a run of
            other settings; an offloaded model; peft (for ``lora``) or accelerate (for
            several processes) not installed; accelerate set up to take weights apart (FSDP, DeepSpeed).
    """
    handle = Converted.of(student)
    layers = handle.layers
    refuse_trained(student)
    windows = windows_for(student, windows)
    check_choice("weights", weights, _RATES)
    numbers = {"steps": steps, "batch_size": batch_size, "accumulate": accumulate, "lora_rank": lora_rank}
    check_numbers(**numbers, checkpoint_every=checkpoint_every)
    if precision not in PRECISIONS:
        raise DoflaError(f"unknown precision {precision!r}: choose bf16, or None")
    given = dict(learning_rates or {})
    if unknown := given.keys() - _RATES[weights].keys():
        known = " and ".join(_RATES[weights])
        raise DoflaError(f"learning_rates names {min(unknown)!r}: weights={weights!r} trains {known}")
    rates = {name: float(checked_rate(name, rate)) for name, rate in (_RATES[weights] | given).items()}
    context = context_of(handle, windows, context)
    if not layers or (weights == "maps" and not any(True for layer in layers.values() for _ in layer.parameters())):
        raise DoflaError("the feature maps of this plan have nothing to train: choose a plan that linearizes layers")
    if isinstance(windows, TokenWindows) and student.can_generate() and windows.length < 2:
        raise DoflaError("windows of one token leave nothing to predict: give longer ones")
    check_in_memory(student, "training")
    batches = Batches(windows, batch_size, accumulate * world_size(), seed, context)
    settings: dict[str, Any] = numbers | {"accumulate": batches.accumulate, "weights": weights}
    settings |= {"learning_rates": rates, "seed": seed, "precision": precision}
    settings |= {"gradient_checkpointing": gradient_checkpointing, "context": context}

    to_device(student)
    with (
        torch.enable_grad(),
        torch.random.fork_rng(),
        evaluation_mode(student),
        layers_made_again(student, gradient_checkpointing),
    ):
        torch.manual_seed(seed)
        with trainable(handle, weights, lora_rank) as part:
            loss, parts = Objective(student, part.teacher), layers | part.weights
            settings["loss"] = loss.name
            maps = [parameter for layer in layers.values() for parameter in layer.parameters()]
            trained = {"maps": maps, "weights": list(part.weights.values())}
            groups = [{"params": trained[name], "lr": rate} for name, rate in rates.items() if trained[name]]
            descent = Descent(groups, steps)
            identity = settings | {"plan": handle.plan.to_dict()["layers"]}
            run = (folder, identity, windows, checkpoint_every)
            checkpoint = Checkpoint(*run, parts, descent.optimizer, [loss.name])
            calibrate(handle, batches.first())  # where a run goes on, its checkpoint comes over it
            curve = checkpoint.resume()
            for step in range(len(curve), steps):
                torch.manual_seed(seed * 1_000_003 + step)
                of_step = batches.of_step(step, torch.default_generator)
                value = _gradients(loss, of_step, precision)
                if not math.isfinite(value):
                    raise DoflaError(f"the {loss.name} loss is {value} at step {step}: lower learning_rates")
                add_gradients(descent.parameters)
                torch.nn.utils.clip_grad_norm_(descent.parameters, _LONGEST_GRADIENT)
                descent.step(step)
                curve.append([value])
                checkpoint.keep(curve)
                if callable(progress) and is_main_process():
                    progress(len(curve), steps, {loss.name: value})
            seconds = checkpoint.seconds
    if folder is not None and weights == "lora" and is_main_process():
        write_lora(student, Path(folder) / "lora")
    what = "feature maps and low-rank updates of the weights" if weights == "lora" else "feature maps"
    options = {name: value for name, value in settings.items() if name != "loss"}
    call = "dofla.linear.distill_end_to_end(student, windows"
    handle.record.add_distillation(f"{what}, end to end", windows, call, options, weights=weights != "maps")
    return History([loss.name], torch.tensor(curve), seconds, settings)


def _gradients(loss: Objective, step: Sequence[Mapping[str, Tensor]], precision: str | None) -> float:
    """Add this process's gradients of a step, of whose batches it takes its share; returns the loss, of all."""
    tokens, windows = sum(map(loss.count, step)), sum(len(next(iter(batch.values()))) for batch in step)
    device = loss.student.device
    total = torch.zeros((), device=device)
    for batch in step[rank() :: world_size()]:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            part = loss({name: data.to(device) for name, data in batch.items()}, tokens, windows)
        part.backward()
        total += part.detach()
    return gather(total).sum().item()
