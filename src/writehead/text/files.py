"""Tokenizers from a checkpoint's own files: tokenizer.json, or vocab.json with merges.txt, or tokenizer.model.

tokenizer.json is used as it is. The classes of transformers are not asked: some of them replace the pre-tokenizer and
so change ids (transformers #45812, GPT2Tokenizer dropping the digit split of BigCode's vocabularies).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as short
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from writehead.errors import TokenizerError
from writehead.text import sentencepiece
from writehead.text.source import Source, mark_special, refusing

_CONFIG = "tokenizer_config.json"


def read_directory(path: Path) -> Source:
    """Read the tokenizer of the checkpoint in `path`. Errors: TokenizerError naming the file."""
    config = {**_read_json(path / "special_tokens_map.json"), **_present(_read_json(path / _CONFIG))}
    backend, origin = _backend(path, config)
    with refusing(str(origin), "the added tokens cannot be used"):
        backend.no_truncation()
        backend.no_padding()
        _add_missing(backend, _added_tokens(path, config), origin)
        named = {name: _spelling(config.get(f"{name}_token")) for name in ("bos", "eos", "unk", "pad")}
        mark_special(backend, [*named.values(), *map(_spelling, _extra(config))])
    ids = {name: None if token is None else backend.token_to_id(token) for name, token in named.items()}
    fallback = path / "config.json"
    bos = ids["bos"] if ids["bos"] is not None else min(_ids(fallback, "bos_token_id"), default=None)
    eos = {i for i in (ids["eos"],) if i is not None} | _ids(path / "generation_config.json", "eos_token_id")
    return Source(
        origin=str(origin),
        backend=backend,
        bos_id=bos,
        eos_ids=frozenset(eos or _ids(fallback, "eos_token_id")),
        pad_id=ids["pad"],
        prefix_ids=_prefix_ids(backend, config.get("add_bos_token"), bos, path / _CONFIG),
        chat_template=_chat_template(path, config),
    )


def _backend(path: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, Path]:
    whole, vocab, merges, spm = (path / n for n in ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model"))
    if whole.is_file():
        data = _read(whole)
        with refusing(str(whole), "this is not a tokenizer that can be used"):
            return tokenizers.Tokenizer.from_str(data.decode("utf-8")), whole
    if vocab.is_file() and merges.is_file():
        for file in (vocab, merges):
            _read(file)  # `tokenizers` does not say which of them it cannot open
        with refusing(str(vocab), f"this and {merges.name} are not a byte-level BPE vocabulary"):
            backend = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
            prefix = bool(config.get("add_prefix_space", False))
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
            backend.decoder = decoders.ByteLevel()
            return backend, vocab
    if spm.is_file():
        data = _read(spm)
        with refusing(str(spm), "this is not a SentencePiece model that can be used"):
            return sentencepiece.build(sentencepiece.read_model(data)), spm
    raise TokenizerError(
        f"{path}: the checkpoint has no tokenizer; expected tokenizer.json, or vocab.json with merges.txt, or "
        "tokenizer.model, so put the files of the original model there."
    )


def _read(path: Path) -> bytes:
    """A file's bytes. Raises TokenizerError that says why it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read ({error.strerror}); make it readable.") from None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or nothing if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: this is not readable JSON ({error}); fetch the file again.") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: expected a JSON object, found {type(value).__name__}; fetch the file again.")
    return value


def _present(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _spelling(token: object) -> str | None:
    """A token is written as a string or as an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) and content else None


def _extra(config: Mapping[str, Any]) -> list[Any]:
    extra = config.get("additional_special_tokens", [])
    return extra if isinstance(extra, list) else []


def _added_tokens(path: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Id to token of `added_tokens_decoder` (tokenizer_config.json) and of the older added_tokens.json."""
    entries: dict[Any, Any] = {index: token for token, index in _read_json(path / "added_tokens.json").items()}
    decoder = config.get("added_tokens_decoder", {})
    entries.update(decoder if isinstance(decoder, dict) else {})
    found: dict[int, AddedToken] = {}
    for index, token in entries.items():
        spelling = _spelling(token)
        if spelling is None or not str(index).isdecimal():
            raise TokenizerError(f"{path / _CONFIG}: added token {index!r} has no text or no id; fetch the file again.")
        flags = token if isinstance(token, dict) else {}
        keys = ("single_word", "lstrip", "rstrip", "special")
        found[int(index)] = AddedToken(
            spelling,
            normalized=bool(flags.get("normalized", False)),
            **{key: bool(flags.get(key, False)) for key in keys},
        )
    return found


def _add_missing(backend: tokenizers.Tokenizer, added: Mapping[int, AddedToken], origin: Path) -> None:
    for index, token in sorted(added.items()):
        if backend.token_to_id(token.content) is not None:
            continue
        backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
        if backend.token_to_id(token.content) != index:
            raise TokenizerError(
                f"{origin}: added token {token.content!r} should have id {index}, but the vocabulary continues at "
                f"{backend.token_to_id(token.content)}; the tokenizer's files do not belong together."
            )


def _ids(file: Path, key: str) -> set[int]:
    """The token id, or the list of them, that a JSON file has under a key; negative ones mean none."""
    value = _read_json(file).get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) and v < 1 << 32 for v in values):
        raise TokenizerError(f"{file}: '{key}' is {short(value)}; expected a token id or a list of them.")
    return {v for v in values if v >= 0}


def _prefix_ids(backend: tokenizers.Tokenizer, add_bos: object, bos: int | None, config: Path) -> tuple[int, ...]:
    """What opens a prompt: what the post-processor puts in front of text, unless `add_bos_token` says otherwise.

    What a post-processor puts behind the text (an end token) is left out: a prompt is there to be continued.
    """
    if add_bos is False:
        return ()
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    start = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), 0)
    if start or not add_bos:
        return tuple(full[:start])
    if bos is None:
        raise TokenizerError(f"{config}: add_bos_token is set, but there is no bos_token in the vocabulary; name one.")
    return (bos,)


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the config's template, else the one named `default` in the config's list."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return _read(file).decode("utf-8")
        except ValueError as error:
            raise TokenizerError(f"{file}: the chat template is not UTF-8 text ({error}); fetch it again.") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
