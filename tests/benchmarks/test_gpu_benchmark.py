"""``benchmarks/speed/gpu.py`` on a CPU: that it works the first time on a GPU."""

import json
import math

import torch
from benches import script_fixture

bench = script_fixture("speed", "gpu")
OPTIONS = {"shape": "tiny", "device": "cpu", "tokens": 2, "repeats": 1, "compiled": False}


def test_all_is_measured_and_shown(bench, tmp_path, capsys):
    bench.main(length=[16, 24], batch=[1, 2], seconds=math.inf, out=str(tmp_path / "out.json"), **OPTIONS)
    found = json.loads((tmp_path / "out.json").read_text())
    for memory in ("softmax", "compressed"):
        assert all(row["ms"] > 0 for row in found[memory]["prefill"].values())
        assert all(taken > 0 for taken in found[memory]["token"].values())
    assert set(found["softmax"]["token"]) == {"(1, 16)", "(1, 24)", "(2, 16)", "(2, 24)"}
    assert set(found["compressed"]["token"]) == {"1", "2"}
    assert found["fit"]["compressed"] > found["fit"]["softmax"] > 0
    assert "exact prefill" in capsys.readouterr().out


def test_nothing_more_is_begun_when_time_is_up(bench, capsys):
    bench.main(length=[16], batch=[1], seconds=-1, **OPTIONS)
    assert "–, 0.0 GiB" in capsys.readouterr().out


@torch.inference_mode()
def test_a_filled_cache_is_written_in_place_and_attended_to(bench, tiny):
    model = tiny.llama(head_dim=16)
    config = model.config
    size = 1, config.num_key_value_heads, 6, config.head_dim
    own = bench.Bench(model, math.inf, 1)
    cache = own.filled(1, 5)
    keys = [entry.keys for entry in cache.layers]
    before = [x.clone() for x in keys]
    assert keys[0].shape == size
    assert own.token(cache, 1, 5) > 0
    for entry, mine, held in zip(cache.layers, keys, before, strict=True):
        assert entry.keys is mine
        assert torch.equal(mine[:, :, :5], held[:, :, :5])
        assert not torch.equal(mine[:, :, 5:], held[:, :, 5:])
    assert cache.get_seq_length() == 5
