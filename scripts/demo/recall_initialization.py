"""Starts a small transformer close to a circuit that recalls; from noise, training takes millions of tokens to find it.

The circuit is the induction head. Layer one carries two tokens to each position, in two channels: the current one,
which queries will read, and the one before, which keys will read. Layer two attends to positions whose key channel
matches the query channel, and copies what stands there: behind "the baker" it finds what followed the last "baker".
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

QUERY_OFFSET, KEY_OFFSET = 0.0, 1.0  # in tokens: the current token, and the one before each key
LOCAL_LOGIT, MATCH_LOGIT = 8.0, 12.0
CHANNEL_SCALE, COPY_SCALE = 4.0, 6.0  # against the size of an embedding
QUIET = 0.03  # of the layers that would drown the circuit
FAST_PAIRS = range(4)  # rotary pairs that turn quickly enough to tell neighboring tokens apart
SLOWEST_PAIRS = 6  # rotary pairs that hardly turn over a whole context


@torch.no_grad()
def initialize_for_recall(model: nn.Module) -> None:
    """Overwrite the attention of the first two layers, and make the rest start quietly."""
    width, heads = model.config.hidden_size, model.config.num_attention_heads
    embedding = model.get_input_embeddings().weight
    size = embedding.std()
    # Embeddings know no constant, so that attention by position alone needs a direction that all of them share.
    shared = nn.functional.normalize(torch.randn(width), dim=0)
    embedding += shared * size * width**0.5
    without_shared = torch.eye(width) - torch.outer(shared, shared)
    channels = orthogonal(width)

    for name, weight in model.named_parameters():
        if name.endswith(("down_proj.weight", "dense_4h_to_h.weight")):
            weight *= QUIET
    first, second, *others = attention_weights(model)

    query, key, value, output = first
    at_query, at_key = local_projections(heads, width // heads, width)
    query.copy_(torch.outer(at_query, shared).view_as(query))
    key.copy_(torch.outer(at_key, shared).view_as(key))
    carried = orthogonal(width)[: width // 2] @ without_shared
    value.copy_(torch.cat([carried, carried]).view_as(value))
    output.copy_(CHANNEL_SCALE * size * channels)

    query, key, value, output = second
    matching = match_projection(heads, width // heads, width // 2)
    query.copy_((matching @ channels[:, : width // 2].T).view_as(query))
    key.copy_((matching @ channels[:, width // 2 :].T).view_as(key))
    copying = orthogonal(width)
    value.copy_((copying @ without_shared).view_as(value))
    output.copy_(COPY_SCALE * size * copying.T)

    for *_, output in others:
        output *= 0.2


def attention_weights(model: nn.Module) -> Iterator[tuple[Tensor, ...]]:
    """Each layer's query, key and value weights by head, and its output weight."""
    width, heads = model.config.hidden_size, model.config.num_attention_heads
    for module in model.modules():
        if hasattr(module, "query_key_value"):
            yield *module.query_key_value.weight.view(heads, 3, -1, width).unbind(1), module.dense.weight
        elif hasattr(module, "q_proj"):
            projections = (module.q_proj, module.k_proj, module.v_proj)
            yield *(linear.weight.view(heads, -1, width) for linear in projections), module.o_proj.weight


def local_projections(heads: int, head_size: int, width: int) -> tuple[Tensor, Tensor]:
    """Constant queries and keys whose rotary phases agree at QUERY_OFFSET (first half of the heads) or KEY_OFFSET."""
    query, key = torch.zeros(2, heads, head_size)
    half = head_size // 2
    for pair in FAST_PAIRS:
        speed = 10000 ** (-pair / half)
        offsets = torch.tensor([QUERY_OFFSET] * (heads // 2) + [KEY_OFFSET] * (heads - heads // 2))
        query[:, pair] = 1
        key[:, pair] = torch.cos(speed * offsets)
        key[:, pair + half] = torch.sin(speed * offsets)
    # A normalized embedding has half of its squared norm, the width, along the shared direction.
    scale = (LOCAL_LOGIT * head_size**0.5 / len(FAST_PAIRS) / (width / 2)) ** 0.5
    return scale * query.flatten(), scale * key.flatten()


def match_projection(heads: int, head_size: int, channel: int) -> Tensor:
    """Reads a channel into the slowest rotary pairs, where a match counts the same at every distance."""
    half = head_size // 2
    slow = [*range(half - SLOWEST_PAIRS, half), *range(head_size - SLOWEST_PAIRS, head_size)]
    projection = torch.zeros(heads, head_size, channel)
    projection[:, slow] = orthogonal(max(channel, heads * len(slow)))[: heads * len(slow), :channel].view(
        heads, len(slow), channel
    )
    return projection.view(-1, channel) * (MATCH_LOGIT * head_size**0.5 / len(slow)) ** 0.5


def orthogonal(width: int) -> Tensor:
    return nn.init.orthogonal_(torch.empty(width, width))
