"""The command line: one verb a file, each loaded when it is called, so that help is instant."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, TextIO

import typer
import typer.core
import typer.main

from writehead import __version__
from writehead.errors import WriteheadError

VERBS = {
    "generate": "Complete code, or fill in the middle of it; the text streams to the terminal.",
    "chat": "Talk to a model that was tuned for it.",
    "convert": "Write a checkpoint as a Hugging Face safetensors checkpoint.",
    "inspect": "Show what a checkpoint is and what it needs, without loading it.",
    "verify": "Compare a checkpoint's numbers with transformers, and MQA with its multi-head twin.",
    "bench": "Measure speed: latency, throughput, sweeps, kernels, and other engines beside it.",
    "profile": "Show where the time of a step goes: by operation and layer, against the machine's limits.",
    "train": "Train a small code model from a folder of source files.",
    "env": "Show versions, processor, memory and kernel backends.",
}

INTERNAL_ERROR = 70
"""EX_SOFTWARE of sysexits.h."""

INTERRUPTED = 130
"""What a shell makes of a process that Ctrl-C ended."""

HELP = {"help_option_names": ["--help", "-h"]}
"""Context settings of every command."""

_WRITING = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""What a stream answers that takes no more; whoever writes files reports their errors by name."""


class Verbs(typer.core.TyperGroup):
    """The group of all verbs. A verb's module is imported when the verb is run or its own help is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """The names, in the order of the help."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """The command of one verb."""
        if cmd_name not in VERBS:
            names: Any = dict.fromkeys(VERBS)
            self.commands = names  # what typer suggests from
            return None
        found = getattr(import_module(f"writehead.cli.{cmd_name}"), cmd_name)
        if isinstance(found, typer.Typer):  # a verb of verbs
            return typer.main.get_command(found)
        verb = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=HELP)
        verb.command(cmd_name)(found)
        return typer.main.get_command(verb)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """The list in the help, from the table above."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


app = typer.Typer(
    cls=Verbs, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=HELP
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"writehead {__version__}")
        raise typer.Exit


@app.callback()
def writehead(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; works behind any verb.")
    ] = False,
) -> None:
    """Multi-query attention turned into speed: run, inspect, convert and train code models."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. What went wrong is one line on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = given[: given.index("--")] if "--" in given else given
    debug = "--debug" in own
    rest = [argument for argument in own if argument != "--debug"] + given[len(own) :]
    _prepare_streams()
    code, lost = 1, None
    try:
        code = _run(rest, debug=debug)
    except OSError as error:
        lost = error
    lost = _settle(sys.stdout) or lost
    if lost is not None and not isinstance(lost, BrokenPipeError):  # whoever closed a pipe has seen enough
        _report(f"the output could not be written ({lost.strerror})", 1, debug=False)
    _settle(sys.stderr)
    return code if lost is None else 1


def _prepare_streams() -> None:
    """Give a closed stream a place to go, and let a terminal that lacks a character be no reason to stop."""
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115 - as long as the process lives
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _run(arguments: Sequence[str], *, debug: bool) -> int:
    """Run a verb, report what went wrong, and return the exit code. OSError: the output takes no more."""
    try:
        app(arguments, prog_name="writehead")
    except KeyboardInterrupt:  # while the verb was being loaded; later ones are typer's or the verb's
        return INTERRUPTED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except WriteheadError as error:
        return _report(str(error), error.exit_code, debug=debug)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _WRITING and error.filename is None:
            raise
        if isinstance(error, MemoryError) or "allocate memory" in str(error):  # as torch and the system say it
            text = "the memory is not enough for this; use a smaller model, --weights bf16 or fewer tokens"
            return _report(text, 1, debug=debug)
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        text = f"internal error: {reason}; please report it (--debug shows the traceback)"
        return _report(text, INTERNAL_ERROR, debug=debug, prefix="")
    return 0


def _settle(stream: TextIO) -> OSError | None:
    """Flush a stream. One that fails loses what it holds, or the interpreter would fail once more at its exit."""
    try:
        stream.flush()
    except OSError as error:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None


def _report(message: str, code: int, *, debug: bool, prefix: str = "error: ") -> int:
    """Say what went wrong, behind what came out so far and as far as there is somebody to tell."""
    if debug:
        import traceback

        traceback.print_exc()
    with contextlib.suppress(OSError):  # `main` tries again and speaks of it
        sys.stdout.flush()
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in prefix + message)  # file names may hold anything
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr)
    return code
