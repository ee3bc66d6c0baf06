"""Guard between clients and the server: a key, a bound on the size of requests, an answer whatever fails."""

from __future__ import annotations

import hmac
import json
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from dofla.errors import DoflaError

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_OPEN = ("/health",)
"""Places that anyone may ask, as those who watch over a server do."""
_DRAINED = 4
"""Bodies that are refused are read as far as this many times the bound, so that the client hears why."""


def check_key(key: str | None) -> None:
    """DoflaError for a key that no client could send."""
    if key is not None and not re.fullmatch("[!-~]+", key):
        raise DoflaError("--api-key is empty, or has spaces or letters outside of ASCII: give another")


class Guard:
    """An ASGI application around another.

    Args:
        app: the other.
        key: clients must send it as ``Authorization: Bearer KEY``, else they get 401; None to let in everyone.
        most: bytes of a body; 413 for a larger one.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], key: str | None, most: int) -> None:
        check_key(key)
        self.app, self.most = app, most
        self._wanted = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        lets_in = self._lets_in(scope)
        body, length = await self._body(receive, self.most if lets_in else 0)
        if length is None:
            return None
        if not lets_in:
            return await _say(send, 401, "a key is needed: Authorization: Bearer KEY", (b"www-authenticate", b"Bearer"))
        if length > self.most:
            return await _say(send, 413, f"the body has more than {self.most} bytes: send less")
        return await self._answer(scope, _again(body, receive), send)

    def _lets_in(self, scope: MutableMapping[str, Any]) -> bool:
        if self._wanted is None or scope["path"] in _OPEN:
            return True
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(sent) != 1:
            return False
        scheme, _, key = sent[0].partition(b" ")
        return hmac.compare_digest(scheme.capitalize() + b" " + key.strip(), self._wanted)

    async def _body(self, receive: Receive, most: int) -> tuple[bytes, int | None]:
        """The body that the client sends, empty if it is more than ``most`` bytes, and the number of bytes read, None
        if the client went away."""
        body, length, more = bytearray(), 0, True
        while more and length <= _DRAINED * self.most:
            message = await receive()
            if message["type"] == "http.disconnect":
                return b"", None
            part = message.get("body", b"")
            length += len(part)
            if length <= most:
                body += part
            else:
                body.clear()
            more = message.get("more_body", False)
        return bytes(body), length

    async def _answer(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """An answer, 500 if it fails, of which the log says why; the connection serves on, unless half was sent."""
        begun, ended = False, False

        async def sent(message: Message) -> None:
            nonlocal begun, ended
            await send(message)
            begun = True
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self.app(scope, receive, sent)
        except Exception:
            if begun and not ended:
                raise
            logger.exception("a request to %s failed", scope["path"])
            if not begun:
                await _say(send, 500, "the server failed")


def _again(body: bytes, receive: Receive) -> Receive:
    """The body that was read, and what comes after it."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> Message:
        return left.pop() if left else await receive()

    return received


async def _say(send: Send, status: int, detail: str, *headers: tuple[bytes, bytes]) -> None:
    """Send an answer of the form that FastAPI's errors have."""
    headers = ((b"content-type", b"application/json"), *headers)
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": json.dumps({"detail": detail}).encode()})
