"""The command line: the whole chain of verbs on a tiny model, and one-line errors with exit code 2."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from command_line import call, refused
from tokenizers.processors import TemplateProcessing
from word_tokenizers import WORDS, word_tokenizer

from dofla.plans.curves import Curves
from dofla.plans.layers import SoftmaxLayer
from dofla.plans.plan import Plan
from dofla.runs.comparison import model_row
from dofla.runs.view import View


@pytest.fixture(scope="module")
def home(tiny, tmp_path_factory):
    """A folder with a tiny model, its tokenizer, and text."""
    folder = tmp_path_factory.mktemp("cli")
    tiny.llama(bos_token_id=0, eos_token_id=0).save_pretrained(folder / "model")
    word_tokenizer(bos_token="<end>", eos_token="<end>").save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(0)
    documents = [" ".join(WORDS[i] for i in torch.randint(60, (40,), generator=generator)) for _ in range(60)]
    (folder / "text.txt").write_text("\n\n".join(documents))
    return folder


@pytest.fixture(scope="module")
def profile(home) -> Path:
    """The folder of the model's profile."""
    options = ["--data", home / "text.txt", "--length", 32, "--windows", 8, "--set", "samples=64"]
    assert call("profile", home / "model", *options, "--out", home / "profile") == 0
    return home / "profile"


def assert_narrow(shown: str) -> None:
    """No line is wider than a terminal but those with the next command, which are to be copied."""
    assert all(len(line) <= 80 for line in shown.splitlines() if not line.startswith("next: dofla "))


@pytest.fixture(scope="module")
def student(home, profile) -> Path:
    """The adapter of a student that was distilled."""
    assert call("allocate", profile, "--budget", 8, "--out", home / "plan.json") == 0
    options = ["--data", home / "text.txt", "--length", 32, "--windows", 16, "--set", "batch_size=4"]
    assert call("distill", home / "model", "--plan", home / "plan.json", *options, "--out", home / "distilled") == 0
    return home / "distilled" / "adapter"


def test_the_verbs_work_one_after_the_other(home, profile, student, capsys):
    assert json.loads((profile / "profile.json").read_text())["samples"] == 64
    assert len(json.loads((home / "distilled" / "losses.json").read_text())["layers"]) == 2
    figures = home / "figures.json"
    evaluation = ["--data", home / "text.txt", "--length", 16, "--windows", 4, "--out", figures]
    assert call("evaluate", student, *evaluation) == 0
    assert json.loads(figures.read_text())["language"]["original_loss"] > 0
    assert call("generate", student, "--prompt", "w1 w2 w3", "--new-tokens", 5) == 0
    (home / "document.txt").write_text("w4 w5 w6 w7")
    state = ["--prompt-state", home / "document.safetensors"]
    options = ["--prompt", "w1 w2 w3", "--new-tokens", 5]
    assert_narrow(capsys.readouterr().out)
    assert call("generate", student, *options, *state, "--document", home / "document.txt") == 0
    first = capsys.readouterr().out
    assert call("generate", student, *options, *state) == 0
    assert capsys.readouterr().out == first
    assert call("generate", student, "--prompt", "w4 w5 w6 w7 w1 w2 w3", "--new-tokens", 5) == 0
    assert capsys.readouterr().out == first
    assert call("generate", student, *options, "--prompt-state", home / "none.safetensors") == 2


def test_a_prompt_behind_a_document_begins_no_second_text(home, capsys, tmp_path):
    options = ["--data", home / "text.txt", "--set", "length=32", "--set", "windows=4", "--set", "prefill=sequential"]
    assert call("compress", home / "model", *options, "--no-evict", "--out", tmp_path / "small") == 0
    tokenizer = word_tokenizer(bos_token="<end>", eos_token="<end>")
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    tokenizer.save_pretrained(tmp_path / "small")
    (tmp_path / "document.txt").write_text("w4 w5 w6 w7")
    state = ["--prompt-state", tmp_path / "state", "--document", tmp_path / "document.txt"]
    capsys.readouterr()
    for prompt, more in (("w4 w5 w6 w7 w1 w2", []), ("w1 w2", state)):
        assert call("generate", tmp_path / "small", "--prompt", prompt, "--new-tokens", 12, *more) == 0
    whole, behind = capsys.readouterr().out.splitlines()
    assert whole == behind


def test_curves_are_measured_and_spent(home, profile, capsys, tmp_path):
    out, plan = tmp_path / "curves.json", tmp_path / "plan.json"
    sizes = ["--length", 32, "--windows", 8, "--set", "steps=2", "--budget", 16]
    assert call("curves", home / "model", "--data", home / "text.txt", *sizes, "--out", out) == 0
    shown = capsys.readouterr().out
    assert_narrow(shown)
    for word in ("attention KL by bytes", "effect", "model.layers.1.self_attn", "error curves written to"):
        assert word in shown
    made_by = json.loads(out.read_text())["made_by"]
    expected = {"budget": 16, "steps": 2, "batch_size": 2, "feature_map": "mlp", "token_dtype": "int8", "seed": 0}
    assert made_by | expected == made_by
    assert len(Curves.load(out).layers) == 2

    measured = ["--strategy", "measured", "--curves", out, "--budget", 16]
    assert call("allocate", profile, *measured, "--out", plan) == 0
    assert_narrow(capsys.readouterr().out)
    made = Plan.load(plan)
    assert made.made_by["strategy"] == "measured"
    assert {(x.feature_map, x.token_dtype) for x in made.layers} == {("mlp", "int8")}
    assert 0 < made.state_bytes() <= sum(16 * x.kv_heads * (x.value_dim + 2) * 4 for x in made.layers)
    assert call("allocate", profile, *measured, "--context", 1, "--out", tmp_path / "softmax.json") == 0
    assert all(isinstance(x, SoftmaxLayer) for x in Plan.load(tmp_path / "softmax.json").layers)
    capsys.readouterr()

    damaged = tmp_path / "damaged.json"
    damaged.write_text(out.read_text()[:300])
    for options, words in (
        (["--curves", damaged], str(damaged)),
        (["--context", 0], "context is 0"),
        (["--set", "token_dtype=model"], "token_dtype is 'model', the error curves were measured with 'int8'"),
    ):
        error = refused(capsys, "allocate", profile, *measured, *options, "--out", tmp_path / "new.json")
        assert words in error
        assert not (tmp_path / "new.json").exists()


def test_tasks_beside_text_and_alone(home, student, capsys, tmp_path):
    """A table of local files, of multiple choice and of generation, and a file."""
    tasks = []
    for n, name in enumerate(("quiz-test", "riddles")):
        lines = [
            {"question": f"{WORDS[i]} {WORDS[i + n]}", "choices": [f"{WORDS[i + 2]} w1", "w3"], "answer": i % 2}
            for i in range(12)
        ]
        tasks.append(tmp_path / f"{name}.jsonl")
        tasks[-1].write_text("\n".join(map(json.dumps, lines)))
    talk = {"task": "talk", "dataset_path": "json", "test_split": "train", "output_type": "generate_until"}
    talk |= {"doc_to_text": "question", "doc_to_target": "choices", "metric_list": [{"metric": "exact_match"}]}
    talk |= {"generation_kwargs": {"max_gen_toks": 2}}
    talk |= {"dataset_kwargs": {"data_files": str(tasks[0]), "cache_dir": str(tmp_path / "cache")}}
    (tmp_path / "talk.yaml").write_text(yaml.safe_dump(talk))
    names = ",".join(map(str, [*tasks, "talk"]))
    options = ["--set", "limit=10", "--set", f"include_path={tmp_path}", "--set", "metadata={}"]
    capsys.readouterr()
    out = tmp_path / "figures.json"
    assert call("evaluate", student, "--tasks", names, *options, "--out", out) == 0
    shown = capsys.readouterr().out
    assert_narrow(shown)
    for word in ("quiz", "riddles", "±", "acc_norm", "talk", "exact_match"):
        assert word in shown
    record = json.loads(out.read_text())["tasks"]
    assert [task["items"] for task in record["tasks"]] == [10, 10, 10]
    assert record["tasks"][2]["metrics"]["exact_match"].keys() >= {"original", "model_stderr", "difference_stderr"}
    text = ["--data", home / "text.txt", "--length", 16, "--windows", 4]
    both = tmp_path / "both.json"
    assert call("evaluate", student, *text, "--tasks", tasks[0], "--out", both) == 0
    assert {"language", "tasks"} <= set(json.loads(both.read_text()))
    capsys.readouterr()
    (tmp_path / "bad.jsonl").write_text('{"question": "w1"}')
    for arguments, message in (
        ([], ["--data", "--tasks"]),
        (["--tasks", tmp_path / "bad.jsonl"], ["bad.jsonl, line 1", "choices"]),
        (["--tasks", tmp_path / "none.jsonl"], ["none.jsonl", "does not exist"]),
        (["--tasks", tasks[0], "--set", "metadata=[4096]"], ["metadata=[4096]", "expected Mapping"]),
    ):
        error = refused(capsys, "evaluate", student, *arguments)
        for word in message:
            assert word in error


SHORT = ["--data", "TEXT", "--length", 32]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["profile", "no/such/model", "--data", "TEXT", "--out", "NEW"], ["no/such/model"]),
        (["profile", "MODEL", "--data", "missing.txt", "--out", "NEW"], ["missing.txt"]),
        (["profile", "MODEL", "--data", "TEXT", "--length", 100000, "--out", "NEW"], ["100000", "tokens"]),
        (["profile", "MODEL", "--data", "TEXT", "--out", "PROFILE"], ["exists already"]),
        (["profile", "MODEL", "--data", "TEXT", "--set", "dtype=int3", "--out", "NEW"], ["int3", "bfloat16"]),
        (["allocate", "PROFILE", "--set", "lambda=0", "--out", "NEW"], ["lambda is 0"]),
        (["allocate", "PROFILE", "--strategy", "best", "--out", "NEW"], ["best", "dof_clip"]),
        (["allocate", "missing", "--out", "NEW"], ["missing"]),
        (["allocate", "PROFILE", "--strategy", "measured", "--out", "NEW"], ["measured", "error curves"]),
        (["allocate", "PROFILE", "--strategy", "measured", "--curves", "missing.json"], ["missing.json", "curves"]),
        (["curves", "MODEL", *SHORT, "--windows", 5, "--out", "NEW"], ["5 windows", "6 or more"]),
        (["curves", "MODEL", *SHORT, "--set", "keep_softmax=odd", "--out", "NEW"], ["'odd'"]),
        (["curves", "MODEL", "--data", "TEXT", "--out", "TEXT"], ["exists already"]),
        (["distill", "MODEL", "--plan", "missing.json", "--data", "TEXT", "--out", "NEW"], ["missing.json"]),
        (["evaluate", "MODEL", "--data", "TEXT"], ["plain model", "dofla compress"]),
        (["evaluate", "demo", "--data", "sample", "--windows", 1], ["not converted", "dofla compress"]),
        (
            ["run", "demo-compression", "--set", "evaluate.new_tokens=0"],
            ["'evaluate': new_tokens is 0"],
        ),
        (["run", "compress", "--set", "model=demo", "--set", "evaluate.prompts=-1"], ["prompts is -1"]),
        (["run", "nosuch"], ["nosuch", "compress, default, demo"]),
        (["run", "missing.yaml"], ["missing.yaml"]),
        (["run", "BAD", "--out", "NEW"], ["bad.yaml", "ratio", "lots"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(home, profile, capsys, arguments, words):
    places = {"MODEL": home / "model", "TEXT": home / "text.txt", "PROFILE": profile}
    places |= {"NEW": home / "new", "BAD": home / "bad.yaml"}
    places["BAD"].write_text("model: x\nratio: lots")
    error = refused(capsys, *(places.get(a, a) for a in arguments))
    for word in words:
        assert word in error
    assert not (home / "new").exists()
    assert not list(home.glob(".*partial*"))


def test_rows_of_a_comparison_stand_in_columns_one_by_one(capsys):
    def row(name, gap, error):
        figures = {"loss": gap + 1, "loss_increase": gap, "kl": gap, "top1_agreement": 0.5}
        figures |= {"attention_output_error": error}
        figures = {key: {"mean": value, "spread": 0.0} for key, value in figures.items()}
        return {"name": name, "state_bytes": 2**17, **figures}

    names = ["Fix", "Window and sinks", "Measured"]
    lines = []
    for name, gap, error in zip(names, (12.25, 0.5, 0.0625), (3.0, 0.25, 0.5), strict=True):
        View().show(*model_row(row(name, gap, error), names, [0]))
        lines += capsys.readouterr().out.splitlines()
    heads, *rows = lines[-4:]
    columns = ["loss", "+loss", "KL", "top-1", "attention", "cache"]
    assert heads.split() == ["model", *columns]
    assert [line.partition(":")[0] for line in lines[1:-5]] == columns  # each is explained
    assert [line.split("  ")[0] for line in rows] == names
    assert {len(line) for line in (heads, *rows)} == {len(heads)}
    ends = [heads.index(" KL") + 3, heads.index("attention") + 9]
    assert [[line[:end].split()[-1] for end in ends] for line in rows] == [
        ["12.250", "3.000"],
        ["0.500", "0.250"],
        ["0.062", "0.500"],
    ]
