"""Guard between clients and the server: who does not send the key is not let in, nor is what is too large."""

import hmac
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dofla.errors import DoflaError
from dofla.serving.errors import error_response

_OPEN = ("/health",)
"""Places that anyone may ask, as those who watch over a server do."""


def check_key(key: str | None) -> None:
    """DoflaError for a key that no client could send."""
    if key is not None and not re.fullmatch("[!-~]+", key):
        raise DoflaError("--api-key is empty, or has spaces or letters outside of ASCII: give another")


class Guard:
    """An ASGI application around another.

    Args:
        app: the other.
        key: clients must send it as ``Authorization: Bearer KEY``, else they get 401; None to let in everyone.
        max_body: size of a request in bytes: one that says it is larger gets 413. The application watches the others.
    """

    def __init__(self, app: ASGIApp, key: str | None, max_body: int) -> None:
        check_key(key)
        self.app, self._max_body = app, max_body
        self._wanted = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http":
            if not self._lets_in(scope):
                said, headers = "a key is needed: Authorization: Bearer KEY", {"www-authenticate": "Bearer"}
                app = error_response(401, said, code="invalid_api_key", headers=headers)
            elif int(Headers(scope=scope).get("content-length", 0)) > self._max_body:
                app = error_response(413, f"the request has more than {self._max_body:,} bytes")
        await app(scope, receive, send)

    def _lets_in(self, scope: Scope) -> bool:
        if self._wanted is None or scope["path"] in _OPEN:
            return True
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(sent) != 1:
            return False
        scheme, _, key = sent[0].partition(b" ")
        return hmac.compare_digest(scheme.capitalize() + b" " + key.strip(), self._wanted)
