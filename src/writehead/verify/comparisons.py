"""`verify`: every way to run a checkpoint here, against transformers and against each other."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from writehead import kernels as kernel_backends
from writehead.build import ModelSource, build, load_tokenizer, open_source
from writehead.errors import PromptError, UsageError
from writehead.kernels import parse_format
from writehead.kernels.packed import FLOATS
from writehead.models.decoder import Decoder
from writehead.text import Tokenizer
from writehead.verify.oracle import Oracle, load_oracle, require_transformers
from writehead.verify.report import Report, Row, compare, judge, largest, spread
from writehead.verify.subject import Ids, Subject, tile_heads, with_kernels
from writehead.verify.tokens import has_tokenizer, tokenizer_row

PROMPTS = (
    "def fibonacci(n):\n    ",
    "# Python 3\nimport heapq\n\n\ndef merge(left: list[int], right: list[int]) -> list[int]:\n"
    '    """Merge two sorted lists into one."""\n    result = []\n    while left and right:\n        ',
    "The cache of a decoder grows with every token that it reads. To keep it small, all query heads share",
)
RANDOM_LENGTHS = (5, 48, 23)

TOLERANCES = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""The largest difference that passes, as a share of the logits' range. In 16 bits the two sides round apart."""


def verify(
    model: str | Path | None = None,
    *,
    weights: str = "fp32",
    prompts: Sequence[str] | None = None,
    max_new_tokens: int = 32,
    tolerance: float | None = None,
    kernels: str = "auto",
    accept_config_keys: Collection[str] = (),
) -> Report:
    """Compare a checkpoint's numbers here with Hugging Face transformers' and with themselves, computed in other ways.

    Both sides hold the weights in the dtype `weights`; at most two copies are in memory. `tolerance` is relative to the
    logits' range (None: by dtype, 2e-5 in fp32). Raises MissingDependencyError without transformers.
    """
    require_transformers()
    format = parse_format(weights, packs_floats=False)
    if format.packed:
        raise UsageError(f"weights: {format} is rounded, and verify compares exact numbers; choose {', '.join(FLOATS)}")
    dtype = format.dtype
    allowed = TOLERANCES[dtype] if tolerance is None else tolerance
    if not 0 <= allowed < 1 or max_new_tokens < 1:
        raise UsageError(
            f"tolerance is {tolerance!r} and max_new_tokens {max_new_tokens!r}; expected 0 to 1, and at least 1"
        )
    source = open_source(model, accept_config_keys=accept_config_keys)
    if source.packed is not None:
        raise UsageError(f"{source.path}: its weights are rounded to {source.packed}; verify the original model")
    tokenizer = load_tokenizer(source) if prompts is not None or has_tokenizer(source) else None
    ids = _prompt_ids(source, tokenizer, prompts, max_new_tokens)
    backend = kernel_backends.load(kernels)
    decoder = build(source, weights=weights, kernels=backend)
    subject = Subject(decoder, tokenizer or Tokenizer.stand_in(source.config.vocab_size))
    texts = [p + new for p, new in zip(ids, subject.greedy(ids, max_new_tokens), strict=True)]
    ours = _run(subject, texts, [len(p) for p in ids])
    oracle = load_oracle(source, dtype)
    rows = _against_transformers(ours, oracle, subject.num_sampleable, max_new_tokens, allowed)
    origin = oracle.origin
    del oracle  # its weights make room for the tiled model
    if backend.packs_floats:  # what follows shares and tiles plain weights
        decoder = build(source, weights=weights, kernels=kernel_backends.load("reference"))
    rows += _against_each_other(ours, Subject(decoder, subject.tokenizer), allowed)
    if tokenizer is not None:
        rows.append(tokenizer_row(source, tokenizer))
    return Report(model=str(source.path), oracle=origin, rows=tuple(rows))


def _prompt_ids(
    source: ModelSource, tokenizer: Tokenizer | None, prompts: Sequence[str] | None, max_new_tokens: int
) -> list[Ids]:
    """The prompts as ids. Built-in ones are cut to what fits the model, a user's are refused."""
    room = source.config.max_positions - max_new_tokens
    if room < 1:
        raise UsageError(
            f"max_new_tokens is {max_new_tokens}; the model has {source.config.max_positions} positions for prompt and "
            "completion together, so give a smaller number"
        )
    if prompts is None and tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        draws = [torch.randint(source.config.vocab_size, (n,), generator=generator).tolist() for n in RANDOM_LENGTHS]
        return [d[:room] for d in draws]
    assert tokenizer is not None
    if prompts is None:
        return [tokenizer.encode(p)[:room] for p in PROMPTS]
    ids = [tokenizer.encode(p) for p in prompts]
    lengths = [len(i) for i in ids]
    if not ids or min(lengths) < 1 or max(lengths) > room:
        raise PromptError(f"the prompts have {lengths} tokens; give at least one, of 1 to {room} tokens each")
    return ids


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ours:
    """Logits [T, V] of the same sequences, computed in three ways."""

    texts: list[Ids]
    """Prompts with their greedy completions, and last the half of the longest: ragged even if all are of a length."""
    prompts: list[int]
    """How many tokens of each text are prompt."""
    whole: list[Tensor]
    """Each at once, without a cache."""
    single: list[Tensor]
    """Each by itself, the prompt and then token by token."""
    batch: list[Tensor]
    """All in one ragged batch, the prompts and then token by token."""


def _run(subject: Subject, texts: list[Ids], prompts: list[int]) -> _Ours:
    longest = max(texts, key=len)
    half = longest[: -(-len(longest) // 2)]
    texts, prompts = [*texts, half], [*prompts, -(-len(half) // 2)]
    return _Ours(
        texts=texts,
        prompts=prompts,
        whole=[subject.whole(text) for text in texts],
        single=[subject.stepwise([text], [prompt])[0] for text, prompt in zip(texts, prompts, strict=True)],
        batch=subject.stepwise(texts, prompts),
    )


def _against_transformers(
    ours: _Ours, oracle: Oracle, num_sampleable: int, num_new: int, tolerance: float
) -> list[Row]:
    """Logits of prompt and completion, computed at once, with the cache and in a ragged batch; the greedy choices."""
    expected = [oracle.whole(text) for text in ours.texts]
    what = f"{len(expected)} sequences, {sum(map(len, ours.texts))} tokens"
    rows = [
        ("logits", ours.whole, expected, f"{what}, each at once"),
        ("cached decoding", ours.single, expected, "the prompt, then token by token; transformers without a cache"),
        ("ragged batch", ours.batch, oracle.left_padded(ours.texts), "one batch; transformers' padded on the left"),
    ]
    choices = [e[:, :num_sampleable] for e in expected[:-1]]
    greedy = greedy_row(ours.texts[:-1], ours.prompts[:-1], choices, num_new=num_new, tolerance=tolerance)
    return [*_compare_all(rows, tolerance), greedy]


def _against_each_other(ours: _Ours, subject: Subject, tolerance: float) -> list[Row]:
    """The cache against none, a batch against single runs, and the computations of shared heads against each other."""

    def run(decoder: Decoder) -> list[Tensor]:
        return Subject(decoder, subject.tokenizer).stepwise(ours.texts, ours.prompts)

    decoder, config = subject.decoder, subject.decoder.config
    queries, broadcast = run(with_kernels(decoder, "reference")), run(with_kernels(decoder, "reference-broadcast"))
    rows = [
        ("cached = uncached", ours.single, ours.whole, "token by token; at once"),
        ("ragged = single", ours.batch, ours.single, "one batch; one sequence at a time"),
        ("queries = broadcast", queries, broadcast, f"{config.num_heads} heads share {config.num_kv_heads} key/value"),
    ]
    if config.num_kv_heads < config.num_heads:
        tiled = run(tile_heads(decoder, "reference"))
        rows.append(("queries = tiled", queries, tiled, "heads as queries; multi-head model of tiled heads"))
        rows.append(("broadcast = tiled", broadcast, tiled, "heads broadcast; multi-head model of tiled heads"))
    return _compare_all(rows, tolerance)


def _compare_all(rows: list[tuple[str, list[Tensor], list[Tensor], str]], tolerance: float) -> list[Row]:
    return [compare(name, found, wanted, tolerance=tolerance, detail=detail) for name, found, wanted, detail in rows]


def greedy_row(texts: list[Ids], prompts: list[int], expected: list[Tensor], *, num_new: int, tolerance: float) -> Row:
    """Whether transformers, at each generated token, would have chosen the same.

    `expected` are its logits [T, V] of the texts, so what follows a difference is judged after our choice. A different
    choice passes if the two logits are as close as rounding may bring them: a tie is not an error of substance.
    """
    notes: list[str] = []
    margins: list[Tensor] = []
    width = spread(expected)
    for number, (text, prompt, logits) in enumerate(zip(texts, prompts, expected, strict=True)):
        if len(text) < prompt + num_new:
            detail = f"prompt {number} ended after {len(text) - prompt} of {num_new} tokens: our logits are not finite"
            return replace(judge("greedy tokens", math.nan, width, tolerance=tolerance, detail=""), detail=detail)
        rows, chosen = logits[prompt - 1 : -1], torch.tensor(text[prompt:])
        margin = rows.max(dim=-1).values - rows.gather(1, chosen[:, None])[:, 0]
        different = (margin != 0).nonzero().flatten().tolist()
        if different:
            at = different[0]
            notes.append(f"prompt {number} at token {at} by {float(margin[at]) / width:.2g} of the range")
        margins.append(margin)
    row = judge("greedy tokens", largest(margins), width, tolerance=tolerance, detail="; ".join(notes))
    if not notes:
        return replace(row, detail=f"{num_new * len(texts)} tokens, the same choices")
    verdict = "ties within rounding, not errors" if row.passed else "not a tie"
    return replace(row, detail=f"first different choices: {row.detail} ({verdict})")
