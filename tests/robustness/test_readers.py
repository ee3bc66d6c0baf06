"""Whatever is wrong with an input: one line that names the file, never another exception; and no change of a sealed
file goes unnoticed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from damage import Damage, damages
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from inputs import READERS

from dofla import DoflaError

ONLY_GENERATE = {"phases": [Phase.generate], "database": None, "deadline": None}
SLOW = ("adapter", "standalone", "prompt state", "distillation")


def fuzz(made: Path, name: str, inputs: int, **options) -> Counter:
    """Damage the files of a reader so many times; returns how often it was refused, and how often read."""
    reader, counts, faults = READERS[name], Counter(), []
    original = reader.read(made)
    whole = {file: (made / file).read_bytes() for file in (*reader.sealed, *reader.open)}

    def read(file: str, damage: Damage) -> str | None:
        """What is wrong with what is made of it."""
        path = made / file
        try:
            path.unlink()
            if damage.content is not None:
                path.write_bytes(damage.content)
            found = reader.read(made)
        except DoflaError as error:
            counts["refused"] += 1
            message = str(error)
            named = path.name in message or path.parent.name in message
            return None if named and "\n" not in message else f"says {message!r}"
        except Exception as error:
            return repr(error)
        finally:
            path.write_bytes(whole[file])
        counts["read"] += 1
        noticed = file not in reader.sealed or damage.unsealed or found == original
        return None if noticed else "goes unnoticed"

    @settings(max_examples=inputs, suppress_health_check=list(HealthCheck), **options | ONLY_GENERATE)
    @given(st.data())
    def test(data):
        file = data.draw(st.sampled_from(list(whole)))
        damage = data.draw(damages(file, whole[file]))
        if found := read(file, damage):
            faults.append(f"{file}, {damage.what}: {found}")

    test()
    assert not faults, "\n".join(faults[:20])
    return counts


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_input_is_refused_in_one_line_or_harmless(made, name):
    counts = fuzz(made, name, 12 if name in SLOW else 40, derandomize=True)
    assert counts["refused"] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_hundreds_of_damaged_inputs(made, name, capsys):
    counts = fuzz(made, name, 200 if name in SLOW else 500)
    with capsys.disabled():
        found = f"{counts['refused']} refused, {counts['read']} read, 0 tracebacks"
        print(f"\n{name}: {counts.total()} tried, {found}")
