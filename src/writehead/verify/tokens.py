"""The tokenizer's own comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from writehead.build import ModelSource
from writehead.text import Tokenizer
from writehead.verify.oracle import quiet
from writehead.verify.report import Row

TEXTS = (
    "def add(a, b):\n    return a + b\n",
    "x = 0x1F + 1234567890 - 3.14159\n",
    "\tfor (int i = 0; i < n; ++i) {\n\t\ts += v[i]; // sum\n\t}\n",
    "    if  not   ready :   \n\n\n        pass\n",
    'print("naïve café, 東京, 🙂")\n',
    "SELECT * FROM t WHERE id='2024-01-31' AND it's_ok;",
)


def has_tokenizer(source: ModelSource) -> bool:
    """Whether the checkpoint brings a tokenizer at all; a broken one counts."""
    if source.checkpoint.format == "gguf":
        return "tokenizer.ggml.tokens" in source.checkpoint.metadata
    return any((directory_of(source) / n).is_file() for n in ("tokenizer.json", "vocab.json", "tokenizer.model"))


def directory_of(source: ModelSource) -> Path:
    """Where the checkpoint's files lie."""
    return source.path if source.path.is_dir() else source.path.parent


def tokenizer_row(source: ModelSource, tokenizer: Tokenizer) -> Row:
    """Ids against the `tokenizers` library on tokenizer.json, or without such a file whether texts survive.

    transformers' tokenizer is reported and never counts: its classes may replace the pre-tokenizer (#45812).
    """
    ours = [tokenizer.encode(text, add_special=False) for text in TEXTS]
    file = directory_of(source) / "tokenizer.json"
    if file.is_file() and source.checkpoint.format != "gguf":
        library = tokenizers.Tokenizer.from_file(str(file))
        library.no_truncation()
        library.no_padding()
        theirs = [library.encode(text, add_special_tokens=False).ids for text in TEXTS]
        wrong = _count(ours, theirs)
        detail = f"ids of {len(TEXTS)} texts against tokenizers on tokenizer.json"
    else:
        wrong = _count([tokenizer.decode(ids) for ids in ours], TEXTS)
        detail = f"{len(TEXTS)} texts encoded and decoded"
    return Row(
        name="tokenizer",
        difference=wrong,
        relative=wrong / len(TEXTS),
        tolerance=0.0,
        passed=wrong == 0,
        detail=f"{detail}; {_opinion(source, ours)}",
    )


def _opinion(source: ModelSource, ours: Sequence[list[int]]) -> str:
    """What transformers' tokenizer makes of the same texts: information, not a verdict."""
    with quiet():
        from transformers import AutoTokenizer

        options = {"gguf_file": source.checkpoint.path.name} if source.checkpoint.format == "gguf" else {}
        try:
            auto = AutoTokenizer.from_pretrained(
                str(directory_of(source)), trust_remote_code=False, local_files_only=True, **options
            )
            theirs = [auto.encode(text, add_special_tokens=False) for text in TEXTS]
        except Exception as error:  # whatever it raises, it is no verdict on the checkpoint
            return f"transformers' {type(error).__name__} kept its tokenizer from loading (information only)"
    wrong = _count(ours, theirs)
    name = type(auto).__name__
    if wrong:
        return f"transformers' {name} disagrees on {wrong} (information only: it may replace the pre-tokenizer)"
    return f"transformers' {name} agrees"


def _count(found: Sequence[object], expected: Sequence[object]) -> int:
    return sum(a != b for a, b in zip(found, expected, strict=True))
