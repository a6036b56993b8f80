"""A stand-in for the Hub on this machine: the part of its HTTP interface that `huggingface_hub` uses to create a
repository, upload to it in commits and read it back. It speaks to the real client and knows nothing of dspark_hf.

Source: the requests of huggingface_hub 2.4 (`HfApi.create_repo`, `create_commit`, `lfs`, `file_download`).
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml


USER, TOKEN = "ann", "hf_token_of_ann"
# As on the Hub, large and binary files go to another store than git's.
LARGE = (".safetensors", ".png")


@dataclass
class Commit:
    """A revision: all its files by path. Large ones are named by their SHA-256 in the store."""

    oid: str
    message: str
    files: dict[str, bytes | str]


@dataclass
class Repository:
    """A repository's branches, each a list of commits."""

    private: bool
    branches: dict[str, list[Commit]] = field(default_factory=dict)

    def find(self, revision: str) -> Commit | None:
        """The newest commit of a branch, or the commit of that id."""
        if revision in self.branches:
            return self.branches[revision][-1]
        return next((one for branch in self.branches.values() for one in branch if one.oid == revision), None)


class HubStandIn(ThreadingHTTPServer):
    """
    The server. It serves until its context ends.

    Attributes:
        repositories (`dict[str, Repository]`): By id.
        store (`dict[str, bytes]`): Large files by SHA-256.
        requests (`list[tuple[str, str]]`): Method and path of all that was asked.
        failures (`dict[str, tuple[int, str]]`): What is answered, with which message, by the action it is answered to:
            `create`, `preupload`, `store`, `commit`.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.store: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.failures: dict[str, tuple[int, str]] = {}

    @property
    def endpoint(self) -> str:
        """What HF_ENDPOINT has to be."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def environment(self, home: str) -> dict[str, str]:
        """Environment variables of a process that takes this for the Hub.

        Args:
            home (`str`): A folder for its caches.
        """
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": TOKEN,
            "HF_HOME": home,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """All files of a repository, large ones too."""
        files = self.repositories[repo_id].branches[revision][-1].files
        return {path: self.store[held] if isinstance(held, str) else held for path, held in files.items()}

    def create(self, repo_id: str, private: bool = False, files: dict[str, str] | None = None) -> None:
        """Put a repository here, with its first commit."""
        repository = Repository(private)
        self.repositories[repo_id] = repository
        held: dict[str, bytes | str] = {".gitattributes": b"*.safetensors filter=lfs\n"}
        held |= {name: text.encode() for name, text in (files or {}).items()}
        self.commit(repository, "main", "initial commit", held)

    def commit(self, repository: Repository, branch: str, message: str, files: dict[str, bytes | str]) -> Commit:
        """Add a commit to a branch."""
        history = repository.branches.setdefault(branch, [])
        oid = hashlib.sha1(f"{id(repository)} {branch} {len(history)}".encode()).hexdigest()
        history.append(Commit(oid, message, files))
        return history[-1]


@contextmanager
def hub_standin() -> Iterator[HubStandIn]:
    """A stand-in that serves for the while."""
    with HubStandIn() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubStandIn

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._handle()

    def do_HEAD(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_PUT(self) -> None:
        self._handle()

    def _handle(self) -> None:
        body = self._read()
        parts = urlsplit(self.path)
        self.server.requests.append((self.command, parts.path))
        match [unquote(part) for part in parts.path.strip("/").split("/")]:
            case ["api", "repos", "create"]:
                if self._authorised() and not self._fails("create"):
                    self._create(json.loads(body))
            case ["api", "validate-yaml"]:
                self._validate(json.loads(body)["content"])
            case ["api", "models", namespace, name, *rest]:
                self._repository(f"{namespace}/{name}", rest, body, parse_qs(parts.query))
            case [namespace, git, "info", "lfs", "objects", "batch"]:
                if self._authorised() and f"{namespace}/{git.removesuffix('.git')}" in self.server.repositories:
                    self._batch(json.loads(body))
            case ["store", oid] if self.command == "PUT":
                if not self._fails("store"):
                    self._keep(oid, body)
            case ["store", oid, "verify"]:
                self._json({}, 200 if oid in self.server.store else 404)
            case [namespace, name, "resolve", revision, *path]:
                self._resolve(f"{namespace}/{name}", revision, "/".join(path))
            case _:
                self._refuse(404, "EntryNotFound", f"the stand-in has no {self.command} {parts.path}")

    # Requests

    def _create(self, wanted: dict[str, Any]) -> None:
        namespace = wanted.get("organization") or USER
        repo_id = f"{namespace}/{wanted['name']}"
        url = f"{self.server.endpoint}/{repo_id}"
        if namespace != USER:
            self._refuse(403, None, f'You don\'t have the rights to create a model under the namespace "{namespace}".')
        elif repo_id in self.server.repositories:
            self._json({"error": "You already created this model repo", "url": url}, 409)
        else:
            self.server.create(repo_id, private=wanted.get("visibility") == "private" or bool(wanted.get("private")))
            self._json({"url": url, "name": repo_id, "id": repo_id})

    def _validate(self, content: str) -> None:
        errors = []
        try:
            metadata = yaml.safe_load(content.split("---")[1])
            if not isinstance(metadata, dict):
                errors.append({"message": "the metadata is no mapping"})
        except (IndexError, yaml.YAMLError) as error:
            errors.append({"message": str(error)})
        self._json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def _repository(self, repo_id: str, rest: list[str], body: bytes, query: dict[str, list[str]]) -> None:
        repository = self._visible(repo_id)
        if repository is None:
            return
        writes = self.command == "POST"
        if writes and not self._authorised():
            return
        revision = rest[1] if len(rest) > 1 else "main"
        commit = repository.find(revision)
        if rest[:1] == ["branch"]:
            self._branch(repository, revision)
        elif commit is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif rest[:1] in ([], ["revision"]):
            siblings = [{"rfilename": path} for path in commit.files]
            self._json({"id": repo_id, "sha": commit.oid, "private": repository.private, "siblings": siblings})
        elif rest[:1] == ["preupload"]:
            if not self._fails("preupload"):
                self._preupload(commit, json.loads(body))
        elif rest[:1] == ["tree"]:
            self._json([self._entry(path, held) for path, held in commit.files.items()])
        elif rest[:1] == ["commit"]:
            if not self._fails("commit"):
                self._commit(repo_id, repository, revision, [json.loads(line) for line in body.splitlines()])
        else:
            self._refuse(404, "EntryNotFound", f"the stand-in has no {rest}")

    def _branch(self, repository: Repository, name: str) -> None:
        if name in repository.branches:
            self._json({"error": "Reference already exists"}, 409)
        else:
            repository.branches[name] = list(repository.branches["main"])
            self._json({})

    def _preupload(self, commit: Commit, wanted: dict[str, Any]) -> None:
        files = []
        for file in wanted["files"]:
            mode = "lfs" if file["path"].endswith(LARGE) else "regular"
            held = commit.files.get(file["path"])
            oid = None if held is None else self._entry(file["path"], held)["oid"]
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._json({"files": files})

    def _batch(self, wanted: dict[str, Any]) -> None:
        objects = []
        for item in wanted["objects"]:
            url = f"{self.server.endpoint}/store/{item['oid']}"
            actions = {"upload": {"href": url}, "verify": {"href": f"{url}/verify"}}
            objects.append(item if item["oid"] in self.server.store else item | {"actions": actions})
        self._json({"transfer": "basic", "objects": objects})

    def _keep(self, oid: str, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self._json({"error": "the content is not what its name says"}, 400)
        else:
            self.server.store[oid] = body
            self._json({})

    def _commit(self, repo_id: str, repository: Repository, branch: str, lines: list[dict[str, Any]]) -> None:
        files, message = dict(repository.branches[branch][-1].files), ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile" and value["oid"] in self.server.store:
                files[value["path"]] = value["oid"]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                self._json({"error": f"cannot {line['key']} {value.get('path')}"}, 400)
                return
        oid = self.server.commit(repository, branch, message, files).oid
        url = f"{self.server.endpoint}/{repo_id}/commit/{oid}"
        self._json({"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    def _resolve(self, repo_id: str, revision: str, path: str) -> None:
        repository = self._visible(repo_id)
        if repository is None:
            return
        commit = repository.find(revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        if path not in commit.files:
            self._refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit.oid})
            return
        held = commit.files[path]
        content = self.server.store[held] if isinstance(held, str) else held
        oid = self._entry(path, held)["oid"]
        self._send(200, content, {"ETag": f'"{oid}"', "X-Repo-Commit": commit.oid})

    # Answers

    def _entry(self, path: str, held: bytes | str) -> dict[str, Any]:
        """A file as the tree lists it; its id is git's, or the SHA-256 of a large one."""
        if isinstance(held, str):
            size = len(self.server.store[held])
            return {"type": "file", "path": path, "oid": held, "size": size, "lfs": None}
        oid = hashlib.sha1(b"blob %d\0" % len(held) + held).hexdigest()
        return {"type": "file", "path": path, "oid": oid, "size": len(held)}

    def _authorised(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self._refuse(401, None, "Invalid username or password.")
        return False

    def _visible(self, repo_id: str) -> Repository | None:
        repository = self.server.repositories.get(repo_id)
        hidden = repository is not None and repository.private
        if repository is None or (hidden and self.headers.get("Authorization") != f"Bearer {TOKEN}"):
            self._refuse(404 if self.headers.get("Authorization") else 401, "RepoNotFound", "Repository not found")
            return None
        return repository

    def _fails(self, action: str) -> bool:
        """Answer with the failure that was asked for, if one was."""
        if action not in self.server.failures:
            return False
        status, message = self.server.failures[action]
        self._refuse(status, None, message)
        return True

    def _refuse(self, status: int, code: str | None, message: str, headers: dict[str, str] | None = None) -> None:
        extra = {"X-Error-Message": message} | ({} if code is None else {"X-Error-Code": code}) | (headers or {})
        self._send(status, json.dumps({"error": message}).encode(), extra | {"Content-Type": "application/json"})

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)
