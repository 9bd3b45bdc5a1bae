"""The command line: one verb a file, each loaded when it is called, so that help is instant."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

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
    "train": "Train a small code model from a folder of source files.",
    "env": "Show versions, processor, memory and kernel backends.",
}

INTERNAL_ERROR = 70
"""EX_SOFTWARE of sysexits.h."""


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
        verb = typer.Typer(add_completion=False, rich_markup_mode=None)
        verb.command(cmd_name)(getattr(import_module(f"writehead.cli.{cmd_name}"), cmd_name))
        return typer.main.get_command(verb)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """The list in the help, from the table above."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


app = typer.Typer(cls=Verbs, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a character is no reason to stop
    try:
        app(rest, prog_name="writehead")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except WriteheadError as error:
        return _report(str(error), error.exit_code, debug=debug)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MemoryError:
        return _report(
            "the memory is not enough for this; use a smaller model, --weights bf16 or fewer tokens", 1, debug=debug
        )
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        text = f"internal error: {reason}; please report it (--debug shows the traceback)"
        return _report(text, INTERNAL_ERROR, debug=debug, prefix="")
    return 0


def _report(message: str, code: int, *, debug: bool, prefix: str = "error: ") -> int:
    if debug:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    print(prefix + message, file=sys.stderr)
    return code
