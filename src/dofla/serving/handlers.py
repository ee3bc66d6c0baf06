"""transformers' handlers of requests, and the check of what they ask for."""

import logging
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, NoReturn

from starlette.exceptions import HTTPException
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler

from dofla.errors import DoflaError
from dofla.integration.reading import check_readable
from dofla.serving.errors import RequestError

logger = logging.getLogger(__name__)

_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("max_new_tokens", lambda x: x >= 1, "max_tokens: give 1 or more"),
    ("temperature", lambda x: 0 <= x < inf, "temperature: give 0 or more"),
    ("top_p", lambda x: 0 < x <= 1, "top_p: give more than 0, and 1 at most"),
    ("repetition_penalty", lambda x: 0 < x < inf, "frequency_penalty: give more than -1"),
    ("num_beams", lambda x: x >= 1, "num_beams: give 1 or more"),
    ("num_return_sequences", lambda x: x == 1, "num_return_sequences: one text is answered"),
)
"""Settings, as generate calls them, that must be within a range."""

_ROLES = ("developer", "system", "user", "assistant", "tool", "function")


class _Answers(BaseHandler):
    """Base of handlers, with what is wrong with a request said as such: status 400, and one line."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        try:
            return await super().handle_request(body, request_id)  # type: ignore[misc] # all have it but their base
        except (HTTPException, ImportError):  # a package that is missing is no fault of the request
            raise
        except Exception as error:  # a chat template is a program, and fails in any way, as do fields of any type
            logger.info("a request was refused", exc_info=True)
            said = " ".join(str(error).split()) or type(error).__name__
            raise RequestError(400, f"the request lacks {said}" if isinstance(error, KeyError) else said) from error

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **options: Any) -> GenerationConfig:
        if body.get("logit_bias") is not None:  # clients send whole numbers, which generate refuses
            body = {**body, "logit_bias": {token: float(bias) for token, bias in body["logit_bias"].items()}}
        return super()._build_generation_config(body, *args, **options)

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict[str, Any]], modality: Any) -> list[dict[str, Any]]:
        read = BaseHandler.get_processor_inputs_from_messages(messages, modality)
        for message in read:
            for part in message["content"] if isinstance(message["content"], list) else ():
                if not str(part.get("url", "data:")).startswith("data:"):  # no file and no address of the server's side
                    raise DoflaError(
                        f"a {part['type']} must come inside of the request, as a URL that begins with data:"
                    )
        return read

    def _resolve_model(self, body: dict[str, Any]) -> tuple:
        if body.get("model") is not None:  # who names none means the one that there is
            self.model_manager.process_model_name(body["model"])
        found = super()._resolve_model(body)
        if not isinstance(self, CompletionHandler) and getattr(found[-1], "chat_template", None) is None:
            raise DoflaError(f"{found[0]} has no chat template: ask /v1/completions")
        return found


class Chats(_Answers, ChatCompletionHandler):
    """/v1/chat/completions"""

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        check_messages(body.get("messages"))


class Completions(_Answers, CompletionHandler):
    """/v1/completions"""

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        if not isinstance(body.get("suffix") or "", str):
            raise DoflaError("suffix: give a text")


class Responses(_Answers, ResponseHandler):
    """/v1/responses"""

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        given = body.get("input")
        if not isinstance(given, str) and not (
            isinstance(given, list) and given and all(isinstance(x, dict) for x in given)
        ):
            raise RequestError(400, "input must be a text, or a list of {role, content} with one or more", "input")


class NotServed(BaseHandler):
    """Answers of other kinds than text."""

    async def handle_request(self, *_: Any) -> NoReturn:
        raise RequestError(404, "the model writes text: ask /v1/chat/completions, /v1/completions or /v1/responses")


def check_messages(messages: Any) -> None:
    """RequestError unless these are messages as OpenAI's API has them."""
    if not isinstance(messages, list) or not messages:
        raise RequestError(400, "messages must be a list of {role, content}, with one or more", "messages")
    for n, message in enumerate(messages):
        place = f"messages[{n}]"
        if not isinstance(message, dict) or "role" not in message:
            raise RequestError(400, f"{place} must be {{role, content}}", place)
        if message["role"] not in _ROLES:
            known = ", ".join(_ROLES)
            raise RequestError(400, f"{place}: role {message['role']!r}; give one of {known}", f"{place}.role")
        content = message.get("content")
        if content is None and message["role"] == "assistant":  # it may have called a tool instead
            continue
        if not isinstance(content, str) and not (isinstance(content, list) and all(map(_is_part, content))):
            raise RequestError(400, f"{place}: content must be a text, or a list of {{type, ...}}", f"{place}.content")


def _is_part(given: Any) -> bool:
    return isinstance(given, dict) and isinstance(given.get("type"), str) and isinstance(given.get("text", ""), str)


def check_request(model: PreTrainedModel, inputs: Mapping[str, Tensor], settings: GenerationConfig) -> None:
    """DoflaError for a prompt that the model cannot read, or settings that it cannot write by."""
    ids = inputs["input_ids"]
    if not ids.numel():
        raise DoflaError("the prompt has no tokens: give a text")
    check_readable(model, ids.reshape(-1, 1), "the prompt")  # whatever its length: sessions go on past positions
    for name, fits, wanted in _RANGES:
        if (value := getattr(settings, name)) is not None and not fits(value):
            raise DoflaError(f"{wanted}; {name} is {value}")
    stops = [settings.stop_strings] if isinstance(settings.stop_strings, str) else settings.stop_strings or []
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise DoflaError("stop: give texts that are not empty")
    known = len(model.get_input_embeddings().get_parameter("weight"))
    for (token,) in settings.sequence_bias or ():
        if not 0 <= token < known:
            raise DoflaError(f"logit_bias: token {token}, and there are 0 to {known - 1}")
