"""A measurement in a process of its own: its threads fight with nobody's, and if it dies only its own row is lost.

Parent and child speak in lines of JSON: a request such as {"do": "decode", "steps": 4}, and one answer, which is what
was measured or {"refused": why}. `child.py` answers for writehead, `peer_process.py` for other engines.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any


class RefusedError(Exception):
    """The child lives and says why it cannot do that."""


class DiedError(Exception):
    """The child is gone; says how."""


class Worker:
    """A child process that answers requests. Use it as a context, or call `stop`."""

    def __init__(self, name: str, command: Seq[str], *, environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - until `stop`
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises RefusedError or DiedError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise DiedError(self._epitaph())
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            raise RefusedError(answer["refused"])
        return answer

    def stop(self) -> None:
        """End the child; it is told by the end of its input, and killed if it does not listen."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # there may be something that was still to be sent
                stream.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _epitaph(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        said = [line.strip() for line in self._errors if line.strip()]
        if code == -signal.SIGKILL:
            return "killed by the system (SIGKILL), most likely for want of memory"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return how + (f": {said[-1][:300]}" if said else "")
