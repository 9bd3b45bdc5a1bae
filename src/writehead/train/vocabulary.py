"""The byte-level BPE tokenizer of a model trained from nothing."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
FIM_PREFIX = "<fim_prefix>"
FIM_MIDDLE = "<fim_middle>"
FIM_SUFFIX = "<fim_suffix>"
FIM_PAD = "<fim_pad>"

# StarCoder's names in StarCoder's order: their ids are 0 to 4.
SPECIAL_TOKENS = (END_OF_TEXT, FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX, FIM_PAD)
END_OF_TEXT_ID, FIM_PREFIX_ID, FIM_MIDDLE_ID, FIM_SUFFIX_ID, FIM_PAD_ID = range(5)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Train a tokenizer in StarCoder's layout: single digits, then byte-level words, then merges.

    The byte-level pattern keeps a line break and all but the last space of the indentation after it in one word, so
    `\\n        return` is two tokens. Training is deterministic.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of text in which a special token's name is ordinary text."""
    return encode_texts(tokenizer, [text])[0]


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Token ids of several texts, each encoded alone."""
    tokenizer.encode_special_tokens = True
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
