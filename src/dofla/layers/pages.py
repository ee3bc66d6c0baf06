"""A step of a server: tokens of several sequences, whose states are pages of a pool."""

from collections.abc import Collection
from itertools import groupby, pairwise

from torch import Tensor

from dofla.attention import Call, CompressedState
from dofla.attention.backends import backend_for
from dofla.layers.layer import AttentionLayer


def read_pages(
    layer: AttentionLayer, call: Call, pool: Tensor, pages: Tensor, starts: list[int], begin: Collection[int] = ()
) -> Tensor:
    """:meth:`AttentionLayer.forward` of n sequences of different lengths, whose states are updated in their pages.

    Args:
        layer: all of whose heads are compressed.
        call: the tokens of all sequences, one after the other, none of them padding: query [L, H, 1, d], key
            [L, Hkv, 1, d] and value [L, Hkv, 1, dv]; importance [L, Hkv, 1], if it is known, and the room of pages.
        pool: [P, bytes], uint8.
        pages: of each sequence [n], int64; no two are the same.
        starts: where each sequence begins among the tokens, and their number, [n + 1]; those with one token come first.
        begin: the sequences, by number, that begin with these tokens: of several tokens at once, their pages are
            written without being read. All pages have the state before the first token then.

    Returns:
        Output [L, H, 1, dv].
    """
    if starts[-1] == len(starts) - 1 or not call.exact:
        found = _in_place(layer, call, pool, pages, starts)
        if found is not None:
            return found
    return _in_batches(layer, call, pool, pages, starts, begin)


def _in_batches(
    layer: AttentionLayer, call: Call, pool: Tensor, pages: Tensor, starts: list[int], begin: Collection[int]
) -> Tensor:
    """:func:`read_pages` where the backend does not take all tokens at once."""
    lengths = [last - first for first, last in pairwise(starts)]
    ones = next((n for n, length in enumerate(lengths) if length > 1), len(lengths))
    begins = [n in begin and length > 1 for n, length in enumerate(lengths)]
    out = call.new_output()
    for first, last in batches(list(zip(lengths, begins, strict=True)), parts=out.is_cpu):
        length = lengths[first]
        rows, own_pages = slice(starts[first], starts[last]), pages[first:last]
        query, key, value = parts = [x[rows] for x in call.vectors]
        found = None
        if last <= ones:
            own = Call(query, key, value, call.scaling)
            found = _in_place(layer, own, pool, own_pages, list(range(last - first + 1)))
        if found is None:
            batch = [part[:, :, 0].unflatten(0, (-1, length)).transpose(1, 2) for part in parts]
            important = None if call.importance is None else call.importance[rows, :, 0].unflatten(0, (-1, length)).mT
            states = None if begins[first] else [CompressedState(pool[own_pages])]
            options = {"exact": call.exact, "room": call.room, "importance": important}
            found, (after,) = layer(*batch, scaling=call.scaling, states=states, **options)
            found = found.transpose(1, 2).flatten(0, 1).unsqueeze(2)
            pool[own_pages] = after.rows
        out[rows] = found
    return out


def batches(kinds: list[tuple[int, bool]], parts: bool) -> list[tuple[int, int]]:
    """Neighbors with as many tokens, all or none of which begin, which are read as a batch: the first, and the one
    after the last. With ``parts`` only those with one token: a CPU has no use for larger batches, and gives each
    sequence what it gives it alone."""
    found = []
    for (length, _), group in groupby(range(len(kinds)), kinds.__getitem__):
        own = list(group)
        step = 1 if parts and length > 1 else len(own)
        found += [(first, first + step) for first in own[::step]]
    return found


def _in_place(layer: AttentionLayer, call: Call, pool: Tensor, pages: Tensor, starts: list[int]) -> Tensor | None:
    """The output of the backend, which updates the pages in place; None if it takes no such call."""
    heads = layer.compressed
    assert heads is not None
    return backend_for(call.vectors).read_pages(heads, call._replace(smoothing=layer.smoothing), pool, pages, starts)
