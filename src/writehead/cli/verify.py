"""`writehead verify`: the numbers of a checkpoint against transformers'."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from writehead.cli import options


def verify(
    model: options.ModelArgument = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="A text to compare on. Repeatable.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Greedy tokens to compare.")] = 32,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest difference as a share of the logits' range; default: by dtype.")
    ] = None,
    weights: Annotated[str, typer.Option(help="Dtype on both sides: fp32, bf16 or fp16.")] = "fp32",
    kernels: options.Kernels = "auto",
    accept_config_key: options.AcceptConfigKey = None,
    as_json: options.Json = False,
) -> None:
    """Compare a checkpoint's numbers with transformers, and MQA with its multi-head twin.

    Exits with 7 if a comparison fails. Needs the extra: pip install 'writehead[hf]'.
    """
    from writehead.verify import verify as compare

    report = compare(
        model, weights=weights, prompts=prompt, max_new_tokens=max_new_tokens, tolerance=tolerance, kernels=kernels,
        accept_config_keys=accept_config_key or (),
    )  # fmt: skip
    if as_json:
        print(json.dumps({**dataclasses.asdict(report), "passed": report.passed}))
    else:
        print(report.table())
    report.raise_if_failed()
