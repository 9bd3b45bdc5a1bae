"""`writehead bench`: every measurement of the speed, one sub-verb each."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from writehead.cli import HELP, VERBS, options
from writehead.errors import UsageError

if TYPE_CHECKING:
    from writehead.bench.report import Report

bench = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, context_settings=HELP)

Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m",
        help="A checkpoint, a Hub id, or random:SHAPE for noise in the shape of a model; default: the box.",
    ),
]  # fmt: skip
New = Annotated[int, typer.Option(min=1, help="Tokens to generate.")]
Rounds = Annotated[int, typer.Option(min=1, help="Measurements of each; one more warms up.")]
Steps = Annotated[int, typer.Option(min=1, help="Decoding steps of a measurement.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the prompts.")]
Seconds = Annotated[float, typer.Option(min=0.001, help="Time spent on each measurement.")]
Buffer = Annotated[
    int | None, typer.Option(metavar="MIB", min=1, help="Read to measure the bandwidth; default: 4 last caches.")
]
Csv = Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the rows as CSV, each as it comes.")]
PlotStem = Annotated[Path | None, typer.Option("--plot", metavar="STEM", help="Draw STEM.png and STEM.svg.")]


@bench.callback(help=VERBS["bench"])
def group() -> None:
    """Each ends with one JSON line on stdout; the table on stderr grows as it goes. docs/benchmarks explains them."""


@bench.command()
def latency(
    context: typer.Context, model: Model = None,
    prompt: Annotated[str, typer.Option(metavar="TOKENS,...", help="Lengths of the prompt.")] = "128",
    new: New = 64, rounds: Rounds = 5, weights: options.Weights = "auto", kernels: options.Kernels = "auto",
    kv_cache_dtype: options.CacheDtype = "auto", seed: Seed = 0, csv: Csv = None, plot: PlotStem = None,
) -> None:  # fmt: skip
    """One completion alone: time to the first token, and for each token after it."""
    from writehead.bench import latency as what
    from writehead.bench.subject import open_subject

    lengths = numbers("--prompt", prompt)
    report = start_report(context, "latency", what.COLUMNS, seed=seed, csv=csv, plot=plot)
    subject = open_subject(
        model, weights=weights, kernels=kernels, kv_cache_dtype=kv_cache_dtype, num_seqs=1, length=max(lengths) + new
    )
    what.measure(subject, report, prompts=lengths, new=new, rounds=rounds)
    report.finish(what.PLOT, load_seconds=subject.load_seconds, weight_bytes=subject.weight_bytes)


@bench.command()
def throughput(
    context: typer.Context, model: Model = None,
    requests: Annotated[int, typer.Option(min=1, help="Prompts given at once.")] = 64,
    batch: Annotated[str, typer.Option(metavar="N,...", help="Sequences that may run at the same time.")] = "64",
    prompt: Annotated[str, typer.Option(metavar="LOW,HIGH", help="Shortest and longest prompt, in tokens.")] = "16,256",
    new: New = 64, rounds: Rounds = 3, weights: options.Weights = "auto", kernels: options.Kernels = "auto",
    kv_cache_dtype: options.CacheDtype = "auto", seed: Seed = 0, csv: Csv = None, plot: PlotStem = None,
) -> None:  # fmt: skip
    """Many prompts of different lengths at once: tokens read and generated in a second."""
    from writehead.bench import throughput as what
    from writehead.bench.subject import open_subject

    bounds, batches = numbers("--prompt", prompt), numbers("--batch", batch)
    if len(bounds) != 2 or bounds[0] > bounds[1]:
        raise UsageError(f"--prompt is '{prompt}'; expected the shortest and the longest length, such as 16,256")
    lengths = what.ragged(requests, bounds[0], bounds[1], seed)
    report = start_report(context, "throughput", what.COLUMNS, seed=seed, csv=csv, plot=plot)
    length = bounds[1] + new
    subject = open_subject(
        model, weights=weights, kernels=kernels, kv_cache_dtype=kv_cache_dtype, num_seqs=max(batches), length=length
    )
    for size in batches:
        what.measure(subject.resized(size, length), report, lengths=lengths, new=new, rounds=rounds)
    report.finish(what.PLOT, load_seconds=subject.load_seconds, weight_bytes=subject.weight_bytes)


@bench.command()
def kernels(
    context: typer.Context, model: Model = None,
    rows: Annotated[str, typer.Option(metavar="N,...", help="Tokens of a step.")] = "1,16,64,512",
    attention: Annotated[
        str, typer.Option(metavar="BATCHxCONTEXT,...", help="Sequences, and the tokens that each has.")
    ] = "1x2000,16x1000,64x1000",
    weights: options.Weights = "auto", kernels: options.Kernels = "auto",
    kv_cache_dtype: options.CacheDtype = "auto",
    seconds: Seconds = 0.5, buffer: Buffer = None, seed: Seed = 0, csv: Csv = None, plot: PlotStem = None,
) -> None:  # fmt: skip
    """Each operation of the kernels, as a share of this machine's measured bandwidth and arithmetic."""
    import torch

    from writehead.bench import kernels as what
    from writehead.bench import limits, shapes

    config, counts, pairs = shapes.structure(model), numbers("--rows", rows), grid("--attention", attention)
    report = start_report(context, "kernels", what.COLUMNS, seed=seed, csv=csv, plot=plot)
    torch.manual_seed(seed)
    found = limits.measure(seconds=seconds, buffer_bytes=buffer and buffer << 20)
    print(found.describe(), file=sys.stderr)
    what.measure(
        report, config, found, weights=weights, kernels=kernels, kv_cache_dtype=kv_cache_dtype, rows=counts,
        attention=pairs, seconds=seconds,
    )  # fmt: skip
    report.finish(what.PLOT, limits=dataclasses.asdict(found))


@bench.command()
def sweep(
    context: typer.Context, model: Model = None,
    batch: Annotated[str, typer.Option(metavar="N,...", help="Sequences that decode together.")] = "1,16,64",
    contexts: Annotated[
        str, typer.Option("--context", metavar="TOKENS,...", help="Tokens that each has in the cache.")
    ] = "128,1000",
    steps: Steps = 4, rounds: Rounds = 3, weights: options.Weights = "auto", kernels: options.Kernels = "auto",
    kv_cache_dtype: options.CacheDtype = "auto", seed: Seed = 0, csv: Csv = None, plot: PlotStem = None,
) -> None:  # fmt: skip
    """Decoding over batch and context: multi-head, broadcast and heads-as-queries attention, alternated.

    The weights are noise in the model's shape. What does not fit the memory is a row that says so.
    """
    from writehead.bench import shapes
    from writehead.bench import sweep as what
    from writehead.bench.sides import stopping

    batches, lengths = numbers("--batch", batch), numbers("--context", contexts)
    shapes.structure(model)  # a name that is wrong is an error here, not in each row
    report = start_report(context, "sweep", what.COLUMNS, seed=seed, csv=csv, plot=plot)
    sides = what.make_sides(model, weights=weights, kernels=kernels, kv_cache_dtype=kv_cache_dtype, seed=seed)
    with stopping(sides):
        what.measure(report, sides, batches=batches, contexts=lengths, steps=steps, rounds=rounds)
    report.finish(what.PLOT)


@bench.command()
def mqa(
    context: typer.Context,
    which: Annotated[
        str, typer.Option("--set", help="Published runs: attention (0.3 B parameters), model (1.1 B) or all.")
    ] = "attention",
    max_batch: Annotated[int, typer.Option(min=1, help="Leave out larger batches.")] = 1024,
    steps: Steps = 1, rounds: Rounds = 2, kernels: options.Kernels = "auto",
    seed: Seed = 0, csv: Csv = None, plot: PlotStem = None,
) -> None:  # fmt: skip
    """The published comparison of multi-head and multi-query attention, at its shapes and batches, in fp32."""
    from writehead.bench import mqa as what
    from writehead.bench.sides import stopping
    from writehead.bench.sweep import make_sides

    if which not in (*what.EXPERIMENTS, "all"):
        raise UsageError(f"--set is '{which}'; choose {', '.join(what.EXPERIMENTS)} or all")
    report = start_report(context, "mqa", what.COLUMNS, seed=seed, csv=csv, plot=plot)
    for experiment in (e for name, some in what.EXPERIMENTS.items() if which in (name, "all") for e in some):
        if experiment.batch <= max_batch:
            sides = make_sides(experiment.model, weights="fp32", kernels=kernels, seed=seed)
            with stopping(sides):
                what.measure(report, sides, experiment, steps=steps, rounds=rounds)
    report.finish(what.PLOT)


@bench.command()
def peers(
    context: typer.Context,
    model: Annotated[str, typer.Option("--model", "-m", help="A checkpoint's directory, as Hugging Face writes it.")],
    weights: Annotated[str, typer.Option(metavar="NAME,...", help="writehead's; the first is compared.")] = "auto",
    peer: Annotated[
        list[str] | None, typer.Option(metavar="NAME[=PATH]", help="A peer and its converted model. Repeatable.")
    ] = None,
    peer_python: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Interpreter of an environment with the peers.")
    ] = None,
    work: Annotated[
        list[str] | None, typer.Option(metavar="WORK", help="decode:BATCHxCONTEXT or prefill:TOKENS. Repeatable.")
    ] = None,
    steps: Steps = 16, rounds: Rounds = 3, kernels: options.Kernels = "auto",
    kv_cache_dtype: options.CacheDtype = "auto", seed: Seed = 0, csv: Csv = None, plot: PlotStem = None,
) -> None:  # fmt: skip
    """Other engines on the same checkpoint and work, alternated with writehead; the median of the ratios.

    Peers: transformers-fp32, transformers-bf16, ctranslate2-int8, llamacpp-q8_0, llamacpp-q4_0, openvino-int8,
    openvino-int4. What is not installed or not converted is skipped with its reason.
    """
    from writehead.bench import peers as what
    from writehead.bench.sides import stopping
    from writehead.build import load_tokenizer, open_source
    from writehead.kernels import parse_format

    for name in weights.split(","):
        parse_format(name, packs_floats=False)  # a name that is wrong is an error before any child starts
    source = open_source(model)
    positions = source.config.max_positions
    works = [what.parse_work(text) for text in work or ()] or [w for w in what.DEFAULT_WORK if w.tokens < positions]
    paths = what.parse_peers(peer or (), source.path)
    vocab = min(source.config.vocab_size, load_tokenizer(source).vocab_size)
    report = start_report(context, "peers", what.COLUMNS, seed=seed, csv=csv, plot=plot)
    own = what.own_sides(
        str(source.path), weights.split(","), kernels=kernels, kv_cache_dtype=kv_cache_dtype, seed=seed
    )
    others = what.peer_sides(paths, python=peer_python, vocab=vocab, seed=seed)
    with stopping([*own, *others]):
        skipped = what.measure(report, own, others, paths, works, steps=steps, rounds=rounds)
    notes = {side.name: side.loaded["note"] for side in others if side.loaded.get("note")}
    report.finish(what.PLOT, skipped=skipped, notes=notes)


def grid(name: str, text: str) -> list[tuple[int, int]]:
    """`1x2000,16x1000` as pairs. Raises UsageError that names the option."""
    pairs = [word.split("x") for word in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise UsageError(f"{name} is '{text}'; expected BATCHxCONTEXT with commas between them, such as 1x2000,16x1000")
    return [(batch, length) for batch, length in (numbers(name, ",".join(pair)) for pair in pairs)]


def numbers(name: str, text: str) -> list[int]:
    """`1,16,64` as whole numbers from 1. Raises UsageError that names the option."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 10 and int(word) for word in words):
        raise UsageError(f"{name} is '{text}'; expected whole numbers from 1 with commas between them, such as 1,16,64")
    return [int(word) for word in words]


def start_report(
    context: typer.Context, name: str, columns: Mapping[str, str], *, seed: int, csv: Path | None, plot: Path | None
) -> Report:
    """The report of a sub-verb, whose settings are all its options but those of the report itself."""
    from writehead.bench.report import Report

    own = {key: value for key, value in context.params.items() if key not in ("seed", "csv", "plot", "trace")}
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in own.items()}
    return Report(
        name, columns, command=command_line(context), seed=seed, settings=settings, csv_file=csv, plot_stem=plot
    )


def command_line(context: typer.Context) -> str:
    """The command that was run, without the options that were left at their defaults."""
    words = [context.command_path]
    for parameter in context.command.params:
        value: Any = context.params.get(str(parameter.name))
        if value in (None, (), [], parameter.default):
            continue
        flag = [] if parameter.param_type_name == "argument" else [parameter.opts[0]]
        values = value if isinstance(value, list | tuple) else [value]
        words += [word for each in values for word in (flag if each is True else [*flag, shlex.quote(str(each))])]
    return " ".join(words)
