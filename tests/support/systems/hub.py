"""A model hub on this machine that remembers what it was asked."""

import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """The repository `model`, with the files of `folder`, as huggingface_hub finds it below `url`."""

    def __init__(self, model: str, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self.log: list[tuple[str, str]] = []
        """Requests: (method, path) without its query. A file's path is its name in the repository, without a slash."""
        self.url = ""
        self.is_gated = False
        """Whether it gives its files to nobody."""

    def environment(self, cache: Path) -> dict[str, str]:
        """Variables of a process that is to use this hub, and keep in `cache` what it fetches."""
        # its client asks again after 10 s without an answer
        patience = {"HF_HUB_ETAG_TIMEOUT": "120", "HF_HUB_DOWNLOAD_TIMEOUT": "120"}
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", **patience}

    def about_model(self, log: list[tuple[str, str]]) -> Counter[tuple[str, str]]:
        """How often `log` has each request; less those of the hub's client about itself."""
        return Counter((method, path) for method, path in log if self.model in path or not path.startswith("/"))

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """(Status, headers, body) for a GET of `path`."""
        facts = f"/api/models/{self.model}"
        if path in (facts, f"{facts}/revision/main", f"{facts}/revision/{COMMIT}"):
            siblings = [{"rfilename": self._name(file), "size": file.stat().st_size} for file in self._files()]
            return _json({"id": self.model, "sha": COMMIT, "siblings": siblings})
        if path in (f"{facts}/tree/main", f"{facts}/tree/{COMMIT}"):
            return _json(
                [
                    {"type": "file", "path": self._name(f), "size": f.stat().st_size, "oid": _oid(f)}
                    for f in self._files()
                ]
            )
        if self.model not in path:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if self.is_gated and self.file_of(path):
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        file = self.folder / (self.file_of(path) or "no folder here")
        if not file.is_file():
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        return 200, {"ETag": f'"{_oid(file)}"', "X-Repo-Commit": COMMIT}, file.read_bytes()

    def file_of(self, path: str) -> str | None:
        """Name of the file that `path` asks for."""
        for revision in ("main", COMMIT):
            if path.startswith(start := f"/{self.model}/resolve/{revision}/"):
                return path.removeprefix(start)
        return None

    def _files(self) -> list[Path]:
        return sorted(file for file in self.folder.rglob("*") if file.is_file())

    def _name(self, file: Path) -> str:
        return file.relative_to(self.folder).as_posix()


@contextlib.contextmanager
def serving(model: str, folder: Path) -> Iterator[Hub]:
    """A hub that has `folder` as `model`."""
    hub = Hub(model, folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.log.append((self.command, hub.file_of(path) or path))
            status, headers, body = hub.answer(path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_POST = _handle

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _json(value: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
