"""``benchmarks/peers/lookups.py``: what is told in a context can be found there, and answers are scored by it."""

import re

import pytest
import torch
import typer
from benches import scripts
from students import reader_of
from transformers import DynamicCache

import dofla
from dofla.errors import DoflaError


@pytest.fixture(scope="module")
def modules():
    """``needles``, ``lookups`` and ``questions``."""
    with scripts("peers", "needles", "lookups", "questions") as modules:
        yield modules


@pytest.fixture
def writer(modules, tokenizer):
    words = [word[1:] for word in tokenizer.get_vocab() if re.fullmatch("Ġ[a-z]{4,8}", word)]
    return modules[0].Writer(tokenizer, tokenizer.encode(". ".join(words), add_special_tokens=False))


def kinds(modules):
    return [(kind, template) for kind, (_, templates) in modules[0].KINDS.items() for template in templates]


def test_contexts_have_room_for_what_is_asked_hold_it_and_are_those_of_the_seed(modules, writer, tokenizer):
    for kind, template in kinds(modules):
        first, again, other = (writer.contexts(kind, template, 700, 2, seed=n) for n in (0, 0, 1))
        assert first == again != other
        for context in first:
            text = tokenizer.decode(context.ids)
            longest = max(len(question.ids) + question.room for question in context.questions)
            assert 500 <= len(context.ids) + longest <= 700, (kind, template)
            for question in context.questions:
                assert all(answer in text for answer in question.answers), (kind, template)
                assert len(tokenizer.encode(" " + ", ".join(question.answers))) <= question.room


def test_a_needle_is_asked_for_by_its_key(modules, writer, tokenizer):
    for kind, count in (("single", 1), ("multi-key", modules[0].NEEDLES)):
        (context,) = writer.contexts(kind, "pass codes", 700, 1, seed=0)
        told = re.findall(r"The pass code of the (\w+) is (\d+)\.", tokenizer.decode(context.ids))
        assert len(told) == count == len(context.questions)
        for question in context.questions:
            (key,) = re.findall(r"What is the pass code of the (\w+)\?", tokenizer.decode(question.ids))
            assert (key, question.answers[0]) in told


def test_variables_lead_from_one_to_the_next(modules, writer, tokenizer):
    (context,) = writer.contexts("variables", "as it is", 700, 1, seed=0)
    steps = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", tokenizer.decode(context.ids))
    assert [name for name, _ in steps] == list(context.questions[0].answers)
    assert [value for _, value in steps[1:]] == [name for name, _ in steps[:-1]]


def test_common_words_are_the_most_common(modules, writer, tokenizer):
    (context,) = writer.contexts("common words", "as it is", 1500, 1, seed=0)
    listed = re.findall(r"\d+\. ([a-z]+)", tokenizer.decode(context.ids))
    common = context.questions[0].answers
    assert min(map(listed.count, common)) > max(listed.count(word) for word in set(listed) - set(common))


def test_the_score_is_the_share_that_was_written(modules):
    question = modules[2].Question([], ["apple", "pear", "plum", "fig"], 9)
    assert question.score("1. Apple 2. grape 3. plum") == 0.5
    assert question.score("") == 0


def test_too_short_a_context_and_a_text_of_few_words_are_refused(modules, writer, tokenizer):
    for length in (30, 60):
        with pytest.raises(DoflaError, match=f"length {length} leaves .* give a greater length"):
            writer.contexts("multi-key", "magic numbers", length, 1, seed=0)
    with pytest.raises(DoflaError, match="give one with 200 or more"):
        modules[0].Writer(tokenizer, tokenizer.encode("A few words."))


@torch.no_grad()
def test_answers_are_those_of_whole_prompts_read_from_the_start(tiny, modules, writer, tokenizer, monkeypatch):
    needles, lookups, questions = modules
    student, said = reader_of(tiny, "llama"), []
    monkeypatch.setattr(questions.Question, "score", lambda question, written: said.append(written) or 1.0)
    (context,) = writer.contexts("multi-key", "pass codes", 200, 1, seed=0)
    scores, held = lookups.answer(student, tokenizer, context)
    assert scores == [1.0] * needles.NEEDLES
    assert held > 0
    for question, written in zip(context.questions, said, strict=True):
        ids = torch.tensor([context.ids + question.ids])
        whole = student.generate(ids, max_new_tokens=question.room, do_sample=False, attention_mask=ids > -1)
        assert tokenizer.decode(whole[0, ids.shape[1] :]) == written


@torch.no_grad()
def test_a_memory_of_fewer_tokens_than_were_read_answers_at_the_places_of_the_text(tiny, modules):
    model, tokens = tiny.llama(max_position_embeddings=64).double(), tiny.tokens(1, 30)
    places = torch.arange(20)[None]

    def remembered():
        """Of 20 tokens the last six."""
        cache = DynamicCache(config=model.config)
        model(tokens[:, :20], past_key_values=cache, position_ids=places)
        kept = [(layer.keys[:, :, -6:], layer.values[:, :, -6:]) for layer in cache.layers]
        return filled(kept, DynamicCache(config=model.config))

    def filled(pairs, cache):
        for index, (keys, values) in enumerate(pairs):
            cache.update(keys, values, index)
        return cache

    ids = tokens[0, 20:].tolist()
    written = [modules[2].write(model, remembered(), ids, 20, 4, chunk=chunk) for chunk in (None, 3)]
    mask = torch.ones(34, 34, dtype=torch.bool).tril()
    mask[20:, :14] = False  # the question and the answer see the last six tokens of the context alone
    whole = tokens
    for _ in range(4):
        own = mask[: whole.shape[1], : whole.shape[1]]
        whole = torch.cat([whole, model(whole, attention_mask=own[None, None]).logits[:, -1:].argmax(dim=-1)], dim=1)
    assert written == [whole[0, 30:].tolist()] * 2


@torch.no_grad()
def test_a_quantized_cache_has_coded_the_context_when_it_is_asked(tiny, modules, writer, tokenizer, quanto):
    model = tiny.llama(vocab_size=len(tokenizer), head_dim=64, max_position_embeddings=256)
    (context,) = writer.contexts("multi-key", "pass codes", 200, 1, seed=0)
    for bits in (4, 2):
        scores, held = modules[1].answer_coded(model, tokenizer, bits, context)
        assert len(scores) == modules[0].NEEDLES
        # Of 2 layers, keys and values of 2 heads: codes, a scale and an offset for each token.
        assert held == 2 * 2 * 2 * len(context.ids) * (64 * bits // 8 + 2 + 2)


def test_what_was_found_is_not_measured_again_and_intervals_are_over_contexts(modules, writer, tmp_path):
    _, lookups, questions = modules
    task = writer.task("single", "pass codes", 150, 2, seed=0)
    found = lookups.ask(tmp_path, "dofla.compress", 900, lambda context: ([0.5] * len(context.questions), 7), task)
    assert (found.scores, found.bytes, found.limit) == ([[0.5], [0.5]], 7, 900)

    def never(_):
        raise AssertionError

    assert lookups.ask(tmp_path, "dofla.compress", 900, never, task) == found
    for other in (
        writer.task("single", "pass codes", 150, 3, seed=0),
        writer.task("single", "pass codes", 140, 2, seed=0),
        writer.task("single", "magic numbers", 150, 2, seed=0),
    ):
        assert questions.read_found(tmp_path, other) == {}
    assert questions.read_found(tmp_path, task) == {("dofla.compress", 900): found}
    other = questions.Found("x", 0, "multi-key", "pass codes", 150, 1024, [[1, 1, 1, 0], [0, 0, 0, 1]])
    assert lookups.cell(other) == "0.50 (0.25 to 0.75)"


def test_rows_stand_by_bytes_and_then_by_what_is_found_where_some_is_missing_too(modules, writer, tmp_path):
    _, lookups, questions = modules
    tasks = [writer.task("single", "pass codes", length, 2, seed=0) for length in (150, 160)]
    rows = {("better", 900): (1.0, 0.5), ("worse", 900): (0.5, 0.5), ("softmax cache", 0): (1.0, 1.0)}
    rows |= {("large", 4000): (0.0, None)}
    for (memory, limit), means in rows.items():
        for task, mean in zip(tasks, means, strict=True):
            if mean is not None:
                scores = [[mean], [mean]]
                questions.Found(memory, limit, "single", "pass codes", task.length, 1024, scores).write(tmp_path)
    columns = [list(column.cells) for column in lookups.merged(tmp_path, tasks).columns]
    assert columns[0] == ["softmax cache", "better", "worse", "large"]
    assert columns[1] == ["1.0 KiB"] * 4
    assert columns[3] == ["1.00 (1.00 to 1.00)", "0.50 (0.50 to 0.50)", "0.50 (0.50 to 0.50)", ""]


def test_what_is_asked_reaches_the_other_environment(modules, writer, tmp_path):
    questions = modules[2]
    tasks = [writer.task(*asked, 700, 2, seed=0) for asked in (("single", "pass codes"), ("variables", "as it is"))]
    questions.write_tasks(tmp_path, tasks, [900, 4000])
    assert questions.read_tasks(tmp_path) == (tasks, [900, 4000])
    assert questions.read_found(tmp_path, tasks[0]) == {}


@pytest.fixture
def lookups(tiny, modules, writer, tokenizer, uncompiled, monkeypatch):
    """The command, with a small model and few windows of text."""
    model = tiny.llama(vocab_size=len(tokenizer), head_dim=64)
    monkeypatch.setattr(modules[1], "open_original", lambda *_: (model, tokenizer))
    monkeypatch.setattr(modules[1], "all_tokens", lambda *_: writer.text)
    monkeypatch.setattr(dofla, "token_windows", lambda *_, **__: dofla.TokenWindows(tiny.tokens(4, 48)))
    return modules[1]


def test_saved_students_are_asked_instead_of_compressing(tiny, lookups, tokenizer, tmp_path, monkeypatch, capsys):
    opened, saved = [], tiny.llama(vocab_size=len(tokenizer), head_dim=64)
    dofla.compress(saved, tiny.tokens(4, 48), ratio=4, context=160, head_budgets="even")
    monkeypatch.setattr(dofla, "load", lambda folder, **_: opened.append(folder) or saved)
    options = {"kind": ["single"], "cache": ["25KiB"], "length": [150], "questions": 2, "choosing": 2, "least": 0.0}
    for _ in range(2):  # the second time all is measured
        lookups.main("model", tmp_path, tmp_path, tmp_path / "run", **options, student=["mine=folder"])
        printed = capsys.readouterr().out
        assert "mine" in printed
        assert lookups.OURS not in printed
    assert opened == ["folder"]
    with pytest.raises(typer.BadParameter, match="--retrieval-heads 1: compress with them"):
        lookups.main("model", tmp_path, tmp_path, tmp_path / "run", student=["mine=folder"], retrieval_heads=1)


def test_the_command_prints_a_row_of_each_memory(lookups, tmp_path, capsys):
    options = {"kind": ["single"], "cache": ["25KiB"], "length": [150], "questions": 2, "choosing": 2}
    lookups.main("model", tmp_path, tmp_path, tmp_path / "run", least=0.0, **options, context=160, retrieval_heads=1)
    printed = capsys.readouterr().out
    ours = ("dofla.compress, context 160", "dofla.compress, 1 retrieval heads, context 160")
    for row in (lookups.SOFTMAX, *ours, "window and sinks, 8 bits, context 160", "single, 150 (2)"):
        assert row in printed
    assert lookups.TRIED not in printed
    with pytest.raises(DoflaError, match=r"the original scores below 1\.1 on every kind"):
        lookups.main("model", tmp_path, tmp_path, tmp_path / "run", least=1.1, **options)
    capsys.readouterr()
    lookups.main("model", tmp_path, tmp_path, tmp_path / "run", least=0.0, **options, template=["pass codes"])
    printed = capsys.readouterr().out
    assert "(pass codes)" in printed
    assert "(magic numbers)" not in printed
    with pytest.raises(typer.BadParameter, match="no template left for single: choose of single: magic numbers, pass"):
        lookups.main("model", tmp_path, tmp_path, tmp_path / "run", **options, template=["as it is"])
