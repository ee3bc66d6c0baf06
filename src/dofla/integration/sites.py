"""Finding a model's attention modules: run it once on a few tokens and see who calls."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from dofla.errors import DoflaError
from dofla.integration.interface import Visitor, is_causal, standard_scaling, unreachable, visiting
from dofla.integration.offload import device_of
from dofla.integration.recorder import evaluation_mode

_SAME = 0.01
"""Largest difference between two ways to compute an output, as a fraction of the largest output."""
_AGAIN = "it is called more than once in a pass, with one entry of the cache"


@dataclass(frozen=True)
class AttentionSite:
    """An attention module as one forward pass shows it."""

    name: str  # in the model
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scaling: float  # of the scores, queries and keys as projected
    causal: bool  # or bidirectional
    linear_time: bool = False  # attends to a bounded number of tokens already (sliding window, chunks); left as it is
    refusal: str | None = None  # why it can be neither compressed nor linear
    shares_keys: bool = False  # keys and values are those of another layer, or another's are its own; left as it is
    window: int | None = None  # how many tokens it attends to at most, where that is known
    borrows_keys: bool = False  # keys and values are those of an earlier layer; it keeps none in the cache


def check_kept(sites: Mapping[str, AttentionSite], keep_softmax: Iterable[str]) -> None:
    """DoflaError if a layer to be kept softmax is none of the model's."""
    if isinstance(keep_softmax, str):
        raise DoflaError(f"keep_softmax is {keep_softmax!r}: give a list of names, [{keep_softmax!r}]")
    for name in keep_softmax:
        if name not in sites:
            first = next(iter(sites))
            raise DoflaError(f"keep_softmax names {name!r}, no attention module of this model: it has {first}, ...")


def attention_sites(model: PreTrainedModel) -> dict[str, AttentionSite]:
    """All attention modules of ``model`` by name, in the order of the forward pass. DoflaError if no attention of the
    model goes through transformers' attention interface, or it needs masks of its own."""
    names = {module: name for name, module in model.named_modules()}
    sites: dict[str, AttentionSite] = {}
    unsaid: list[str] = []
    seen: dict[str, Tensor] = {}  # keys, which stand where they are as long as they are held

    def visit(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask, scaling, kwargs: dict) -> None:
        name = names[module]
        if name in sites:  # DiffLlama's; layers that encoders share have no cache
            sites[name] = replace(sites[name], refusal=_AGAIN if sites[name].causal else sites[name].refusal)
            return
        if "is_causal" not in kwargs and not hasattr(module, "is_causal"):  # Splinter's
            unsaid.append(name)
        _, heads, length, head_dim = query.shape
        pattern = mask is not None and mask.ndim == 4
        window = kwargs.get("sliding_window") or getattr(module, "sliding_window", None)
        bounded = window or _kind(module) not in (None, "full_attention")
        for size in ("sliding_window", "attention_chunk_size"):
            window = window or getattr(module.config, size, None)
        linear_time, causal = bool(bounded and pattern), is_causal(module, kwargs)
        sharing = [other for other, own in seen.items() if causal and own.data_ptr() == key.data_ptr()]
        seen[name] = key
        for other in sharing:
            sites[other] = replace(sites[other], shares_keys=True)
        shape, shared = (heads, key.shape[1], head_dim, value.shape[-1]), bool(sharing)
        refusal = None if linear_time else _refusal(module, kwargs, pattern, length != key.shape[-2])
        held, scaling = window if linear_time else None, standard_scaling(module, query, scaling)[1]
        sites[name] = AttentionSite(name, *shape, scaling, causal, linear_time, refusal, shared, held, shared)

    tokens = a_few_tokens(model)
    with evaluation_mode(model), torch.no_grad():
        out = _output(model, tokens, visit)
        if unsaid and not torch.allclose(own := model(**tokens)[0], out, rtol=0, atol=_SAME * own.abs().max()):
            raise DoflaError(
                f"layer {unsaid[0]} does not say whether it is causal (is_causal), and is not: {type(model).__name__} "
                "cannot be converted"
            )
    if not sites:
        raise DoflaError(unreachable(model))
    return sites


def _output(model: PreTrainedModel, tokens: dict[str, Tensor], visit: Visitor) -> Tensor:
    """The model's output for ``tokens``, while ``visit`` sees its attention. DoflaError if it does not run without
    masks of its own."""
    try:
        with visiting(model, visit):
            return model(**tokens)[0]
    except DoflaError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
        model(**tokens)  # if it fails by itself, it says so
        raise DoflaError(
            f"{type(model).__name__} does not run without attention masks of its own ({error}): models that choose "
            "what to attend to (DeepSeek V3.2, ...) cannot be converted"
        ) from error


def check_left(config: PreTrainedConfig, kind: str, layers: Collection[Any]) -> None:
    """DoflaError if there are no ``layers`` to convert in a model of this config and class."""
    if layers:
        return
    config = config.get_text_config()
    opened = getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None)
    way_out = ", unless it is opened with sliding_window=None" if opened else ""
    raise DoflaError(
        f"{kind}: no layer is left to convert: all attend to bounded windows already{way_out}, share their keys with "
        "others, or are in keep_softmax"
    )


def refuse(site: AttentionSite) -> None:
    """Raise DoflaError if the layer cannot be converted."""
    reason = site.refusal or ("it attends to a bounded window already" if site.linear_time else None)
    reason = reason or ("it shares its keys and values with other layers" if site.shares_keys else None)
    if reason:
        raise DoflaError(f"layer {site.name} cannot be converted: {reason}; keep it softmax (keep_softmax)")


def _kind(module: nn.Module) -> str | None:
    """The kind of the layer, as the config calls it; None if it does not say."""
    kinds, index = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
    return kinds[index] if kinds and index is not None and index < len(kinds) else None


def _refusal(module: nn.Module, kwargs: dict[str, Any], pattern: bool, crossing: bool) -> str | None:
    if kwargs.get("softcap") is not None:
        return "its logits are soft-capped"
    if kwargs.get("s_aux") is not None:
        return "its attention sinks are parameters"
    if kwargs.get("position_bias") is not None:
        return "a position bias is added to its scores"
    if crossing:
        return "it is cross-attention"
    if pattern:
        return "its mask is neither causal nor bidirectional, or a bias is folded into it"
    if _kind(module) == "hybrid":  # Falcon-H1
        return "it shares its entry of the cache with a recurrent layer beside it"
    if is_causal(module, kwargs) and getattr(module, "layer_idx", 0) is None:  # Zamba's
        return "it has no entry of its own in the cache (layer_idx is None)"
    return None


def a_few_tokens(model: PreTrainedModel) -> dict[str, Tensor]:
    """Something short for the model to read; DoflaError unless it takes text or images."""
    config, device = model.config, device_of(model)
    if model.main_input_name == "pixel_values":
        size = config.image_size if isinstance(config.image_size, (tuple, list)) else (config.image_size,) * 2
        return {"pixel_values": torch.zeros(1, config.num_channels, *size, device=device, dtype=model.dtype)}
    if model.main_input_name != "input_ids":
        raise DoflaError(f"{type(model).__name__} takes {model.main_input_name!r}: only text and images are supported")
    ids = (torch.arange(8, device=device) % config.get_text_config().vocab_size).unsqueeze(0)
    # Two lengths, so that cross-attention shows as more keys than queries.
    extra = {"decoder_input_ids": ids[:, :6]} if config.is_encoder_decoder else {}
    if getattr(config, "add_cross_attention", False):
        extra["encoder_hidden_states"] = torch.zeros(1, 6, config.hidden_size, device=device, dtype=model.dtype)
    return {"input_ids": ids, **extra}
