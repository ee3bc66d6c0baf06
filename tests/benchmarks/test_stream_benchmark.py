"""``benchmarks/quality/stream.py``: losses of a stream by block, however it is read."""

import pytest
import torch
from benches import script_fixture
from torch.nn.functional import cross_entropy

import dofla
from dofla.integration.cache import cache_bytes

PIECE = 10


module = script_fixture("quality", "stream")


@pytest.fixture
def stream(module, monkeypatch):
    monkeypatch.setattr(module, "PIECE", PIECE)
    return module


@pytest.fixture
def student(tiny):
    model = tiny.llama(max_position_embeddings=64).double()
    return tiny.compressed(model)


def read(stream, way, student, ids, **options):
    losses, held = zip(*stream.WAYS[way](student, ids, options.get("positions", 64), 20), strict=True)
    return torch.cat(losses), set(held)


def whole(student, ids):
    return cross_entropy(student(ids[None, :-1]).logits[0].float(), ids[1:], reduction="none")


@torch.no_grad()
def test_as_far_as_there_are_positions_all_ways_are_one(stream, student, tiny):
    ids = tiny.tokens(1, 61)[0]
    for way in stream.WAYS:
        losses, held = read(stream, way, student, ids)
        assert torch.allclose(losses, whole(student, ids))
        assert len(held) == 1


@torch.no_grad()
def test_past_them_each_goes_its_way(stream, student, tiny):
    ids = tiny.tokens(1, 101)[0]
    found = {way: read(stream, way, student, ids)[0] for way in stream.WAYS}
    assert torch.allclose(found["on"], whole(student, ids))
    assert not torch.allclose(found["wrapped"][70:], found["on"][70:])
    # The seventh piece begins a state at its 60 - 20.
    assert torch.allclose(found["again"][60:], whole(student, ids[40:])[20:])


@torch.no_grad()
def test_the_original_sees_as_much_before_each_token(stream, student, tiny):
    ids = tiny.tokens(1, 51)[0]
    losses = stream.original(student, ids, 20)
    with dofla.original(student):
        for token in (5, 10, 29, 30, 49):
            before = max(0, token - token % 10 - 10)
            assert torch.allclose(losses[token], whole(student, ids[before : token + 2])[-1])
        assert torch.allclose(stream.original(student, ids, 200), whole(student, ids))


def test_the_table_has_gaps_by_block_and_what_changed(stream):
    teacher = torch.tensor([1.0, 1.0, 2.0, 2.0], dtype=torch.float64)
    way = stream.Way([1.25, 1.25, 2.5, 2.5], [1024, 2048, 1024, 1024])
    columns = [list(column.cells) for column in stream.summary({"on": way}, teacher, 2 * PIECE).columns]
    assert columns[1] == ["0 to 20", "20 to 40"]
    assert columns[4] == ["0.250 (0.250 to 0.250)", "0.500 (0.500 to 0.500)"]
    assert columns[5] == ["+0.000", "+0.250"]
    assert columns[6] == ["2.0 KiB", "1.0 KiB"]


def test_the_command_prints_a_row_of_each_block(stream, student, tiny, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dofla, "load", lambda *_, **__: student)
    monkeypatch.setattr(stream.AutoTokenizer, "from_pretrained", lambda _: tokenizer)
    monkeypatch.setattr(dofla, "token_windows", lambda *_, length, **__: dofla.TokenWindows(tiny.tokens(1, length)))
    out = tmp_path / "stream.json"
    stream.main("student", tmp_path, tokens=100, block=50, way=None, overlap=20, context=20, positions=None, out=out)
    printed = capsys.readouterr().out
    assert printed.count("50 to 100") == len(stream.WAYS)
    assert out.exists()
    held = dofla.serving.Stream(student)
    held.read(tiny.tokens(1, 10))
    assert f"{cache_bytes(held.cache) / 1024:.1f} KiB" in printed
