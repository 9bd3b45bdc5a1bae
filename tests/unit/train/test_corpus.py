"""Which files a model learns from, and which it never sees."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from writehead.errors import UsageError
from writehead.train.corpus import is_held_out, parses, read_corpus


def write(root: Path, name: str, data: bytes) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for i in range(40):
        write(tmp_path, f"pkg/m{i}.py", f"x{i} = {i}\r\n".encode())
    write(tmp_path, "pkg/copy.py", b"x3 = 3\r\n")  # m3 again, earlier in the alphabet
    write(tmp_path, "pkg/latin.py", "x = 'é'\n".encode("latin-1"))
    write(tmp_path, "pkg/broken.py", b"def f(:\n")
    write(tmp_path, "pkg/empty.py", b"\n")
    write(tmp_path, "pkg/huge.py", b"x = 1\n" * 100_000)
    write(tmp_path, "site-packages/other.py", b"y = 1\n")
    write(tmp_path, "pkg/__pycache__/z.py", b"z = 1\n")
    write(tmp_path, "encodings/cp1.py", b"t = 1\n")
    return tmp_path


def test_files_are_usable_and_unique(root: Path) -> None:
    corpus = read_corpus(str(root), pattern="**/*.py", held_out=0.2)
    names = sorted(f.path for f in corpus.train + corpus.held_out)
    assert names == sorted(["pkg/copy.py", *(f"pkg/m{i}.py" for i in range(40) if i != 3)])
    assert all("\r" not in f.text for f in corpus.train)


def test_split_is_by_name_and_disjoint(root: Path) -> None:
    corpus = read_corpus(str(root), pattern="**/*.py", held_out=0.2)
    assert {f.sha256 for f in corpus.train}.isdisjoint(f.sha256 for f in corpus.held_out)
    write(root, "pkg/m5.py", b"changed = 5\n")
    again = read_corpus(str(root), pattern="**/*.py", held_out=0.2)
    assert [f.path for f in again.held_out] == [f.path for f in corpus.held_out]
    share = sum(is_held_out(f"{i}.py", 0.2) for i in range(4000)) / 4000
    assert share == pytest.approx(0.2, abs=0.02)
    assert is_held_out("a.py", 0.0) is False
    assert is_held_out("a.py", 1.0) is True


def test_manifest_states_every_file(root: Path) -> None:
    corpus = read_corpus(str(root), pattern="**/*.py", held_out=0.2)
    rows = [json.loads(line) for line in corpus.manifest().splitlines()]
    assert [r["part"] for r in rows] == ["train"] * len(corpus.train) + ["held_out"] * len(corpus.held_out)
    by_path = {r["path"]: r for r in rows}
    assert by_path["pkg/m7.py"]["sha256"] == hashlib.sha256(b"x7 = 7\r\n").hexdigest()
    assert by_path["pkg/m7.py"]["bytes"] == len(b"x7 = 7\n")


def test_pattern_and_other_languages(root: Path) -> None:
    for i in range(30):
        write(root, f"web/{i}.js", f"let x = {i};\n".encode())
    corpus = read_corpus(str(root), pattern="**/*.js", held_out=0.2)
    assert len(corpus.train) + len(corpus.held_out) == 30


def test_unusable_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        read_corpus(str(tmp_path / "nowhere"), pattern="**/*.py", held_out=0.2)
    with pytest.raises(UsageError, match="has 0 usable files"):
        read_corpus(str(tmp_path), pattern="**/*.py", held_out=0.2)


def test_a_file_that_cannot_be_read_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_bytes

    def denied(path: Path) -> bytes:
        if path.name == "m7.py":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(UsageError, match=r"m7.py, which cannot be read \(Permission denied\)"):
        read_corpus(str(root), pattern="**/*.py", held_out=0.2)


@pytest.mark.parametrize(("text", "ok"), [("x = 1\n", True), ("x = \n", False), ("x = '\0'\n", False), ("'\\d'", True)])
def test_parses(text: str, ok: bool) -> None:
    assert parses(text) is ok
