"""Who is let in."""

import asyncio
import json

import pytest

from dofla.errors import DoflaError
from dofla.serving.guard import Guard, check_key


def asked(key, headers=(), path="/v1/models"):
    """What a client hears of a server with this key, which takes four bytes."""
    heard = []

    async def receive():
        return {"type": "http.request", "body": b"text", "more_body": False}

    async def send(message):
        heard.append(message)

    scope = {"type": "http", "path": path, "headers": list(headers)}
    asyncio.run(Guard(echo, key, 4)(scope, receive, send))
    return heard[0]["status"], b"".join(message.get("body", b"") for message in heard[1:])


async def echo(scope, receive, send):
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


def bearer(key: bytes):
    return [(b"authorization", key)]


WRONG = [b"Bearer other", b"Bearer secre", b"Bearer secrets", b"Bearer", b"secret", b"Basic secret", b"Bearer \xff"]
OTHERWISE = [[], bearer(b"Bearer secret") * 2, [(b"x-authorization", b"Bearer secret")]]


@pytest.mark.parametrize("headers", [*map(bearer, WRONG), *OTHERWISE])
def test_without_the_key_nobody_is_let_in(headers):
    status, said = asked("secret", headers)
    assert status == 401
    message = "a key is needed: Authorization: Bearer KEY"
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
    assert json.loads(said) == {"error": error}


@pytest.mark.parametrize("header", [b"Bearer secret", b"bearer secret", b"Bearer  secret "])
def test_with_the_key_one_is_let_in(header):
    assert asked("secret", bearer(header)) == (200, b"text")


def test_what_says_that_it_is_too_large_is_refused_and_who_lacks_the_key_hears_of_that_first():
    large = [(b"content-length", b"5")]
    status, said = asked(None, large)
    assert (status, json.loads(said)["error"]["message"]) == (413, "the request has more than 4 bytes")
    assert asked(None, [(b"content-length", b"4")])[0] == 200
    assert asked("secret", large)[0] == 401


def test_without_a_key_all_are_let_in_and_anyone_may_ask_for_health():
    assert asked(None) == (200, b"text")
    assert asked("secret", path="/health")[0] == 200


@pytest.mark.parametrize("key", ["", " ", "two words", "schlüssel", "a\n"])
def test_a_key_that_nobody_can_send_is_refused(key):
    with pytest.raises(DoflaError, match="--api-key is empty, or has spaces"):
        check_key(key)
