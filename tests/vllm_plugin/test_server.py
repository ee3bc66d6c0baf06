"""vLLM's server with compressed models: what it answers over HTTP is what generate writes. Pretrained ones are those of
the benchmarks, in ``models/`` (docs/results/index.md says how to get them)."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from http_server import ask, serving
from transformers import AutoModelForCausalLM, AutoTokenizer

import dofla

MODELS = Path(__file__).parents[2] / "models"
SENTENCES = "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is Rome. "
PROMPT = (SENTENCES * 12).removesuffix(" Rome. ")


@pytest.mark.slow
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


@pytest.mark.long
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_a_pretrained_model_is_served(name, tmp_path):
    if not (MODELS / name).exists():
        pytest.skip(f"models/{name} is not there")
    model = AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name)
    windows = dofla.token_windows("sample", tokenizer, windows=8)
    options = {"head_budgets": "even", "prefill": "sequential", "progress": False}
    dofla.compress(model, windows, ratio=8, context=2048, **options)
    model.save_pretrained(tmp_path / "served")
    tokenizer.save_pretrained(tmp_path / "served")
    prompt = tokenizer(PROMPT, return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    del model
    options = ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]  # compiling takes minutes
    with serving(tmp_path / "served", *options) as place:
        body = {"model": str(tmp_path / "served"), "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        answer = json.loads(ask(place, **body))["choices"][0]["text"]
    assert answer == tokenizer.decode(written, skip_special_tokens=True)
    assert "Rome" in answer
