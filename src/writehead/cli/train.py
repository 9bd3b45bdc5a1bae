"""`writehead train`: the fields of TrainConfig as options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from writehead.cli import options
from writehead.errors import UsageError
from writehead.train.config import TrainConfig

if TYPE_CHECKING:
    from writehead.train.bodies import Complete

HELP = {
    "out": "Folder of the run; it must not hold another one, unless --resume.",
    "corpus": "Folder of source files, or 'stdlib' for the running Python's own.",
    "pattern": "Which files of the folder.",
    "held_out": "Share of the files that is never trained on.",
    "vocab_size": "Tokens of the byte-level BPE that is trained first.",
    "fim_rate": "Share of the documents that become fill-in-the-middle.",
    "function_rate": "Share of the other documents that are shown one function at a time.",
    "layers": "Layers.",
    "width": "Width of the model.",
    "heads": "Query heads; they share one key/value head.",
    "context": "Tokens of a sequence, and positions of the model.",
    "steps": "Optimizer steps.",
    "batch": "Sequences of a pass.",
    "accumulate": "Passes of a step.",
    "short_share": "Share of the run, from its start, that sees sequences cut in two.",
    "optimizer": "muon, or adamw.",
    "lr": "Highest learning rate.",
    "min_lr": "Last learning rate.",
    "warmup": "Steps of linear warmup.",
    "weight_decay": "Weight decay of matrices.",
    "beta1": "AdamW's first beta.",
    "beta2": "AdamW's second beta.",
    "clip": "Largest norm of the gradient.",
    "repetition": "Weight of unlikelihood against repeating the last tokens; 0: plain cross-entropy.",
    "loop_share": "Share of the run, at its end, that also trains against loops in greedy completions; 0: none.",
    "loop_every": "Steps from one that trains against loops to the next.",
    "loop_batch": "Greedy completions of such a step.",
    "loop_tokens": "Tokens of such a completion; fewer where the context is short.",
    "loop_weight": "Weight of the unlikelihood of what they repeat.",
    "dtype": "float32 or bfloat16.",
    "seed": "Seed of the weights and of the data's order.",
    "minutes": "Budget of time: the schedule ends after it.",
    "resume": "Go on with the run in the folder.",
    "checkpoint_minutes": "Minutes between two saved states.",
    "eval_every": "Steps between two evaluations.",
    "eval_files": "Held-out files of an evaluation.",
    "threads": "Threads; default: torch's choice.",
}
"""A line for each field; a test holds that none is missing."""


Publish = Annotated[
    Path | None, typer.Option(help="Folder to copy the finished model to, measured and with a model card.")
]


@options.with_fields(TrainConfig, HELP)
def train(publish: Publish = None, **fields: Any) -> None:
    """Train a small code model from a folder of source files."""
    from writehead.train import train as run

    config = TrainConfig(**fields)
    if publish is not None:
        try:
            publish.mkdir(parents=True, exist_ok=True)  # hours before it is needed, while somebody is there
        except OSError as error:
            raise UsageError(f"--publish: {publish} cannot be a folder ({error.strerror}); choose another") from None
    result = run(config, show_progress=sys.stderr.isatty())
    print(
        f"{config.out}: {result.steps} steps, {result.tokens} tokens in {result.seconds / 60:.1f} minutes, "
        f"{result.held_out_bits_per_byte:.3f} bits per byte on held-out files; the model is {result.model}"
    )
    if publish is not None:
        from writehead.train.report import publish as publish_run

        report = publish_run(config, publish, complete_with=completer)
        print(
            f"{publish}: {report.model.mean:.3f} bits per byte on all held-out files, xz -9e {report.xz.mean:.3f}; "
            f"{report.alone.num_passed} of {len(report.alone.passed)} function bodies parse"
        )


def completer(checkpoint: Path) -> Complete:
    """Greedy completions through the engine that users run."""
    from writehead import LLM, SamplingParams
    from writehead.train.bodies import Completion

    llm = LLM(checkpoint)

    def complete(prompts: list[list[int]], limit: int) -> list[Completion]:
        params = SamplingParams(temperature=0, max_tokens=limit)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        return [Completion(o.outputs[0].text, o.outputs[0].finish_reason == "stop") for o in outputs]

    return complete
