"""Texts for the benchmarks, from datasets of the Hugging Face hub, into data/.

    python benchmarks/data.py                   # needs dofla[data] and the network
    python benchmarks/data.py --from FOLDER     # copies the files that FOLDER has, gets the others

Six files of documents with two blank lines between them: `english` (movie reviews, news, fiction, about a third each),
`stories` (short ones for children) and `books` (whole), each as `train` and `val`. The selection is fixed: every n-th
document of a split, in its order. Files that are there already stay.
"""

from __future__ import annotations

import gzip
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import datasets
import typer

from dofla.errors import DoflaError
from dofla.storage.files import replacing


@dataclass(frozen=True)
class Part:
    """Documents of one dataset: every ``step``-th from number ``first`` on; of each, ``longest`` characters."""

    dataset: str
    split: str
    config: str | None = None
    field: str = "text"
    first: int = 0
    step: int = 1
    longest: int | None = None

    def documents(self) -> Iterator[str]:
        rows = datasets.load_dataset(self.dataset, self.config, split=self.split, streaming=True)
        for row in islice(rows, self.first, None, self.step):
            text = row[self.field].replace("<br />", "\n")  # in reviews
            start = (
                max(len(text) - (self.longest or len(text)), 0) // 2
            )  # from the middle: books begin with their titles
            text = text[start:][: self.longest]
            text = re.sub(r"\n\s*\n", "\n\n", text.strip())  # two blank lines separate documents
            if text:
                yield text


def english(split: str, of_reviews: str, first_book: int, step: int) -> list[Part]:
    return [
        Part("stanfordnlp/imdb", of_reviews, step=step),  # half of a split is favorable, half is not
        Part("abisee/cnn_dailymail", split, "3.0.0", "article"),
        Part("emozilla/pg19", split, first=first_book, longest=20_000),
    ]


FILES = {  # characters, and where they come from
    "english-train": (23_200_000, english("train", "train", first_book=50, step=4)),
    "english-val": (1_080_000, english("validation", "test", first_book=20, step=80)),
    "stories-train": (22_900_000, [Part("roneneldan/TinyStories", "train")]),
    "stories-val": (460_000, [Part("roneneldan/TinyStories", "validation")]),
    "books-train": (5_600_000, [Part("emozilla/pg19", "train")]),
    "books-val": (1_130_000, [Part("emozilla/pg19", "validation")]),
}


def selected(characters: int, parts: list[Part]) -> Iterator[str]:
    """Documents, each of the part that has given the fewest characters so far; the last one is cut.

    Raises:
        DoflaError: if a split ends before.
    """
    sources, given = [part.documents() for part in parts], [0] * len(parts)
    while characters > 0:
        n = given.index(min(given))
        text = next(sources[n], "")[:characters]
        if not text:
            raise DoflaError(
                f"{parts[n].dataset} has too few texts in {parts[n].split}: lower the file's size in FILES"
            )
        given[n] += len(text)
        characters -= len(text)
        yield text


def write(path: Path, documents: Iterator[str]) -> None:
    # Without a name and a time, the same texts are the same bytes.
    with replacing(path) as partial, open(partial, "wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
        for n, text in enumerate(documents):
            file.write(("\n\n\n" * (n > 0) + text).encode())


def main(
    source: Annotated[Path | None, typer.Option("--from", help="Folder that has some of the files.")] = None,
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("data"),
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, (characters, parts) in FILES.items():
        path = out / f"{name}.txt.gz"
        if path.exists():
            print(f"{path}: is there")
        elif source is not None and (source / path.name).is_file():
            with replacing(path) as partial:
                shutil.copyfile(source / path.name, partial)
            print(f"{path}: copied")
        else:
            print(f"{path}: from {', '.join(part.dataset for part in parts)}", flush=True)
            write(path, selected(characters, parts))


if __name__ == "__main__":
    typer.run(main)
