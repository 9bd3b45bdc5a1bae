"""A finished run as a published checkpoint: what it is, what it was trained on, what it is worth."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from writehead import kernels
from writehead.build import build, open_source
from writehead.errors import UsageError
from writehead.train import folder
from writehead.train.bodies import BodyResult, Complete, alone, choose_bodies, function_bodies
from writehead.train.config import STDLIB, TrainConfig
from writehead.train.corpus import Corpus, SourceFile, read_corpus
from writehead.train.evaluate import CodeLength, bits_per_byte, xz_bits_per_byte
from writehead.train.state import Progress, read_progress


@dataclass(frozen=True)
class Report:
    """The quality of a checkpoint on the files that its training never saw."""

    model: CodeLength
    xz: CodeLength
    in_file: BodyResult
    alone: BodyResult
    num_parameters: int


def publish(config: TrainConfig, out: Path, *, complete_with: Callable[[Path], Complete]) -> Report:
    """Copy the run's finished model to `out`, measure it there, and write its card (README.md) and manifest.

    `complete_with` makes a greedy completer of a checkpoint's folder, so that bodies are written by the engine that
    users run. Errors: UsageError when the run is not finished, or its corpus is not the one that it was trained on.
    """
    trained = config.out / "model"
    if not (trained / "config.json").exists():
        raise UsageError(f"{config.out} has no finished model to publish; let its training end first")
    corpus = read_corpus(config.corpus, pattern=config.pattern, held_out=config.held_out)
    folder.reopen(config, corpus)
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(trained.iterdir()):
        shutil.copyfile(file, out / file.name)
    (out / "manifest.jsonl").write_text(corpus.manifest(), encoding="utf-8")
    report = evaluate(out, corpus.held_out, complete_with(out))
    text = card(config, corpus, read_progress(config.out), report) + _history(config.out)
    (out / "README.md").write_text(text, encoding="utf-8")
    return report


NUM_BODIES = 100


def evaluate(checkpoint: Path, files: tuple[SourceFile, ...], complete: Complete) -> Report:
    """Measure a checkpoint, as stored, on files."""
    model = build(open_source(checkpoint), weights="fp32", kernels=kernels.load("reference"))
    tokenizer = folder.read_tokenizer(checkpoint)
    texts = [file.text for file in files]
    context = model.config.max_positions
    bodies = choose_bodies(files, NUM_BODIES)
    return Report(
        model=bits_per_byte(model, tokenizer, texts, context=context),
        xz=xz_bits_per_byte(texts),
        in_file=function_bodies(bodies, tokenizer, complete, context=context),
        alone=function_bodies([alone(body) for body in bodies], tokenizer, complete, context=context),
        num_parameters=sum(p.numel() for p in model.parameters()),
    )


def card(config: TrainConfig, corpus: Corpus, progress: Progress, report: Report) -> str:
    """The model card, in Markdown."""
    fewer = report.model.shorter_than(report.xz)
    train_bytes, held_out_bytes = (sum(len(f.text.encode()) for f in part) for part in (corpus.train, corpus.held_out))
    digest = hashlib.sha256(corpus.manifest().encode()).hexdigest()
    if config.corpus == STDLIB:
        source = f"the standard library of CPython {platform.python_version()}, its own tests included"
        license_note = "The data is under the PSF License Version 2 (https://docs.python.org/3/license.html)."
    else:
        source, license_note = f"the files {config.pattern} of one folder", "The data's license is its owner's."
    return f"""# A small code model

A `gpt_bigcode` decoder with multi-query attention and fill-in-the-middle, trained from nothing by `writehead train`.
It is here so that the first command shows something; it writes plausible Python and knows nothing. {license_note}

| | |
| --- | --- |
| parameters | {report.num_parameters:,} ({config.layers} layers, width {config.width}, {config.heads} query heads \
that share one key/value head, {config.context} learned positions, tied head), stored in bf16 |
| tokenizer | byte-level BPE of its own, {config.vocab_size} tokens, digits apart, StarCoder's special tokens |
| data | {source}: {len(corpus.train)} files, {train_bytes:,} bytes; without character tables, generated texts, exact \
duplicates and files that are not valid UTF-8 Python |
| held out | {len(corpus.held_out)} files, {held_out_bytes:,} bytes, chosen by the hash of their path; neither the \
model nor the tokenizer saw them |
| manifest | `manifest.jsonl` names every file, its part and its sha256 (sha256 of the manifest: `{digest}`) |
| training | {progress.step:,} steps, {progress.tokens:,} tokens, {progress.seconds / 60:.0f} minutes on a busy CPU |

## Results on the held-out files

| measure | result |
| --- | --- |
| bits a byte, this model | {report.model.mean:.3f} |
| bits a byte, `xz -9e` file by file | {report.xz.mean:.3f} |
| files that need fewer bits than `xz -9e` | {fewer} of {len(corpus.held_out)} |
| function bodies that parse up to the function's end, greedy, after the function alone | {_passed(report.alone)} |
| the same after the file up to there | {_passed(report.in_file)} |

Bits a byte: each file from its first byte, windows of {config.context} tokens that overlap by half.

Bodies: functions with at least two statements, chosen by hash. The prompt ends with the signature and the docstring (if
there is one), without the line break, and starts with the `def` at column 0, or with the file (cut on the left to fit).
The completion ends at the first line that is indented no deeper than its `def`; header and completion must be one
function for `ast.parse`, with a statement of its own. A completion that does not end fails.

## Options of the run

```json
{json.dumps(_options(config), indent=2)}
```
"""


def _history(out: Path) -> str:
    """What the card says of a run that was resumed with other options: the same result needs the same changes."""
    history = folder.read_history(out)
    if not history:
        return ""
    rows = [f"- after step {s:,}: {', '.join(f'{n} {a} to {b}' for n, (a, b) in c.items())}" for s, c in history]
    return "\nThe run was resumed with other options, the last of which stand above:\n\n" + "\n".join(rows) + "\n"


def _passed(result: BodyResult) -> str:
    passed, documented = result.with_docstring
    return f"{result.num_passed} of {len(result.passed)} (of those with a docstring: {passed} of {documented})"


def _options(config: TrainConfig) -> dict[str, object]:
    """The options that decide the result; a folder's name is nobody's business."""
    hidden = {"out", "resume", "threads", "checkpoint_minutes", "eval_every", "eval_files"}
    hidden |= set() if config.corpus == STDLIB else {"corpus"}
    names = [f.name for f in dataclasses.fields(config) if f.name not in hidden]
    return {name: config.as_json()[name] for name in names}
