"""How many wrong inputs were tried in a session, no two alike, of which kind, and how they ended."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

from command_line import call
from hypothesis import assume

REFUSED, ACCEPTED, TRACEBACK, FAULT = "refused in one line", "harmless", "tracebacks", "other faults"


class Trials:
    """Inputs of one kind.

    Attributes:
        endings: how often they ended in which way.
        faults: what was wrong with those that ended as none should.
    """

    session: ClassVar[list["Trials"]] = []
    tried: ClassVar[set[Any]] = set()

    def __init__(self, kind: str) -> None:
        self.kind, self.endings, self.faults = kind, Counter(), []
        self.session.append(self)

    def only_once(self, *made_of: Any) -> None:
        """Have hypothesis pass over an input that the session has tried."""
        assume(made_of not in self.tried)
        self.tried.add(made_of)

    def note(self, ending: str, fault: str = "") -> None:
        """Count an input; ``fault`` says which it was and what is wrong."""
        self.endings[ending] += 1
        if ending in (TRACEBACK, FAULT):
            self.faults.append(fault)

    def command(self, words: list, capsys) -> None:
        """Carry out a command line, and count it by its ending."""
        capsys.readouterr()
        code = call(*words)
        out, err = capsys.readouterr()
        last = err.rstrip().rpartition("\n")[2]
        if code not in (0, 2) or "Traceback" in err or "dofla: unexpected" in err:
            self.note(TRACEBACK, f"{words}: exit code {code}: {last}")
        elif code == 2 and not last.startswith(("dofla: ", "╰")):  # the latter ends typer's box
            self.note(FAULT, f"{words}: says {err!r}")
        elif words[0] == "--json" and "--help" not in words and code == 0 and not _is_json(out):
            self.note(FAULT, f"{words}: prints {out!r}")
        else:
            self.note(REFUSED if code else ACCEPTED)

    def check(self) -> None:
        assert self.endings.total()
        assert not self.faults, "\n".join(self.faults[:20])


def tally() -> dict[str, dict[str, int]]:
    """How often inputs of each kind ended in which way in this process."""
    kinds = dict.fromkeys(trials.kind for trials in Trials.session)
    return {kind: dict(sum((x.endings for x in Trials.session if x.kind == kind), Counter())) for kind in kinds}


def summary(tallies: list[dict[str, dict[str, int]]]) -> Iterator[str]:
    """Lines that say what the whole session has tried, in one process or several."""
    total: Counter = Counter()
    for kind in dict.fromkeys(kind for tally in tallies for kind in tally):
        endings = sum((Counter(tally.get(kind, {})) for tally in tallies), Counter())
        ways = [f"{endings[way]:,} {way}" for way in (REFUSED, ACCEPTED, TRACEBACK, FAULT)]
        yield f"{kind}: {endings.total():,} tried, {', '.join(ways)}"
        total += endings
    if total:
        yield f"inputs tried {total.total():,}, tracebacks {total[TRACEBACK]:,}"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
