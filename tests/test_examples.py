"""Every file in examples/ does what it says, on a student that is made once."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module", autouse=True)
def on_the_path():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """The folder of the examples' own student, with its tokenizer."""
    folder = tmp_path_factory.mktemp("examples") / "student"
    model, tokenizer = importlib.import_module("opening").open_converted()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run(name, *arguments):
    return importlib.import_module(name).main(*arguments)


def test_the_readme_lists_all_of_them_and_all_are_tested_here():
    files = {path.stem for path in EXAMPLES.glob("*.py")} - {"opening"}
    assert set(re.findall(r"^\| `(\w+)\.py`", (EXAMPLES / "README.md").read_text(), re.MULTILINE)) == files
    assert set(re.findall(r"run\(\s*\"(\w+)\"", Path(__file__).read_text())) == files


def test_text_generation(student, capsys):
    texts = run("text_generation", student)
    assert all(map(str.startswith, texts, ("Once upon", "Lily and Tom")))
    assert len(texts) == 2
    assert all(len(text.split()) > 20 for text in texts)
    assert capsys.readouterr().out == "\n".join(texts) + "\n"


@pytest.mark.slow
def test_sentence_embeddings(capsys):
    ours, theirs = run("sentence_embeddings")
    assert ours.shape == theirs.shape == (3, 3)
    assert (ours - theirs).abs().max() < 0.1
    assert not torch.equal(ours, theirs)
    assert ours[0, 1] > ours[0, 2] + 0.2
    assert "A man gives hay to cattle. 0." in capsys.readouterr().out


def test_streaming(student, capsys):
    sizes = run("streaming", student)
    assert sizes[0] == sizes[1] > 0
    first, second, last = re.split(r"\[\d+ tokens, [\d,]+ bytes of state\]\n", capsys.readouterr().out)
    assert len(first.split()) > 20
    assert second
    assert not last


def test_chat(student, capsys):
    messages = run("chat", student, "Tell me about a cat.")
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert messages[0]["content"] == "Tell me about a cat."
    assert all(message["content"] for message in messages)
    assert capsys.readouterr().out.startswith("> Tell me about a cat.\n" + messages[1]["content"])


@pytest.mark.slow
def test_serving(student, capsys, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "localhost")
    messages = run("serving", student, "Tell me about a cat.")
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert all(message["content"] for message in messages)
    assert capsys.readouterr().out.startswith("> Tell me about a cat.\n" + messages[1]["content"])


def test_long_document(student, capsys):
    answers = run("long_document", student)
    assert len(answers) == 3
    assert re.match(r"1500 tokens read; their state takes \d+ KiB\n", capsys.readouterr().out)


def test_lm_eval_harness(student, capsys):
    state = torch.random.get_rng_state()  # which the harness sets
    found = run("lm_eval_harness", student)
    torch.random.set_rng_state(state)
    assert found["compressed"]["next_word"] >= 0.5
    assert found.keys() == {"compressed", "original"}
    assert re.search(r"^compressed next_word [\d.]+%$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.slow
def test_finetune(student, capsys):
    before, after = run("finetune", student)
    assert before < 0.5 < 0.9 < after
    assert f"merged, saved and opened {after:.1%}" in capsys.readouterr().out


def test_device_map(student, capsys):
    texts = run("device_map", student)
    assert len(texts) == 3
    assert len(set(texts.values())) == 1
    assert "disk (cpu, disk): Once upon a time" in capsys.readouterr().out


def test_half_precision(student, capsys):
    losses = run("half_precision", student)
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], abs=0.02)
    assert "torch.bfloat16: loss" in capsys.readouterr().out


def test_int8_weights(capsys):
    pytest.importorskip("torchao")
    (before, full), (after, small) = run("int8_weights").values()
    assert after == pytest.approx(before, abs=0.02)
    assert after != before
    assert small < 0.7 * full
    assert "Once upon a time" in capsys.readouterr().out


def test_sharing(student, capsys):
    card = run("sharing", student)
    assert "license: apache-2.0" in card
    assert "| loss increase, nats per token |" in card
    assert "Nothing was trained" in card
    out = capsys.readouterr().out
    assert re.search(r"^adapter/dofla.safetensors: [\d,]+ KiB$", out, re.MULTILINE)
    assert card in out


@pytest.mark.slow
def test_the_notebook_on_compression_runs(tmp_path):
    said = executed("compress", tmp_path)
    assert re.findall(r"(\w+) +\d+\.\d{3}", said[-3]) == ["48KiB", "64KiB", "96KiB", "original"]
    assert "Once upon a time, there was a" in said[-1]


@pytest.mark.slow
def test_the_notebook_on_the_paper_runs(tmp_path):
    said = executed("paper", tmp_path)
    assert "Degrees of freedom, layer" in said[3]
    assert "not to be trusted" not in said[3]
    assert re.findall(r"(\w+) +\d+\.\d{3} nats", said[-2]) == ["fixed", "dof"]


def executed(name: str, folder: Path) -> list[str]:
    """What each cell of a notebook prints."""
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, resources={"metadata": {"path": str(folder)}}).execute()
    return ["".join(out.get("text", "") for out in cell.get("outputs", [])) for cell in notebook.cells]


@pytest.mark.long
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_each_runs_as_it_stands(path):
    done = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout or path.stem == "opening"
