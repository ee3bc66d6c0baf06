"""What a server answers to requests of all kinds."""

import base64
import http.client
import io
import json
import re

import openai
import pytest
import torch
from command_line import call
from PIL import Image
from served_models import Client, chat_tokenizer, served, small
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaProcessor,
)

import dofla
from dofla.integration.packages import packaged_path
from dofla.runs.opening import reader_of as processor_of
from dofla.serving import ContinuousBatching
from dofla.serving.models import view
from dofla.serving.server import conversing

pytestmark = pytest.mark.slow

TEXT = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
USER = {"role": "user", "content": "Who is it?"}
CHAT = {"messages": [USER], "max_tokens": 4, "temperature": 0}
RESPONSE = {"input": "a", "max_output_tokens": 4, "stream": False}
NO_KEY = {"Authorization": "Bearer wrong"}


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
        ("completions", {"colour": "red"}, "Unexpected fields in the request: {'colour'}"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens: give 1 or more"),
        ("chat/completions", {"logit_bias": {"99999": 1}}, "logit_bias: token 99999, and there are 0 to 2047"),
        ("responses", {"input": "a", "max_output_tokens": 0}, "max_tokens: give 1 or more"),
    ],
)
def test_what_is_wrong_with_a_request_is_said_in_one_line(client, path, body, reason):
    status, said = client.ask(f"/v1/{path}", {**{"completions": TEXT, "chat/completions": CHAT}.get(path, {}), **body})
    assert status == 400
    assert reason in (message := said["error"]["message"])
    assert said["error"] == {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    assert "\n" not in message
    assert client.ask("/v1/completions", TEXT)[0] == 200  # on the same connection


@pytest.mark.parametrize(
    ("messages", "param", "reason"),
    [
        (None, "messages", "messages must be a list of {role, content}, with one or more"),
        ("Hi", "messages", "messages must be a list"),
        ({"role": "user", "content": "Hi"}, "messages", "messages must be a list"),
        ([], "messages", "messages must be a list"),
        (["Hi"], "messages[0]", "messages[0] must be {role, content}"),
        ([{"content": "Hi"}], "messages[0]", "messages[0] must be {role, content}"),
        ([USER, {"role": "robot", "content": "Hi"}], "messages[1].role", "messages[1]: role 'robot'; give one of dev"),
        ([{"role": ["user"], "content": "Hi"}], "messages[0].role", "messages[0]: role ['user']; give one of"),
        ([{"role": "user"}], "messages[0].content", "messages[0]: content must be a text, or a list of {type, ...}"),
        ([{"role": "user", "content": 4}], "messages[0].content", "content must be a text"),
        ([{"role": "user", "content": ["Hi"]}], "messages[0].content", "content must be a text"),
        ([{"role": "user", "content": [{"text": "Hi"}]}], "messages[0].content", "content must be a text"),
        ([{"role": "user", "content": [{"type": "text", "text": 4}]}], "messages[0].content", "content must be a text"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_messages_of_another_form_are_refused(client, messages, param, reason, stream):
    status, said = client.ask("/v1/chat/completions", {**CHAT, "messages": messages, "stream": stream})
    assert status == 400
    assert reason in said["error"]["message"]
    assert said["error"]["param"] == param


@pytest.mark.parametrize("given", [None, 4, [], ["a"], [4], {"role": "user", "content": "a"}])
def test_an_input_of_another_form_is_refused(client, given):
    status, said = client.ask("/v1/responses", {**RESPONSE, "input": given})
    assert status == 400
    assert said["error"]["param"] == "input"
    assert said["error"]["message"].startswith("input must be a text, or a list of {role, content}")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "assistant", "content": None},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "content": "nothing", "tool_call_id": "1"},
    ],
)
def test_messages_of_all_roles_are_read(client, message):
    assert client.ask("/v1/chat/completions", {**CHAT, "messages": [USER, message, USER]})[0] == 200


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_the_model_has_one_name_or_none(client, path):
    body = {"completions": TEXT, "chat/completions": CHAT, "responses": RESPONSE}[path]
    for name in ("small", None):
        status, said = client.ask(f"/v1/{path}", {**body, "model": name})
        assert (status, said["model"]) == (200, "small")
    for name in ("another", "small@main", "", 4):
        status, said = client.ask(f"/v1/{path}", {**body, "model": name})
        message = f"there is no model {name!r}: this server has 'small'"
        error = {"message": message, "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
        assert (status, said) == (404, {"error": error})
    assert client.ask("/load_model", {"model": "another"})[0] == 404


def test_the_model_is_listed_as_it_is_asked_for(client):
    model = {"id": "small", "object": "model", "owned_by": "", "created": 0}
    assert client.ask("/v1/models") == (200, {"object": "list", "data": [model]})


def test_the_openai_client_shows_what_is_wrong(tiny):
    def broken(**_):
        raise RuntimeError("a secret of the server's")

    model = small(tiny)
    with served(view(model, generate=broken), chat_tokenizer(), key="secret", max_body=1_000) as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0)
        for kind, reason, options in (
            (openai.BadRequestError, "400 - max_tokens: give 1 or more; max_new_tokens is 0", {"max_tokens": 0}),
            (openai.NotFoundError, "404 - there is no model 'another': this server has 'small'", {"model": "another"}),
            (openai.APIStatusError, "413 - the request has more than 1,000 bytes", {"user": "a" * 1_000}),
            (openai.InternalServerError, "500 - the server failed", {}),
            (openai.AuthenticationError, "401 - a key is needed: Authorization: Bearer KEY", {"extra_headers": NO_KEY}),
        ):
            for stream in (False, True) if kind is not openai.InternalServerError else (False,):
                with pytest.raises(kind, match=f"^Error code: {reason}$"):
                    client.chat.completions.create(**{"model": "small", **CHAT, "stream": stream, **options})


def test_what_fails_outside_of_generation_is_an_error_of_the_server(tiny, monkeypatch):
    def broken(*_):
        raise ImportError("no such package")

    monkeypatch.setattr("dofla.serving.server._OneModel.list_models", broken)
    with served(small(tiny), chat_tokenizer()) as port:
        error = {"message": "the server failed", "type": "server_error", "param": None, "code": None}
        assert Client(port).ask("/v1/models") == (500, {"error": error})


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), ("/v1/completions", 405)])
def test_places_that_there_are_not_have_errors_of_the_same_shape(client, path, status):
    found, said = client.ask(path)
    assert found == status
    assert said["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[" * 9_000, b"[]", b"", b'{"prompt": "a'])
def test_what_is_no_json_is_refused(client, body):
    status, said = client.ask("/v1/completions", body)
    assert status == 400
    assert re.match("the request must be a JSON object: .|There was an error parsing", said["error"]["message"])
    assert client.ask("/v1/completions", TEXT)[0] == 200


@pytest.mark.parametrize("size", [10_001, 1_000_000, 30_000_000])
def test_a_body_that_is_too_large_is_refused_and_the_client_hears_why(client, size):
    status, said = client.ask("/v1/completions", json.dumps({**TEXT, "prompt": "a" * size}).encode())
    assert (status, said["error"]["message"]) == (413, "the request has more than 10,000 bytes")
    assert client.ask("/v1/completions", TEXT)[0] == 200


def test_a_body_that_turns_out_too_large_is_refused_as_well(client):
    connection = http.client.HTTPConnection("127.0.0.1", client.connection.port, timeout=60)
    pieces = iter([b'{"prompt": "', b"a" * 10_000, b'"}'])
    connection.request("POST", "/v1/completions", pieces, {"content-type": "application/json"}, encode_chunked=True)
    answer = connection.getresponse()
    assert answer.status == 413
    assert json.loads(answer.read())["error"]["type"] == "invalid_request_error"


def test_a_bias_is_a_whole_number_as_well(client):
    _, said = client.ask("/v1/chat/completions", {**CHAT, "logit_bias": {"300": 100}})
    _, plain = client.ask("/v1/chat/completions", CHAT)
    assert said["choices"] != plain["choices"]


def test_without_a_chat_template_texts_are_completed_alone(tiny, tokenizer):
    with served(small(tiny), tokenizer) as port:
        client = Client(port)
        status, said = client.ask("/v1/chat/completions", CHAT)
        assert status == 400
        assert "has no chat template: ask /v1/completions" in said["error"]["message"]
        assert client.ask("/v1/completions", TEXT)[0] == 200
        for kind in ("audio/transcriptions", "systemone"):
            assert client.ask(f"/v1/{kind}", {})[0] == 404


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


def test_a_model_that_sees_is_compressed_with_its_processor(tiny, tmp_path):
    compressed, processor = seeing(tiny, tmp_path / "before")
    dofla.restore(compressed).save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    text = ["--data", "sample", "--set", "length=64", "--set", "windows=2"]
    assert call("compress", tmp_path / "model", *text, "--no-evict", "--out", tmp_path / "small") == 0
    assert isinstance(AutoProcessor.from_pretrained(tmp_path / "small"), LlavaProcessor)


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
                assert "must come inside of the request" in said["error"]["message"]
            status, _ = client.ask("/v1/chat/completions", about("data:image/png;base64,AAAA"))
            assert status == 400
    assert len({json.dumps(choices) for choices in answers.values()}) == 3


def test_without_a_processor_it_reads_texts_alone(tiny, tmp_path, caplog):
    compressed, processor = seeing(tiny, tmp_path / "whole")
    for folder in ("bare", "none"):
        assert processor_of(str(tmp_path / folder), compressed, processor.tokenizer) is processor.tokenizer
        assert "reads texts alone, for it has no processor of pictures" in caplog.text
