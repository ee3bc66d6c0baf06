"""A memory that fades, at once, and what more or fewer bytes of it do to the model, measured in one pass over the text.

A student is made whose layers all have the same size. While it reads a window, each layer also computes what it would
have answered with fewer tokens, and with more; and the gradient of the student's loss at the layer's output says what
that would change: ⟨∂ KL(teacher ‖ student) / ∂ out, out' − out⟩, to first order. So the effect is that on a model whose
other layers forget as well, which matters: where one head alone forgets what is far back, others make up for it. Bytes
go where they do most, in a few small steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dofla.data import TokenWindows, as_windows
from dofla.display import Bar, reports_progress
from dofla.distillation.objective import Objective
from dofla.distillation.trainable import trainable
from dofla.errors import DoflaError
from dofla.integration.attaching import AttachedLinearAttention
from dofla.integration.fading import fading_plan, measure_directions
from dofla.integration.interface import RECORDING, softmax_attention, visiting, with_gradients_of_softmax
from dofla.integration.places import placed_over, whole_reach
from dofla.integration.recorder import AttentionCall
from dofla.integration.sites import attention_implementation, evaluation_mode
from dofla.integration.streaming import is_streamed
from dofla.integration.surgery import describe, linear_layers, linearize, restore
from dofla.plans.plan import LayerPlan, Plan
from dofla.plans.shares import FACTORS, Ladder, Shares

WAYS = ("measured", "even")
"""How layers may share the bytes."""
STEPS = 2
"""From an even split. First order says little of large steps, above all of small memories."""
HELD = 0.5
"""Of a window, the most that a memory holds with which shares are measured: one that forgets nothing of it would say
where rounding does harm, and not where tokens are missed."""
LEAST = 16
"""Features per KV head with which they are measured however short windows are: less cannot be made smaller still."""
_REFERENCE = 64  # features whose memory is counted in tokens


def measure_shares(
    model: PreTrainedModel,
    tokens: TokenWindows | Tensor | Mapping[str, Tensor],
    budget: int = 64,
    *,
    keep_softmax: Collection[str] = (),
    batch_size: int = 1,
    reach: int | None = None,
    progress: Callable[[str, int, int], None] | bool = True,
) -> Shares:
    """How the bytes of a memory that fades are best shared among layers; :func:`dofla.fade` spends them so.

    Args:
        model: as for :func:`dofla.fade`; it is linearised in between, and restored.
        tokens: a dozen windows, of any text.
        budget: around which sizes are tried, in features per KV head; fewer where a memory of so many would hold more
            than half of a window.
        keep_softmax: layers to leave out.
        batch_size: windows per pass, forward and backward.
        reach: as for :func:`dofla.fade`.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (stage, done, total) after each pass.

    Raises:
        DoflaError: as :func:`dofla.fade`; a model that predicts no tokens; a streamed one.
    """
    return _measured(model, as_windows(tokens), budget, keep_softmax, batch_size, reach, progress=progress)[0]


def fade(
    model: PreTrainedModel,
    tokens: TokenWindows | Tensor | Mapping[str, Tensor],
    *,
    budget: int = 64,
    shares: Shares | str = "measured",
    keep_softmax: Collection[str] = (),
    batch_size: int = 1,
    reach: int | None = None,
) -> PreTrainedModel:
    """Give a causal model a memory that fades, in place and without training: tokens lose bits as they age, and are
    forgotten at the end.

    Args:
        model: any causal model that :func:`dofla.linearize` takes.
        tokens: a dozen windows of any text, to measure shares, and the means and directions of keys and values on.
        budget: bytes, as so many features per KV head, in the mean over layers.
        shares: how layers share them: ``measured``, by :func:`dofla.measure_shares` on the same windows; ``even``, all
            the same, which takes no gradients and a tenth of the time; or what was measured before.
        keep_softmax: layers to leave as they are.
        batch_size: windows per pass.
        reach: positions that the memory is for: windows are read as if they stood here and there among so many. Default
            all that the model has, where they are rotary; other models' windows stay where they are. Fewer are a little
            better within, and much worse beyond.

    Returns:
        ``model`` itself. :func:`dofla.restore` undoes it.

    Raises:
        DoflaError: as :func:`dofla.linearize`; an encoder, which keeps nothing from token to token; a budget too small
            for a token of each kind; heads whose size is no multiple of 8; as :func:`dofla.measure_shares`.
    """
    if not isinstance(shares, Shares) and shares not in WAYS:
        raise DoflaError(f"shares is {shares!r}: give {', '.join(WAYS)}, or what dofla.measure_shares returned")
    directions = {}
    if shares == "measured":
        shares, directions = _measured(model, as_windows(tokens), budget, keep_softmax, batch_size, reach)
    known = shares if isinstance(shares, Shares) else None
    linearize(model, fading_plan(model, budget, shares=known, keep_softmax=keep_softmax))
    try:
        for name, own in directions.items():
            linear_layers(model)[name].fading.load_state_dict(own)
        measure_directions(model, tokens, batch_size=batch_size, reach=reach)  # where they are not known
    except BaseException:
        restore(model)
        raise
    return model


def measured_at(model: PreTrainedModel, budget: int, windows: TokenWindows, keep_softmax: Collection[str] = ()) -> int:
    """The budget that shares of ``budget`` are measured with: one that holds no more than :data:`HELD` of a window."""
    even = fading_plan(model, _REFERENCE, keep_softmax=keep_softmax)
    held = [layer.window + layer.sinks + sum(n for n, _ in layer.coded_per_head[0]) for layer in even.layers]
    return min(budget, max(LEAST, math.floor(_REFERENCE * HELD * windows.length / max(held, default=1))))


@reports_progress("shares", Bar.stage)
def _measured(
    model: PreTrainedModel,
    windows: TokenWindows,
    budget: int,
    keep_softmax: Collection[str],
    batch_size: int,
    reach: int | None,
    *,
    progress: Callable[[str, int, int], None] | None,
) -> tuple[Shares, dict[str, dict[str, Tensor]]]:
    """Shares; and by layer the directions that were measured on the way, which memories of all sizes have in common."""
    if is_streamed(model):
        raise DoflaError("measuring shares needs the whole model in memory: open it without stream, or split evenly")
    budget = measured_at(model, budget, windows, keep_softmax)
    even = fading_plan(model, budget, keep_softmax=keep_softmax)
    student = linearize(model, even)
    try:
        measure_directions(student, windows, batch_size=batch_size, reach=reach)
        reach = whole_reach(model, windows, reach)
        parts = list(placed_over(windows, batch_size, reach))
        layers = linear_layers(student)
        sizes = {name: even[name].state_bytes(model.dtype.itemsize) for name in layers}
        made_by = {"budget": budget, "tokens": windows.tokens, "source": windows.source, "reach": reach}
        shares, ladder = Shares(dict.fromkeys(layers, 1.0), {}, describe(model)["name"], made_by), Ladder(sizes)
        for step in range(STEPS):
            plans = [_plan(model, budget, factor, shares, keep_softmax) for factor in FACTORS]
            tried = {name: [_resized(layer, plan[name]) for plan in plans] for name, layer in layers.items()}
            effects = _effects(student, tried, parts, _report(progress, step))
            shares = replace(shares, layers=ladder.climb(effects), effects=effects)
    finally:
        restore(model)
    return shares, {name: layer.fading.state_dict() for name, layer in layers.items()}


def _resized(layer: AttachedLinearAttention, plan: LayerPlan) -> AttachedLinearAttention:
    """The layer with other numbers of tokens, and the same codes."""
    other = AttachedLinearAttention(plan, layer.beside_softmax)
    for name, fading in layer.fading.items():
        other.fading[name].key, other.fading[name].value = fading.key, fading.value
    return other


def _plan(model: PreTrainedModel, budget: int, factor: float, shares: Shares, keep_softmax: Collection[str]) -> Plan:
    try:
        return fading_plan(model, factor * budget, shares=shares, keep_softmax=keep_softmax)
    except DoflaError as error:
        raise DoflaError(f"at {factor:.2g} of budget {budget}: {error}, or shares='even'") from None


def _report(progress: Callable[[str, int, int], None] | None, step: int) -> Callable[[int, int], None] | None:
    """What to call within a step with (done, total) passes."""
    return progress and (lambda done, total: progress("passes", step * total + done, STEPS * total))


def _effects(
    student: PreTrainedModel,
    tried: Mapping[str, Sequence[AttachedLinearAttention]],
    parts: Sequence[Mapping[str, Tensor]],
    report: Callable[[int, int], None] | None,
) -> dict[str, list[float]]:
    """By layer, the change of the loss if it alone were each of those ``tried`` instead of the first."""
    effects = {name: torch.zeros(len(layers), dtype=torch.float64) for name, layers in tried.items()}
    with trainable(student, "maps", 0) as part, evaluation_mode(student), torch.enable_grad():
        loss = Objective(student, part.teacher)
        count, rows = sum(map(loss.count, parts)), sum(len(batch["input_ids"]) for batch in parts)
        for done, batch in enumerate(parts, start=1):
            with _answers(student, tried) as seen:
                value = loss({name: data.to(student.device) for name, data in batch.items()}, count, rows)
            gradients = torch.autograd.grad(value, [out for out, _ in seen.values()])
            for (name, (_, differences)), gradient in zip(seen.items(), gradients, strict=True):
                effects[name][1:] += torch.stack([(gradient.double() * x).sum() for x in differences]).cpu()
            if report:
                report(done, len(parts))
    return {name: own.tolist() for name, own in effects.items()}


@contextmanager
def _answers(
    student: PreTrainedModel, tried: Mapping[str, Sequence[AttachedLinearAttention]]
) -> Iterator[dict[str, tuple[Tensor, list[Tensor]]]]:
    """Within the block the student answers as ever, and gradients pass as through softmax attention. Yields, by layer,
    its output in the last call, and what those of the others are more than that."""
    by_module = {student.get_submodule(name): name for name in tried}
    seen: dict[str, tuple[Tensor, list[Tensor]]] = {}

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if module not in by_module:
            return softmax_attention(module, query, key, value, mask, scaling, **kwargs)
        call = AttentionCall.of(by_module[module], module, query, key, value, mask, scaling, kwargs)
        options = {"scaling": call.scaling, "weight": call.weight}
        with torch.no_grad():
            outs = [layer(call.query, key, value, **options)[0].transpose(1, 2) for layer in tried[call.name]]
        out = with_gradients_of_softmax(outs[0], module, query, key, value, mask, scaling, **kwargs)
        out = out if out.requires_grad else out.requires_grad_()  # nothing before the first layer trains
        seen[call.name] = out, [other - outs[0] for other in outs[1:]]
        return out, None

    with attention_implementation(student, RECORDING), visiting(None, attention):
        yield seen
