"""Small tokenizers, trained or spelled out here, in the shapes that real checkpoints have."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from writehead.text import Tokenizer

CORPUS = [
    "def add(a, b):\n    return a + b\n",
    "for i in range(2023):\n        print(i, 650841823)\n",
    "class Shape:\n\tpass\n\n\n# naïve café, 日本語 and ☃\n",
    "x  =  12\ny = x ** 2\nif x == 12 and y != 144:\n    raise ValueError('the value is wrong')\n",
]
STARCODER = ["<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<file_sep>", "<repo_name>"]

TokenizerMaker = Callable[..., Tokenizer]


def train_byte_level(special: Sequence[str], *, digits: bool = True, size: int = 420) -> tokenizers.Tokenizer:
    """Byte-level BPE as BigCode trains it: digits one by one, special tokens first. A fresh copy each time."""
    return tokenizers.Tokenizer.from_str(_trained(tuple(special), digits, size))


@cache
def _trained(special: tuple[str, ...], digits: bool, size: int) -> str:
    backend = tokenizers.Tokenizer(models.BPE())
    splits = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return backend.to_str()


def write_checkpoint(folder: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder


@pytest.fixture
def make(tmp_path: Path) -> TokenizerMaker:
    """A byte-level tokenizer with these special tokens, read back from a checkpoint directory."""

    def build(special: Sequence[str] = STARCODER, **config: Any) -> Tokenizer:
        folder = tmp_path / f"checkpoint{len(list(tmp_path.iterdir()))}"
        return Tokenizer.from_directory(write_checkpoint(folder, train_byte_level(special), **config))

    return build


def byte_level_gguf(backend: tokenizers.Tokenizer, *, pre: str, **more: Any) -> dict[str, Any]:
    """The metadata that a GGUF file of this tokenizer has."""
    model = json.loads(backend.to_str())["model"]
    special = {token.content for token in backend.get_added_tokens_decoder().values()}
    tokens = sorted(backend.get_vocab(), key=lambda token: backend.get_vocab()[token])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        **more,
    }


def sentencepiece_gguf(words: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    """Metadata of a Llama-like vocabulary: control tokens, all bytes, characters and a few longer pieces."""
    control = ["<unk>", "<s>", "</s>"]
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    chars = list("▁abcdefghilnorstu(){}=+:,.0123456789\n<>/|_PRESUFMIDOT")
    pieces = list(dict.fromkeys([*control, *byte_pieces, *words, *chars]))
    kinds = {"<unk>": 2, **dict.fromkeys(control[1:], 3), **dict.fromkeys(byte_pieces, 6)}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(pieces))],
        "tokenizer.ggml.token_type": [kinds.get(piece, 1) for piece in pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **more,
    }


def llama_json() -> tokenizers.Tokenizer:
    """A tokenizer.json as Llama 2 has it: Prepend, byte fallback, a post-processor that adds bos."""
    data = sentencepiece_gguf(["▁de", "▁def", "de", "re", "tu", "rn", "▁re"])
    backend = Tokenizer.from_gguf(data)._backend
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken(f"▁<{name}>", normalized=False) for name in ("PRE", "SUF", "MID", "EOT")])
    return backend
