"""Hook of mkdocs: a link to a folder of pages, which a repository's site lists, leads to a page that lists it here."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath

from mkdocs.structure.files import File

_LINK = re.compile(r"\]\(([\w./-]+)\)")


def on_files(files, config):
    root = Path(config.docs_dir)
    pages = [PurePosixPath(file.src_uri) for file in files.documentation_pages()]
    for folder in sorted({page.parent for page in pages if page.parts[0] == "tables"}):
        names = sorted(page.name for page in pages if page.parent == folder)
        rows = [f"- [{_title(root / folder / name)}]({name})" for name in names]
        text = f"# Tables: {folder.name}\n\n" + "\n".join(rows) + "\n"
        files.append(File.generated(config, f"{folder}/index.md", content=text))
    return files


def on_page_markdown(markdown: str, page, files, **_) -> str:
    def indexed(match: re.Match) -> str:
        index = normpath(PurePosixPath(page.file.src_uri).parent / match[1] / "index.md")
        return f"]({match[1].rstrip('/')}/index.md)" if files.get_file_from_path(index) else match[0]

    return _LINK.sub(indexed, markdown)


def _title(path: Path) -> str:
    first = path.read_text(encoding="utf-8").lstrip().partition("\n")[0]
    return first.lstrip("# ") if first.startswith("#") else path.stem
