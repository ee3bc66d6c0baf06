"""Which rows of a batch belong to which request, and which page of vLLM's cache holds the request's state."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from dofla.errors import DoflaError


@dataclass(frozen=True)
class StateSpec(MambaSpec):
    """A page per sequence, like that of Mamba, but for its size, which differs between layers: all compressed layers
    are one group of vLLM's, and none is padded to the largest state."""

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        return all(isinstance(spec, StateSpec) for spec in kv_cache_specs.values())


@dataclass
class Round:
    """Tokens that are read at once: of each request one, or all.

    Attributes:
        pages: of the states of the requests [n], int64.
        starts: place of each request's first token among those of the round, and their number [n + 1]; requests with
            one token come first.
        rows: of these tokens in the batch [tokens], int64; None for all from the first on.
        copies: pages to be copied before, and where to.
        begin: the requests, by number, that begin with these tokens.
    """

    pages: Tensor
    starts: list[int]
    rows: Tensor | None
    copies: tuple[list[int], list[int]]
    begin: frozenset[int]


class CompressedCacheBuilder(AttentionMetadataBuilder[list[Round]]):
    """Makes the metadata of a step, once for layers with pages of one size: the rounds in which its tokens are read.

    With speculative decoding a request has a page for each token that it may be given at once, and the state after each
    in another: the next step goes on from that after the last accepted one, which is known by its number of tokens.

    Without, a step in which each request has one token can be a CUDA graph, which knows requests by what stands in a
    tensor alone: their pages are in the same tensor at every step, and new requests get their first states here. Rows
    that fill a graph up, without a token, have vLLM's page 0, which no request has.
    """

    kv_cache_spec: MambaSpec

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._tokens: dict[int, int] = {}  # of the state in each page, where requests have several
        most = self.vllm_config.compilation_config.max_cudagraph_capture_size or 0
        most = max(most, self.vllm_config.scheduler_config.max_num_seqs)
        self._pages = torch.zeros(most, dtype=torch.int64, device=self.device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        alone = vllm_config.num_speculative_tokens == 0
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if alone else AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> list[Round]:
        common, mode = common_attn_metadata, self.vllm_config.cache_config.mamba_cache_mode
        table = mamba_get_block_table_tensor(common.block_table_tensor, common.seq_lens, self.kv_cache_spec, mode)
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        new = [last - first for first, last in pairwise(starts)]
        most = 1 + self.kv_cache_spec.num_speculative_blocks
        # Where none is refused, the CPU knows how many tokens there are, and need not wait for a GPU.
        known = common.seq_lens_cpu_upper_bound if most == 1 else None
        lengths = (common.seq_lens if known is None else known)[: len(new)].tolist()
        before = [length - own for length, own in zip(lengths, new, strict=True)]
        if most == 1:
            pages = self._pages[: len(new)].copy_(table[: len(new), 0])
            first = [n for n, tokens in enumerate(new) if tokens and not before[n]]
            if first:
                self._begin(pages[torch.tensor(first, device=self.device)])
            count = sum(tokens > 0 for tokens in new)
            return [Round(pages[:count], starts[: count + 1], None, ([], []), frozenset(first))]
        rounds, tables = [], table[: len(new), :most].tolist()
        for place in range(most):
            # One token after the other, unless there are more than can be candidates.
            rows = {
                n: range(starts[n] + place, starts[n + 1] if tokens > most else starts[n] + place + 1)
                for n, tokens in enumerate(new)
                if place < tokens <= most or (tokens > most and not place)
            }
            if rows:
                rounds.append(self._round(tables, place, before, rows))
        return rounds

    def _round(self, tables: list[list[int]], place: int, before: list[int], rows: dict[int, range]) -> Round:
        """The states of these requests, by their rows, go from page ``place`` - 1, or where they are, to ``place``."""
        order = sorted(rows, key=lambda n: len(rows[n]) > 1)
        pages, copies, begin = list[int](), {}, set[int]()
        for n in order:
            own = tables[n]
            if not before[n] + place:
                begin.add(len(pages))
            elif (source := own[place - 1] if place else self._after(before[n], own)) != own[place]:
                copies[own[place]] = source
            pages.append(own[place])
            for page in own if not place else ():
                self._tokens.pop(page, None)
            self._tokens[own[place]] = before[n] + place + len(rows[n])
        starts = [0, *accumulate(len(rows[n]) for n in order)]
        places = torch.tensor([row for n in order for row in rows[n]], device=self.device)
        turned = list(copies.values()), list(copies)
        if begin:
            self._begin(torch.tensor([pages[n] for n in begin], device=self.device))
        return Round(torch.tensor(pages, device=self.device), starts, places, turned, frozenset(begin))

    def _begin(self, pages: Tensor) -> None:
        """Write the state before the first token into these pages of all layers."""
        layers = self.vllm_config.compilation_config.static_forward_context
        for name in self.layer_names:
            layers[name].begin(pages)

    def _after(self, tokens: int, pages: list[int]) -> int:
        """Which of these pages holds the state after so many tokens."""
        found = [page for page in pages if self._tokens.get(page) == tokens]
        if not found:
            raise DoflaError(f"no page holds the state after {tokens} tokens, which are those that vLLM has accepted")
        return found[0]


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
