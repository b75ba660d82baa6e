"""`export --push` with the real huggingface_hub, against a Hub on this machine."""

import base64
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from outcomes import expect_error

from metaseq_lm.cli import main

pytest.importorskip("transformers")
pytest.importorskip("huggingface_hub")
from hf_folders import make

TOKEN = "hf_" + "t" * 34


class Hub(ThreadingHTTPServer):
    """The requests that an upload makes: repositories by name, and the files of each."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.refusal: tuple[int, str] | None = None


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *words: Any) -> None:
        """Print nothing."""

    def answer(self, content: dict[str, Any], status: int) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer(*self.repository())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Authorization"] == f"Bearer {TOKEN}"
        self.answer(*self.result(body))

    def repository(self) -> tuple[dict[str, Any], int]:
        name = self.path.removeprefix("/api/models/").split("/revision")[0].split("?")[0]
        if name not in self.server.private:
            return {"error": "no such repository"}, 404
        return {"id": name, "private": self.server.private[name], "siblings": []}, 200

    def result(self, body: bytes) -> tuple[dict[str, Any], int]:
        hub = self.server
        if hub.refusal:
            status, reason = hub.refusal
            return {"error": reason}, status
        if self.path == "/api/repos/create":
            row = json.loads(body)
            name = f"{row.get('organization') or 'me'}/{row['name']}"
            status = 409 if name in hub.private else 200
            hub.private.setdefault(name, row.get("private", row.get("visibility") == "private"))
            return {"url": f"{hub.address}/{name}", "error": "is there"}, status
        if self.path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}, 200
        name = "/".join(self.path.split("/")[3:5])
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular"} for f in files]
            return {"files": [m | {"shouldIgnore": False} for m in modes]}, 200
        assert "/commit/" in self.path
        rows = [json.loads(line) for line in body.splitlines()]
        files = [row["value"] for row in rows if row["key"] == "file"]
        hub.files[name] = {f["path"]: base64.b64decode(f["content"]) for f in files}
        oid = "0" * 40
        return {"commitUrl": f"{hub.address}/{name}/commit/{oid}", "commitOid": oid}, 200


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pushed")
    make(folder / "hf", "BertForMaskedLM")
    assert main(["import", f"{folder}/hf", "--out", f"{folder}/run"]) == 0
    return f"{folder}/run"


@pytest.mark.parametrize("public", [False, True])
def test_the_folder_is_in_the_repository(run, tmp_path, hub, public, capsys):
    out = tmp_path / "out"
    push = ["--check", "--push", "me/bert", *["--public"] * public]
    assert main(["export", run, "--out", str(out), *push]) == 0
    assert f"{hub.address}/me/bert: uploaded from {out}" in capsys.readouterr().out
    assert hub.private == {"me/bert": not public}
    assert hub.files["me/bert"] == {path.name: path.read_bytes() for path in out.iterdir()}
    # Once more into the same repository.
    again = ["--out", str(tmp_path / "again"), *push[1:]]
    assert main(["export", run, *again]) == 0


def test_a_public_repository_is_not_filled_by_chance(run, tmp_path, hub, capsys):
    hub.private["me/bert"] = False
    export = ["export", run, "--out", str(tmp_path / "out"), "--push", "me/bert"]
    assert main(export) == 2
    assert "--public" in capsys.readouterr().err and not hub.files
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize(
    ("status", "reason"), [(401, "Invalid user token."), (403, "You have no rights there.")]
)
def test_a_refusal(run, tmp_path, hub, status, reason, capsys):
    hub.refusal = status, reason
    out = tmp_path / "out"
    assert main(["export", run, "--out", str(out), "--push", "other/bert"]) == 1
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("metaseq-lm: ")]
    assert reason in line and f"hf upload other/bert {out}" in line and TOKEN not in line


def test_no_network(run, tmp_path, hub, monkeypatch, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", closed)
        assert main(["export", run, "--out", str(tmp_path / "out"), "--push", "me/bert"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_the_library_says_that_it_is_offline(run, tmp_path):
    """In a process of its own, where nothing has imported the library before."""
    command = [sys.executable, "-m", "metaseq_lm", "export", run, "--out", f"{tmp_path}/out"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_TOKEN": TOKEN}
    done = subprocess.run(
        [*command, "--push", "me/bert"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "cannot be reached" in done.stderr and "offline" in done.stderr


def test_what_is_missing_is_said_first(run, tmp_path, monkeypatch, capsys):
    export = ["export", run, "--out", str(tmp_path / "out")]
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    expect_error(capsys, main([*export, "--public"]), 2, "--push REPO")
    expect_error(capsys, main([*export, "--push", "me/a/b"]), 2, "of a repository")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    expect_error(capsys, main([*export, "--push", "me/bert"]), 2, "HF_TOKEN")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    expect_error(capsys, main([*export, "--push", "me/bert"]), 2, "metaseq-lm[hub]")
    assert not (tmp_path / "out").exists()
