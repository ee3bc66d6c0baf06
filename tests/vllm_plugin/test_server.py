"""vLLM's server answers over HTTP."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from http_server import ask, serving

pytestmark = pytest.mark.slow


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
