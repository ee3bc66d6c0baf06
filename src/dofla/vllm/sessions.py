"""Conversations that move: the states of a request as a file, from which another server goes on.

A request names its conversation, ``kv_transfer_params={"session": "alice"}``. If the folder has a file of that name and
the prompt begins with the tokens in it, the request begins with its states; when the request ends, its states are
written there. The file is that of :func:`dofla.serving.save_state`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.forward_context import ForwardContext
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from dofla.errors import DoflaError
from dofla.layers.state_file import constants_of, filled, form, tensors_of
from dofla.storage.tensors import read_tensors, write_tensors
from dofla.vllm import FOLDER
from dofla.vllm.layer import CompressedAttention

logger = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass
class Move:
    """States of a request that go from a file into a page, or from there into the file: those after some ``tokens``."""

    request: str
    path: Path
    page: int
    tokens: list[int]


@dataclass
class Moves(KVConnectorMetadata):
    loads: list[Move] = field(default_factory=list)
    saves: list[Move] = field(default_factory=list)


class SessionConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM asks it for states from elsewhere, in the process that schedules and in that which computes."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._folder = Path(self._kv_transfer_config.kv_connector_extra_config[FOLDER])
        plan = vllm_config.model_config.hf_config.quantization_config
        self._form, self._next = form(plan["layers"]), Moves()
        self._matched: dict[str, list[int]] = {}  # of requests that wait
        self._saved, self._failed = set[str](), set[int]()

    # In the process that schedules.

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        if request.request_id not in self._matched:  # it is asked again at each step, until there is a page
            self._matched[request.request_id] = self._known(request)
        return len(self._matched[request.request_id]), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        tokens = self._matched.pop(request.request_id, [])
        if num_external_tokens and (path := self._path(request)):
            self._next.loads.append(Move(request.request_id, path, blocks.get_block_ids()[0][0], tokens))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the page until it is written; of a request that was given up, nothing is."""
        self._matched.pop(request.request_id, None)
        path, read = self._path(request), request.num_computed_tokens
        given_up = request.status not in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        if path is None or given_up or not 0 < read <= len(request.all_token_ids):
            return False, None
        tokens = list(request.all_token_ids[:read])
        self._next.saves.append(Move(request.request_id, path, block_ids[0][0], tokens))
        return True, None

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Moves:
        moves, self._next = self._next, Moves()
        return moves

    def _path(self, request: Request) -> Path | None:
        """The file of the conversation; None for a request without one, with a name that is none for a file, or whose
        states depend on more than its tokens."""
        name = (request.kv_transfer_params or {}).get("session")
        if name is None or request.lora_request or request.prompt_embeds is not None or request.mm_features:
            return None
        if isinstance(name, str) and _NAME.fullmatch(name):
            return self._folder / f"{name}.safetensors"
        logger.warning(
            "session %r: a name is of letters, digits, '.', '_' and '-', 100 at most; it is passed over", name
        )
        return None

    def _known(self, request: Request) -> list[int]:
        """The tokens whose states the request may begin with, at least one fewer than it has."""
        path = self._path(request)
        try:
            if path is None or not path.exists():
                return []
            tokens = self._read(path, ["input_ids"])["input_ids"][0].tolist()
        except Exception as error:  # no file may end the engine
            logger.warning("%s: %s", path, error)
            return []
        if len(tokens) < request.num_tokens and list(request.all_token_ids[: len(tokens)]) == tokens:
            return tokens
        logger.warning(
            "the prompt does not go on from the %d tokens of %s: it is read from its beginning", len(tokens), path
        )
        return []

    def _read(self, path: Path, names: list[str] | None = None) -> dict[str, Tensor]:
        tensors, metadata = read_tensors(path, "read the text again", finite=False, names=names)
        ids = tensors.get("input_ids", torch.empty(0))
        if not self._form.items() <= metadata.items() or ids.dtype != torch.int64 or ids.shape[:-1] != (1,):
            raise DoflaError(f"{path} is no state of one text, of this version and this plan: read the text again")
        return tensors

    # In the process that computes.

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        moves = self._get_connector_metadata()
        assert isinstance(moves, Moves)
        if (moves.loads or moves.saves) and "constants" not in self._form:
            self._form["constants"] = constants_of(next(_layers(forward_context)).layer)
        for move in moves.loads:  # before another request writes the same file
            try:
                self._load(move, forward_context)
            except Exception as error:  # the text is read instead
                logger.error("%s: %s", move.path, error)
                self._failed.add(move.page)
        for move in moves.saves:
            try:
                self._save(move, forward_context)
            except Exception as error:  # the answer is there
                logger.error("%s: %s", move.path, error)
            self._saved.add(move.request)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], None]:
        saved, self._saved = self._saved, set()
        return saved, None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: all layers are there before the first computes."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: states are written when a request has ended."""

    def wait_for_save(self) -> None:
        """Nothing, likewise."""

    def _save(self, move: Move, context: ForwardContext) -> None:
        tensors = {"input_ids": torch.tensor([move.tokens])}
        for index, layer in enumerate(_layers(context)):
            tensors |= tensors_of(layer.state(move.page, len(move.tokens)), f"{index}.0")
        self._folder.mkdir(parents=True, exist_ok=True)
        write_tensors(move.path, tensors, self._form)

    def _load(self, move: Move, context: ForwardContext) -> None:
        tensors = self._read(move.path)
        if tensors["input_ids"][0].tolist() != move.tokens:
            raise DoflaError(f"{move.path} has been written anew meanwhile")
        for index, layer in enumerate(_layers(context)):
            layer.take_state(move.page, filled(layer.empty_state(len(move.tokens)), f"{index}.0", tensors))


def _layers(context: ForwardContext) -> Iterator[CompressedAttention]:
    """In the order of the model."""
    return (layer for layer in context.no_compile_layers.values() if isinstance(layer, CompressedAttention))
