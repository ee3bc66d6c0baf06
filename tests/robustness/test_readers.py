"""Whatever is wrong with an input: one line that names the file, never another exception; and no change of a checked
file goes unnoticed."""

from pathlib import Path

import pytest
from damage import Damage, damages
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from inputs import READERS
from trials import ACCEPTED, FAULT, REFUSED, TRACEBACK, Trials

from dofla import DoflaError

ONLY_GENERATE = {"phases": [Phase.generate], "database": None, "deadline": None}
SLOW = ("adapter", "standalone", "teacher", "prompt state", "distillation", "end-to-end distillation", "report")


def fuzz(made: Path, name: str, inputs: int, **options) -> Trials:
    """Damage the files of a reader so many times."""
    reader, trials = READERS[name], Trials("readers")
    original = reader.read(made)
    whole = {file: (made / file).read_bytes() for file in reader.files}

    def read(file: str, damage: Damage) -> tuple[str, str]:
        """How reading it ends, and what is wrong with that."""
        path = made / file
        try:
            path.unlink()
            if damage.content is not None:
                path.write_bytes(damage.content)
            found = reader.read(made)
        except DoflaError as error:
            message, own = str(error), path.relative_to(made).parents[:-1]
            named = path.name in message or any(str(made / folder) in message for folder in own)
            return (REFUSED, "") if named and "\n" not in message else (FAULT, f"says {message!r}")
        except Exception as error:
            return TRACEBACK, repr(error)
        finally:
            path.write_bytes(whole[file])
        return (FAULT, "goes unnoticed") if file in reader.checked and found != original else (ACCEPTED, "")

    @settings(max_examples=inputs, suppress_health_check=list(HealthCheck), **options | ONLY_GENERATE)
    @given(st.data())
    def test(data):
        file = data.draw(st.sampled_from(list(whole)))
        damage = data.draw(damages(file, whole[file]))
        trials.only_once(name, file, damage.content)
        ending, wrong = read(file, damage)
        trials.note(ending, f"{file}, {damage.what}: {wrong}")

    test()
    trials.check()
    return trials


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_input_is_refused_in_one_line_or_harmless(made, name):
    trials = fuzz(made, name, 6 if name in SLOW else 20, derandomize=True)
    assert trials.endings[REFUSED]


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_hundreds_of_damaged_inputs(made, name):
    fuzz(made, name, 200 if name in SLOW else 600)
