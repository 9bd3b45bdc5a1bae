"""Tokenizers from GGUF metadata.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) instead of carrying it. The expressions are the ones of the
families' own tokenizer.json files, as llama.cpp's src/llama-vocab.cpp lists them: text is cut at every match of the
first one, the parts at every match of the next, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from writehead.errors import TokenizerError
from writehead.text import sentencepiece
from writehead.text.source import Source, mark_special, refusing

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_SLASH}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}|{_REST_SLASH}"
)
_SEED = rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = r"[一-龥ࠀ-一가-퟿]+"
_DIGIT, _THREE = r"\p{N}", "[0-9][0-9][0-9]"

_FAMILIES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("gpt-2", "phi-2", "mpt", "olmo", "jais", "mellum", "exaone4", "granite-docling", "trillion", "a.x-4.0"): (_GPT2,),
    ("starcoder", "refact", "smollm", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"): (_DIGIT, _GPT2),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "dbrx", "smaug-bpe"): (_LLAMA3,),
    ("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan", "grok-2", "solar-open"): (_QWEN2,),
    ("deepseek-coder",): (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT),
    ("deepseek-v3", "hunyuan-dense"): (r"\p{N}{1,3}", "[一-龥\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3),
    ("falcon",): (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE),
    ("default",): (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREE),
    ("tekken",): (_TEKKEN,),
    ("gpt-4o", "llama4"): (_GPT4O,),
    ("seed-coder",): (_SEED,),
}
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {name: splits for names, splits in _FAMILIES.items() for name in names}

# These take a word that is a whole token without merging it up, and open a prompt with bos if the file is silent.
_WHOLE_WORDS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken"})
# Files from before the key existed: the architecture tells which pre-tokenizer its tokenizer.json had.
_PRE_OF_ARCHITECTURE = {"starcoder": "starcoder", "starcoder2": "starcoder", "gpt2": "gpt-2", "qwen2": "qwen2"}

_KEY = "tokenizer.ggml."
_FIM_KEYS = {
    "prefix": ("fim_pre_token_id", "prefix_token_id"),
    "suffix": ("fim_suf_token_id", "suffix_token_id"),
    "middle": ("fim_mid_token_id", "middle_token_id"),
    "pad": ("fim_pad_token_id",),
    "rep": ("fim_rep_token_id",),
    "sep": ("fim_sep_token_id",),
}
_ID_KEYS = ("bos", "eos", "eot", "eom", "padding", "unknown")
_LLAMA_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # what llama.cpp assumes of SentencePiece vocabularies


@dataclass(frozen=True, slots=True)
class _Metadata:
    """Typed access to a GGUF file's metadata. Errors: TokenizerError naming the file and the key."""

    values: Mapping[str, Any]
    origin: str

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.refused(f"{key} is of type {type(value).__name__}, expected {kind.__name__}")
        return value

    def list(self, key: str, *kinds: type) -> list[Any]:
        value = self.values.get(_KEY + key, [])
        if hasattr(value, "tolist"):
            value = value.tolist()
        if not isinstance(value, list) or not all(isinstance(item, kinds) for item in value):
            raise self.refused(f"{_KEY}{key} is not a list of {kinds[0].__name__}")
        return value

    def token_id(self, key: str, vocab_size: int) -> int | None:
        value: int | None = self.get(_KEY + key, int)
        if value is not None and not 0 <= value < vocab_size:
            raise self.refused(f"{_KEY}{key} is {value}, but the vocabulary has {vocab_size} tokens")
        return value

    def refused(self, reason: str) -> TokenizerError:
        return TokenizerError(
            f"{self.origin}: {reason}; convert the model to GGUF again or use its Hugging Face files."
        )


def read_gguf(metadata: Mapping[str, Any], *, origin: str) -> Source:
    """Build the tokenizer that a GGUF file's metadata describes.

    Errors: TokenizerError for a model besides `gpt2` and `llama`, an unknown pre-tokenizer, fields of a wrong type.
    """
    data = _Metadata(metadata, origin)
    model = data.get(_KEY + "model", str)
    tokens = data.list("tokens", str)
    types = data.list("token_type", int) or [sentencepiece.NORMAL] * len(tokens)
    if not tokens or len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise data.refused(
            f"{len(tokens)} tokens ({len(set(tokens))} distinct) with {len(types)} types are no vocabulary"
        )
    pre = data.get(_KEY + "pre", str, _PRE_OF_ARCHITECTURE.get(data.get("general.architecture", str, ""), "default"))
    with refusing(origin, "the tokenizer's metadata cannot be used"):
        if model == "gpt2":
            backend = _byte_level(data, tokens, types, pre)
        elif model == "llama":
            backend = _sentencepiece(data, tokens, types)
        else:
            raise data.refused(f"the tokenizer is of model {model!r}, expected 'gpt2' or 'llama'")
        ids = {key: data.token_id(f"{key}_token_id", len(tokens)) for key in _ID_KEYS}
        if model == "llama":
            ids = {key: _LLAMA_IDS.get(key) if found is None else found for key, found in ids.items()}
        mark_special(backend, [tokens[i] for i in ids.values() if i is not None and i < len(tokens)])
    bos = ids["bos"]
    add_bos = data.get(_KEY + "add_bos_token", bool, model == "llama" or pre in _WHOLE_WORDS)
    return Source(
        origin=origin,
        backend=backend,
        bos_id=bos,
        eos_ids=frozenset(i for key in ("eos", "eot", "eom") if (i := ids[key]) is not None),
        pad_id=ids["padding"],
        prefix_ids=(bos,) if add_bos and bos is not None else (),
        chat_template=data.get("tokenizer.chat_template", str),
        unused_ids=frozenset(i for i, kind in enumerate(types) if kind == sentencepiece.UNUSED),
        fim_ids={part: i for part, keys in _FIM_KEYS.items() if (i := _first(data, keys, len(tokens))) is not None},
    )


def _first(data: _Metadata, keys: tuple[str, ...], vocab_size: int) -> int | None:
    return next((i for key in keys if (i := data.token_id(key, vocab_size)) is not None), None)


def _byte_level(data: _Metadata, tokens: list[str], types: list[int], pre: str) -> tokenizers.Tokenizer:
    splits = PRE_TOKENIZERS.get(pre)
    if splits is None:
        raise data.refused(f"the pre-tokenizer {pre!r} is unknown")
    # A merge is "left right"; a token may itself begin with a space.
    merges = [(merge[:cut], merge[cut + 1 :]) for merge in data.list("merges", str) if (cut := merge.find(" ", 1)) > 0]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS))
    backend.pre_tokenizer = byte_level_splitter(splits)
    backend.decoder = decoders.ByteLevel()
    sentencepiece.add_tokens(backend, tokens, types)
    return backend


def byte_level_splitter(splits: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    """Cut at every match of each expression in turn, then spell the parts in the byte-level alphabet."""
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), "isolated") for split in splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece(data: _Metadata, tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    return sentencepiece.build(
        sentencepiece.Vocabulary(
            pieces=tokens,
            scores=[float(score) for score in data.list("scores", float, int)],
            types=types,
            add_prefix=data.get(_KEY + "add_space_prefix", bool, True),
            squeeze_spaces=data.get(_KEY + "remove_extra_whitespaces", bool, False),
        )
    )
