"""Every table, on stand-ins of the architectures the studies are for."""

import json

import pytest
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM
from word_tokenizers import WORDS, word_tokenizer

from dofla.cli import main
from dofla.errors import DoflaError
from dofla.paper import TABLES, Study, reproduce
from dofla.paper.bench import Bench
from dofla.paper.methods import paper_methods

pytestmark = pytest.mark.slow

TASKS = ("piqa", "winogrande")
SIZE = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Models, a text, and task files."""
    folder = tmp_path_factory.mktemp("reproduce")
    special = {"bos_token": "<end>", "eos_token": "<end>", "cls_token": "<end>", "pad_token": "<pad>"}
    tokenizer = word_tokenizer(["<end>", "<unk>", "<pad>", "<sep>", *WORDS], sep_token="<sep>", **special)
    torch.manual_seed(0)
    stand_ins = {
        "gpt2": GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **SIZE)),
        "pythia-1b": GPTNeoXForCausalLM(GPTNeoXConfig(**SIZE, **LAYERS)),
        "minilm": BertModel(BertConfig(vocab_size=64, **LAYERS)),
    }
    for name, model in stand_ins.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    generator = torch.Generator().manual_seed(0)

    def words(count: int) -> str:
        return " ".join(WORDS[i] for i in torch.randint(60, (count,), generator=generator))

    (folder / "text.txt").write_text("\n\n".join(words(40) for _ in range(60)))
    for task in TASKS:
        for part in ("train", "test"):
            items = [
                {"question": f"{words(4)} _ {words(2)}", "choices": [words(2), words(2)], "answer": n % 2, "id": n}
                for n in range(6)
            ]
            lines = "\n".join(map(json.dumps, items))
            (folder / f"{task}-{part}.jsonl").write_text(lines)
    return folder


def changes(home, name):
    padded = name == "minilm"
    lines = [
        f"model={home / name}",
        "budget=6",
        f"data={{source: {home / 'text.txt'}, length: 24, windows: 16, padded: {padded}}}",
        f"validation={{source: {home / 'text.txt'}, length: 24, windows: 4, split: all, padded: {padded}}}",
        "profile={samples: 32, windows: 8, batch_size: 4}",
        "distill={steps: 2, batch_size: 4, rows: 8}",
        "curve={heads: 2, vectors: 16, sizes: [4, 8], draws: 2}",
        "cost={tokens: 5, steps: 2}",
    ]
    if not padded:
        lines += [
            f"tasks={{source: {home}, names: [{', '.join(TASKS)}], items: 5}}",
            "finetune.tasks=[piqa]",
            'finetune.methods=[Original, "DoF, softmax"]',
            "finetune.seeds=1",
            "finetune.epochs=1",
        ]
    return lines


def made(home, name, seeds=1) -> tuple[dict, object]:
    """All tables of a stand-in, by name, and the folder."""
    folder = home / f"tables of {name}"
    study = Study.of(name, "full", seeds, changes(home, name))
    return {table.key: table for table in reproduce(study, ["all"], folder, command="go {}".format)}, folder


@pytest.mark.parametrize("name", ["gpt2", "pythia-1b"])
def test_every_table_of_a_language_model(home, name):
    tables, folder = made(home, name)
    assert tables.keys() == TABLES.keys()
    for key, table in tables.items():
        assert table.rows, key
        assert all(len(row) == len(table.columns) for row in table.rows), key
        assert all(len(row) == len(table.paper_columns) for row in table.paper), key
        path = folder / "tables" / (f"table-{key}" if key.isdecimal() else key)
        data = json.loads(path.with_suffix(".json").read_text())
        assert data["command"] == f"go {key}"
        assert data["seconds"] >= 0
        assert table.to_markdown() == path.with_suffix(".md").read_text()
    losses = {row[0]: row[1].mean for row in tables["7"].rows}
    assert {spec.name for spec in paper_methods()} < losses.keys()
    assert all(3 < loss < 6 for loss in losses.values())
    accuracies = {row[0]: row for row in tables["3"].rows}
    assert set(tables["3"].columns) >= {"average", *TASKS, "critical τ", "fine-tuned piqa"}
    assert accuracies["DoF, softmax"][-1] is not None
    assert accuracies["Fix, softmax"][-1] is None
    assert [row[0] for row in tables["6"].rows] == ["Original", "Performer", "Fix", "DoF", "DoF + Clip"]


def test_every_table_of_an_encoder_but_those_that_ask_for_answers(home):
    tables, folder = made(home, "minilm")
    assert tables.keys() == TABLES.keys() - {"3", "6"}
    assert tables["7"].columns == ["model", "cosine", "Spearman", "attention KL", "state"]
    assert not any("direct" in row[0] for row in tables["7"].rows)
    with pytest.raises(DoflaError, match="table 3 asks for next tokens"):
        reproduce(Study.of("minilm", changes=changes(home, "minilm")), ["3"], folder)


def test_what_was_measured_is_not_measured_again_and_seeds_can_be_added(home, monkeypatch):
    first, folder = made(home, "gpt2")
    again, _ = made(home, "gpt2")
    assert [t.to_dict() for t in again.values()] == [t.to_dict() for t in first.values()]

    study = Study.of("gpt2", "full", 2, changes(home, "gpt2"))
    more = reproduce(study, ["heads"], folder, notes=["too small"])[0]
    assert more.columns[1] == "loss increase"
    assert "\n- too small\n" in (folder / "tables" / "heads.md").read_text()
    one = {row[0]: row[1].values for row in first["heads"].rows}
    two = {row[0]: row[1].values for row in more.rows}
    assert all(len(two[name]) == 2 and two[name][0] == values[0] for name, values in one.items())
    with pytest.raises(DoflaError, match="another recipe"):
        Bench(Study.of("gpt2", "full", 1, [*changes(home, "gpt2"), "budget=7"]), folder)


def test_the_seconds_of_a_table_are_those_of_all_it_looks_at(home):
    study = Study.of("gpt2", "full", 1, changes(home, "gpt2"))
    bench = Bench(study, home / "seconds")
    spec = paper_methods()[1]
    bench.evaluations(spec)
    once = bench.seconds
    bench.evaluations(spec)
    assert bench.seconds == once
    assert once >= bench.students.seconds(spec, 0)
    bench.begin()
    assert bench.seconds == 0


def test_an_unknown_table_lists_the_known_ones(home):
    with pytest.raises(DoflaError, match="unknown table '13': choose from 1, 2, scale"):
        reproduce(Study.of("gpt2", changes=changes(home, "gpt2")), ["13"], home / "none")
    assert not (home / "none").exists()


def test_the_command_makes_the_table_that_is_asked_for(home, monkeypatch, capsys):
    settings = [word for change in changes(home, "gpt2") for word in ("--set", change)]
    out = home / "by command"
    options = ["--model", "gpt2", "--table", "1", "--seeds", "1", "--out", str(out), *settings]
    monkeypatch.setattr("sys.argv", ["dofla", "reproduce", *options])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    assert [path.name for path in sorted((out / "tables").iterdir())] == ["table-1.json", "table-1.md"]
    assert (
        "dofla reproduce --model gpt2 --table 1 --seeds 1 --scale full --set" in (out / "tables/table-1.md").read_text()
    )
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
