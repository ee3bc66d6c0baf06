"""The distillation loop: feature maps trained against the softmax attention they replace, or on the text itself."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import Images, TokenWindows
from dofla.display import Bar
from dofla.distillation.calibrate import calibrate
from dofla.distillation.checkpoint import Checkpoint
from dofla.distillation.descent import Descent, groups_of
from dofla.distillation.distributed import add_gradients, to_device
from dofla.distillation.gradients import DIRECT, layerwise_gradients, next_token_gradients
from dofla.distillation.history import History
from dofla.distillation.losses import LOSSES
from dofla.distillation.steps import Batches, generator_of
from dofla.errors import DoflaError, check_choice, check_numbers
from dofla.integration.converted import Converted
from dofla.integration.offload import check_in_memory
from dofla.integration.placement import context_of
from dofla.integration.reading import windows_for
from dofla.integration.recorder import evaluation_mode
from dofla.integration.wrapped import takes_model
from dofla.storage.rank import is_main_process, world_size


@takes_model("distill", Bar.losses)
def distill(
    student: PreTrainedModel,
    windows: TokenWindows | Images | Tensor | Mapping[str, Tensor],
    *,
    loss: str = "output",
    epochs: int = 1,
    steps: int | None = None,
    batch_size: int = 2,
    accumulate: int = 1,
    rows: int | None = 64,
    learning_rates: Mapping[str, float] | None = None,
    from_data: bool = True,
    context: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    checkpoint_every: int = 50,
    progress: Callable[[int, int, dict[str, float]], None] | bool = True,
) -> History:
    """Train the feature maps of a linearized model (arXiv 2507.03340, section 4). Everything else stays frozen.

    The losses ``softmax``, ``l2`` and ``output`` train each layer against its own softmax attention: the model runs
    once per batch with softmax attention and without gradients, and as each layer is reached, the loss of its feature
    maps on the teacher's queries and keys is computed and propagated at once, so no graph crosses layers and memory
    holds one layer's graph, however deep the model is. ``direct`` is the next-token loss of the whole linearized model.

    Maps that start from data (:func:`dofla.distillation.calibrate`) do so on the first batch.

    In several processes (``torchrun``, ``accelerate launch``) each takes its share of every batch, and all end with the
    student that one process makes of batches that are as many times as large. The main process alone writes and shows
    progress.

    Args:
        student: a linearized model; it is its own teacher.
        windows: to train on.
        loss: a name in :data:`dofla.distillation.LOSSES`, or ``direct``.
        epochs: passes over the windows, unless ``steps`` says how many optimizer steps to take. The last step of a pass
            takes the windows that are left.
        batch_size: windows per forward pass, and process.
        accumulate: forward passes per optimizer step.
        rows: query rows per window that the loss looks at, drawn anew each time, at a fraction of the cost of
            all (None); of ``softmax`` an unbiased estimate. ``direct`` sees all in any case.
        learning_rates: by parameter name, over the feature map's own; they fall to 0 along a cosine.
        from_data: let maps that start from data do so.
        context: read the windows as if they began anywhere among so many positions (of models with rotary ones, where
            the teacher does not notice). A student that training showed the first L alone is lost beyond them; one with
            a longer context loses a little within L. Default: four times the windows' length for hybrid language models
            with rotary positions; their length itself leaves windows where they are.
        seed: of the order of the windows and of the rows.
        folder: where checkpoints and curves go. If a run of the same settings stopped there, it goes on, and ends with
            the same numbers as if it had not.
        checkpoint_every: steps between checkpoints.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (step, steps, loss of each layer) after each step.

    Raises:
        DoflaError: not linearized; offloaded; unknown loss or parameter; ``direct`` for a model that predicts
            no next token; a number out of range; fewer windows than one step takes; a loss
            that is not finite, naming layer and step (nothing of that step is saved); a folder holding a run of other
            settings; a last batch with fewer windows than there are processes.
    """
    handle = Converted.of(student)
    check_in_memory(student, "training")
    check_choice("loss", loss, sorted([*LOSSES, DIRECT]))
    windows = windows_for(student, windows)
    check_numbers(epochs=epochs, batch_size=batch_size, accumulate=accumulate, checkpoint_every=checkpoint_every)
    check_numbers(**{k: v for k, v in (("steps", steps), ("rows", rows)) if v is not None})
    context = context_of(handle, windows, context)
    batches = Batches(windows, batch_size * world_size(), accumulate, seed, context)
    if 0 < (left := len(windows) % batches.batch_size) < world_size():
        raise DoflaError(
            f"the last batch of an epoch has {left} of {len(windows)} windows, and there are {world_size()} processes: "
            f"give {len(windows) - left}"
        )
    steps = steps or epochs * batches.per_epoch
    rates = dict(learning_rates or {})
    settings: dict[str, Any] = {"loss": loss, "steps": steps, "batch_size": batches.batch_size}
    settings |= {"accumulate": accumulate, "rows": rows, "seed": seed, "learning_rates": rates}
    settings |= {"from_data": from_data, "context": context}
    identity = settings | {"plan": handle.plan.to_dict()["layers"]}
    layers, columns = handle.layers, [DIRECT] if loss == DIRECT else list(handle.layers)
    descent = Descent(groups_of(layers, rates), steps)
    checkpoint = Checkpoint(folder, identity, windows, checkpoint_every, layers, descent.optimizer, columns)
    to_device(student)

    with evaluation_mode(student):
        if from_data:
            calibrate(handle, batches.first())  # where a run goes on, its checkpoint comes over it
        curve = checkpoint.resume()
        for step in range(len(curve), steps):
            of_step = batches.of_step(step)
            if loss == DIRECT:
                losses = next_token_gradients(student, layers, of_step)
            else:
                draws = partial(generator_of, seed, step)
                losses = layerwise_gradients(student, layers, of_step, loss=loss, rows=rows, generator=draws)
            for name, value in losses.items():
                if not math.isfinite(value):
                    what = "next-token loss" if name == DIRECT else f"loss of layer {name}"
                    raise DoflaError(f"the {what} is {value} at step {step}: NaN in activations")
            add_gradients(descent.parameters)
            descent.step(step)
            curve.append(list(losses.values()))
            checkpoint.keep(curve)
            if callable(progress) and is_main_process():
                progress(len(curve), steps, losses)
    how = "feature maps, on the text itself" if loss == DIRECT else "feature maps, layer by layer"
    handle.record.add_distillation(how, windows, "dofla.linear.distill(student, windows", settings)
    return History(columns, torch.tensor(curve), checkpoint.seconds, settings)
