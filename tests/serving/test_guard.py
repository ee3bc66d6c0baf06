"""Who is let in, and with how much."""

from __future__ import annotations

import asyncio
import json

import pytest

from dofla.errors import DoflaError
from dofla.serving.guard import Guard, check_key


def asked(guard, *parts: bytes, headers=(), path="/v1/models"):
    """What a client hears, and how many parts were taken from it."""
    left = [{"type": "http.request", "body": part, "more_body": n + 1 < len(parts)} for n, part in enumerate(parts)]
    count, heard = len(left), []

    async def receive():
        return left.pop(0)

    async def send(message):
        heard.append(message)

    scope = {"type": "http", "path": path, "headers": list(headers)}
    asyncio.run(guard(scope, receive, send))
    return heard[0]["status"], b"".join(message.get("body", b"") for message in heard[1:]), count - len(left)


async def echo(scope, receive, send):
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


def bearer(key: bytes):
    return [(b"authorization", key)]


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer(b"Bearer other"),
        bearer(b"Bearer secre"),
        bearer(b"Bearer secrets"),
        bearer(b"Bearer"),
        bearer(b"secret"),
        bearer(b"Basic secret"),
        bearer(b"Bearer \xff"),
        bearer(b"Bearer secret") * 2,
        [(b"x-authorization", b"Bearer secret")],
    ],
)
def test_without_the_key_nobody_is_let_in(headers):
    status, said, _ = asked(Guard(echo, "secret", 100), b"text", headers=headers)
    assert status == 401
    assert json.loads(said) == {"detail": "a key is needed: Authorization: Bearer KEY"}


@pytest.mark.parametrize("header", [b"Bearer secret", b"bearer secret", b"Bearer  secret "])
def test_with_the_key_one_is_let_in(header):
    assert asked(Guard(echo, "secret", 100), b"te", b"xt", headers=bearer(header))[:2] == (200, b"text")


def test_without_a_key_all_are_let_in_and_anyone_may_ask_for_health():
    assert asked(Guard(echo, None, 100), b"text")[:2] == (200, b"text")
    assert asked(Guard(echo, "secret", 100), b"", path="/health")[0] == 200


@pytest.mark.parametrize("key", ["", " ", "two words", "schlüssel", "a\n"])
def test_a_key_that_nobody_can_send_is_refused(key):
    with pytest.raises(DoflaError, match="--api-key is empty, or has spaces"):
        check_key(key)


def test_bodies_have_a_bound_and_the_client_hears_of_it():
    guard = Guard(echo, None, 10)
    assert asked(guard, b"12345", b"67890")[:2] == (200, b"1234567890")
    status, said, taken = asked(guard, b"12345", b"678901", b"2")
    assert (status, taken) == (413, 3)
    assert json.loads(said) == {"detail": "the body has more than 10 bytes: send less"}
    assert asked(guard, *[b"12345"] * 100)[::2] == (413, 9)  # enough was heard


def test_who_goes_away_in_the_middle_is_not_answered():
    async def unasked(scope, receive, send):
        raise AssertionError

    left = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive():
        return next(left)

    asyncio.run(Guard(unasked, None, 10)({"type": "http", "path": "/", "headers": []}, receive, None))


def test_what_fails_is_answered_and_logged(caplog):
    async def fails(scope, receive, send):
        raise RuntimeError("secret of the server")

    status, said, _ = asked(Guard(fails, None, 10), b"")
    assert (status, json.loads(said)) == (500, {"detail": "the server failed"})
    assert "secret of the server" in caplog.text


def test_half_an_answer_is_not_taken_for_a_whole_one():
    async def fails(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("failed")

    with pytest.raises(RuntimeError, match="failed"):
        asked(Guard(fails, None, 10), b"")
