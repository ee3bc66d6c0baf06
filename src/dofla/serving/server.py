"""Students in transformers' own server, whose requests and answers are OpenAI's."""

from __future__ import annotations

import socket
import threading
from ipaddress import ip_address
from typing import Any

import uvicorn
from fastapi import HTTPException
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerateManager, GenerationState, InferenceThread

from dofla.errors import DoflaError
from dofla.serving.guard import Guard
from dofla.serving.handlers import Chats, Completions, Decisions, NoTranscriptions, Responses, reason

MOST = 2**25
"""Bytes of a request, if nothing is said."""


class _OneStudent(ModelManager):
    """Hands out a student that is open already, and no other model."""

    def __init__(self, name: str, student: PreTrainedModel, reader: PreTrainedTokenizerBase | ProcessorMixin) -> None:
        super().__init__(model_timeout=-1)
        self.force_model, self.student, self.reader = name, student, reader

    def load_model_and_processor(
        self, model_id_and_revision: str, progress_callback: Any = None, *_: Any, **__: Any
    ) -> tuple:
        if progress_callback is not None:
            progress_callback({"status": "ready", "model": model_id_and_revision, "cached": True})
        return self.student, self.reader

    def get_gen_models(self) -> list[dict[str, Any]]:  # type: ignore[override] # theirs is a cached function
        return [{"id": self.force_model, "object": "model", "owned_by": "", "created": 0}]

    def shutdown(self) -> None:
        """The student stays open."""


class _Threads(InferenceThread):
    """Several that answer requests, one each; who comes when all are busy waits."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for _ in range(count - 1):
            threading.Thread(target=self._run, daemon=True).start()


class _AtOnce(GenerateManager):
    """Calls ``generate`` for several requests at once."""

    def __init__(self, count: int) -> None:
        self._thread = _Threads(count)

    async def generate_non_streaming(self, *args: Any, **options: Any) -> tuple:
        try:
            return await super().generate_non_streaming(*args, **options)
        except ValueError as error:  # so generate says what is wrong with settings
            raise HTTPException(400, reason(error)) from error


class _OneManager(GenerationState):
    """All requests are for one student."""

    def __init__(self, manager: GenerateManager) -> None:
        super().__init__()
        self._manager = manager

    def get_manager(self, model_id: str, use_cb: bool = False) -> GenerateManager:
        return self._manager


def listening(host: str, port: int) -> socket.socket:
    """A socket that nobody else has; DoflaError if that cannot be."""
    try:
        return socket.create_server((host, port))
    except (OSError, OverflowError, ValueError) as error:  # no such name; no port; no name at all
        raise DoflaError(f"cannot listen on --host {host!r} --port {port} ({error}): give others, or port 0") from error


def is_open(place: socket.socket) -> bool:
    """True if other machines may reach it."""
    return not ip_address(place.getsockname()[0]).is_loopback


def server(
    name: str,
    student: PreTrainedModel,
    reader: PreTrainedTokenizerBase | ProcessorMixin,
    at_once: int = 1,
    *,
    key: str | None = None,
    most: int = MOST,
) -> uvicorn.Server:
    """One that answers for ``name``, so many requests ``at_once``; run it on a socket of :func:`listening`.

    Args:
        reader: the student's tokenizer, or processor if it sees pictures.
        key: that clients must send, if any.
        most: bytes of a request.
    """
    students, state = _OneStudent(name, student, reader), _OneManager(_AtOnce(at_once))
    app = build_server(
        students,
        Chats(students, state),
        completion_handler=Completions(students, state),
        response_handler=Responses(students, state),
        transcription_handler=NoTranscriptions(students, state),
        systemone_handler=Decisions(students, state),
        generation_state=state,
    )
    return uvicorn.Server(uvicorn.Config(Guard(app, key, most), log_level="warning"))
