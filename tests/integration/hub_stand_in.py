"""A stand-in for the Hugging Face hub on this machine: what huggingface_hub asks for when it uploads and downloads."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from huggingface_hub import ModelCard


class Hub:
    """Repositories: name → file → content, one commit after another; and the commits, as they came in."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.commits: list[dict] = []
        self.asked: list[str] = []

    def create(self, name: str) -> None:
        self.repositories.setdefault(name, {})

    def sha(self, name: str) -> str:
        """Of the repository as it is."""
        return hashlib.sha1(repr(sorted(self.repositories[name].items())).encode()).hexdigest()

    def commit(self, name: str, lines: list[dict], query: str) -> str:
        """Carry out the lines of a commit."""
        files = self.repositories[name]
        commit = {"repository": name, "added": {}, "deleted": [], "query": query}
        for line in lines:
            key, value = line["key"], line["value"]
            if key == "header":
                commit["summary"] = value["summary"]
            elif key == "file":
                commit["added"][value["path"]] = files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert key == "deletedFile", key
                commit["deleted"].append(value["path"])
                del files[value["path"]]
        self.commits.append(commit)
        return self.sha(name)

    def info(self, name: str) -> dict:
        """What the hub says of a repository."""
        files = self.repositories[name]
        card = ModelCard(files["README.md"].decode()).data.to_dict() if "README.md" in files else None
        siblings = [{"rfilename": path} for path in files]
        return {"id": name, "modelId": name, "sha": self.sha(name), "siblings": siblings, "cardData": card}


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args) -> None:
            pass

        def answer(self, body: bytes | dict | list, status: int = 200, **headers: str) -> None:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for key, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(f"{self.command} {path}")
            parts = path.strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                name, rest = "/".join(parts[2:4]), parts[4:]
                if name not in hub.repositories:
                    return self.answer(b"{}", 404, X_Error_Code="RepoNotFound")
                if rest[:1] == ["tree"]:
                    files = hub.repositories[name].items()
                    listed = [{"type": "file", "path": p, "size": len(c), "oid": "0" * 40} for p, c in files]
                    return self.answer(listed)
                return self.answer(hub.info(name))
            name, file = "/".join(parts[:2]), "/".join(parts[4:])
            if name not in hub.repositories:
                return self.answer(b"", 404, X_Error_Code="RepoNotFound")
            if file not in hub.repositories[name]:
                return self.answer(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=hub.sha(name))
            content = hub.repositories[name][file]
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            return self.answer(content, ETag=etag, X_Repo_Commit=hub.sha(name))

        def do_POST(self) -> None:
            split = urlsplit(self.path)
            parts = unquote(split.path).strip("/").split("/")
            hub.asked.append(f"POST {unquote(split.path)}")
            body = self.rfile.read(int(self.headers["Content-Length"])) if "Content-Length" in self.headers else b""
            while self.headers.get("Transfer-Encoding") == "chunked":
                size = int(self.rfile.readline(), 16)
                body += self.rfile.read(size)
                self.rfile.readline()
                if not size:
                    break
            if parts == ["api", "repos", "create"]:
                asked = json.loads(body)
                name = f"{asked.get('organization') or 'me'}/{asked['name']}"
                hub.create(name)
                return self.answer({"url": f"http://{self.headers['Host']}/{name}"})
            if parts == ["api", "validate-yaml"]:
                return self.answer({"warnings": [], "errors": []})
            name, verb = "/".join(parts[2:4]), parts[4]
            if verb == "preupload":
                files = json.loads(body)["files"]
                return self.answer(
                    {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
                )
            if verb == "branch":
                return self.answer({})
            assert verb == "commit", self.path
            sha = hub.commit(name, [json.loads(line) for line in body.splitlines()], split.query)
            address = f"http://{self.headers['Host']}/{name}"
            made = {"commitUrl": f"{address}/commit/{sha}", "commitOid": sha}
            return self.answer(made | {"pullRequestUrl": f"{address}/discussions/1"})

    return Handler


@contextmanager
def serving() -> Iterator[tuple[Hub, str]]:
    """A hub and its address, on this machine only, for the time of the block."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
