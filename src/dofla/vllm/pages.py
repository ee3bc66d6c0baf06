"""Pages of vLLM's cache that hold states."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec


@dataclass(frozen=True)
class StateSpec(MambaSpec):
    """A page per sequence, like that of Mamba, but for its size, which differs between layers: all compressed layers
    are one group of vLLM's, and none is padded to the largest state."""

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        return all(isinstance(spec, StateSpec) for spec in kv_cache_specs.values())
