"""A layer's attention through a compressed cache, whose states are pages of vLLM's cache."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpec

from dofla.attention import Call
from dofla.attention.layout import CompressedState, Layouts
from dofla.layers import check_constants, input_of, layer_of, read_pages, take_heads
from dofla.plans.layers import CompressedLayer
from dofla.vllm import BACKEND
from dofla.vllm.metadata import StateSpec


class CompressedAttention(nn.Module, MambaBase):
    """Attention of one layer, for the requests of a batch, each of which has a page for its state.

    Args:
        layer: of the plan.
        rank, ranks: the number of this process among those that divide the heads, and how many these are.
        heads: query heads in this process.
        scaling: of the scores.
        exact_prefill: whether several tokens at once attend exactly to one another, and those to retain are selected at
            the end.
        name: of the module, by which vLLM knows it.
        length: tokens of a request that a page has room for, in heads that hold every one.
        context: vLLM's table of such modules, where it enters itself.
    """

    def __init__(
        self,
        layer: CompressedLayer,
        rank: int,
        ranks: int,
        heads: int,
        scaling: float,
        exact_prefill: bool,
        name: str,
        length: int,
        context: dict[str, nn.Module],
    ) -> None:
        super().__init__()
        self.plan, self.own = layer, heads_of(layer.kv_heads, rank, ranks)
        self.layer = layer_of(layer.of_heads(self.own)).requires_grad_(False)
        compressed = self.layer.compressed
        assert compressed is not None
        layout = compressed.layouts.with_room(length)
        self._compressed, self._length = compressed, length
        self._before, self.page = layout.empty(1, torch.device("cpu")).rows, page_bytes(layer, length, ranks)
        self.heads, self.scaling, self.exact_prefill = heads, scaling, exact_prefill
        self.predicts = exact_prefill and self.layer.predictor is not None
        self._hidden: Tensor | None = None
        self.prefix = name
        context[name] = self
        self.kv_cache = (torch.empty(0),)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((self.page,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum[BACKEND]

    def get_kv_cache_spec(self, vllm_config: object) -> KVCacheSpec | None:
        """Pages of the state's size; beside vLLM's attention of the one that vLLM has found for both."""
        cache = vllm_config.cache_config  # type: ignore[attr-defined]
        return StateSpec(
            shapes=self.get_state_shape(),
            dtypes=self.get_state_dtype(),
            block_size=cache.mamba_block_size,
            page_size_padded=cache.mamba_page_size_padded,
            mamba_type=self.mamba_type,
            mamba_cache_mode=cache.mamba_cache_mode,
            num_speculative_blocks=vllm_config.num_speculative_tokens,  # type: ignore[attr-defined]
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take the constants of the KV heads in this process from a checkpoint; those of all heads must be there, and
        valid."""
        whole = layer_of(self.plan)
        whole.load_state_dict(dict(weights))
        check_constants(whole, f"{self.prefix} of the checkpoint")
        take_heads(self.layer, whole, self.own)
        return {f"layer.{name}" for name in self.layer.state_dict()}

    @property
    def pool(self) -> Tensor:
        """The pages' states [P, bytes]; pages may be longer."""
        return self.kv_cache[0][:, : self._before.shape[1]]

    def begin(self, pages: Tensor) -> None:
        """Write the state before the first token into these pages [n]."""
        self._before = self._before.to(pages.device)
        self.pool[pages] = self._before

    def state(self, page: int, tokens: int) -> CompressedState:
        """The state in a page, with room for so many tokens."""
        return self._compressed.resized(CompressedState(self.pool[page : page + 1]), tokens)

    def empty_state(self, tokens: int) -> CompressedState:
        """The state before the first token, with room for so many."""
        return self._compressed.layouts.with_room(tokens).empty(1, torch.device("cpu"))

    def take_state(self, page: int, state: CompressedState) -> None:
        """Write a state into a page."""
        rows = self._compressed.resized(state, self._length).rows
        self.kv_cache[0][page, : rows.shape[1]] = rows[0].to(self.kv_cache[0].device)

    def take_input(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the module whose attention this is: what it reads, for the forward that follows."""
        self._hidden = input_of(args, kwargs)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Outputs [rows, H · dv] of queries [rows, H · d], keys [rows, Hkv · d] and values [rows, Hkv · dv]."""
        out, hidden, self._hidden = torch.empty_like(query), self._hidden, None
        torch.ops.vllm.dofla_attention(query, key, value, hidden, out, self.prefix)
        return out

    def attend(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, out: Tensor) -> None:
        """Fill ``out`` [rows, H · dv] for the requests of the step, and write their states. What the module reads is
        ``hidden`` [1, rows, D], where importance is predicted."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # a run that only measures memory
            out.zero_()
            return
        pool, heads = self.pool, (self.heads, len(self.own), len(self.own))
        vectors = [
            x.view(len(x), own, 1, self.plan.head_dim) for x, own in zip((query, key, value), heads, strict=True)
        ]
        for step in metadata[self.prefix]:
            sources, targets = step.copies
            if targets:
                pool[targets] = pool[sources]
            rows = slice(step.starts[-1]) if step.rows is None else step.rows
            whole = step.rows is None and step.starts[-1] == len(query)
            query, key, value = vectors if whole else [x[rows] for x in vectors]
            importance = None
            if hidden is not None and step.starts[-1] > len(step.pages):  # some have several tokens
                importance = self.layer.predicted(hidden[0, rows].unsqueeze(1))
            call = Call(query, key, value, self.scaling, exact=self.exact_prefill, importance=importance)
            call = call._replace(room=self._length)
            out[rows] = read_pages(self.layer, call, pool, step.pages, step.starts, step.begin).flatten(1)


def heads_of(kv_heads: int, rank: int, ranks: int) -> list[int]:
    """The KV heads of a process of several that share a model, as vLLM divides them: a part of them, or one where there
    are fewer than processes."""
    own = max(kv_heads // ranks, 1)
    first = rank * kv_heads // ranks
    return list(range(first, first + own))


def page_bytes(layer: CompressedLayer, length: int, ranks: int) -> int:
    """Bytes of a page of a layer: its state with room for so many tokens, the largest in any process, as vLLM wants
    pages of one size in all."""
    parts = (layer.of_heads(heads_of(layer.kv_heads, rank, ranks)) for rank in range(ranks))
    layouts = (Layouts(part.sizes, part.head_dim, part.value_dim, part.bits) for part in parts)
    return max(layout.with_room(length).bytes for layout in layouts)


def _attend(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, out: Tensor, layer_name: str) -> None:
    get_forward_context().no_compile_layers[layer_name].attend(query, key, value, hidden, out)


def _attend_fake(
    query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, out: Tensor, layer_name: str
) -> None:
    return


direct_register_custom_op("dofla_attention", _attend, mutates_args=["out"], fake_impl=_attend_fake)
