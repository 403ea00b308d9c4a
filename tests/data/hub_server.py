"""A Hugging Face hub on this machine: the few answers that hybrid_jax.data.hub and the package `datasets` ask for."""

import contextlib
import dataclasses
import hashlib
import http.server
import json
import re
import threading
import urllib.parse

API = re.compile(r"/api/(models|datasets)/(\w+/[\w.-]+)(?:/(.*))?")
FILE = re.compile(r"/(datasets/)?(\w+/[\w.-]+)/resolve/([^/]+)/(.+)")


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclasses.dataclass
class Repository:
    """files: by path, of the newest revision, `commit`. earlier: those of older ones, by commit."""

    files: dict
    commit: str = COMMIT
    gated: bool = False
    earlier: dict = dataclasses.field(default_factory=dict)

    def at(self, revision):
        return self.files if revision in (self.commit, "main") else self.earlier[revision]


class Server:
    """url; repositories by ("models" or "datasets", name); asked: what was asked for so far, as (method, path).
    status: if set, what everything is answered with."""

    def __init__(self, url):
        self.url, self.repositories, self.asked, self.status = url, {}, [], 0


@contextlib.contextmanager
def serving():
    """A Server, until the block ends."""
    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    listening.daemon_threads = True
    listening.hub = Server(f"http://127.0.0.1:{listening.server_address[1]}")
    thread = threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield listening.hub
    finally:
        listening.shutdown()
        listening.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        path, hub = urllib.parse.unquote(url.path), self.server.hub
        hub.asked.append((self.command, path))
        if hub.status:
            self._answer(hub.status)
        elif found := API.fullmatch(path):
            self._api(hub.repositories.get((found[1], found[2])), found[2], found[3] or "", url.query)
        elif found := FILE.fullmatch(path):
            self._file(hub.repositories.get(("datasets" if found[1] else "models", found[2])), found[3], found[4])
        else:
            self._answer(404)

    do_HEAD = do_GET

    def _api(self, repository, name, rest, query):
        if repository is None:
            self._answer(404, X_Error_Code="RepoNotFound")
        elif not rest or rest.startswith("revision/"):
            siblings = [{"rfilename": file} for file in repository.files]
            commit = rest.partition("/")[2] or repository.commit
            self._json({"id": name, "sha": commit, "gated": repository.gated and "auto", "siblings": siblings})
        elif rest == "auth-check":
            self._answer(403, X_Error_Code="GatedRepo") if repository.gated else self._json({})
        elif rest.startswith("tree/"):
            _, revision, folder = (*rest.split("/", 2), "")[:3]
            self._json(_tree(repository.at(revision), folder, "recursive=true" in query.lower()))
        else:
            self._answer(404)

    def _file(self, repository, revision, path):
        if repository is None:
            return self._answer(404, X_Error_Code="RepoNotFound")
        if repository.gated:
            return self._answer(403, X_Error_Code="GatedRepo")
        content = repository.at(revision).get(path)
        about = {"X_Repo_Commit": repository.commit if revision == "main" else revision}
        if content is None:
            return self._answer(404, X_Error_Code="EntryNotFound", **about)
        about["ETag"] = f'"{hashlib.sha1(content).hexdigest()}"'
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            return self._answer(200, content, Accept_Ranges="bytes", **about)
        first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
        about["Content_Range"] = f"bytes {first}-{last}/{len(content)}"
        return self._answer(206, content[first : last + 1], **about)

    def _json(self, value):
        self._answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def _answer(self, status, content=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _tree(files, folder, recursive):
    found = {}
    for path, content in files.items():
        inside = path.removeprefix(f"{folder}/" if folder else "")
        if folder and inside == path:
            continue
        steps = inside.split("/")
        for depth in range(1, len(steps) if recursive else min(len(steps), 2)):
            name = "/".join([folder] * bool(folder) + steps[:depth])
            found[name] = {"type": "directory", "path": name, "size": 0, "oid": "0"}
        if recursive or len(steps) == 1:
            oid = hashlib.sha1(content).hexdigest()
            found[path] = {"type": "file", "path": path, "size": len(content), "oid": oid}
    return list(found.values())
