"""What a server answers to requests of all kinds."""

from __future__ import annotations

import base64
import io
import json

import pytest
import torch
from PIL import Image
from served_models import Client, chat_tokenizer, served, small
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaProcessor,
)

from dofla.integration.packages import packaged_path
from dofla.runs.opening import reader_of as processor_of
from dofla.serving import ContinuousBatching
from dofla.serving.server import conversing

pytestmark = pytest.mark.slow

TEXT = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Who is it?"}], "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def client(tiny):
    with (
        ContinuousBatching(small(tiny)) as batching,
        served(conversing(batching), chat_tokenizer(), max_body=10_000) as port,
    ):
        yield Client(port)


def message(content):
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("completions", {"prompt": ""}, "the prompt has no tokens: give a text"),
        ("completions", {"max_tokens": 0}, "max_tokens: give 1 or more; max_new_tokens is 0"),
        ("completions", {"max_tokens": 0, "stream": True}, "max_tokens: give 1 or more; max_new_tokens is 0"),
        ("completions", {"max_tokens": "many"}, "invalid literal for int"),
        ("completions", {"temperature": -1}, "temperature: give 0 or more; temperature is -1"),
        ("completions", {"top_p": 0}, "top_p: give more than 0"),
        ("completions", {"frequency_penalty": -2}, "frequency_penalty: give more than -1"),
        ("completions", {"stop": [""]}, "stop: give texts that are not empty"),
        ("completions", {"suffix": 4}, "suffix: give a text"),
        ("completions", {"generation_config": "{"}, "Expecting property name"),
        ("completions", {"generation_config": '{"num_beams": 0}'}, "num_beams: give 1 or more"),
        ("completions", {"prompt": ["a"]}, "prompt must be a string"),
        ("completions", {"model": "another"}, "Server is pinned"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens: give 1 or more"),
        ("chat/completions", {"messages": []}, "empty conversation"),
        ("chat/completions", {"messages": [{"content": "a"}]}, "the request lacks 'role'"),
        ("chat/completions", {"logit_bias": {"99999": 1}}, "logit_bias: token 99999, and there are 0 to 2047"),
        ("responses", {"input": "a", "max_output_tokens": 0}, "max_tokens: give 1 or more"),
    ],
)
def test_what_is_wrong_with_a_request_is_said_in_one_line(client, path, body, reason):
    status, said = client.ask(f"/v1/{path}", {**{"completions": TEXT, "chat/completions": CHAT}.get(path, {}), **body})
    assert status == 400
    assert reason in said["detail"]
    assert "\n" not in said["detail"]
    assert client.ask("/v1/completions", TEXT)[0] == 200  # on the same connection


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[" * 9_000, b"[]", b"", b'{"prompt": "a'])
def test_what_is_no_json_is_refused(client, body):
    status, said = client.ask("/v1/completions", body)
    assert status in (400, 422)
    assert "detail" in said
    assert client.ask("/v1/completions", TEXT)[0] == 200


@pytest.mark.parametrize("size", [10_001, 1_000_000, 30_000_000])
def test_a_body_that_is_too_large_is_refused_and_the_client_hears_why(client, size):
    status, said = client.ask("/v1/completions", json.dumps({**TEXT, "prompt": "a" * size}).encode())
    assert (status, said) == (413, b"Content Too Large")
    assert client.ask("/v1/completions", TEXT)[0] == 200


def test_a_bias_is_a_whole_number_as_well(client):
    _, said = client.ask("/v1/chat/completions", {**CHAT, "logit_bias": {"300": 100}})
    _, plain = client.ask("/v1/chat/completions", CHAT)
    assert said["choices"] != plain["choices"]


def test_without_a_chat_template_texts_are_completed_alone(tiny, tokenizer):
    with served(small(tiny), tokenizer) as port:
        client = Client(port)
        status, said = client.ask("/v1/chat/completions", CHAT)
        assert status == 400
        assert "has no chat template: ask /v1/completions" in said["detail"]
        assert client.ask("/v1/completions", TEXT)[0] == 200
        for kind in ("audio/transcriptions", "systemone"):
            assert client.ask(f"/v1/{kind}", {})[0] == 404


def test_the_key_is_asked_for_everywhere(tiny, tokenizer):
    with served(small(tiny), tokenizer, key="secret") as port:
        client = Client(port)
        for path in ("/v1/models", "/docs", "/openapi.json", "/v1/nothing"):
            assert client.ask(path)[0] == 401
        for path in ("/v1/completions", "/v1/chat/completions", "/reset", "/load_model"):
            assert client.ask(path, TEXT, authorization="Bearer wrong")[0] == 401
        assert client.ask("/v1/completions", b"a" * 30_000_000)[0] == 401
        assert client.ask("/v1/completions", TEXT, authorization="Bearer secret")[0] == 200
        assert client.ask("/health")[0] == 200


SEES = "{% for m in messages %}{{ m.role }}: {% for c in m.content %}"
SEES += "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}\n{% endfor %}assistant:"


def seeing(tiny, folder):
    """A compressed model that sees, and its processor, as a folder has them."""
    tokenizer = AutoTokenizer.from_pretrained(packaged_path("demo"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": len(tokenizer), "num_key_value_heads": 2, "max_position_embeddings": 256, **vision}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision, image_size=32, patch_size=8),
        text_config=CONFIG_MAPPING["llama"](**text, initializer_range=0.3, bos_token_id=None, eos_token_id=None),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config).eval()
    compressed = tiny.compressed(model)
    compressed.save_pretrained(folder)
    size = {"height": 32, "width": 32}
    pictures = CLIPImageProcessor(size=size, crop_size=size, do_center_crop=False)
    options = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaProcessor(pictures, tokenizer, chat_template=SEES, image_token="<image>", **options).save_pretrained(folder)
    return compressed, processor_of(str(folder), compressed, tokenizer)


def picture(color):
    file = io.BytesIO()
    Image.new("RGB", (32, 32), color).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def test_pictures_are_seen_and_conversations_about_them_go_on(tiny, tmp_path):
    compressed, processor = seeing(tiny, tmp_path)
    assert isinstance(processor, LlavaProcessor)

    def about(url):
        return {
            **CHAT,
            **message([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]),
        }

    answers = {}
    for kept in (False, True):
        with (
            ContinuousBatching(compressed) as batching,
            served(conversing(batching) if kept else compressed, processor) as port,
        ):
            client = Client(port)
            for _ in range(2):
                for asked in (about(picture("red")), about(picture("white")), {**CHAT, **message("What?")}):
                    status, said = client.ask("/v1/chat/completions", asked)
                    assert status == 200
                    key = json.dumps(asked)
                    assert answers.setdefault(key, said["choices"]) == said["choices"]
            for url in ("/etc/hostname", str(tmp_path / "x.png"), "http://127.0.0.1:1/x.png", "file:///x.png"):
                status, said = client.ask("/v1/chat/completions", about(url))
                assert status == 400
                assert "must come inside of the request" in said["detail"]
            status, _ = client.ask("/v1/chat/completions", about("data:image/png;base64,AAAA"))
            assert status == 400
    assert len({json.dumps(choices) for choices in answers.values()}) == 3


def test_without_a_processor_it_reads_texts_alone(tiny, tmp_path, caplog):
    compressed, processor = seeing(tiny, tmp_path / "whole")
    for folder in ("bare", "none"):
        assert processor_of(str(tmp_path / folder), compressed, processor.tokenizer) is processor.tokenizer
        assert "reads texts alone, for it has no processor of pictures" in caplog.text
