"""The start of layers that look at data first: the mean of their keys, the scale of what their feature maps get, and
the level of the kernel."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dofla.attention import LOG_ZERO, KeySmoothing
from dofla.attention.coding import Moments
from dofla.distillation.losses import student_log_scores
from dofla.distillation.scores import feature_heads, is_hybrid, seen_exactly, split_heads
from dofla.integration.converted import Converted
from dofla.integration.recorder import AttentionCall, recording, run_body, together
from dofla.layers import AttentionLayer

_ROWS = 64  # query rows per window from which the level is read


def calibrate(student: Converted, batches: Sequence[Mapping[str, Tensor]]) -> None:
    """Calibrate the layers that want to look at data (:func:`calibrate_layer`), in one softmax forward of each batch;
    all of one shape."""
    linear = {name: layer for name, layer in student.layers.items() if layer.compressed is None}
    layers = {n: x for n, x in linear.items() if _new_smoothing(x) or any(m.wants_data for m in x.maps)}
    if not layers:
        return
    generator = torch.Generator().manual_seed(0)
    calls: dict[str, list[AttentionCall]] = {name: [] for name in layers}

    def look(call: AttentionCall) -> None:
        seen = calls[call.name]
        seen.append(call)
        if len(seen) == len(batches):
            calibrate_layer(together(seen), layers[call.name], generator)
            seen.clear()  # one batch, the usual case, is never held for more than a layer

    with recording(student.model, layers, look), torch.no_grad():
        for batch in batches:
            run_body(student.model, batch)


@torch.no_grad()
def calibrate_layer(call: AttentionCall, layer: AttentionLayer, generator: torch.Generator) -> None:
    """Start what smooths the keys of a layer, and its maps, from a call of its teacher, unless they have been, or do
    not look at data.

    A map standardizes its inputs by its head's queries and keys. Where a window or sinks stand beside the features,
    their level is then set so that all far keys together weigh, in the mean over rows, what they weigh in softmax
    attention (rows count by that weight): a start that is off by a factor spends most of its training on that factor.
    """
    if smoothing := _new_smoothing(layer):
        smoothing.calibrate(Moments.of(_real_vectors(call, call.key).cpu()))
    if not any(feature_map.wants_data for feature_map in layer.maps):
        return
    for group, query, key in split_heads(layer, *layer.smooth(call.query, call.key)):
        groups = query.shape[1] // key.shape[1]
        query = _real_vectors(call, query).unflatten(0, (-1, groups)).transpose(1, 2).flatten(1, 2)
        group.map.calibrate(query, _real_vectors(call, key))
    if is_hybrid(layer):
        _set_level(call, layer, call.random_rows(_ROWS, generator))


def _new_smoothing(layer: AttentionLayer) -> KeySmoothing | None:
    """The smoothing of the layer's keys, unless it has been calibrated."""
    return None if layer.smoothing is None or layer.smoothing.is_calibrated else layer.smoothing


def _real_vectors(call: AttentionCall, x: Tensor) -> Tensor:
    """The vectors of tokens that are no padding, of ``x`` [B, H, L, d], as [H, tokens, d]."""
    real = call.real_rows(torch.arange(x.shape[-2], device=x.device))
    return x.transpose(1, 2)[real].transpose(0, 1)


def _set_level(call: AttentionCall, layer: AttentionLayer, rows: Tensor) -> None:
    kv_heads = call.key.shape[1]
    near = seen_exactly(layer, call, rows)
    exact = call.log_weights(rows)
    approximate = student_log_scores(call, layer, rows)
    # log_weights are scores less their normalizer, which the student's scores must lose as well.
    near_mass = exact.masked_fill(~near, LOG_ZERO).logsumexp(-1)
    normalizer = approximate.masked_fill(~near, LOG_ZERO).logsumexp(-1) - near_mass
    wanted = exact.masked_fill(near, LOG_ZERO).logsumexp(-1)
    found = approximate.masked_fill(near, LOG_ZERO).logsumexp(-1) - normalizer
    # Rows that see no far key, or nothing near, say nothing of the level.
    weight = wanted.exp() * ((wanted > LOG_ZERO / 2) & (near_mass > LOG_ZERO / 2)) * call.real_rows(rows)[:, None]
    difference = torch.where(weight > 0, wanted - found, 0)
    total = weight.unflatten(1, (kv_heads, -1)).sum((0, 2, 3))
    level = (weight * difference).unflatten(1, (kv_heads, -1)).sum((0, 2, 3)) / total.clamp_min(1e-12)
    for group in feature_heads(layer):
        group.map.shift(level[group.heads])
