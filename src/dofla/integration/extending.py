"""Methods of a model that are done another way, on this model alone: its class becomes a subclass of the same name.

A function put on a model would stay that of the first model in every copy, pickle could not write it, and a bound
method makes a circle of references: a deleted model would keep its memory until the garbage collector comes by. A class
is shared by copies and written by its name, and its methods are given the model at each call.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    # What an extension comes before.
    class _Extended(PreTrainedModel):
        def generate(self, *args: Any, **options: Any) -> Any: ...
else:
    _Extended = object


class Extension(_Extended):
    """Base of classes whose methods come before those of a model's own class, which they call by ``super()``.

    Attributes:
        place: the extension with the lowest number comes first where a model has several, whatever order they came in.
        holder: attribute of the model that holds what the extension works with.
    """

    place: ClassVar[int]
    holder: ClassVar[str]
    extended: ClassVar[tuple[type[nn.Module], tuple[type[Extension], ...]]]

    def __reduce_ex__(self, protocol: Any) -> tuple:
        # The class was made here, so it is written as what it was made of; copies are made in this way too.
        reduced = super().__reduce_ex__(max(int(protocol), 2))
        return _empty, self.extended, *reduced[2:]


def extend(model: nn.Module, extension: type[Extension], held: Any) -> None:
    """Put an extension before the class of a model, in place, and ``held`` where it looks; another one of the same kind
    is replaced."""
    base, present = vars(type(model)).get("extended", (type(model), ()))
    found = sorted({*present, extension}, key=lambda each: each.place)
    model.__class__ = _extended(base, tuple(found))
    setattr(model, extension.holder, held)


def withdraw(model: nn.Module) -> None:
    """Give a model, and what is in it, the classes that they had."""
    for module in model.modules():
        base, present = vars(type(module)).get("extended", (None, ()))
        for extension in present:
            module.__dict__.pop(extension.holder, None)
        if base is not None:
            module.__class__ = base


@cache
def _extended(base: type, extensions: tuple[type[Extension], ...]) -> type[nn.Module]:
    # transformers takes the name of a class for that of an architecture: it stays.
    same = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (*extensions, base), {**same, "extended": (base, extensions)})


def _empty(base: type, extensions: tuple[type[Extension], ...]) -> nn.Module:
    made = _extended(base, extensions)
    return made.__new__(made)
