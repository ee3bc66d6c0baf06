"""``benchmarks/peers/ruler.py``: RULER's contexts are cut before the question, and answers are scored as RULER's."""

import pytest
import torch
import typer
from benches import scripts
from transformers import DynamicCache

import dofla
from dofla.errors import DoflaError
from dofla.integration.cache import cache_bytes
from dofla.serving.prompt_state import read_prompt

LENGTH = 2048


@pytest.fixture(scope="module")
def modules():
    """``ruler`` and ``questions``."""
    with scripts("peers", "ruler", "questions") as modules:
        yield modules


@pytest.fixture
def ask(modules, tokenizer):
    """Contexts of a task."""

    def ask(*names, count=1, seed=0):
        return modules[0].tasks_of(tokenizer, names, LENGTH, count, "sample", seed)

    return ask


@pytest.fixture
def model(tiny, tokenizer):
    return tiny.llama(vocab_size=len(tokenizer), head_dim=64, max_position_embeddings=LENGTH)


def test_contexts_hold_the_answers_and_questions_follow_on_them(modules, ask, tokenizer):
    tasks = ask(*modules[0].TASKS)
    assert [task.name for task in tasks] == modules[0].TASKS
    for task in tasks:
        (context,) = task.contexts
        text, question = tokenizer.decode(context.ids), tokenizer.decode(context.question)
        assert question.startswith(("\nQuestion: ", "\nWhat ")), task.name
        assert len(context.question) < 150 < len(context.ids) <= LENGTH, task.name
        assert all(answer in text for answer in context.answers), task.name
        assert context.room == {"vt": 30, "cwe": 120, "fwe": 50}.get(task.name[-3:].strip("_"), 128)
    assert tasks[0] == ask("niah_single_1")[0] != ask("niah_single_1", seed=1)[0]


def test_the_score_is_the_share_that_was_written(modules):
    context = modules[1].Context([], [], ["apple", "pear", "plum", "fig"], 9)
    assert context.score("1. Apple 2. grape 3. plum") == 0.5
    assert context.score("") == 0


@torch.no_grad()
@pytest.mark.parametrize("prefill", ["exact", "sequential"])
def test_answers_are_those_of_a_model_that_reads_the_context_itself(
    tiny, modules, model, tokenizer, uncompiled, monkeypatch, prefill
):
    ruler, questions = modules
    ids, said = tiny.tokens(1, 400)[0].tolist(), []
    context = questions.Context(ids[:380], ids[380:], ["no such answer"], 12)
    monkeypatch.setattr(questions.Context, "score", lambda _, written: said.append(written) or 0.0)
    windows = dofla.TokenWindows(tiny.tokens(4, 48))
    student = dofla.compress(ruler.copied(model), windows, size="100KiB", retrieval_heads=0, prefill=prefill)
    ((_, held, _),) = ruler.answers(model, tokenizer, {"dofla": student}, context, ["dofla"])
    answered = said[-1]
    cache = read_prompt(student, torch.tensor([context.ids]))
    assert held == cache_bytes(cache)
    modules[1].score(student, tokenizer, cache, context)
    assert said[-1] == answered
    assert not any("dofla" in module._modules for module in model.modules())


@torch.no_grad()
def test_a_memory_of_fewer_tokens_than_were_read_answers_at_the_places_of_the_text(tiny, modules, tokenizer):
    model, tokens = tiny.llama(max_position_embeddings=64).double(), tiny.tokens(1, 30)
    places, said = torch.arange(20)[None], []

    def remembered():
        """Of 20 tokens the last six."""
        cache = DynamicCache(config=model.config)
        model(tokens[:, :20], past_key_values=cache, position_ids=places)
        kept = [(layer.keys[:, :, -6:], layer.values[:, :, -6:]) for layer in cache.layers]
        return modules[0].filled(kept, DynamicCache(config=model.config))

    class Told(modules[1].Context):
        def score(self, written):
            said.append(written)
            return 0.0

    context = Told(tokens[0, :20].tolist(), tokens[0, 20:].tolist(), [], 4)
    model.generation_config.eos_token_id = None
    for chunk in (None, 3):
        modules[1].score(model, tokenizer, remembered(), context, chunk=chunk)
    mask = torch.ones(34, 34, dtype=torch.bool).tril()
    mask[20:, :14] = False  # the question and the answer see the last six tokens of the context alone
    whole = tokens
    for _ in range(4):
        own = mask[: whole.shape[1], : whole.shape[1]]
        whole = torch.cat([whole, model(whole, attention_mask=own[None, None]).logits[:, -1:].argmax(dim=-1)], dim=1)
    assert said[4] == said[9] == tokenizer.decode(whole[0, 30:])


@torch.no_grad()
def test_a_quantized_cache_has_coded_the_context_when_it_is_asked(modules, model, ask, tokenizer, quanto, monkeypatch):
    monkeypatch.setattr(modules[0], "BITS", {"softmax": None, "four": 4, "two": 2})
    ((context,),) = (task.contexts for task in ask("niah_single_1"))
    found = modules[0].answers(model, tokenizer, {}, context, list(modules[0].BITS))
    whole, *coded = [held for _, held, _ in found]
    # Of 2 layers, keys and values of 2 heads: 64 numbers; or codes, a scale and an offset for each token.
    tokens = 2 * 2 * 2 * len(context.ids)
    assert whole == tokens * 64 * 2
    assert coded == [tokens * (64 * bits // 8 + 2 + 2) for bits in (4, 2)]


def test_what_was_found_is_not_measured_again(modules, tmp_path, monkeypatch):
    ruler, questions = modules
    task = questions.Task("niah_single_1", [questions.Context([n], [2], ["3"], 4) for n in range(3)])
    asked = []

    def answers(model, tokenizer, students, context, memories):
        asked.append((context.ids, memories))
        return [(memory, 7, 0.5) for memory in memories]

    monkeypatch.setattr(ruler, "BITS", {"softmax": None})
    monkeypatch.setattr(ruler, "answers", answers)
    ruler.ask(tmp_path, None, None, {"dofla": None}, questions.Task(task.name, task.contexts[:2]))
    ruler.ask(tmp_path, None, None, {"dofla": None, "other": None}, task)
    both, all_three = ["softmax", "dofla"], ["softmax", "dofla", "other"]
    assert asked == [([0], both), ([1], both), ([0], ["other"]), ([1], ["other"]), ([2], all_three)]
    known = questions.read_found(tmp_path)
    assert all(list(known[memory, 0]) == [x.digest for x in task.contexts] for memory in all_three)
    digest = task.contexts[0].digest
    assert known["dofla", 0][digest] == questions.Found("dofla", 0, task.name, digest, 7, 0.5)
    questions.write_tasks(tmp_path, [task], [900, 4000])
    assert questions.read_tasks(tmp_path) == ([task], [900, 4000])


def test_rows_stand_by_bytes_and_then_by_what_is_found_where_some_is_missing_too(modules, tmp_path):
    ruler, questions = modules
    contexts = [questions.Context([n], [2], ["3"], 4) for n in range(4)]
    tasks = [questions.Task("niah_single_1", contexts[:2]), questions.Task("ruler_vt", contexts[2:])]
    rows = {
        "better": (900, 1.0, 0.5),
        "worse": (900, 0.5, 0.5),
        "softmax cache": (4000, 1.0, 1.0),
        "small": (8, 0, None),
    }
    for memory, (held, *means) in rows.items():
        for task, mean in zip(tasks, means, strict=True):
            measured = task.contexts if mean is not None else task.contexts[:1]
            found = [questions.Found(memory, 0, task.name, x.digest, held, mean or 0) for x in measured]
            questions.add_found(tmp_path, found)
    columns = [
        [column.header, *column.cells]
        for column in ruler.merged(questions.read_found(tmp_path), tasks, "title").columns
    ]
    assert columns[0] == ["memory", "softmax cache", "better", "worse", "small"]
    assert columns[3] == ["vt", "1.00", "0.50", "0.50", ""]
    assert columns[4] == ["mean of 2", "1.00 (1.00 to 1.00)", "0.75 (0.50 to 1.00)", "0.50 (0.50 to 0.50)", ""]


def test_the_command_prints_a_row_of_each_memory(
    tiny, modules, model, tokenizer, uncompiled, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(modules[0], "open_original", lambda *_: (model, tokenizer))
    monkeypatch.setattr(dofla, "token_windows", lambda *_, **__: dofla.TokenWindows(tiny.tokens(4, 48)))
    options = {"task": ["niah_single_1"], "length": LENGTH, "contexts": 1, "calibrate": tmp_path}
    for _ in range(2):  # the second time all is measured
        modules[0].main("model", tmp_path / "run", ["size=100KiB,context=2048"], **options)
        printed = capsys.readouterr().out
        for text in (
            modules[0].SOFTMAX,
            "dofla, size=100KiB,context=2048",
            "sample in place of its essays, contexts of each task: 1",
        ):
            assert text in printed
        monkeypatch.setattr(dofla, "compress", None)
    for text in ("size", "=3MiB"):
        with pytest.raises(typer.BadParameter, match="give NAME=VALUE,NAME=VALUE"):
            modules[0].options_of(text)
    assert modules[0].options_of("ratio=8,evict=false,size=3MiB") == {"ratio": 8, "evict": False, "size": "3MiB"}
    with pytest.raises(typer.BadParameter, match="'qa_1': choose of niah_single_1"):
        modules[0].main("model", tmp_path, task=["qa_1"])
    with pytest.raises(DoflaError, match="length 4096: model has 2048 positions, give no more"):
        modules[0].main("model", tmp_path, length=4096)
