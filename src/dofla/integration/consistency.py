"""The check that a compressed model answers with a cache as it does in one pass, on a few tokens.

Families differ in what they do with a cache, and attention alone does not show it: layers read the keys of others,
share an entry, or count tokens themselves. So a converted model is tried before it is handed out.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dofla.errors import DoflaError
from dofla.integration.cache import CACHE_ARGUMENT
from dofla.integration.interface import token_by_token
from dofla.integration.recorder import evaluation_mode
from dofla.integration.sites import a_few_tokens

CALLS = (3, 4, 1)
"""Tokens of the calls with a cache, few enough that nearly all windows hold them: codes of few bits may turn out
otherwise where a number differs in its last digit."""
TOKENS = sum(CALLS)
PADDED = 2
"""Tokens of padding: in front of one row in the first call, and of another in the second."""
DRAWS = 3
"""Number of draws of tokens that all have to fail: the effect of a last digit on codes or on the choice of experts is
confined to one of them."""
TOLERATED = 2.0**-6
"""Relative difference of a token's output: twice what a step of eight bits is of the largest number."""


def check_consistency(model: PreTrainedModel, original: Callable[[], AbstractContextManager]) -> None:
    """DoflaError, naming the layer, if the converted model fails with a cache where it does not within the block of
    ``original``, in which it computes softmax attention."""
    if model.main_input_name != "input_ids":
        return
    with evaluation_mode(model), torch.no_grad(), token_by_token():
        for padded in (True, False):
            if (fault := _fault(model, 0, padded)) is None:
                return
            with original():
                own = _fault(model, 0, padded)
            if own is None:  # else nothing can be said, with padding or at all
                if all(_fault(model, seed, padded) for seed in range(1, DRAWS)):
                    name = _first(model, padded)
                    raise DoflaError(
                        f"layer {name} cannot be converted: {fault}; keep it softmax, and those whose keys it reads "
                        "(keep_softmax)"
                    )
                return


def _fault(model: PreTrainedModel, seed: int, padded: bool) -> str | None:
    """The failure of calls with a cache, in words: an error, or a difference from the single pass. None if the model
    answers in several calls as in one, keeps no cache, or does not answer to every token."""
    try:
        whole, parts = _both_ways(model, seed, padded)
    except Exception as error:  # code of any family, of which any may come
        return f"a call with a cache fails ({type(error).__name__}: {str(error)[:160]})"
    difference = 0.0 if parts is None else _difference(whole, parts, padded)
    if difference <= _tolerated(model.dtype):
        return None
    return f"with a cache it answers otherwise than in one pass (relative difference {difference:.2g})"


def _tolerated(dtype: torch.dtype) -> float:
    return max(TOLERATED, 16 * torch.finfo(dtype).eps)


def _both_ways(model: PreTrainedModel, seed: int, padded: bool) -> tuple[Tensor, list[Tensor] | None]:
    """Outputs of one pass [rows, n, ...] over tokens that stand for nothing else, and of each call with a cache after
    it; None if the model keeps none."""
    config = model.config.get_text_config()
    special = {
        number
        for own in (config, model.config)
        for name, number in vars(own).items()
        if name.endswith(("token_id", "token_index")) and isinstance(number, int)
    }
    plain = [n for n in range(min(config.vocab_size, 4 * TOKENS + len(special))) if n not in special] or [0]
    chosen = torch.randint(len(plain), (3 if padded else 1, TOKENS), generator=torch.Generator().manual_seed(seed))
    few = a_few_tokens(model)
    ids = torch.tensor(plain)[chosen].to(few["input_ids"].device)
    given: dict[str, Any] = {name: x.expand(len(ids), *x.shape[1:]) for name, x in few.items()}
    whole, parts = _call(model, ids, padded, torch.ones_like(ids), use_cache=False, **given)[0], []
    pieces, masks = _pieces(ids, padded)
    for n, piece in enumerate(pieces, 1):
        out = _call(model, piece, padded, torch.cat(masks[:n], 1), use_cache=True, **given)
        given[CACHE_ARGUMENT] = getattr(out, CACHE_ARGUMENT, None)
        if given[CACHE_ARGUMENT] is None:
            return whole, None
        parts.append(out[0])
    if any(len(out) != len(ids) or out.shape[1] != length for out, length in zip(parts, CALLS, strict=True)):
        return whole, None
    return whole, parts


def _pieces(ids: Tensor, padded: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens of each call, and which of them are real. With padding, the second row begins with some, and the third
    goes on with some: they then end as many tokens earlier."""
    mask, first = torch.ones_like(ids), CALLS[0]
    if padded:
        mask[1, :PADDED], mask[2, first : first + PADDED] = 0, 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    return list(ids.gather(1, places).split(CALLS, 1)), list(mask.split(CALLS, 1))


def _call(model: PreTrainedModel, ids: Tensor, padded: bool, mask: Tensor, **given: Any) -> Any:
    decodes = model.config.is_encoder_decoder
    given["decoder_input_ids" if decodes else "input_ids"] = ids
    if padded and not decodes:
        given["attention_mask"] = mask
        if "position_ids" in inspect.signature(model.forward).parameters:
            given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(**given)


def _difference(whole: Tensor, parts: list[Tensor], padded: bool) -> float:
    """The largest, over rows and calls, of the median relative difference of the real tokens' outputs."""
    ids = torch.arange(TOKENS, device=whole.device).repeat(len(whole), 1)
    worst = 0.0
    for part, places, mask in zip(parts, *_pieces(ids, padded), strict=True):
        for row in range(len(whole)):
            real = mask[row].bool()
            found, wanted = part[row][real].flatten(1).double(), whole[row][places[row][real]].flatten(1).double()
            relative = (found - wanted).norm(dim=1) / wanted.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
            worst = max(worst, relative.nan_to_num(torch.inf).median().item() if len(relative) else 0.0)
    return worst


def _first(model: PreTrainedModel, padded: bool) -> str:
    """The first module of the plan whose output differs, or in which a call fails."""
    modules = {layer.name: model.get_submodule(layer.name) for layer in model.config.quantization_config.plan.layers}
    outputs: dict[nn.Module, list[Tensor]] = {module: [] for module in modules.values()}
    called = [*modules.values()][:1]

    def before(module: nn.Module, args: tuple) -> None:
        called.append(module)

    def after(module: nn.Module, args: tuple, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) else out
        if isinstance(out, Tensor) and out.ndim > 2:
            outputs[module].append(out)

    with ExitStack() as hooks:
        for module in outputs:
            hooks.callback(module.register_forward_pre_hook(before).remove)
            hooks.callback(module.register_forward_hook(after).remove)
        try:
            _both_ways(model, 0, padded)
        except Exception:  # seen before, and said
            return next(name for name, module in modules.items() if module is called[-1])
    for name, module in modules.items():
        once = len(outputs[module]) == 1 + len(CALLS)  # in each call; otherwise nothing can be said
        if once and _difference(outputs[module][0], outputs[module][1:], padded) > _tolerated(model.dtype):
            return name
    return [*modules][-1]
