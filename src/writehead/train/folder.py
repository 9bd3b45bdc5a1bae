"""The folder of a run: what it was started with, so that only the same run continues in it.

train_config.json   the config            tokens-N.npy   epoch N as token ids
manifest.jsonl      every file's part     log.jsonl      loss, learning rate, held-out quality
tokenizer.json      the tokenizer         state.pt       weights, optimizer, place in the data
history.jsonl       changed options       model/         the finished model as a checkpoint
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from writehead.errors import CheckpointError, UsageError
from writehead.train.config import TrainConfig
from writehead.train.corpus import Corpus
from writehead.train.vocabulary import train_tokenizer

_FIXED = (
    "corpus", "pattern", "held_out", "vocab_size", "layers", "width", "heads", "context", "seed",
)  # fmt: skip
"""Options that decide model and data: a run cannot continue with others. Changed rates hold from the next epoch."""

_FREE = ("out", "resume", "threads", "checkpoint_minutes", "eval_every", "eval_files", "minutes", "steps")
"""Options that say how a run is run: a change is not worth remembering."""


def start(config: TrainConfig, corpus: Corpus) -> Tokenizer:
    """Make the folder of a new run and train its tokenizer. Errors: UsageError when it holds a run already."""
    out = config.out
    if (out / "train_config.json").exists():
        raise UsageError(f"{out} already holds a training run; resume it, or choose another output folder")
    tokenizer = train_tokenizer((f.text for f in corpus.train), vocab_size=config.vocab_size)
    try:
        out.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(out / "tokenizer.json"))
        (out / "manifest.jsonl").write_text(corpus.manifest(), encoding="utf-8")
        (out / "train_config.json").write_text(json.dumps(config.as_json(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the output folder {out} cannot be written ({error.strerror}); choose another") from error
    return tokenizer


def record_resume(config: TrainConfig, *, step: int) -> None:
    """Remember which options changed when the run was resumed after `step`, for its card."""
    path = config.out / "train_config.json"
    before, now = json.loads(path.read_text(encoding="utf-8")), config.as_json()
    changed = {name: [before.get(name), now[name]] for name in now if before.get(name) != now[name]}
    path.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
    if kept := {name: values for name, values in changed.items() if name not in _FREE}:
        with (config.out / "history.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "changed": kept}) + "\n")


def read_history(out: Path) -> list[tuple[int, dict[str, list[object]]]]:
    """Each resumption with changed options: the step, and old and new value by name."""
    path = out / "history.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [(row["step"], row["changed"]) for row in map(json.loads, lines)]


def read_tokenizer(out: Path) -> Tokenizer:
    """The tokenizer of a run or of a published model. Errors: CheckpointError when it is missing or damaged."""
    path = out / "tokenizer.json"
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises plain Exception for a damaged file
        raise CheckpointError(f"{path} is missing or no tokenizer; start a new run in another folder") from error


def reopen(config: TrainConfig, corpus: Corpus) -> Tokenizer:
    """Check that the folder's run is the one asked for; return its tokenizer.

    Errors: UsageError when an option or the corpus differs, CheckpointError when files are missing or damaged.
    """
    out = config.out
    try:
        before = json.loads((out / "train_config.json").read_text(encoding="utf-8"))
        manifest = (out / "manifest.jsonl").read_text(encoding="utf-8")
        if not isinstance(before, dict):
            raise ValueError("not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{out} holds no complete training run to resume; start one without resume") from error
    now = config.as_json()
    for name in _FIXED:
        if before.get(name) != now[name]:
            raise UsageError(
                f"{out} holds a run with {name} {before.get(name)}, but {now[name]} is asked for; "
                "resume with the same options, or choose another output folder"
            )
    if manifest != corpus.manifest():
        raise UsageError(
            f"the files of the corpus {config.corpus} changed since the run in {out} began; "
            "choose another output folder for a new run"
        )
    return read_tokenizer(out)
