"""safetensors files that are whole or not there."""

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dofla.errors import DoflaError
from dofla.storage.files import replacing


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors; DoflaError if the system does not let it."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as partial:
        save_file(tensors, partial, metadata=dict(metadata) if metadata else None)
        os.umask(mask := os.umask(0))
        partial.chmod(0o666 & ~mask)  # safetensors would keep it from everybody else


def read_tensors(
    path: str | Path,
    way_out: str = "copy or make it again",
    *,
    finite: bool = True,
    names: Collection[str] | None = None,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, or those of these ``names``, on the CPU, and its metadata; DoflaError naming the file and
    the ``way_out`` if it is missing, damaged, or, where it is to be ``finite``, holds NaN or infinity."""
    try:
        with safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in names or file.keys()}
    except FileNotFoundError:
        raise DoflaError(f"{path} does not exist: {way_out}") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise DoflaError(f"{path} is damaged ({error}): {way_out}") from error
    for name, tensor in tensors.items() if finite else ():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise DoflaError(f"{path} is damaged ({name} holds NaN or infinity): {way_out}")
    return tensors, metadata


def digest(tensors: Iterable[Tensor], *options: object) -> str:
    """A digest of what tensors hold, and of plain options, in hexadecimal digits."""
    found = hashlib.blake2b(repr(options).encode(), digest_size=8)
    for tensor in tensors:
        found.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()
