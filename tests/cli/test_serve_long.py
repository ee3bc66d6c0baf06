"""A server that many clients use at once, and not all of them well: each gets what the model says to it alone."""

import http.client
import json
import multiprocessing
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest
import torch
from served_models import Client, chat_tokenizer, served

from dofla.serving import ContinuousBatching
from dofla.serving.server import conversing

pytestmark = pytest.mark.long

CLIENTS, WARM_UP, REQUESTS = 16, 8, 24  # of each client
MOST = 100_000
TOKENS = 6
WORDS = ("the old dog", "went home and", "the sun was warm", "who came to", "the door", "with a cat")
HEADERS = {"content-type": "application/json", "authorization": "Bearer secret"}


def model_of(tiny, tokenizer):
    """In float64, where the order of sums changes no token; it writes whole letters only, so that parts of a stream
    are those of the text."""
    model = tiny.llama(vocab_size=2048, max_position_embeddings=2048).double()
    broken = [n for n in range(2048) if n in tokenizer.all_special_ids or "\ufffd" in tokenizer.decode([n])]
    with torch.no_grad():
        model.lm_head.weight[broken] = 0
    return tiny.compressed(model)


def serve(pipe):
    """A process of its own, until the other end of the pipe says so."""
    from conftest import Tiny

    tokenizer = chat_tokenizer()
    compressed = model_of(Tiny(), tokenizer)
    with (
        ContinuousBatching(compressed) as batching,
        served(conversing(batching, most=8), tokenizer, at_once=8, max_body=MOST, key="secret") as port,
    ):
        pipe.send(port)
        pipe.poll(3600)


@contextmanager
def running():
    """Port and process of a server."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,))
    process.start()
    try:
        assert here.poll(600), "the server did not start"
        yield here.recv(), psutil.Process(process.pid)
        here.send("stop")
        process.join(30)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


class Person:
    """Somebody who talks to the server, and sends it other things in between."""

    def __init__(self, port, number):
        self.port, self.random = port, random.Random(number)
        self.client, self.messages = Client(port), []
        self.heard = []  # what was said, and the answer

    def act(self):
        kinds = (self.talk, self.listen, self.leave, self.send_too_much, self.send_nonsense, self.lack_the_key)
        self.random.choices(kinds, (8, 5, 3, 1, 2, 1))[0]()

    def rests(self):
        """A connection that nobody uses for seconds is closed by the server."""
        self.client.connection.close()

    def words(self, count):
        return " ".join(self.random.choices(WORDS, k=count))

    def body(self, **options):
        if len(self.messages) > 8:
            self.messages = []
        if not self.messages:
            self.messages = [{"role": "system", "content": "tell a story"}]  # with which all begin
        self.messages = [*self.messages, {"role": "user", "content": self.words(self.random.randint(1, 6))}]
        return {"messages": self.messages, "max_tokens": TOKENS, "temperature": 0, **options}

    def goes_on(self, text):
        self.heard.append((self.messages, text))
        self.messages = [*self.messages, {"role": "assistant", "content": text}]

    def asks(self, body):
        return self.client.ask("/v1/chat/completions", body, authorization="Bearer secret")

    def talk(self):
        status, said = self.asks(self.body())
        assert status == 200, said
        self.goes_on(said["choices"][0]["message"]["content"])

    def listen(self):
        status, said = self.asks(self.body(stream=True))
        assert status == 200
        parts = [json.loads(line[6:]) for line in said.decode().splitlines() if line.startswith("data: {")]
        self.goes_on("".join(part["choices"][0]["delta"].get("content") or "" for part in parts))

    def leave(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = self.body(stream=self.random.random() < 0.7, max_tokens=100)
        self.messages = self.messages[:-1]
        connection.request("POST", "/v1/chat/completions", json.dumps(body), HEADERS)
        if body["stream"]:
            connection.getresponse().read(self.random.choice((1, 300, 900)))
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        self.rests()

    def send_too_much(self):
        assert self.asks({**self.body(), "messages": [{"role": "user", "content": "a" * 2 * MOST}]})[0] == 413
        self.messages = self.messages[:-1]

    def send_nonsense(self):
        bodies = (b"{", b"\xff", b"[]", {"messages": []}, {"messages": "a"}, {**self.body(), "max_tokens": 0})
        self.messages = self.messages[:-1]
        assert self.asks(self.random.choice(bodies))[0] == 400

    def lack_the_key(self):
        assert self.client.ask("/v1/chat/completions", self.body())[0] == 401
        self.messages = self.messages[:-1]


def test_sixteen_clients_get_what_each_would_get_alone_in_the_same_memory(tiny):
    with running() as (port, process), ThreadPoolExecutor(CLIENTS) as threads:
        people = [Person(port, number) for number in range(CLIENTS)]

        def act(person, count):
            person.rests()
            for _ in range(count):
                person.act()

        list(threads.map(act, people, [WARM_UP] * CLIENTS))
        before = process.memory_info().rss
        list(threads.map(act, people, [REQUESTS] * CLIENTS))
        for person in people:  # nobody who left is in the way
            person.rests()
            person.talk()
        assert process.memory_info().rss < 1.05 * before
    tokenizer = chat_tokenizer()
    compressed = model_of(tiny, tokenizer)
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    for person in people:
        for messages, text in person.heard:
            inputs = tokenizer.apply_chat_template(messages, **options)
            out = compressed.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
            assert text == tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
