"""A conversation goes on in another engine, or in transformers, from a file of a few kilobytes."""

import json
import os
import subprocess
import sys

import pytest
import torch
from http_server import ask, serving
from test_plugin import MOVES, engine, texts
from vllm import SamplingParams

from dofla.storage.tensors import read_tensors, write_tensors

IN_TRANSFORMERS = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
import dofla
from dofla.serving import load_state, read_prompt, save_state
folder, known, path, ids = sys.argv[1], sys.argv[2], sys.argv[3], torch.tensor([json.loads(sys.argv[4])])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
tokens, cache = load_state(known, model)
save_state(read_prompt(model, ids[:, :200]), ids[:, :200], path, model)
out = model.generate(ids, past_key_values=cache, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0)
print(json.dumps([tokens[0].tolist(), out[0, ids.shape[1]:].tolist()]))
"""
"""A program, as vLLM changes what transformers does in its process: it goes on from one file, and writes another."""


@pytest.fixture(scope="module")
def moving(compressed, tmp_path_factory):
    """An engine, and its folder of conversations, which is there once one is written."""
    folder = tmp_path_factory.mktemp("moving") / "sessions"
    made = engine(compressed[1], max_num_batched_tokens=64, kv_transfer_config=moves(folder))
    yield made, folder
    del made


def moves(folder):
    return MOVES | {"kv_connector_extra_config": {"folder": str(folder)}}


def named(session):
    arguments = {"kv_transfer_params": {"session": session}}
    return SamplingParams(max_tokens=12, min_tokens=12, temperature=0, extra_args=arguments)


def answer(llm, ids, session):
    """What is written, and how many tokens were known."""
    (output,) = llm.generate([{"prompt_token_ids": ids}], named(session), use_tqdm=False)
    llm.llm_engine.step()  # as a server does while nobody asks
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def test_a_conversation_goes_on_from_a_file_here_and_in_transformers(moving, compressed, prompts):
    (llm, folder), story, others = moving, prompts[12], prompts[9][:20]
    said, known = answer(llm, story, "anna")
    assert known == 0
    longer = [*story, *said, *others]
    (wanted,) = texts(llm, [longer])
    files = [str(folder / f"{name}.safetensors") for name in ("anna", "other")]
    command = [sys.executable, "-c", IN_TRANSFORMERS, str(compressed[1]), *files, json.dumps(longer)]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"VLLM_PLUGINS": ""})
    assert run.returncode == 0, run.stderr
    tokens, elsewhere = json.loads(run.stdout.splitlines()[-1])
    assert tokens == longer[: len(story) + 11]  # nobody has read the last token
    assert elsewhere == wanted
    assert answer(llm, longer, "other") == (wanted, 200)
    assert answer(llm, longer, "anna") == (wanted, len(tokens))
    assert answer(llm, [*longer, *wanted, *others], "anna")[1] == len(longer) + 11


def test_requests_beside_one_another_have_their_own(moving, prompts, check):
    llm, folder = moving
    for turn in range(2):
        for n in (9, 10, 11):
            llm.llm_engine.add_request(f"{turn} {n}", {"prompt_token_ids": prompts[n]}, named(f"of-{n}"))
        found = {}
        while llm.llm_engine.has_unfinished_requests():
            found |= {out.request_id: out for out in llm.llm_engine.step() if out.finished}
        assert len(found) == 3
        for out in found.values():
            check(prompts.index(list(out.prompt_token_ids)), list(out.outputs[0].token_ids))
    llm.llm_engine.step()
    for n in (9, 10, 11):
        tensors, _ = read_tensors(folder / f"of-{n}.safetensors")
        assert tensors["input_ids"][0, : len(prompts[n])].tolist() == prompts[n]


@pytest.mark.parametrize("session", ["anna", "half", "number", "float", "other", "../anna", "a/b", "", 7, None])
def test_what_is_no_state_of_the_text_is_passed_over(moving, prompts, check, session):
    llm, folder = moving
    answer(llm, prompts[9], "anna")
    whole = (folder / "anna.safetensors").read_bytes()
    (folder / "half.safetensors").write_bytes(whole[: len(whole) // 2])
    tensors, metadata = read_tensors(folder / "anna.safetensors")
    ids, first = torch.tensor([prompts[10][:50]]), tensors["0.0.rows"]
    write_tensors(folder / "number.safetensors", tensors | {"input_ids": torch.tensor(3)}, metadata)
    write_tensors(folder / "float.safetensors", tensors | {"input_ids": ids.float()}, metadata)
    known = metadata | ({"constants": "of another calibration"} if session == "other" else {})
    write_tensors(folder / "other.safetensors", tensors | {"input_ids": ids, "0.0.rows": first[:, 1:]}, known)
    before = sorted(folder.parent.rglob("*"))
    said, known = answer(llm, prompts[10], session)
    check(10, said)
    assert known == (50 if session == "other" else 0)  # which were to be loaded, and have been read after all
    assert sorted(folder.parent.rglob("*")) == before
    if session and len(str(session)) > 3 and session[0] != ".":  # written anew
        tensors, _ = read_tensors(folder / f"{session}.safetensors")
        assert tensors["input_ids"][0, :-11].tolist() == prompts[10]


def test_two_of_one_conversation_at_once_are_both_answered(moving, prompts, check):
    llm, _ = moving
    wanted, _ = answer(llm, prompts[10], "twins")
    for _ in range(2):
        llm.llm_engine.add_request("first", {"prompt_token_ids": [*prompts[10], *wanted]}, named("twins"))
        llm.llm_engine.add_request("second", {"prompt_token_ids": [*prompts[10], *wanted]}, named("twins"))
        found = []
        while llm.llm_engine.has_unfinished_requests():
            found += [out.outputs[0] for out in llm.llm_engine.step() if out.finished]
        assert [out.finish_reason for out in found] == ["length"] * 2
        assert found[0].token_ids == found[1].token_ids
        llm.llm_engine.step()


def test_pages_are_given_back(moving, prompts):
    llm, _ = moving
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    answer(llm, prompts[9], "anna")
    assert pool.get_num_free_blocks() == free


@pytest.mark.slow
def test_a_server_writes_them_and_goes_on(compressed, prompts, tmp_path):
    options = ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
    options += ["--kv-transfer-config", json.dumps(moves(tmp_path / "sessions"))]
    body = {"model": str(compressed[1]), "max_tokens": 12, "min_tokens": 12, "temperature": 0, "return_token_ids": True}
    text, said, texts_written = prompts[12], [], []
    for _ in range(2):  # servers
        with serving(compressed[1], *options) as place:
            for _ in range(2):
                text = [*text, *said, *prompts[9][:5]]
                asked = {"prompt": text, "kv_transfer_params": {"session": "anna"}}
                said = json.loads(ask(place, **body, **asked))["choices"][0]["token_ids"]
                texts_written.append((text, said))
            stopped = body | {"stop": [" "], "min_tokens": 0, "kv_transfer_params": {"session": "ben"}}
            ask(place, **stopped, prompt=prompts[9])
            assert ask(place, **stopped, prompt=prompts[9])  # whatever has been read
    assert not (tmp_path / "sessions" / "ben.safetensors").exists()  # to vLLM they were given up
    tensors, _ = read_tensors(tmp_path / "sessions" / "anna.safetensors")
    assert tensors["input_ids"][0].tolist() == [*text, *said][:-1]
    with serving(compressed[1], *options[:5]) as place:
        for text, said in texts_written:
            assert json.loads(ask(place, **body, prompt=text))["choices"][0]["token_ids"] == said
