"""A layer's attention through a compressed cache, whose states are pages of vLLM's cache."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpec

from dofla.attention.coding.coder import check_coders
from dofla.attention.layout import Layouts
from dofla.layers import layer_of, read_pages
from dofla.plans.layers import CompressedLayer
from dofla.vllm import BACKEND
from dofla.vllm.metadata import CompressedCacheMetadata, StateSpec


class CompressedAttention(nn.Module, MambaBase):
    """Attention of one layer, for the requests of a batch, each of which has a page for its state.

    Args:
        layer: of the plan.
        heads: query heads.
        scaling: of the scores.
        exact_prefill: whether several tokens at once attend exactly to one another.
        name: of the module, by which vLLM knows it.
        length: tokens of a request that a page has room for, in heads that hold every one.
        context: vLLM's table of such modules, where it enters itself.
    """

    def __init__(
        self,
        layer: CompressedLayer,
        heads: int,
        scaling: float,
        exact_prefill: bool,
        name: str,
        length: int,
        context: dict[str, nn.Module],
    ) -> None:
        super().__init__()
        self.layer = layer_of(layer).requires_grad_(False)
        compressed = self.layer.compressed
        assert compressed is not None
        layout = compressed.layouts.with_room(length)
        self.bytes, self._before = layout.bytes, layout.empty(1, torch.device("cpu")).rows
        self.heads, self.kv_heads, self.scaling, self.exact_prefill = heads, layer.kv_heads, scaling, exact_prefill
        self.prefix = name
        context[name] = self
        self.kv_cache = (torch.empty(0),)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((self.bytes,),)

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
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take the layer's constants from a checkpoint; all of them must be there, and valid."""
        found = dict(weights)
        self.layer.load_state_dict(found)
        check_coders(self.layer, f"{self.prefix} of the checkpoint")
        return {f"layer.{name}" for name in found}

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Outputs [rows, H · dv] of queries [rows, H · d], keys [rows, Hkv · d] and values [rows, Hkv · dv]."""
        out = torch.empty_like(query)
        torch.ops.vllm.dofla_attention(query, key, value, out, self.prefix)
        return out

    def attend(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        """Fill ``out`` [rows, H · dv] for the requests of the step, and write their states."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # a run that only measures memory
            out.zero_()
            return
        step: CompressedCacheMetadata = metadata[self.prefix]
        pool, rows, counts = self.kv_cache[0], step.starts[-1], (self.heads, self.kv_heads, self.kv_heads)
        if step.begins:
            pool[step.pages[step.begins]] = self._before.to(query.device)
        tokens = [
            x[:rows].unflatten(-1, (count, -1)).transpose(0, 1).unsqueeze(0)  # [1, heads, rows, d]
            for x, count in zip((query, key, value), counts, strict=True)
        ]
        found = read_pages(
            self.layer,
            *tokens,
            scaling=self.scaling,
            pool=pool,
            pages=step.pages,
            starts=step.starts,
            exact=self.exact_prefill,
        )
        out[:rows] = found[0].transpose(0, 1).flatten(1)


def state_bytes(layer: CompressedLayer, length: int) -> int:
    """Bytes of a layer's state, with room for so many tokens."""
    return Layouts(layer.sizes, layer.head_dim, layer.value_dim, layer.bits).with_room(length).bytes


def _attend(query: Tensor, key: Tensor, value: Tensor, out: Tensor, layer_name: str) -> None:
    get_forward_context().no_compile_layers[layer_name].attend(query, key, value, out)


def _attend_fake(query: Tensor, key: Tensor, value: Tensor, out: Tensor, layer_name: str) -> None:
    return


direct_register_custom_op("dofla_attention", _attend, mutates_args=["out"], fake_impl=_attend_fake)
