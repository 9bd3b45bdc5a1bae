"""The training loop of one process. Model, optimizer and data are arguments: another driver may shard them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from torch import Tensor

from writehead import kernels
from writehead.errors import UsageError
from writehead.models.config import ModelConfig
from writehead.models.decoder import Decoder
from writehead.train import folder
from writehead.train.config import TrainConfig
from writehead.train.corpus import read_corpus
from writehead.train.data import Batch, Batches
from writehead.train.evaluate import bits_per_byte
from writehead.train.export import export
from writehead.train.init import initialize
from writehead.train.loops import LoopStage
from writehead.train.loss import loss_sum
from writehead.train.optimizer import learning_rate, make_optimizer, set_learning_rate
from writehead.train.state import FILE_NAME, Progress, load_state, save_state
from writehead.train.vocabulary import END_OF_TEXT_ID

EVAL_CHARS_PER_TOKEN = 3
"""Evaluation during a run reads the beginning of each file: about one context."""


@dataclass(frozen=True)
class TrainResult:
    """What a finished run has: its length, the quality on the beginnings of some held-out files, and its files."""

    steps: int
    tokens: int
    seconds: float
    held_out_bits_per_byte: float
    state: Path
    model: Path


def model_config(config: TrainConfig, *, vocab_size: int) -> ModelConfig:
    """The decoder that a training config asks for: `gpt_bigcode` with one key/value head."""
    head_dim = config.width // config.heads
    return ModelConfig(
        family="gpt_bigcode",
        vocab_size=vocab_size,
        hidden_size=config.width,
        num_layers=config.layers,
        num_heads=config.heads,
        num_kv_heads=1,
        head_dim=head_dim,
        intermediate_size=4 * config.width,
        max_positions=config.context,
        positions="learned",
        activation="gelu_tanh",
        attention_scale=head_dim**-0.5,
        bos_id=END_OF_TEXT_ID,
        eos_ids=(END_OF_TEXT_ID,),
    )


def train(config: TrainConfig, *, show_progress: bool = True) -> TrainResult:
    """Train a model from nothing, or resume; `folder` says what it leaves in `config.out`.

    Errors: UsageError when the folder holds another run, or the corpus is too small; CheckpointError when the state to
    resume is missing or damaged.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    corpus = read_corpus(config.corpus, pattern=config.pattern, held_out=config.held_out)
    tokenizer = folder.reopen(config, corpus) if config.resume else folder.start(config, corpus)
    model = Decoder(model_config(config, vocab_size=tokenizer.get_vocab_size()), kernels.load("reference"))
    initialize(model, num_layers=config.layers, seed=config.seed)
    optimizer = make_optimizer(model, config)
    batches = Batches(corpus.train, tokenizer, config)
    progress = Progress()
    if config.resume:
        progress = load_state(config.out / FILE_NAME, model=model, optimizer=optimizer, batches=batches)
        folder.record_resume(config, step=progress.step)
    sample = [f.text[: EVAL_CHARS_PER_TOKEN * config.context] for f in corpus.held_out[: config.eval_files]]

    def evaluate() -> float:
        return bits_per_byte(model, tokenizer, sample, context=config.context).mean

    run = Run(
        config, model=model, optimizer=optimizer, batches=batches, loops=LoopStage(corpus.train, tokenizer, config),
        progress=progress, evaluate=evaluate,
    )  # fmt: skip
    result = run.finish(show_progress=show_progress)
    export(model, tokenizer, result.model)
    return result


def optimizer_step(
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    *,
    clip: float,
    dtype: torch.dtype,
    repetition: float = 0.0,
    extra: Callable[[], Tensor | None] | None = None,
) -> tuple[float, int]:
    """One step over all passes in `batches`; returns the mean loss in nats and the number of tokens.

    Gradients are those of sum / num_tokens over all passes, so accumulation changes nothing but memory.
    Those of the loss that `extra` returns, if any, are added before clipping.
    """
    passes = list(batches)
    num_tokens = sum(b.targets.numel() for b in passes)
    total = 0.0
    for batch in passes:
        loss = loss_sum(model, batch, dtype=dtype, repetition=repetition)
        (loss / num_tokens).backward()
        total += loss.item()
    if extra is not None and (loss_of_extra := extra()) is not None:
        loss_of_extra.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total / num_tokens, num_tokens


class Run:
    """A run in progress: the parts it is given, and how far it is. Owns the log and the state file in `config.out`."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        model: Decoder,
        optimizer: torch.optim.Optimizer,
        batches: Batches,
        loops: LoopStage,
        progress: Progress,
        evaluate: Callable[[], float],
    ) -> None:
        self.config, self.model, self.optimizer, self.batches = config, model, optimizer, batches
        self.loops, self.progress, self.evaluate = loops, progress, evaluate
        self._dtype = getattr(torch, config.dtype)
        self._started = time.monotonic() - progress.seconds

    @property
    def fraction(self) -> float:
        """How much of the run is done, 0 to 1: of its steps or of its minutes, whichever is more."""
        done = self.progress.step / self.config.steps
        if self.config.minutes is not None:
            done = max(done, self.progress.seconds / (60 * self.config.minutes))
        return min(done, 1.0)

    def finish(self, *, show_progress: bool) -> TrainResult:
        """Step until done; evaluate and save on the way and at the end."""
        saved = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        with Bar(*columns, TimeElapsedColumn(), disable=not show_progress) as bar:
            task = bar.add_task("training", total=1.0)
            while self.fraction < 1.0:
                loss = self.step()
                bar.update(task, completed=self.fraction, description=f"step {self.progress.step}, loss {loss:.3f}")
                if self.progress.step % self.config.eval_every == 0:
                    self._log(held_out_bits_per_byte=self.evaluate())
                if time.monotonic() - saved > 60 * self.config.checkpoint_minutes:
                    self.save()
                    saved = time.monotonic()
        self.save()
        quality = self.evaluate()
        self._log(held_out_bits_per_byte=quality)
        p = self.progress
        out = self.config.out
        return TrainResult(p.step, p.tokens, p.seconds, quality, state=out / FILE_NAME, model=out / "model")

    def step(self) -> float:
        """One optimizer step; returns its loss in nats a token."""
        lr = learning_rate(self.config, step=self.progress.step, progress=self.fraction)
        set_learning_rate(self.optimizer, lr)
        passes = [next(self.batches) for _ in range(self.config.accumulate)]
        if self.fraction < self.config.short_share:
            passes = [batch.halved() for batch in passes]
        measured: dict[str, float] = {}

        def against_loops() -> Tensor | None:
            loss, measured["repeated"] = self.loops.loss(self.model, step=self.progress.step + 1)
            return loss if loss.requires_grad else None

        due = self.loops.due(step=self.progress.step + 1, fraction=self.fraction)
        loss, tokens = optimizer_step(
            self.model,
            self.optimizer,
            passes,
            clip=self.config.clip,
            dtype=self._dtype,
            repetition=self.config.repetition,
            extra=against_loops if due else None,
        )
        if not math.isfinite(loss):
            raise UsageError(
                f"the loss became {loss} at step {self.progress.step + 1} with a learning rate of {lr:g}; "
                "start again, or resume from the last state, with a lower one"
            )
        self.progress.step += 1
        self.progress.tokens += tokens
        self.progress.seconds = time.monotonic() - self._started
        if self.progress.step % 10 == 0 or self.progress.step == 1:
            self._log(loss=loss, lr=lr, **measured)
        return loss

    def save(self) -> None:
        """Write the state to resume from."""
        save_state(
            self.config.out / FILE_NAME,
            model=self.model, optimizer=self.optimizer, batches=self.batches, progress=self.progress,
        )  # fmt: skip

    def _log(self, **values: float) -> None:
        p = self.progress
        row = {"step": p.step, "tokens": p.tokens, "seconds": round(p.seconds, 1), **values}
        with (self.config.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
