"""The Hub, served by a small server of our own over real HTTP; no test here leaves the machine."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors.torch
import torch
from huggingface_hub.utils.tqdm import enable_progress_bars

from writehead.checkpoint import open_checkpoint, resolve
from writehead.errors import ModelNotFoundError

SHA = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = safetensors.torch.save({"w": torch.arange(3.0)})
TEXT = {"config.json": b'{"model_type": "gpt_bigcode"}', "tokenizer.json": b"{}", "merges.txt": b"", "README.md": b"#"}
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = json.dumps({"weight_map": {"w": ONE, "v": TWO}}).encode()
REPOS: dict[str, dict[str, bytes]] = {
    "org/plain": TEXT
    | {
        "model.safetensors": WEIGHTS,
        "pytorch_model.bin": b"old",
        "pytorch_model.bin.index.json": b"{}",
        "onnx/model.onnx": b"onnx",
        "onnx/config.json": b"{}",
        "modeling.py": b"import os",
    },
    "org/sharded": TEXT
    | {
        "model.safetensors.index.json": INDEX,
        ONE: WEIGHTS,
        TWO: safetensors.torch.save({"v": torch.ones(1)}),
        "consolidated.safetensors": WEIGHTS,
    },
    "org/old": TEXT | {"pytorch_model.bin": b"weights", "model.safetensors.index.json": b"{}"},
    "org/gguf": {"m.Q4_0.gguf": b"GGUF4", "m.Q8_0.gguf": b"GGUF8"},
    "org/empty": {"README.md": b""},
    "org/gptq": {"quantize_config.json": b"{}", "gptq_model-4bit-128g.bin": b"weights"},
}


class FakeHub(BaseHTTPRequestHandler):
    """The four requests that huggingface_hub makes to download a model."""

    protocol_version = "HTTP/1.1"
    requests: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests look at `requests`."""

    def _answer(self, *, body: bool) -> None:
        self.requests.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        found = re.fullmatch(r"(?:/api/models)?/(\w+/\w+)(?:/(revision|tree|resolve)/(\w+)(?:/(.+))?)?", path)
        repo, kind, revision, file = found.groups() if found else ("", "", "", "")
        if repo == "org/gated":
            return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        if repo == "org/broken":
            return self._send(500, b"", {})
        files = REPOS.get(repo)
        if files is None:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        if revision not in (None, "main", "v1", SHA):
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if kind == "resolve":
            return self._send(200, files[file], {}, body=body)
        if kind == "tree":
            listed = [{"type": "file", "path": n, "size": len(d), "oid": etag(d)} for n, d in files.items()]
            return self._send(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})
        info = {"id": repo, "sha": SHA, "siblings": [{"rfilename": name} for name in files]}
        return self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str], *, body: bool = True) -> None:
        self.send_response(status)
        for name, value in {"X-Repo-Commit": SHA, "ETag": f'"{etag(data)}"', **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own settings for the Hub and for proxies do not count."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """(endpoint, the requests so far) of a fake Hub on 127.0.0.1."""
    FakeHub.requests = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", FakeHub.requests
    server.shutdown()
    thread.join()
    server.server_close()


def names(directory: Path) -> list[str]:
    return sorted(str(item.relative_to(directory)) for item in directory.rglob("*") if not item.is_dir())


def refusal(model: str, **options: Any) -> str:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(model, progress=False, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("repo", "weights"),
    [
        ("org/plain", ["model.safetensors"]),
        ("org/sharded", [ONE, TWO, "model.safetensors.index.json"]),
        ("org/old", ["pytorch_model.bin"]),
    ],
)
def test_what_a_model_needs_is_downloaded_and_nothing_else(
    tmp_path: Path, hub: tuple[str, list[str]], repo: str, weights: list[str]
) -> None:
    endpoint, requests = hub
    path = resolve(repo, cache_dir=tmp_path, progress=False, endpoint=endpoint)
    assert names(path) == sorted(["config.json", "merges.txt", "tokenizer.json", *weights])
    assert all((path / name).read_bytes() == REPOS[repo][name] for name in names(path))
    if repo != "org/old":
        assert open_checkpoint(path).read("w").tolist() == [0, 1, 2]
    requests.clear()
    assert resolve(repo, cache_dir=tmp_path, progress=False, endpoint=endpoint) == path
    assert resolve(repo, cache_dir=tmp_path, progress=False, offline=True) == path
    assert requests == []


def test_an_interrupted_download_is_completed(tmp_path: Path, hub: tuple[str, list[str]]) -> None:
    path = resolve("org/sharded", cache_dir=tmp_path, progress=False, endpoint=hub[0])
    (path / TWO).resolve().unlink()
    (path / TWO).unlink()
    assert "is not in the local cache and downloads are switched off" in refusal(
        "org/sharded", cache_dir=tmp_path, offline=True
    )
    assert resolve("org/sharded", cache_dir=tmp_path, progress=False, endpoint=hub[0]) == path
    assert open_checkpoint(path).read("v").tolist() == [1]


@pytest.mark.parametrize(("model", "revision"), [("org/plain@v1", None), ("org/plain", "v1")])
def test_revisions(tmp_path: Path, hub: tuple[str, list[str]], model: str, revision: str | None) -> None:
    endpoint, requests = hub
    path = resolve(model, revision=revision, cache_dir=tmp_path, progress=False, endpoint=endpoint)
    assert any("/revision/v1" in request for request in requests)
    assert (path / "model.safetensors").is_file()
    wrong = refusal("org/plain@v9", cache_dir=tmp_path, endpoint=endpoint)
    assert wrong == "org/plain: has no revision 'v9'; check the branch, tag or commit"


def test_one_gguf_file_of_several(tmp_path: Path, hub: tuple[str, list[str]]) -> None:
    endpoint, requests = hub
    path = resolve("org/gguf:m.Q8_0.gguf", cache_dir=tmp_path, progress=False, endpoint=endpoint)
    assert (path.name, path.read_bytes()) == ("m.Q8_0.gguf", b"GGUF8")
    assert names(path.parent) == ["m.Q8_0.gguf"]
    requests.clear()
    assert resolve("org/gguf:m.Q8_0.gguf", cache_dir=tmp_path, offline=True) == path
    assert requests == []
    assert refusal("org/gguf", cache_dir=tmp_path, endpoint=endpoint) == (
        "org/gguf: holds only GGUF files, name one as org/gguf:FILE; it has m.Q4_0.gguf, m.Q8_0.gguf"
    )
    assert "holds no x.gguf; it has m.Q4_0.gguf" in refusal("org/gguf:x.gguf", cache_dir=tmp_path, endpoint=endpoint)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/nothing", "is not on {endpoint}, or it is private; check the name, or log in with `hf auth login`"),
        ("org/gated", "is gated; accept its terms at {endpoint}/org/gated and log in with `hf auth login`"),
        ("org/broken", "{endpoint} answered 500; try again later, or give a local path"),
        ("org/empty", "holds no safetensors, pytorch_model.bin or GGUF file"),
        ("org/gptq", "holds weights that are quantized by GPTQ (quantize_config.json), which writehead does not read; "
                     "use the original model, or a GGUF file of it"),
    ],
)  # fmt: skip
def test_refusals_say_what_to_do(tmp_path: Path, hub: tuple[str, list[str]], model: str, message: str) -> None:
    expected = f"{model}: {message.format(endpoint=hub[0])}"
    assert refusal(model, cache_dir=tmp_path, endpoint=hub[0]) == expected


def test_progress_is_shown_unless_switched_off(
    tmp_path: Path, hub: tuple[str, list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    enable_progress_bars()  # for the whole process, where a test before this one switched them off
    resolve("org/plain", cache_dir=tmp_path / "a", progress=False, endpoint=hub[0])
    assert capfd.readouterr() == ("", "")
    resolve("org/plain", cache_dir=tmp_path / "b", endpoint=hub[0])
    assert "100%" in capfd.readouterr().err


def test_no_network_fails_fast(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"  # bound, so nobody else answers, but not listening
        begin = time.perf_counter()
        message = refusal("org/plain", cache_dir=tmp_path, endpoint=endpoint)
        assert time.perf_counter() - begin < 20
    assert message.startswith(f"org/plain: could not be downloaded from {endpoint} (ConnectError")
    assert message.endswith("; check the network, or give a local path")


def test_a_server_that_never_answers_fails_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("writehead.checkpoint.hub._CONNECT_SECONDS", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        begin = time.perf_counter()
        message = refusal("org/plain", cache_dir=tmp_path, endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert time.perf_counter() - begin < 20
    assert "could not be downloaded" in message


def test_paths_come_first_and_typing_errors_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "santacoder").mkdir()
    (tmp_path / "org").mkdir()
    (tmp_path / "org/starcoder").mkdir()
    (tmp_path / "m.gguf").write_bytes(b"")
    assert resolve("santacoder") == Path("santacoder")
    assert resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/santacoder") == tmp_path / "santacoder"
    for model, hint in (
        ("./santacodr", "; did you mean santacoder?"),
        ("n.gguf", "; did you mean m.gguf?"),
        (f"{tmp_path}/santa-coder", f"; did you mean {tmp_path}/santacoder?"),
        ("gpt2", "; a model on the Hub is named org/name"),
        ("a/b/c", ""),
        ("org/name/", ""),
        ("", ""),
        ("~nobody-of-that-name/x", ""),
    ):
        assert refusal(model) == f"{model}: there is no such file or directory{hint}"
    assert refusal("bad\0name") == r"'bad\x00name': there is no such file or directory"
    assert "there is no such file" in refusal("x" * 5000)
    assert "not in the local cache" in refusal("org/starcodr", cache_dir=tmp_path / "cache", offline=True)


@pytest.mark.parametrize("page", ["https://huggingface.co/bigcode/santacoder/tree/main", "hf.co/bigcode/santacoder"])
def test_the_address_of_a_page_gives_the_name_on_the_hub(page: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"a model on the Hub is named org/name: bigcode/santacoder$"):
        resolve(page)


def test_a_link_that_leads_nowhere_is_not_suggested_for_itself(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(tmp_path / "gone")
    with pytest.raises(ModelNotFoundError, match=r"model: there is no such file or directory$"):
        resolve(str(tmp_path / "model"))
