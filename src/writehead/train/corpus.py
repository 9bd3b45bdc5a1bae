"""Source files to learn from: which ones, which are held out, and a manifest that says so exactly."""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import warnings
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from writehead.errors import UsageError
from writehead.train.config import STDLIB

MAX_FILE_BYTES = 400_000

# Installed packages, and files that are tables or deliberately broken: they teach nothing about writing code.
_EXCLUDED = (
    "*site-packages/*",
    "*dist-packages/*",
    "*__pycache__/*",
    "encodings/*",
    "pydoc_data/*",
    "lib2to3/tests/data/*",
    "stringprep.py",
    "html/entities.py",
    "test/re_tests.py",
    "test/test_int_literal.py",
    "test/test_strtod.py",
    "test/encoded_modules/*",
    "test/tokenizedata/*",
)


@dataclass(frozen=True)
class SourceFile:
    """One file: its path inside the corpus (with `/`), its text, the digest of its bytes."""

    path: str
    text: str
    sha256: str


@dataclass(frozen=True)
class Corpus:
    """The files of one corpus, sorted by path, in two parts that share no content."""

    train: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]

    def manifest(self) -> str:
        """One line of JSON a file: path, part, bytes, sha256."""
        parts = [("train", f) for f in self.train] + [("held_out", f) for f in self.held_out]
        rows = [{"path": f.path, "part": part, "bytes": len(f.text.encode()), "sha256": f.sha256} for part, f in parts]
        return "".join(json.dumps(row) + "\n" for row in rows)


def read_corpus(source: str, *, pattern: str, held_out: float) -> Corpus:
    """Read all usable files under `source` and split them.

    A file counts once (exact duplicates go), must be UTF-8, not empty, at most MAX_FILE_BYTES, and valid syntax if it
    is Python. It is held out when the hash of its path falls below the share `held_out`, so the split depends on
    nothing but names. Errors: UsageError when the folder is missing, or either part is empty.
    """
    root = Path(sysconfig.get_path("stdlib")) if source == STDLIB else Path(source)
    if not root.is_dir():
        raise UsageError(f"the training corpus {source} is not a folder; give one with source files, or {STDLIB!r}")
    files: dict[str, SourceFile] = {}
    for path in _matching(root, pattern):
        file = _read(path, path.relative_to(root).as_posix())
        if file is not None:
            files.setdefault(file.sha256, file)
    ordered = sorted(files.values(), key=lambda f: f.path)
    corpus = Corpus(
        train=tuple(f for f in ordered if not is_held_out(f.path, held_out)),
        held_out=tuple(f for f in ordered if is_held_out(f.path, held_out)),
    )
    if not corpus.train or not corpus.held_out:
        raise UsageError(
            f"the training corpus {source} has {len(ordered)} usable files matching {pattern}, "
            f"too few for a training part and a held-out part of {held_out:g}; give more files"
        )
    return corpus


def _matching(root: Path, pattern: str) -> list[Path]:
    try:
        return sorted(root.glob(pattern))
    except (ValueError, NotImplementedError, IndexError):  # empty, absolute or malformed; its types changed over time
        raise UsageError(
            f"training option pattern is {pattern!r}, but it must be a pattern of paths inside the corpus, such as "
            "'**/*.py'"
        ) from None


def is_held_out(path: str, share: float) -> bool:
    """Whether the file of this name is never trained on."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _read(path: Path, name: str) -> SourceFile | None:
    if any(fnmatch(name, glob) for glob in _EXCLUDED) or not path.is_file():
        return None
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"the training corpus holds {path}, which cannot be read ({error.strerror}); make it readable, or remove it"
        ) from None
    if not data.strip() or len(data) > MAX_FILE_BYTES:
        return None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    text = text.replace("\r\n", "\n")
    if name.endswith(".py") and not parses(text):
        return None
    return SourceFile(name, text, hashlib.sha256(data).hexdigest())


def parses(text: str) -> bool:
    """Whether the text is a valid Python module."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
