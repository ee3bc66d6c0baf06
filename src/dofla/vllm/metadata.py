"""Which rows of a batch belong to which request, and which page of vLLM's cache holds the request's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec


@dataclass(frozen=True)
class StateSpec(MambaSpec):
    """A page per sequence, like that of Mamba, but for its size, which differs between layers: all compressed layers
    are one group of vLLM's, and none is padded to the largest state."""

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        return all(isinstance(spec, StateSpec) for spec in kv_cache_specs.values())


@dataclass
class CompressedCacheMetadata:
    """Requests of a batch, those that decode one token first.

    Attributes:
        pages: of each request [n], int64.
        starts: row of each request's first token, and the number of rows [n + 1].
        begins: numbers of the requests whose first tokens these are.
    """

    pages: Tensor
    starts: list[int]
    begins: list[int]


class CompressedCacheBuilder(AttentionMetadataBuilder[CompressedCacheMetadata]):
    """Makes the metadata of a step, once for all layers."""

    kv_cache_spec: MambaSpec
    reorder_batch_threshold: int = 1

    def __init__(self, *args: Any, **options: Any) -> None:  # abstract in the base class, which does all of it
        super().__init__(*args, **options)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CompressedCacheMetadata:
        common, mode = common_attn_metadata, self.vllm_config.cache_config.mamba_cache_mode
        pages = mamba_get_block_table_tensor(common.block_table_tensor, common.seq_lens, self.kv_cache_spec, mode)
        requests = common.num_reqs
        starts = common.query_start_loc_cpu[: requests + 1].tolist()
        lengths = common.seq_lens[:requests].tolist()
        begins = [n for n, length in enumerate(lengths) if length == starts[n + 1] - starts[n]]
        return CompressedCacheMetadata(pages[:requests, 0].long(), starts, begins)


class CompressedCacheBackend(AttentionBackend):
    """The name by which vLLM knows all of this."""

    @staticmethod
    def get_name() -> str:
        return "DOFLA"

    @staticmethod
    def get_builder_cls() -> type[CompressedCacheBuilder]:
        return CompressedCacheBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True
