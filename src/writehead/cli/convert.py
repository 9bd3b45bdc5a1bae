"""`writehead convert`: any checkpoint to Hugging Face safetensors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from writehead.cli import options
from writehead.cli.inspect import readable


def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint's directory or file, or a Hub id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write.")],
    dtype: Annotated[str, typer.Option(help="keep, fp32, bf16 or fp16; keep makes what is quantized fp32.")] = "keep",
    weights: Annotated[
        str | None,
        typer.Option(help="Round and pack for writehead alone: int8, int4, int4-64, int4-128, bf16, fp16, fp32."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint that OUT holds.")] = False,
    accept_config_key: options.AcceptConfigKey = None,
) -> None:
    """Write a checkpoint as a Hugging Face safetensors checkpoint.

    Reads safetensors, torch .bin, GGUF and BigCode's Megatron; SantaCoder's first form becomes gpt_bigcode. One
    parameter is in memory at a time, and without a change of dtype every number stays the same. With --weights the
    result is for writehead: the next start maps it as it lies.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from writehead.convert import convert as write_checkpoint

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("")
        done = write_checkpoint(
            model, out, dtype=dtype, weights=weights, overwrite=overwrite, accept_config_keys=accept_config_key or (),
            on_bytes=lambda written, total: bar.update(task, completed=written, total=total),
        )  # fmt: skip
    print(
        f"{out}: {done.family}, {done.num_tensors} tensors, {readable(done.num_bytes)} in {len(done.files)} "
        f"file{'s' * (len(done.files) > 1)}, {' and '.join(done.dtypes)}"
    )
    if not done.has_tokenizer:
        print(f"{model} has no tokenizer, so {out} has none; add the one of the original model", file=sys.stderr)
