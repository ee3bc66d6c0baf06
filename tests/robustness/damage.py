"""Ways in which a file comes to be wrong, as hypothesis strategies."""

import copy
import json
from dataclasses import dataclass
from typing import Any

import yaml
from hypothesis import strategies as st

NUMBERS = st.one_of(st.integers(-3, 70), st.sampled_from([2**31, 2**64, -(2**63), 10**30]), st.floats())
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=4,
)
OTHERS = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([b"", b"\n", b"null", b"[]", b"{}", b"[" * 100_000, b'{"a": %s}' % (b"9" * 5000)]),
)


@dataclass(frozen=True)
class Damage:
    """What a file has become; its content is None if it is gone."""

    what: str
    content: bytes | None


@st.composite
def damages(draw: st.DrawFn, name: str, content: bytes) -> Damage:
    """A file of this name and content, with something wrong."""
    kinds = ["flip", "flip", "cut", "insert", "other", "gone"]
    if name.endswith((".json", ".yaml", ".jsonl", ".safetensors")):
        kinds += ["field"] * 6
    kind = draw(st.sampled_from(kinds))
    if kind == "field":
        return draw(_fields(name, content))
    place = draw(st.integers(0, len(content) - 1))
    if kind == "flip":
        bit = 1 << draw(st.integers(0, 7))
        return Damage(kind, content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
    if kind == "cut":
        return Damage(kind, content[:place])
    if kind == "insert":
        return Damage(kind, content[:place] + draw(st.binary(min_size=1, max_size=8)) + content[place:])
    if kind == "gone":
        return Damage(kind, None)
    return Damage(kind, draw(OTHERS))


@st.composite
def _fields(draw: st.DrawFn, name: str, content: bytes) -> Damage:
    """One field changed, taken away or given another name."""
    document, rest = _opened(name, content)
    before = copy.deepcopy(document)
    place = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw(st.sampled_from(keys))
        if not (isinstance(place[key], (dict, list)) and place[key]) or draw(st.integers(0, 5)) == 0:
            break
        place = place[key]
    how = draw(st.sampled_from(["change", "change", "remove", "rename"]))
    value = place[key] if how != "change" else draw(VALUES)
    if how != "change":
        del place[key]
    if how == "change":
        place[key] = value
    elif how == "rename" and isinstance(place, dict):
        place[draw(st.text(max_size=6))] = value
    return Damage(f"{how} {key!r} of {before!r:.60}", _closed(name, document, rest))


def _opened(name: str, content: bytes) -> tuple[Any, bytes]:
    """What a file says in words, and the rest of it."""
    if name.endswith(".safetensors"):
        end = 8 + int.from_bytes(content[:8], "little")
        return json.loads(content[8:end]), content[end:]
    if name.endswith(".jsonl"):
        first, _, rest = content.partition(b"\n")
        return json.loads(first), rest
    return (yaml.safe_load(content) if name.endswith(".yaml") else json.loads(content)), b""


def _closed(name: str, document: Any, rest: bytes) -> bytes:
    if name.endswith(".yaml"):
        return yaml.safe_dump(document, allow_unicode=True).encode("utf-8", "surrogatepass")
    text = json.dumps(document).encode()
    if name.endswith(".safetensors"):
        return len(text).to_bytes(8, "little") + text + rest
    return text + b"\n" + rest if name.endswith(".jsonl") else text
