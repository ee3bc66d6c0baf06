"""safetensors files."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.errors import DoflaError
from dofla.storage.tensors import read_tensors, write_tensors

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]
SHAPES = [(), (0,), (1,), (3,), (2, 3), (0, 4), (2, 1, 2)]


@given(
    st.dictionaries(st.text(min_size=1, max_size=5), st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES))),
    st.dictionaries(st.text(min_size=1, max_size=5), st.text(max_size=5), max_size=3),
)
@settings(max_examples=30)
def test_what_was_written_is_read(tmp_path_factory, kinds, metadata):
    path = tmp_path_factory.mktemp("tensors") / "a.safetensors"
    tensors = {name: (torch.rand(shape) * 3).to(dtype) for name, (dtype, shape) in kinds.items() if "__" not in name}
    write_tensors(path, tensors, metadata)
    found, words = read_tensors(path)
    assert words == metadata
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_parameters_and_transposed_tensors_are_written_as_they_look(tmp_path):
    weight = torch.nn.Parameter(torch.rand(2, 3))
    write_tensors(tmp_path / "a.safetensors", {"a": weight, "b": weight.T})
    found, _ = read_tensors(tmp_path / "a.safetensors")
    assert torch.equal(found["a"], weight)
    assert torch.equal(found["b"], weight.T)


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_file_that_is_cut_is_refused(tmp_path, size):
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": torch.arange(40.0)}, {"of": "x"})
    path.write_bytes(path.read_bytes()[:size])
    for place in (path, tmp_path):  # or is a folder
        with pytest.raises(DoflaError, match=rf"{place} is damaged \(.*\): make it again"):
            read_tensors(place, "make it again")


def test_numbers_that_are_not_finite_are_refused_unless_they_are_expected(tmp_path):
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": torch.tensor([1.0, torch.inf])})
    with pytest.raises(DoflaError, match="a holds NaN or infinity"):
        read_tensors(path)
    assert read_tensors(path, finite=False)[0]["a"][1] == torch.inf
