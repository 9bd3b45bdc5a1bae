"""The import contracts of pyproject.toml hold on the tree, and each of them catches what it is there to catch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LAYERS = "A module imports only from lower layers"
ORACLE = "transformers is the oracle of `verify` and of nothing else"
PICKLE = "Nothing unpickles"


def lint(source: Path, cwd: Path) -> str:
    """What import-linter reports about the package in `source` under the contracts of pyproject.toml."""
    # An editable install finds its own package first, whatever the path says.
    linter = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__ != '_writehead_editable']; "
        "from importlinter.cli import lint_imports_command; lint_imports_command()"
    )
    command = [sys.executable, "-c", linter, "--no-cache", "--no-logo", str(REPOSITORY / "pyproject.toml")]
    # A path of the environment goes before that of an installed writehead, and `cwd` must not offer another one.
    environment = {**os.environ, "PYTHONPATH": str(source), "COLUMNS": "200", "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert (done.returncode == 0) == ("0 broken" in done.stdout), done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package's sources that a test may break."""
    copy = tmp_path / "src" / "writehead"
    shutil.copytree(REPOSITORY / "src" / "writehead", copy, ignore=lambda _, names: {n for n in names if skipped(n)})
    return copy


def skipped(name: str) -> bool:
    """Whether a file is of no interest to a linter of imports."""
    return name == "__pycache__" or ("." in name and not name.endswith(".py"))


def write(path: Path, text: str) -> None:
    """Append `text` to a module of the copy, which is created with its package where it does not exist."""
    path.parent.mkdir(exist_ok=True)
    (path.parent / "__init__.py").touch()
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" + text)


def test_contracts_hold_on_the_tree(tmp_path: Path) -> None:
    report = lint(REPOSITORY / "src", tmp_path)
    assert "Contracts: 3 kept, 0 broken." in report


@pytest.mark.parametrize(
    ("module", "text", "broken"),
    [
        ("errors.py", "def late() -> None:\n    from writehead import cli\n", LAYERS),
        ("kernels/bad.py", "import writehead.text\n", LAYERS),
        ("text/bad.py", "from writehead.checkpoint import x\n", LAYERS),
        ("models/bad.py", "def late() -> None:\n    import writehead.engine\n", LAYERS),
        ("engine/bad.py", "from writehead import train\n", LAYERS),
        ("train/bad.py", "from writehead import bench\n", LAYERS),
        ("bench/bad.py", "from writehead import cli\n", LAYERS),
        ("unplanned/__init__.py", "", LAYERS),
        ("models/bad.py", "def late() -> None:\n    import transformers\n", ORACLE),
        ("cli/bad.py", "from transformers import AutoConfig\n", ORACLE),
        ("checkpoint/bad.py", "def late() -> None:\n    import pickle\n", PICKLE),
        ("cache/bad.py", "from shelve import open\n", PICKLE),
    ],
)
def test_a_violation_breaks_its_contract(package: Path, module: str, text: str, broken: str) -> None:
    write(package / module, text)
    report = lint(package.parent, package.parent)
    assert f"{broken} BROKEN" in report
    assert "Contracts: 2 kept, 1 broken." in report


def test_a_downward_import_breaks_nothing(package: Path) -> None:
    write(package / "cli" / "good.py", "from writehead import bench, build, engine, errors, models\n")
    assert "Contracts: 3 kept, 0 broken." in lint(package.parent, package.parent)
