"""A server of a compressed model, in the process of the tests."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from dofla.integration.packages import packaged_path
from dofla.serving.server import listening, server


def small(tiny: Any) -> PreTrainedModel:
    """A compressed model with the vocabulary of the demo's tokenizer."""
    return tiny.compressed(tiny.llama(vocab_size=2048))


def chat_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer of the bundled model with a chat template, which it does not have."""
    tokenizer = AutoTokenizer.from_pretrained(packaged_path("demo"))
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    return tokenizer


class Client:
    """One connection, which goes on from request to request."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and answer; a body of bytes goes out as it is."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        method = "GET" if body is None else "POST"
        self.connection.request(
            method, path, None if body is None else raw, {"content-type": "application/json", **headers}
        )
        answer = self.connection.getresponse()
        data = answer.read()
        return answer.status, json.loads(data) if answer.headers["content-type"] == "application/json" else data


@contextmanager
def served(model: Any, reader: Any, at_once: int = 4, **options: Any) -> Iterator[int]:
    """Within the block the model answers as ``small`` on the port that is yielded."""
    with listening("127.0.0.1", 0) as place:
        running = server("small", model, reader, at_once, **options)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [place]})
        thread.start()
        try:
            yield place.getsockname()[1]
        finally:
            running.should_exit = True
            thread.join()
