"""The documents keep their promises: commands parse, Python runs, links lead somewhere."""

from __future__ import annotations

import pkgutil
import re
import runpy
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import transformers

import writehead.build
from tests.models import write_tiny_model
from writehead.cli import VERBS, Verbs

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "docs/quickstart.md")
BENCHMARKS = "docs/benchmarks/README.md"


def blocks(document: str, language: str) -> list[str]:
    """The fenced blocks of a document in one language."""
    parts = re.split(r"^```(.*)\n", (REPOSITORY / document).read_text("utf-8"), flags=re.MULTILINE)
    # text, opening, block, closing, text, opening, ...
    return [block for opening, block in zip(parts[1::4], parts[2::4], strict=True) if opening == language]


def commands(document: str) -> list[list[str]]:
    """Every call of writehead, as words."""
    lines = [line for block in blocks(document, "") for line in block.splitlines()]
    calls = [re.split(r"\|\s*", line)[-1] for line in lines]
    return [shlex.split(call)[1:] for call in calls if re.match(r"(\.venv/bin/)?writehead ", call)]


@pytest.mark.parametrize("document", [*DOCUMENTS, BENCHMARKS])
def test_commands_parse(document: str) -> None:
    found = commands(document)
    expected = {"bench"} if document == BENCHMARKS else {"generate", "chat", "inspect", "convert", "verify", "env"}
    assert {call[0] for call in found} >= expected
    group = Verbs(name="writehead")
    for verb, *arguments in found:
        if verb.startswith("--"):
            continue
        command: Any = group.get_command(None, verb)
        assert command is not None, verb
        made = command.make_context(verb, arguments)  # raises where a word is unknown, missing or too much
        if hasattr(command, "resolve_command"):  # a verb of verbs
            name, inner, rest = command.resolve_command(made, arguments)
            inner.make_context(name, rest, parent=made)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_runs(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers.utils.logging.disable_progress_bar()
    monkeypatch.setattr(writehead.build, "BOX", write_tiny_model(tmp_path / "box"))
    code = "\n".join(blocks(document, "python"))
    assert "LLM(" in code
    (tmp_path / "example.py").write_text(code)
    runpy.run_path(str(tmp_path / "example.py"))
    assert capsys.readouterr().out


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    path = REPOSITORY / document
    for target in re.findall(r"\]\(([^)#]+)", path.read_text("utf-8")):
        assert (path.parent / target).exists(), target


def test_the_tree_names_files_that_are_there() -> None:
    tree = next(block for block in blocks("README.md", "") if block.startswith("src/writehead/"))
    folders = {2: REPOSITORY / "src/writehead"}
    for line in tree.splitlines()[1:]:
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        if name == "...":
            continue
        path = folders[indent] / name
        assert path.exists(), name
        folders[indent + 2] = path
    top = {path.name for path in (REPOSITORY / "src/writehead").iterdir() if path.suffix in ("", ".py")}
    named = {line.split()[0].rstrip("/") for line in tree.splitlines()[1:] if re.match(r"  \S", line)}
    assert named == top - {"__init__.py", "__main__.py", "__pycache__"}


def test_the_quickstart_lists_every_exit_code() -> None:
    from writehead import errors

    text = (REPOSITORY / "docs/quickstart.md").read_text("utf-8")
    found = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    classes = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.WriteheadError)
    ]
    assert found == {kind.exit_code for kind in classes} | {70, 130}


def test_every_verb_is_in_the_quickstart() -> None:
    assert {call[0] for call in commands("docs/quickstart.md") if not call[0].startswith("--")} == set(VERBS)


def test_the_benchmarks_page_explains_every_column() -> None:
    from writehead import bench

    sections = re.split(r"^## ", (REPOSITORY / BENCHMARKS).read_text("utf-8"), flags=re.MULTILINE)[1:]
    tables = {
        section.split("\n")[0]: dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.M)) for section in sections
    }
    found = {}
    for module in pkgutil.iter_modules(bench.__path__):
        columns = getattr(import_module(f"writehead.bench.{module.name}"), "COLUMNS", None)
        if columns is not None:
            found[module.name] = columns
    assert tables == found
