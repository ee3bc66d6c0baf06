"""Turning a model into a converted model in place, and back."""

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dofla.errors import DoflaError
from dofla.feature_maps.cost import HeadCost
from dofla.integration.attaching import SOFTMAX, attach, renamed, switch_on, with_own_configs
from dofla.integration.consistency import check_consistency
from dofla.integration.converted import Converted, is_converted
from dofla.integration.hub import origin
from dofla.integration.instead import computing
from dofla.integration.interface import dofla_attention, softmax_attention, visiting
from dofla.integration.offload import device_of
from dofla.integration.precision import warn_of_slow_products
from dofla.integration.quantizer import DoflaConfig, DoflaQuantizer
from dofla.integration.sites import AttentionSite, attention_sites, check_kept, check_left, refuse
from dofla.integration.trained import original_weights, put_back
from dofla.integration.wrapped import takes_model
from dofla.plans.hybrid import FEATURE_MAP, TOKEN_SHARE, default_token_dtype, even_size
from dofla.plans.layers import FeatureLayer, LayerPlan, SoftmaxLayer
from dofla.plans.plan import Plan
from dofla.storage.defaults import torchs_defaults

logger = logging.getLogger(__name__)


@takes_model()
def linearize(model: PreTrainedModel, plan: Plan | None = None, *, budget: int = 64, seed: int = 0) -> PreTrainedModel:
    """Replace softmax by linear attention, in place, as ``plan`` says.

    Args:
        model: any model whose attention goes through transformers' attention interface.
        plan: names the model's attention modules; see :func:`dofla.linear.allocate`. Without one, :func:`even_plan`.
        budget: of the plan, if none is given.
        seed: of the feature maps' initial values.

    Returns:
        ``model`` itself. :func:`restore` undoes it.

    Raises:
        DoflaError: if the model is converted already, the plan was made for another model, or the plan asks for a
            layer that linear attention cannot express; if the model, tried on a few tokens, fails with a cache.
    """
    return tried(convert(model, even_plan(model, budget) if plan is None else plan, seed))


def tried(converted: Converted) -> PreTrainedModel:
    """The converted model, once :func:`check_consistency` has let it pass; otherwise it is restored."""
    model = converted.model
    try:
        if converted.layers:
            check_consistency(model, lambda: original(model))
    except BaseException:
        restore(model)
        raise
    return model


@torchs_defaults()
def convert(
    model: PreTrainedModel, plan: Plan, seed: int = 0, *, sites: Mapping[str, AttentionSite] | None = None
) -> Converted:
    """:func:`linearize` of a plan, without a trial: for models on the way, and such as were tried before. ``sites`` are
    the model's, if it has been looked at."""
    if is_converted(model):
        raise DoflaError("the model is converted already: call dofla.restore(model) first")
    plan = renamed(plan, model)
    warn_of_slow_products(device_of(model), model.dtype)
    _check(plan, attention_sites(model) if sites is None else sites)
    with_own_configs(model)
    layers, generator = attach(model, plan), torch.Generator().manual_seed(seed)
    for layer in layers:
        layer.reset_parameters(generator)
    switch_on(model)
    config = DoflaConfig(**plan.to_dict())
    config.record.base_model = origin(model.config._name_or_path)
    config.of_weights = getattr(model, "hf_quantizer", None)
    model.config.quantization_config = config
    model.hf_quantizer = DoflaQuantizer(config)  # type: ignore[assignment] # to torch, an attribute is a module
    return Converted(model, {layer.name: layer for layer in layers}, config.plan, config.record)


def even_plan(
    model: PreTrainedModel,
    budget: float = 64,
    *,
    share: float = TOKEN_SHARE,
    feature_map: str = FEATURE_MAP,
    token_dtype: str | None = None,
    keep_softmax: Collection[str] = (),
) -> Plan:
    """Hybrid layers, the same everywhere, for which no profile is needed.

    Args:
        model: its shapes, and its dtype.
        budget: in features per KV head, whose bytes are spent as :func:`dofla.plans.hybrid.split` says.
        share: of the bytes, what goes to exact tokens.
        feature_map: a name in :data:`dofla.feature_maps.FEATURE_MAPS`.
        token_dtype: how exact tokens are kept; default eight bits, but for an encoder.
        keep_softmax: layers to leave as they are.

    Raises:
        DoflaError: a budget below 1; a name in ``keep_softmax`` that is no layer; no layer left to linearize.
    """
    sites = attention_sites(model)
    layers: list[LayerPlan] = []
    check_kept(sites, keep_softmax)
    for site in sites.values():
        shape = (site.name, site.kv_heads, site.head_dim, site.value_dim)
        if site.linear_time and site.name not in keep_softmax:
            continue
        if site.shares_keys or site.name in keep_softmax:
            layers.append(SoftmaxLayer(*shape))
            continue
        kept_as = token_dtype or default_token_dtype(site.causal)
        sizes = even_size(budget, HeadCost.of(site.head_dim, site.value_dim, model.dtype.itemsize, kept_as), share)
        layers.append(FeatureLayer(*shape, *sizes, feature_map, kept_as, smooth_keys=kept_as == "int8"))
    check_left(model.config, type(model).__name__, [x for x in layers if not isinstance(x, SoftmaxLayer)])
    _tell_of_shared(tuple(site.name for site in sites.values() if site.shares_keys and not site.linear_time))
    made_by = {"strategy": "hybrid", "budget": budget, "share": share}
    return Plan(layers, model.config._name_or_path or type(model).__name__, made_by)


@lru_cache
def _tell_of_shared(names: tuple[str, ...]) -> None:
    """Say, once, which layers stay as they are unasked."""
    if names:
        logger.warning("%d layers stay softmax, as they share keys and values: %s", len(names), ", ".join(names))


@takes_model()
def restore(model: PreTrainedModel) -> PreTrainedModel:
    """Give the original model back, bit for bit: feature maps off, softmax attention on, weights as they were before
    end-to-end training. Returns ``model``."""
    for layer in Converted.of(model).layers.values():
        module = model.get_submodule(layer.name)
        for hook in layer.hooks:
            hook.remove()
        del module.dofla
    put_back(model)
    model.set_attn_implementation(getattr(model, SOFTMAX))
    of_weights = model.config.quantization_config.of_weights
    delattr(model, SOFTMAX)
    del model.config.quantization_config, model.hf_quantizer
    if of_weights is not None:
        model.config.quantization_config, model.hf_quantizer = of_weights.quantization_config, of_weights
    return model


@contextmanager
def original(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Within the block the converted model is its own original: softmax attention, and the weights it had before
    end-to-end training if there was any. Other threads go on with the converted model."""
    Converted.of(model)
    with computing(model, getattr(model, SOFTMAX)), original_weights(model):
        yield model


@contextmanager
def answering(model: PreTrainedModel, heads: Mapping[str, Collection[int]]) -> Iterator[PreTrainedModel]:
    """Within the block only these KV heads of the model's layers are linear, and the queries that look there; all
    others compute softmax attention, and no cache may be in use."""
    Converted.of(model)
    chosen = {model.get_submodule(name): list(own) for name, own in heads.items()}

    def mixed(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        out, _ = softmax_attention(module, query, key, *args, **kwargs)
        if own := chosen.get(module):
            linear, _ = dofla_attention(module, query, key, *args, **kwargs)
            of_head = torch.arange(query.shape[1], device=out.device).view(key.shape[1], -1)
            queries = of_head[own].flatten()
            out = out.index_copy(2, queries, linear[:, :, queries].to(out.dtype))
        return out, None

    with visiting(model, None, mixed):
        yield model


def as_teacher(model: PreTrainedModel) -> AbstractContextManager:
    """Within the block the model computes softmax attention, converted or not."""
    return original(model) if is_converted(model) else nullcontext()


def _check(plan: Plan, sites: Mapping[str, AttentionSite]) -> None:
    planned = {layer.name: layer for layer in plan.layers}
    unknown = [name for name in planned if name not in sites]
    missing = [name for name, site in sites.items() if name not in planned and not site.linear_time]
    if unknown or missing:
        what = f"it names {unknown[0]!r}" if unknown else f"it says nothing of {missing[0]!r}"
        made_for = f" (it was made for {plan.model})" if plan.model else ""
        raise DoflaError(f"the plan is for another model: {what}{made_for}; profile and allocate this one")
    for name, layer in planned.items():
        site = sites[name]
        for what in ("kv_heads", "head_dim", "value_dim"):
            if getattr(layer, what) != getattr(site, what):
                raise DoflaError(
                    f"the plan is for another model: layer {name} has {what} {getattr(site, what)}, "
                    f"the plan says {getattr(layer, what)}; profile and allocate this one"
                )
        if not isinstance(layer, SoftmaxLayer):
            refuse(site)


def describe(model: PreTrainedModel) -> dict[str, Any]:
    """The description of a model in the record of a run: class, name and number of parameters."""
    return {"class": type(model).__name__, "name": model.config._name_or_path, "parameters": model.num_parameters()}
