"""A compressed model in transformers' own server, whose requests and answers are OpenAI's."""

import logging
import socket
import threading
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import uvicorn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerateManager, GenerationState

from dofla.errors import DoflaError
from dofla.integration.reading import keeps_states
from dofla.serving.compiled_model import CompiledModel
from dofla.serving.continuous_batching import ContinuousBatching
from dofla.serving.errors import RequestError, answer_errors
from dofla.serving.guard import Guard
from dofla.serving.handlers import Chats, Completions, NotServed, Responses, check_request
from dofla.serving.models import view
from dofla.serving.session import NotOneText, Session

logger = logging.getLogger(__name__)


class _OneModel(ModelManager):
    """Hands out a model that is open already, and no other."""

    def __init__(self, name: str, model: PreTrainedModel, reader: PreTrainedTokenizerBase | ProcessorMixin) -> None:
        super().__init__(model_timeout=-1)
        self.force_model, self.model, self.reader = name, model, reader

    def process_model_name(self, model_id: str) -> str:  # type: ignore[override] # theirs adds a revision
        if model_id != self.force_model:
            message = f"there is no model {model_id!r}: this server has {self.force_model!r}"
            raise RequestError(404, message, "model", "model_not_found")
        return model_id

    def load_model_and_processor(
        self, model_id_and_revision: str, progress_callback: Any = None, *_: Any, **__: Any
    ) -> tuple:
        if progress_callback is not None:
            progress_callback({"status": "ready", "model": model_id_and_revision, "cached": True})
        return self.model, self.reader

    def list_models(self, *_: Any) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "owned_by": "", "created": 0}]

    get_gen_models = list_models  # as transformers before 5.24 calls it

    def shutdown(self) -> None:
        """The model stays open."""


class _AtOnce(GenerateManager):
    """Calls ``generate`` for several requests at once, in a thread for each; who comes when all are busy waits."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for _ in range(count - 1):
            threading.Thread(target=self._thread._run, daemon=True).start()

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any):
        check_request(model, inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args, **kwargs):
        check_request(model, inputs, gen_config)
        try:
            return await super().generate_non_streaming(model, processor, inputs, gen_config, *args, **kwargs)
        except ValueError:  # so generate says what is wrong with settings
            raise
        except Exception as error:
            logger.exception("a request failed")
            raise RequestError(500, "the server failed") from error


def conversing(
    writer: ContinuousBatching | CompiledModel, most: int = 32, folder: Path | None = None
) -> PreTrainedModel:
    """The model as the server is to call it: what continues one text goes through a :class:`Session` of so many
    conversations, in a ``folder`` or not, all else (pictures, beams) to the writer."""
    if not keeps_states(writer.model):
        if folder is not None:
            raise DoflaError(f"{type(writer.model).__name__} keeps no states of texts: leave out --session-folder")
        logger.warning("%s keeps no states of texts: each prompt is read as a whole", type(writer.model).__name__)
        return view(writer.model, generate=writer.generate)
    session = Session(writer, most, folder)

    def generate(**options: Any) -> Any:
        try:
            return session.generate(**options)
        except NotOneText:
            return writer.generate(**options)

    return view(writer.model, generate=generate)


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
    model: PreTrainedModel,
    reader: PreTrainedTokenizerBase | ProcessorMixin,
    at_once: int = 1,
    *,
    key: str | None = None,
    max_body: int = 33_554_432,
) -> uvicorn.Server:
    """One that answers for ``name``, so many requests ``at_once``; run it on a socket of :func:`listening`.

    Args:
        model: of :func:`conversing`, or any other.
        reader: the model's tokenizer, or processor if it sees pictures.
        key: that clients must send, if any.
        max_body: size of a request, in bytes.
    """
    models, state, manager = _OneModel(name, model, reader), GenerationState(), _AtOnce(at_once)
    state.get_manager = lambda *_, **__: manager  # type: ignore[method-assign] # all requests are for one model
    app = build_server(
        models,
        Chats(models, state),
        completion_handler=Completions(models, state),
        response_handler=Responses(models, state),
        transcription_handler=NotServed(models, state),  # type: ignore[arg-type] # it has all that is asked of one
        systemone_handler=NotServed(models, state),  # type: ignore[arg-type] # as above
        generation_state=state,
    )
    app.max_body_size = max_body
    answer_errors(app)
    return uvicorn.Server(uvicorn.Config(Guard(app, key, max_body), log_level="warning"))
