"""Documents, one at a time, from files, lists and the ``datasets`` library.

Everything is a generator, so asking for a few windows of a large file reads only its beginning.
"""

import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dofla.errors import DoflaError, first_line
from dofla.storage.extras import extra

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

SAMPLE = Path(__file__).parent / "sample.txt.gz"
"""The bundled text, of the source ``sample``: documents like those of the demo's model, 1 to a line."""
_FILE_SUFFIXES = {".txt", ".md", ".gz", ".json", ".jsonl", ".parquet", ".safetensors"}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# A text file is cut after at most this many characters, so that a file without blank lines is not one document
# in memory; and this many are looked at to learn how its documents are separated.
_LONGEST_TEXT = 1 << 20
_LOOK_AHEAD = 1 << 24


def read_documents(source: Source, *, text_field: str = "text") -> Iterator[str]:
    """The documents of a source, one at a time, in its order; blank ones are left out.

    A source is one of

    - a text file, plain or .gz, in UTF-8. Documents are separated by two or more blank lines if there is such a place
      between the text of the file's first 16 Mi characters, else by one or more. Documents above 1 Mi characters are
      cut, at a line end where there is one;
    - JSON lines (.jsonl, .json, either with .gz): the string in each record's ``text_field``;
    - Parquet (.parquet): the column ``text_field``. Needs pyarrow;
    - the word ``sample``: the bundled text: children's stories by the demo's model, about 150,000 of its tokens;
    - a list of such files, read one after another;
    - a list of strings, each a document;
    - a name for the ``datasets`` library, ``name``, ``name:config`` or ``name:config@split`` (split: train unless
      given), or a directory that library can load. It is streamed. Needs datasets.

    Args:
        source: see above. A list is taken for files if any entry is a Path or names an existing file.
        text_field: where the text stands in records; those whose text is null are left out.

    Raises:
        DoflaError: at once for a source that is none of these; while reading, for one that is empty or malformed.
    """
    return _never_empty(_documents(source, text_field), describe(source))


def check_source(source: str) -> None:
    """Raise DoflaError if a source can only be a file, and there is none: before a model is loaded."""
    name = os.path.expanduser(source.partition("@")[0].partition(":")[0])
    looks_like_file = Path(name).suffix.lower() in _FILE_SUFFIXES or not _HUB_NAME.fullmatch(name)
    if looks_like_file and not os.path.exists(name) and not os.path.exists(os.path.expanduser(source)):
        raise DoflaError(
            f"{source[:200]!r}: no such file; give an existing file, a datasets name, or a list for texts in memory"
        )


def describe(source: Source) -> str:
    """A few words naming the source, for error messages and run records."""
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(source)
    paths = files_of(source)
    if paths is None:
        return f"{len(source)} texts in memory"
    return ", ".join(map(str, paths[:3])) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def dataset_name(description: str) -> str | None:
    """``owner/name`` of a data set of the hub, from what :func:`describe` says of it; None for any other source."""
    name = re.split("[:@ ]", description, maxsplit=1)[0]
    is_file = Path(name).suffix.lower() in _FILE_SUFFIXES or os.path.exists(name)
    return name if "/" in name and _HUB_NAME.fullmatch(name) and not is_file else None


def files_of(source: Source) -> list[Path] | None:
    """The files that a source names; None for texts in memory and for what the ``datasets`` library loads."""
    if isinstance(source, (str, os.PathLike)):
        path = SAMPLE if source == "sample" else Path(os.path.expanduser(source))
        names_file = os.path.isfile(path) or (isinstance(source, os.PathLike) and not path.is_dir())
        return [path] if names_file else None
    if not isinstance(source, (list, tuple)) or not all(isinstance(entry, (str, os.PathLike)) for entry in source):
        raise DoflaError(f"source: a {type(source).__name__}; give a path, a list of paths or a list of strings")
    if any(isinstance(entry, os.PathLike) or os.path.isfile(os.path.expanduser(entry)) for entry in source):
        return [Path(os.path.expanduser(entry)) for entry in source]
    return None


def _documents(source: Source, text_field: str) -> Iterator[str]:
    paths = files_of(source)
    if paths is not None:
        readers = [_reader(path, text_field) for path in paths]
        return (document for reader in readers for document in reader)
    if isinstance(source, (str, os.PathLike)):
        check_source(os.fspath(source))
        return _dataset(os.fspath(source), text_field)
    if not source:
        raise DoflaError("source: an empty list; give at least one text or file")
    return (os.fspath(text) for text in source)


def _never_empty(documents: Iterator[str], name: str) -> Iterator[str]:
    empty = True
    for document in documents:
        if document.strip():
            empty = False
            yield document
    if empty:
        raise DoflaError(f"{name}: empty, no text in it; give a source with text")


def _reader(path: Path, text_field: str) -> Iterator[str]:
    if not os.path.isfile(path):
        raise DoflaError(
            f"{str(path)[:200]!r}: {'a directory' if os.path.isdir(path) else 'no such file'}; give a file"
        )
    kind = _kind(path)
    if kind == ".safetensors":
        raise DoflaError(f"{path}: holds tokens, not text; pass it alone, to token_windows")
    if kind == ".parquet":
        return _parquet(path, text_field)
    if kind in (".jsonl", ".json"):
        return (_field(record, text_field, f"{path}: line {number}") for number, record in json_lines(path))
    return _text(path)


def _kind(path: Path) -> str:
    """The suffix in lower case, that of the compressed file for .gz."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix == ".gz" else suffix


def _lines(path: Path, longest: int = -1) -> Iterator[str]:
    """Lines with their ends; a line above ``longest`` characters comes in pieces."""
    try:
        opener = gzip.open if path.suffix.lower() == ".gz" else open
        with opener(path, "rt", encoding="utf-8-sig") as file:
            while line := file.readline(longest):
                yield line
    except UnicodeDecodeError as error:
        raise DoflaError(f"{path}: not UTF-8 text ({error.reason}); convert it, or give .jsonl or .parquet") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DoflaError(f"{path}: cannot be read ({error}); check the file") from error


def _text(path: Path) -> Iterator[str]:
    gap = 2 if _has_wide_gap(path) else 1
    lines: list[str] = []
    size = blanks = 0
    for line in _lines(path, _LONGEST_TEXT):
        if not line.strip():
            blanks += 1
            continue
        if lines and (blanks >= gap or size + len(line) > _LONGEST_TEXT):
            yield "".join(lines).rstrip("\n")
            lines, size = [], 0
        elif blanks and lines:
            lines.append("\n" * blanks)
        lines.append(line)
        size += len(line)
        blanks = 0
    if lines:
        yield "".join(lines).rstrip("\n")


def _has_wide_gap(path: Path) -> bool:
    """True if two blank lines stand between lines of text, near enough to the beginning."""
    seen, blanks = 0, -math.inf  # so that those before any text are too few
    for line in _lines(path, _LONGEST_TEXT):
        if line.strip():
            if blanks >= 2:
                return True
            blanks = 0
        else:
            blanks += 1
        seen += len(line)
        if seen > _LOOK_AHEAD:
            break
    return False


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and object of each line of a file, plain or .gz, blank ones aside; DoflaError naming a line with anything
    else."""
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if "\\ud" in line.lower():  # perhaps half a surrogate pair, which is no character and tokenizers refuse
                record = json.loads(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace"))
        except (ValueError, RecursionError) as error:
            raise DoflaError(f"{path}: line {number}: no JSON ({error}); give one JSON object per line") from error
        if not isinstance(record, dict):
            raise DoflaError(f"{path}: line {number} is a {type(record).__name__}; give one JSON object per line")
        yield number, record


def _field(record: dict[str, Any], text_field: str, where: str) -> str:
    if text_field not in record:
        raise _missing(text_field, list(record), where)
    text = record[text_field]
    if text is not None and not isinstance(text, str):
        raise DoflaError(f"{where}: {text_field!r} is a {type(text).__name__}, not text; name another text_field")
    return text or ""


def _missing(text_field: str, fields: list[str], where: str) -> DoflaError:
    return DoflaError(
        f"{where}: no field {text_field!r}; set text_field to one of: {', '.join(fields) or '(no fields)'}"
    )


def _parquet(path: Path, text_field: str) -> Iterator[str]:
    pyarrow = extra("pyarrow", "data", f"{path}: reading Parquet")
    try:
        with extra("pyarrow.parquet").ParquetFile(path) as file:
            if text_field not in file.schema_arrow.names:
                raise _missing(text_field, file.schema_arrow.names, str(path))
            for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
                for record in batch.to_pylist():
                    yield _field(record, text_field, str(path))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DoflaError(f"{path}: not a readable Parquet file ({first_line(error)}); check the file") from error


def _dataset(source: str, text_field: str) -> Iterator[str]:
    base, _, split = source.partition("@")
    name, _, config = base.partition(":")
    datasets = extra("datasets", "data", f"{source}: no such file, and loading it as a dataset")
    try:
        options = {"split": split or "train", "streaming": True}
        for record in datasets.load_dataset(os.path.expanduser(name), config or None, **options):
            yield _field(record, text_field, f"dataset {base}")
    except DoflaError:
        raise
    except Exception as error:  # the library lets those of its file systems, its network and its parsers through
        raise DoflaError(
            f"{source}: no such file, and no dataset to be had ({first_line(error)}); check the name "
            "(name:config@split) and the network, or give a file"
        ) from error
