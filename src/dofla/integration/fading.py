"""What a memory that fades takes of a model: a plan, and the directions that matter to coded tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dofla.attention import Moments
from dofla.data import Images, TokenWindows
from dofla.errors import DoflaError
from dofla.integration.attaching import AttachedLinearAttention
from dofla.integration.places import placed_over, whole_reach
from dofla.integration.positions import positions_of
from dofla.integration.reading import windows_for
from dofla.integration.recorder import AttentionCall, recording, run_body
from dofla.integration.sites import AttentionSite, attention_sites, evaluation_mode
from dofla.integration.surgery import linear_layers, plan_by_site
from dofla.plans.fading import FADING, PER_HEAD, fade_evenly, fillable
from dofla.plans.hybrid import HeadCost
from dofla.plans.plan import Plan
from dofla.plans.shares import Shares

WINDOWS = 12
"""That directions and shares are measured on where nobody says how many; of 512 tokens they are enough."""


def fading_plan(
    model: PreTrainedModel,
    budget: float = 64,
    *,
    shares: Shares | None = None,
    keep_softmax: Collection[str] = (),
    reach: int | None = None,
) -> Plan:
    """What :func:`dofla.fade` makes of a model: stages of tokens, no features.

    Args:
        model: a causal one.
        budget: bytes, as so many features per KV head.
        shares: of the KV heads; default the same for all. What a head could not fill goes to the others, and then
            to more bits.
        keep_softmax: layers to leave as they are.
        reach: positions that the memory is for; default all that the model has.

    Raises:
        DoflaError: as :func:`dofla.fade`.
    """
    positions, shapes = reach or positions_of(model), {}
    for site in attention_sites(model).values():
        if site.name not in keep_softmax:
            cost = HeadCost.of(site.head_dim, site.value_dim, model.dtype.itemsize, "int8")
            shapes[site.name] = site.head_dim, site.value_dim, cost
    if shares is not None and shares.whole and positions is None:
        raise DoflaError(f"{type(model).__name__} has any number of positions: say by reach how many heads are to hold")
    if shares is not None and positions is not None and budget > 0:  # no other is enough for any head
        shares = fillable(shares, budget, positions, shapes)

    def size(site: AttentionSite) -> dict[str, Any]:
        if not site.causal:
            raise DoflaError(f"layer {site.name} sees both ways: an encoder keeps no tokens, linearize it instead")
        budgets = [budget] * site.kv_heads if shares is None else shares.budgets(site.name, site.kv_heads, budget)
        sizes = [asdict(fade_evenly(own, *shapes[site.name], positions)) for own in budgets]
        alike = len(set(budgets)) == 1
        fields = {name: sizes[0][name] if alike else [own[name] for own in sizes] for name in PER_HEAD}
        return {**sizes[0], **fields, "feature_map": "none"}

    made_by = {"strategy": FADING, "budget": budget} | ({} if shares is None else {"shares": shares.layers})
    if shares is not None and shares.whole:
        made_by["retrieval_heads"] = shares.whole
    return plan_by_site(model, size, keep_softmax, made_by, reach)


@torch.no_grad()
def measure_directions(
    student: PreTrainedModel,
    tokens: TokenWindows | Images | Tensor | Mapping[str, Tensor],
    *,
    batch_size: int = 4,
    reach: int | None = None,
) -> None:
    """Calibrate the coders of all stages (:class:`dofla.attention.Coder`) that have not been.

    An error in a key counts by what queries make of it, one in a value by what the output projection does: the first
    linear layer of its module that runs after attention. Where that is none, all errors in values count alike.

    Args:
        student: a linearised model.
        tokens: a few windows, of any text: a dozen of 512 tokens are enough.
        batch_size: windows per forward pass.
        reach: as for :func:`dofla.fade`.

    Raises:
        DoflaError: the model is not linearised; as :func:`dofla.fade`; NaN in the activations, with layer and batch.
    """
    layers = {name: layer for name, layer in linear_layers(student).items() if _is_new(layer)}
    if not layers:
        return
    windows = windows_for(student, tokens)
    found: dict[str, tuple[Moments, Moments, Moments]] = {}
    answered: list[str] = []
    batch_number = 0

    def look(call: AttentionCall) -> None:
        call.check_finite(batch_number)
        answered.append(call.name)
        real = call.real_rows(torch.arange(call.key.shape[-2], device=call.key.device))
        heads = call.key.shape[1]
        vectors = [x.transpose(1, 2)[real].transpose(0, 1).cpu() for x in (call.query, call.key, call.value)]
        vectors[0] = vectors[0].unflatten(0, (heads, -1)).flatten(1, 2)
        moments = tuple(map(Moments.of, vectors))
        found[call.name] = (
            tuple(a + b for a, b in zip(found[call.name], moments, strict=True)) if call.name in found else moments
        )

    with evaluation_mode(student), recording(student, layers, look), _outputs(student, layers, answered) as outputs:
        for batch in placed_over(windows, batch_size, whole_reach(student, windows, reach)):
            run_body(student, batch)
            batch_number += 1
    for name, layer in layers.items():
        queries, keys, values = found[name]
        weighing = _weighing(outputs.get(name), *values.total.shape)
        for group, heads in enumerate(layer.groups):
            if (fading := layer.fading_of(group)) is not None:
                fading.key.calibrate(keys[heads], queries.second[heads])
                fading.value.calibrate(values[heads], None if weighing is None else weighing[heads])


def _is_new(layer: AttachedLinearAttention) -> bool:
    return any(not fading.key.is_calibrated for fading in layer.fading.values())


@contextmanager
def _outputs(
    student: PreTrainedModel, layers: Mapping[str, AttachedLinearAttention], answered: list[str]
) -> Iterator[dict[str, nn.Module]]:
    """By layer, once it has run: the first linear layer inside its module after attention has ``answered``."""
    found: dict[str, nn.Module] = {}

    def hook(name: str):
        def note(module: nn.Module, _: tuple) -> None:
            if name in answered:
                found.setdefault(name, module)

        return note

    with ExitStack() as stack:
        for name in layers:
            for module in student.get_submodule(name).modules():
                if isinstance(module, (nn.Linear, Conv1D)):
                    stack.callback(module.register_forward_pre_hook(hook(name)).remove)
        yield found


def _weighing(output: nn.Module | None, heads: int, value_dim: int) -> Tensor | None:
    """The quadratic forms [Hkv, dv, dv] that say what an error in a value does to the output."""
    weight = getattr(output, "weight", None)
    if type(weight) is not nn.Parameter or not weight.is_floating_point():
        return None  # quantised
    weight = weight.detach().double().cpu()
    weight = weight.T if isinstance(output, Conv1D) else weight  # [D, H · dv]
    if weight.shape[1] % (heads * value_dim):
        return None
    per_head = weight.unflatten(1, (heads, -1, value_dim))
    return torch.einsum("ohgi,ohgj->hij", per_head, per_head)
