"""`writehead generate`: a prompt, or the code around a cursor, to a completion on stdout."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from writehead.cli import INTERRUPTED, options, sampling
from writehead.engine.request import SamplingParams
from writehead.errors import UsageError

if TYPE_CHECKING:
    from writehead.api import LLM
    from writehead.engine.engine import Event
    from writehead.engine.outputs import RequestOutput
    from writehead.engine.sequence import Sequence


@options.with_fields(SamplingParams, sampling.HELP, defaults=sampling.DEFAULTS, flags={"n": "-n"})
def generate(
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="Code to continue; '-' reads stdin.")] = None,
    model: options.Model = None,
    file: Annotated[str | None, typer.Option("--file", "-f", help="Read the prompt from a file; '-' is stdin.")] = None,
    suffix: Annotated[str | None, typer.Option(help="Code behind the gap: fill in the middle.")] = None,
    fim_file: Annotated[
        str | None, typer.Option(metavar="FILE:LINE:COL", help="Fill in at this place of a file; both count from 1.")
    ] = None,
    weights: options.Weights = "auto",
    kernels: options.Kernels = "auto",
    kv_cache_dtype: options.CacheDtype = "auto",
    max_model_len: options.MaxModelLen = None,
    accept_config_key: options.AcceptConfigKey = None,
    as_json: options.Json = False,
    stats: Annotated[bool, typer.Option("--stats", help="Report tokens and times on stderr.")] = False,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Print the text when it is complete.")] = False,
    **fields: Any,
) -> None:
    """Complete code, or fill in the middle of it; the text streams to the terminal.

    Only the completion goes to stdout. The prompt is the argument, a file, or stdin. Several completions (-n) each
    follow a line `--- 1 ---`.
    """
    params = sampling.read_params(fields)
    request = _read_request(prompt, file, suffix, fim_file)
    started = time.perf_counter()
    from writehead.api import LLM

    llm = LLM(
        model, weights=weights, kernels=kernels, kv_cache_dtype=kv_cache_dtype, max_model_len=max_model_len,
        max_num_seqs=params.n, accept_config_keys=accept_config_key or (),
    )  # fmt: skip
    progress = Progress(llm, load_seconds=time.perf_counter() - started)
    streams = not (no_stream or as_json or params.n > 1)
    code = _run(llm, request, params, progress, streams=streams, as_json=as_json)
    if stats:
        print(f"\n{progress.describe()}", file=sys.stderr)
    for sequence in progress.sequences.values():
        sampling.check_end(sequence)
    raise typer.Exit(code)


class Progress:
    """What came out so far and when. `see` and `write` are listeners of `LLM.generate`."""

    def __init__(self, llm: LLM, *, load_seconds: float) -> None:
        self.llm, self.load_seconds = llm, load_seconds
        self.sequences: dict[int, Sequence] = {}
        self.started = self.first = self.last = time.perf_counter()

    def see(self, event: Event) -> None:
        """Take note of an event."""
        self.last = time.perf_counter()
        if not self.sequences:
            self.first = self.last
        self.sequences[event.index] = event.sequence

    def write(self, event: Event) -> None:
        """Take note of an event and print its text, after the prompt if that is wanted."""
        is_first = not self.sequences
        self.see(event)
        text = self.echo(event.sequence) if is_first else ""
        print(text + event.text, end="", flush=True)

    def echo(self, sequence: Sequence) -> str:
        """What stands before the completion: the prompt as the model read it, with `echo`."""
        from writehead.engine.outputs import echo_text

        return echo_text(sequence.request, self.llm.tokenizer)

    def so_far(self, prompt: str | None) -> RequestOutput | None:
        """The output of a run that was interrupted; None if nothing came out."""
        from writehead.engine.outputs import make_output

        sequences = [self.sequences[index] for index in sorted(self.sequences)]
        return make_output(prompt, sequences, self.echo(sequences[0])) if sequences else None

    def describe(self) -> str:
        """One line of figures."""
        sequences = list(self.sequences.values())
        if not sequences:
            return f"loaded in {self.load_seconds:.2f} s, no token came out"
        count = sum(sequence.num_output for sequence in sequences)
        seconds = self.last - self.first
        rest = count - len(sequences)
        rate = f", {rest / seconds:.1f} tokens/s after the first" if rest > 0 and seconds > 0 else ""
        return (
            f"loaded in {self.load_seconds:.2f} s; {sequences[0].num_prompt} prompt tokens, first token after "
            f"{1000 * (self.first - self.started):.0f} ms; {count} tokens in {self.last - self.started:.2f} s{rate}"
        )


def _run(
    llm: LLM, request: dict[str, str], params: SamplingParams, progress: Progress, *, streams: bool, as_json: bool
) -> int:
    """Generate and print; the exit code."""
    code = 0
    output: RequestOutput | None
    progress.started = time.perf_counter()
    try:
        [output] = llm.generate(request, params, on_event=progress.write if streams else progress.see)
    except KeyboardInterrupt:
        code, output = INTERRUPTED, progress.so_far(request["prompt"])
    if output is None:
        return code
    if as_json:
        print(json.dumps(dataclasses.asdict(output)))
    elif not streams:
        _print_texts([completion.text for completion in output.outputs])
    if not as_json and sys.stdout.isatty() and not output.outputs[-1].text.endswith("\n"):
        print()
    sys.stdout.flush()
    return code


def _print_texts(texts: list[str]) -> None:
    if len(texts) == 1:
        print(texts[0], end="")
        return
    for number, text in enumerate(texts, start=1):
        print(f"--- {number} ---\n{text}", end="" if text.endswith("\n") else "\n")


def _read_request(prompt: str | None, file: str | None, suffix: str | None, fim_file: str | None) -> dict[str, str]:
    """The one source of the prompt that was given, in the form that `LLM.generate` takes."""
    given = [n for n, v in (("PROMPT", prompt), ("--file", file), ("--fim-file", fim_file)) if v is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} both give a prompt; use one of them")
    if fim_file is not None:
        if suffix is not None:
            raise UsageError("--suffix and --fim-file both say what stands behind the gap; use one of them")
        before, after = split_at_cursor(fim_file)
        return {"prompt": before, "suffix": after}
    text = _read_prompt(prompt, file)
    return {"prompt": text} if suffix is None else {"prompt": text, "suffix": suffix}


def _read_prompt(prompt: str | None, file: str | None) -> str:
    if file is not None and file != "-":
        return options.read_text(Path(file))
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and file is None and sys.stdin.isatty():
        raise UsageError("there is no prompt; give it as an argument, with --file, or through a pipe")
    return options.read_stream(sys.stdin.buffer, "stdin")


def split_at_cursor(place: str) -> tuple[str, str]:
    """`FILE:LINE:COL` -> the file's text before and behind the place, which lies before that column."""
    name, *numbers = place.rsplit(":", 2)
    if len(numbers) != 2 or not all(n.isascii() and n.isdigit() and 0 < len(n) < 10 for n in numbers) or not name:
        raise UsageError(f"--fim-file is '{place}'; expected FILE:LINE:COL, such as main.py:12:5")
    line, column = map(int, numbers)
    text = options.read_text(Path(name))
    lines = text.split("\n")
    if not 1 <= line <= len(lines):
        raise UsageError(f"--fim-file: {name} has lines 1 to {len(lines)}, and line {line} was asked for")
    width = len(lines[line - 1].removesuffix("\r"))
    if not 1 <= column <= width + 1:
        raise UsageError(f"--fim-file: line {line} of {name} has columns 1 to {width + 1}, and {column} was asked for")
    cursor = sum(len(each) + 1 for each in lines[: line - 1]) + column - 1
    return text[:cursor], text[cursor:]
