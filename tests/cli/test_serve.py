"""``dofla serve``, started for real: OpenAI's client talks to it."""

import asyncio
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager

import openai
import pytest
from command_line import refused
from served_models import Client, chat_tokenizer, small
from transformers import AutoTokenizer

from dofla.integration.packages import packaged_path
from dofla.serving.server import _AtOnce

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(tiny, tmp_path_factory):
    """Of a server of the model ``small``, to which no proxy stands in between."""
    folder = tmp_path_factory.mktemp("served") / "small"
    small(tiny).save_pretrained(folder)
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(folder)
    with started(folder) as (place, _), pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield openai.OpenAI(base_url=place, api_key="none", max_retries=5)


@contextmanager
def started(folder, *words, host="127.0.0.1", **environment):
    """Where the server of a folder answers, and what it said before on stderr."""
    command = [sys.executable, "-m", "dofla", "serve", str(folder), "--host", host, "--port", "0", *words]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | environment
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        try:
            said = process.stdout.readline()
            place = re.fullmatch(rf"{folder.name} answers at (http://{host}:\d+/v1) until Ctrl-C\n", said)
            errors.seek(0)
            yield place[1].replace("0.0.0.0", "127.0.0.1"), errors.read()
        finally:
            process.terminate()


def test_a_chat_goes_on_and_is_streamed(client):
    messages = [{"role": "user", "content": "Who came to the door?"}]
    options = {"model": "small", "max_tokens": 8, "temperature": 0}
    prompts = []
    for question in ("And then?", "Why?"):
        result = client.chat.completions.create(messages=messages, **options)
        prompts.append(result.usage.prompt_tokens)
        again = client.chat.completions.create(messages=messages, stream=True, **options)
        text = "".join(part.choices[0].delta.content or "" for part in again if part.choices)
        assert text == result.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
    assert prompts[1] > prompts[0]


@pytest.mark.slow
def test_a_chat_goes_on_in_another_server(client, tiny, tmp_path, monkeypatch):
    folder, kept = tmp_path / "small", tmp_path / "sessions"
    small(tiny).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    messages, options = [], {"model": "small", "max_tokens": 8, "temperature": 0}
    for question in ("Who came to the door?", "And then?"):
        messages.append({"role": "user", "content": question})
        with started(folder, "--session-folder", str(kept)) as (place, _):
            result = openai.OpenAI(base_url=place, api_key="none", max_retries=5).chat.completions.create(
                messages=messages, **options
            )
        assert (
            result.choices[0].message.content
            == client.chat.completions.create(messages=messages, **options).choices[0].message.content
        )
        messages.append({"role": "assistant", "content": result.choices[0].message.content})
        assert len(list(kept.iterdir())) >= 1


def test_what_is_longer_than_the_positions_is_answered_from_its_end(client):
    tail, answers = " and then they went home" * 100, set()
    for start in ("Once upon a time there was a dog", "The sun is warm, said the old man"):
        result = client.completions.create(model="small", prompt=start + tail, max_tokens=8, temperature=0)
        assert result.usage.prompt_tokens > 256  # positions that the model has
        answers.add(result.choices[0].text)
    assert len(answers) == 1


def test_several_are_answered_at_once():
    """Two that each wait for the other are both answered."""
    meeting = threading.Barrier(2, timeout=60)

    async def ask():
        manager = _AtOnce(2)
        return await asyncio.gather(*(manager.async_submit(meeting.wait) for _ in range(2)))

    assert sorted(asyncio.run(ask())) == [0, 1]


def test_a_place_that_is_taken_is_refused_before_the_model_is_opened(capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(capsys, "serve", tmp_path, "--host", "127.0.0.1", "--port", port)
    assert f"cannot listen on --host '127.0.0.1' --port {port}" in said


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--port", -1), "cannot listen on"),
        (("--port", 70000), "cannot listen on"),
        (("--host", "a\nb"), "cannot listen on"),
        (("--host", "." * 300), "cannot listen on"),
        (("--api-key", ""), "--api-key is empty"),
        (("--api-key", "two words"), "--api-key is empty, or has spaces"),
        (("--set", "max_body=0"), "max_body is 0: give 1 or more"),
        (("--at-once", 0), "at_once is 0: give 1 or more"),
        (("--sessions", 0), "sessions is 0: give 1 or more"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(capsys, tmp_path, words, reason):
    said = refused(capsys, "serve", tmp_path, *words)
    assert said.startswith("dofla: ")
    assert reason in said


def test_what_is_no_model_is_refused(capsys, tmp_path):
    assert str(tmp_path / "none") in refused(capsys, "serve", tmp_path / "none", "--port", 0)


@pytest.mark.parametrize("key", [None, "secret"])
def test_beyond_this_machine_a_key_is_wanted(tiny, tmp_path, key):
    folder = tmp_path / "open"
    small(tiny).save_pretrained(folder)
    AutoTokenizer.from_pretrained(packaged_path("demo")).save_pretrained(folder)
    environment = {} if key is None else {"DOFLA_API_KEY": key}
    with started(folder, host="0.0.0.0", **environment) as (place, errors):
        assert ("anyone who reaches --host 0.0.0.0 is answered: give --api-key, or DOFLA_API_KEY" in errors) == (
            not key
        )
        for sent in ("wrong", "secret"):
            client = Client(int(place.rpartition(":")[2].removesuffix("/v1")))
            status, said = client.ask("/v1/models", authorization=f"Bearer {sent}")
            assert status == (401 if key and sent != key else 200)
            assert key is None or key not in str(said)
