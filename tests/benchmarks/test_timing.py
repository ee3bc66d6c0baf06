"""``benchmarks/peers/timing.py``: who takes turns, and what is said of it."""

import pytest
from benches import script_fixture
from sizes import compress

import dofla

LENGTH = 140
"""More tokens than a QuantizedCache gathers before it codes."""


timing = script_fixture("peers", "timing")


@pytest.fixture
def found(timing, tiny, uncompiled):
    """Seconds of prompts and of tokens, and bytes, by the name of a memory."""
    model, student = (tiny.llama(head_dim=64, max_position_embeddings=512) for _ in range(2))
    compress(student, tiny.tokens(2, 64), tokens=48, head_budgets="even")
    return timing.timed(timing.memories(model, {"ours": student}), LENGTH, repeats=1, new_tokens=1)


def test_every_memory_has_its_time_and_its_bytes(timing, found, quanto):
    prompts, tokens, held = found
    assert list(prompts) == list(tokens) == list(held) == [timing.SOFTMAX, *timing.CODED, "ours"]
    assert min(*prompts.values(), *tokens.values()) > 0
    four, two = (held[name] for name in timing.CODED)
    assert held[timing.SOFTMAX] == LENGTH * 2 * 2 * 2 * 64 * 4  # keys and values of two layers of two heads, in float32
    assert two < four < held[timing.SOFTMAX]


def test_times_stand_beside_the_softmax_cache_of_their_own_turns(timing):
    own = {"turns": "dofla", "length": 100, "bytes": 2048}
    other = {"turns": "kvpress", "length": 100, "bytes": 2048}
    rows = [
        {"memory": timing.SOFTMAX, **own, "prompt": 2.0, "token": 0.020},
        {"memory": "ours", **own, "prompt": 1.0, "token": 0.010},
        {"memory": timing.SOFTMAX, **other, "prompt": 4.0, "token": 0.040},
        {"memory": "press", **other, "prompt": 8.0, "token": 0.010},
    ]
    shown = timing.merged(rows)
    columns = [list(column.cells) for column in shown.columns]
    assert columns[0] == [timing.SOFTMAX, "ours", "press"]
    assert columns[2] == ["2.00, 1.00 x", "1.00, 0.50 x", "8.00, 2.00 x"]
    assert columns[3] == ["20.0, 1.00 x", "10.0, 0.50 x", "10.0, 0.25 x"]


def test_the_command_takes_students_by_name_and_folder(timing, tiny, uncompiled, tmp_path, monkeypatch, capsys):
    model = tiny.llama(head_dim=64, max_position_embeddings=512)
    model.save_pretrained(tmp_path / "model")
    student = compress(model, tiny.tokens(2, 64), tokens=48, head_budgets="even")
    dofla.save_adapter(student, tmp_path / "ours")
    options = {"dtype": "float32", "new_tokens": 1, "repeats": 1}
    timing.main(str(tmp_path / "model"), [f"mine={tmp_path / 'ours'}"], [LENGTH], out=tmp_path / "rows.json", **options)
    printed = capsys.readouterr().out
    for word in ("processor", "mine", timing.SOFTMAX, "1.00 x"):
        assert word in printed
    assert (tmp_path / "rows.json").exists()
