"""A decoded token on a GPU as torch.compile sees it, traced without one: tensors have no contents."""

import sys
from types import SimpleNamespace

import pytest
import torch
from graphs import Graphs
from sizes import compress
from tiny_families import teacher, tokens
from torch._subclasses import FakeTensorMode
from transformers import StaticCache

from dofla.attention import CompressedState, gpu
from dofla.attention.gpu import operators
from dofla.integration.cache import state_entry
from dofla.integration.interface import dofla_attention


def on_a_gpu(model: torch.nn.Module) -> None:
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, x in tensors.items():
                if x is not None:
                    own = torch.empty(x.shape, dtype=x.dtype, device="cuda")
                    tensors[name] = torch.nn.Parameter(own, False) if isinstance(x, torch.nn.Parameter) else own


@pytest.mark.parametrize("head_budgets", ["even", "measured"])
@torch.no_grad()
def test_a_layer_is_one_operator_that_updates_rows_in_place(head_budgets, monkeypatch):
    prepared: list = []
    monkeypatch.setattr(gpu, "_obstacle", lambda: None)
    monkeypatch.setattr(operators, "decoders_of", lambda heads, layout: prepared.append(heads) or [])
    monkeypatch.setattr(operators, "weight_steps", lambda scaling, device: prepared.append([scaling, device.type]))
    model = compress(teacher("llama").to(torch.bfloat16), tokens(4, 48), tokens=48, head_budgets=head_budgets)
    module = next(module for module in model.modules() if "dofla" in module._modules)
    backend = Graphs("eager")
    with FakeTensorMode():
        on_a_gpu(model)
        entry = state_entry(StaticCache(model.config, 64), module)
        entry.update(*[torch.empty(2, 2, 9, 8, device="cuda", dtype=torch.bfloat16)] * 2)
        heads = module.dofla.compressed
        entry.states = [CompressedState(torch.empty(2, heads.layout.bytes, dtype=torch.uint8, device="cuda"))]
        rows, count = entry._rows, entry.tokens

        def step(query, key, value):
            entry.handed_over = True
            return dofla_attention(module, query, *entry.update(key, value), None, dofla_entry=entry)[0]

        parts = [torch.empty(2, 1, count, 8, device="cuda", dtype=torch.bfloat16) for count in (4, 2, 2)]
        out = torch.compile(step, fullgraph=True, backend=backend)(*(x.transpose(1, 2) for x in parts))
    assert backend.calls == [["dofla.decode_token.default"]]
    assert prepared == [[8**-0.5, "cuda"], heads]
    assert out.shape == (2, 1, 4, 8)
    assert out.is_cuda
    assert entry._rows is rows  # neither states nor count moved
    assert entry.tokens is count
    assert count.is_cuda


def test_a_triton_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.10.1"))
    assert gpu.obstacle.__wrapped__() is None
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.3.1"))
    assert "triton 3.3.1 is older than 3.5" in gpu.obstacle.__wrapped__()
