"""What the tests of the command line share: a tiny model on disk, and a terminal in a variable."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import transformers

from tests.models import write_tiny_model
from writehead.cli import main


@dataclass(frozen=True, slots=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a tiny gpt_bigcode checkpoint with a tokenizer of StarCoder's kind and no chat template."""
    transformers.utils.logging.disable_progress_bar()
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with a chat template: the messages, each behind the first letter of its role."""
    transformers.utils.logging.disable_progress_bar()
    path = write_tiny_model(tmp_path_factory.mktemp("chat") / "model")
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"
    (path / "chat_template.jinja").write_text(template)
    return str(path)


class Stdin(io.TextIOWrapper):
    """Standard input that is a pipe, or that claims to be a terminal."""

    def __init__(self, data: bytes, *, terminal: bool) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in this process."""

    def call(*arguments: str | Path, stdin: bytes | None = None) -> Result:
        monkeypatch.setattr("sys.stdin", Stdin(stdin or b"", terminal=stdin is None))
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call
