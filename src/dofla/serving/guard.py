"""Guard between clients and the server: who does not send the key is not let in."""

from __future__ import annotations

import hmac
import re

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dofla.errors import DoflaError

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
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        check_key(key)
        self.app, self._wanted = app, None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http" and not self._lets_in(scope):
            said = {"detail": "a key is needed: Authorization: Bearer KEY"}
            app = JSONResponse(said, 401, {"www-authenticate": "Bearer"})
        await app(scope, receive, send)

    def _lets_in(self, scope: Scope) -> bool:
        if self._wanted is None or scope["path"] in _OPEN:
            return True
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(sent) != 1:
            return False
        scheme, _, key = sent[0].partition(b" ")
        return hmac.compare_digest(scheme.capitalize() + b" " + key.strip(), self._wanted)
