"""Layers as submodules of a model's attention modules."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from dofla.errors import DoflaError
from dofla.integration.cache import hand_over_cache, record_candidates
from dofla.integration.instead import DOFLA
from dofla.integration.interface import begin_call, end_call
from dofla.integration.offload import device_of
from dofla.integration.positions import positions_of
from dofla.integration.second_reading import check_reads_twice, read_first, read_second
from dofla.layers import AttentionLayer, parts_of
from dofla.plans.layers import MOST_TOKENS, LayerPlan
from dofla.plans.plan import Plan

SOFTMAX = "_dofla_softmax_implementation"
"""Attribute of a converted model: the attention it ran with before."""
_HELD_ANYWAY = 2**16
"""Tokens that a KV head may have even if the model has fewer positions."""


class AttachedLayer(AttentionLayer):
    """A layer as the submodule ``dofla`` of an attention module.

    Its parameters stay float32 whatever dtype the model is moved to: exponents of real heads pass 100, where a
    half-precision log-feature would be off by whole factors. ``beside_softmax`` says whether other layers stay softmax,
    ``positions`` how many there are for it, if that is known, ``prefill`` how the plan has prompts read.
    """

    hooks: list[RemovableHandle]  # that hand it its entry of the cache

    def __init__(self, layer: LayerPlan, plan: Plan, positions: int | None) -> None:
        super().__init__(*parts_of(layer))
        self.name, self.positions = layer.name, positions
        self.beside_softmax = len(plan.converted) < len(plan.layers)
        self.prefill = plan.prefill

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        def move_only(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        return super()._apply(move_only, recurse)


def attach(model: PreTrainedModel, plan: Plan) -> list[AttachedLayer]:
    """Add the submodules and hooks of the plan's converted layers; nothing is switched on yet. DoflaError, before
    anything is allocated, for a layer that the model does not have, or that cannot be of its sizes."""
    attached, modules, converted = [], [], plan.converted
    positions = positions_of(model, plan.context)
    for layer in converted:
        try:
            modules.append(model.get_submodule(layer.name))
        except AttributeError:
            raise DoflaError(f"the plan is for another model: {type(model).__name__} has no {layer.name!r}") from None
        _check_sizes(layer, modules[-1], positions)
    if plan.prefill == "twice":
        check_reads_twice(model, converted)
    for layer, module in zip(converted, modules, strict=True):
        own = module.dofla = AttachedLayer(layer, plan, positions)
        own.to(device_of(module))
        own.train(module.training)
        own.hooks = [module.register_forward_pre_hook(hand_over_cache, with_kwargs=True)]
        attached.append(own)
    if attached:
        body, hooks = model.base_model, attached[0].hooks
        called = [model] if body is model else [model, body]
        hooks.append(model.register_forward_pre_hook(record_candidates, with_kwargs=True))
        hooks += [each.register_forward_pre_hook(begin_call, with_kwargs=True) for each in called]
        if plan.prefill == "twice":
            first, second = (partial(read, model) for read in (read_first, read_second))
            hooks.append(body.register_forward_pre_hook(first, with_kwargs=True))
            hooks.append(body.register_forward_hook(second, with_kwargs=True))
        hooks += [each.register_forward_hook(end_call, always_call=True) for each in called]
    return attached


def with_own_configs(model: PreTrainedModel) -> None:
    """Give a model configs that no other shares: its config says that it is converted, and how."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                setattr(module, name, deepcopy(value, copies))


def _check_sizes(layer: LayerPlan, module: nn.Module, positions: int | None) -> None:
    """DoflaError unless the module that a layer is planned for has so large heads, and the model so many tokens."""
    width, most = layer.kv_heads * max(layer.head_dim, layer.value_dim), max(positions or MOST_TOKENS, _HELD_ANYWAY)
    weights = *module.parameters(), *module.buffers()  # quantized ones may be either
    widest = max((side for weight in weights for side in weight.shape), default=width)
    if width > widest:
        raise DoflaError(
            f"the plan is for another model: in it, {layer.name} has {layer.kv_heads} KV heads, together {width} wide, "
            f"and no projection of the model's is wider than {widest}; compress the model again"
        )
    if layer.largest > most:
        raise DoflaError(
            f"the plan gives a KV head of {layer.name} {layer.largest} tokens or features, and the model, which has "
            f"{positions or 'an unknown number of'} positions, may have {most}; compress the model again"
        )


def switch_on(model: PreTrainedModel) -> None:
    """Let a model with layers attached use them."""
    before = model.config._attn_implementation
    # Ours, asked for when loading or taken over with the config of a converted model, says nothing.
    setattr(model, SOFTMAX, model.get_correct_attn_implementation(None) if before == DOFLA else before)
    model.set_attn_implementation(DOFLA)


def renamed(plan: Plan, model: PreTrainedModel) -> Plan:
    """The plan with the names its layers have in ``model``, which may be the body alone of the model it was made
    for, or the same body under another head."""
    prefix = f"{model.base_model_prefix}."
    modules = dict(model.named_modules())
    layers = []
    for layer in plan.layers:
        names = (layer.name, layer.name.removeprefix(prefix), prefix + layer.name)
        layers.append(replace(layer, name=next((name for name in names if name in modules), layer.name)))
    return replace(plan, layers=layers)
