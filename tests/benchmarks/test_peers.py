"""``benchmarks/peers``: what its rows say of bytes and of losses. Its presses run in an environment of their own."""

import pytest
import torch
import typer
from arithmetic import sum_error
from benches import scripts
from sizes import compress, size_of
from transformers import DynamicCache, QuantizedCache

import dofla
from dofla.attention.constants import ALIGNMENT
from dofla.attention.layout import PARTS
from dofla.errors import DoflaError
from dofla.integration.cache import cache_bytes

WRITTEN = 256
"""Tokens judged here, instead of 512: twice those that a QuantizedCache gathers."""


@pytest.fixture(scope="module")
def modules():
    """``judging`` and ``continuation``."""
    with scripts("peers", "judging", "continuation") as modules:
        yield modules


@pytest.fixture
def judging(modules, monkeypatch):
    for module in modules:
        monkeypatch.setattr(module, "WRITTEN", WRITTEN)
    return modules[0]


@pytest.fixture
def continuation(modules, judging):
    return modules[1]


@pytest.fixture
def model(tiny):
    """Two layers of two KV heads of 64 numbers, which a QuantizedCache takes as one group."""
    return tiny.llama(head_dim=64, max_position_embeddings=512).double()


def row(judging, name="dofla.compress", limit=1000, losses=(1.0, 2.0), **bytes_of_it):
    known = {"prompt_bytes": limit, "end_bytes": limit, **bytes_of_it}
    return judging.Row(name, "constant", limit, losses={"books": list(losses)}, **known)


@torch.no_grad()
def test_what_is_written_in_pieces_has_the_loss_of_one_call(judging, model, tiny):
    window = tiny.tokens(1, WRITTEN + 20)
    losses = [judging.loss_of(model, *judging.read_prompt(model, window), window, chunk=size) for size in (WRITTEN, 7)]
    logits = model(window).logits[0, -WRITTEN - 1 : -1]
    whole = torch.nn.functional.cross_entropy(logits.float(), window[0, -WRITTEN:]).item()
    # transformers' loss is of float32 logits.
    assert losses == pytest.approx([whole] * 2, rel=sum_error(WRITTEN))


@torch.no_grad()
def test_a_memory_of_fewer_tokens_than_were_read_goes_on_at_the_places_of_the_text(judging, model, tiny):
    window = tiny.tokens(1, WRITTEN + 20)
    cache, first = judging.read_prompt(model, window)
    pairs = [(layer.keys[:, :, -6:], layer.values[:, :, -6:]) for layer in cache.layers]
    loss = judging.loss_of(model, judging.filled(pairs, DynamicCache(config=model.config)), first, window)

    mask = torch.ones(WRITTEN + 20, WRITTEN + 20, dtype=torch.bool).tril()
    mask[20:, : 20 - 6] = False  # what is written sees the last six tokens of the prompt alone
    logits = model(window, attention_mask=mask[None, None]).logits[0, -WRITTEN - 1 : -1]
    whole = torch.nn.functional.cross_entropy(logits.float(), window[0, -WRITTEN:]).item()
    assert loss == pytest.approx(whole, rel=sum_error(WRITTEN))


@torch.no_grad()
def test_a_quantized_cache_in_pieces_is_that_of_token_by_token_and_so_are_its_bytes(
    continuation, judging, model, tiny, quanto
):
    window = tiny.tokens(1, WRITTEN + 40)
    rows = {found.memory: found for found in continuation.cache_rows(model, {"books": window})}
    assert (rows["softmax cache"].prompt_bytes, rows["softmax cache"].end_bytes) == (40 * 1024, (40 + WRITTEN) * 1024)
    for name, bits in continuation.CODED.items():
        # Of 2 layers, keys and values of 2 heads: codes, a scale and an offset for each token.
        assert rows[name].prompt_bytes == 2 * 2 * 2 * 40 * (64 * bits // 8 + 2 + 2)

    prompt, first = judging.read_prompt(model, window)
    pairs = [(layer.keys, layer.values) for layer in prompt.layers]
    cache, held = judging.filled(pairs, QuantizedCache("quanto", model.config, nbits=4)), []
    model.register_forward_hook(lambda *_: held.append(continuation.coded_bytes(cache)))
    loss = judging.loss_of(model, cache, first, window, chunk=1)
    found = rows["QuantizedCache, 4 bits"]
    assert found.losses["books"] == pytest.approx([loss], rel=sum_error(WRITTEN))
    assert found.end_bytes == max(held)


def test_a_memory_that_fades_has_the_bytes_it_may_take_after_the_prompt_and_at_the_end(continuation, tiny):
    model = tiny.llama(max_position_embeddings=512)
    limit = continuation.limit_of(model, size_of(model, 48))
    texts = {"books": tiny.tokens(2, WRITTEN + 40), "stories": tiny.tokens(1, WRITTEN + 40, seed=1)}
    student = compress(model, tiny.tokens(2, 48), tokens=48, head_budgets="even")
    found = continuation.student_row("dofla.compress", limit, student, texts)
    assert found.prompt_bytes == found.end_bytes == limit
    loss, _ = continuation.judge_student(student, texts["stories"])
    assert [len(found.losses[name]) for name in texts] == [2, 1]
    assert found.losses["stories"] == [loss]


@torch.no_grad()
def test_a_student_reads_the_prompt_in_one_call_and_writes_token_by_token(continuation, judging, tiny):
    model, window = tiny.llama(max_position_embeddings=1024), tiny.tokens(1, WRITTEN + 200)
    student = compress(model, tiny.tokens(2, 48), tokens=48, head_budgets="even")
    cache, first = judging.read_prompt(student, window)
    written = judging.loss_of(student, cache, first, window, chunk=1)
    judged, held = continuation.judge_student(student, window)
    assert held == cache_bytes(cache)
    assert judged == pytest.approx(written, rel=sum_error(WRITTEN))
    at_once = judging.loss_of(student, *judging.read_prompt(student, window), window)
    assert abs(at_once - written) > 1e-4  # with exact attention among the tokens that are written


def test_models_of_one_size_take_no_more_than_its_bytes(continuation, tiny):
    model = tiny.llama(max_position_embeddings=512)
    known = dofla.calibrate(model, dofla.TokenWindows(tiny.tokens(2, 48)))
    limit = continuation.limit_of(model, size_of(model, 48))
    aligned = 4 * len(PARTS) * (ALIGNMENT - 1)  # each of two layers' two KV heads has a size, and so parts, of its own
    for name, make in continuation.students(size_of(model, 48), lambda: known, lambda: known).items():
        held = continuation.judge_student(make(model), tiny.tokens(1, WRITTEN + 40))[1]
        assert 0.5 * limit < held <= limit + aligned, name
        dofla.restore(model)


def test_the_bytes_of_what_is_not_constant_are_seen_to_grow(continuation, model, tiny):
    found = continuation.student_row("softmax", 0, model, {"books": tiny.tokens(1, WRITTEN + 40)})
    assert (found.prompt_bytes, found.end_bytes) == (40 * 4096, (40 + WRITTEN) * 4096)  # float64


def test_gaps_are_differences_on_the_windows_that_a_row_has(continuation, judging):
    softmax = row(judging, "softmax cache", 0, (1.0, 2.0, 6.0))
    [(mean, interval)] = continuation.gaps(row(judging, losses=(1.25, 2.5)), softmax).values()
    assert mean == 0.375
    assert interval == [0.25, 0.5]
    # In the order of the first row, whatever that of another.
    softmax.losses, other = {"stories": [1.0], "python": [2.0]}, row(judging)
    other.losses = {"python": [2.5], "stories": [1.125]}
    gaps = [(text, mean) for text, (mean, _) in continuation.gaps(other, softmax).items()]
    assert gaps == [("stories", 0.125), ("python", 0.5)]


def test_what_a_row_loses_beyond_ours_is_paired_over_the_windows_of_all_texts(continuation, judging):
    ours, other = row(judging), row(judging, "a press")
    ours.losses = {"stories": [1.0, 2.0], "python": [4.0]}
    other.losses = {"python": [4.5], "stories": [1.25, 2.0]}
    mean, (low, high) = continuation.beyond(other, ours, other.losses)
    assert mean == pytest.approx(0.25)
    assert 0 <= low < mean < high <= 0.5
    shown = continuation.merged(
        {x.name: x for x in (row(judging, "softmax cache", 0), row(judging), row(judging, "p"))}
    )
    assert list(shown.columns[-1].cells) == ["", "", "0.000 (0.000 to 0.000)"]


def test_the_table_has_all_rows_by_bytes_and_then_by_gap(continuation, judging, tmp_path):
    rows = [
        row(judging, "worse", losses=(1.5, 2.5, 3.5)),
        row(judging, "softmax cache", 0, (1.0, 2.0, 3.0), prompt_bytes=2048, end_bytes=4096),
        row(judging, "large", 2000, losses=(1.0, 2.0, 3.0)),
        row(judging, "better", losses=(1.25, 2.25)),
    ]
    for each in rows:
        each.write(tmp_path)
    found = judging.read_rows(tmp_path)
    assert found == {each.name: each for each in rows}
    columns = [list(column.cells) for column in continuation.merged(found).columns]
    assert columns[0] == ["softmax cache", "better", "worse", "large"]
    assert (columns[2][0], columns[3][0]) == ("2.0 KiB", "4.0 KiB")
    assert columns[4][1] == "0.250 (0.250 to 0.250)"
    assert (columns[5][1], columns[6][1]) == ("0.250", "+28.4 %")
    assert columns[7] == ["3", "2", "3", "3"]


def test_a_folder_keeps_to_its_windows_and_bytes(continuation, judging, tiny, tmp_path):
    texts, folder = {"books": tiny.tokens(2, 40)}, tmp_path / "run"
    for _ in range(2):
        continuation.write_texts(folder, texts, [1000, 4000])
    [(name, windows)], limits = judging.read_texts(folder)[0].items(), judging.read_texts(folder)[1]
    assert (name, limits) == ("books", [1000, 4000])
    assert windows.equal(texts["books"])
    others = (
        ({"books": tiny.tokens(2, 40, seed=1)}, [1000, 4000]),
        (texts, [1000]),
        ({"tales": texts["books"]}, [1000, 4000]),
    )
    for other in others:
        with pytest.raises(DoflaError, match="begun with other windows"):
            continuation.write_texts(folder, *other)


def test_saved_students_have_a_name_and_a_folder(continuation):
    assert continuation.saved(["trained=runs/a", "paper=runs/b=c"]) == {"trained": "runs/a", "paper": "runs/b=c"}
    for wrong in ("trained", "=runs/a", "trained="):
        with pytest.raises(typer.BadParameter, match=f"{wrong!r}: give NAME=FOLDER"):
            continuation.saved(["paper=runs/b", wrong])
