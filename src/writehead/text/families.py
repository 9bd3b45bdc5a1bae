# ruff: noqa: RUF001 - full-width bars are what DeepSeek wrote
"""Spellings of the control tokens that code models use, by family. Data only.

Sources: the model cards and tokenizers of the families; `infilling_prompt_tokens` of CodeLlama, `encode_fim` of
mistral-common, `permute` of BigCode's Megatron-LM (suffix-first is variant 2 of Bavarian et al. 2022, section 3.1),
the end-of-generation list of llama.cpp's vocabulary loader.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FimMode = Literal["psm", "spm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FimFamily:
    """How one family spells fill-in-the-middle.

    `middle` is None where the prompt simply ends with the prefix. `also` must be in the vocabulary too: it tells
    families with equal sentinels apart. `stops` end a completion besides the sentinels. `bos`: the prompt
    opens with what the tokenizer puts in front of any prompt.
    """

    name: str
    prefix: str
    suffix: str
    middle: str | None
    also: str | None = None
    stops: tuple[str, ...] = ()
    modes: tuple[FimMode, ...] = ("psm", "spm")
    bos: bool = True

    @property
    def sentinels(self) -> tuple[str, ...]:
        return (self.prefix, self.suffix) if self.middle is None else (self.prefix, self.suffix, self.middle)


FIM_FAMILIES: tuple[FimFamily, ...] = (
    FimFamily(
        name="santacoder",
        prefix="<fim-prefix>",
        suffix="<fim-suffix>",
        middle="<fim-middle>",
        stops=("<fim-pad>",),
        bos=False,
    ),
    FimFamily(
        name="starcoder",  # also granite-code, StarCoder2, Refact, SmolLM's vocabulary
        prefix="<fim_prefix>",
        suffix="<fim_suffix>",
        middle="<fim_middle>",
        stops=("<fim_pad>", "<file_sep>", "<filename>", "<reponame>", "<repo_name>"),
        bos=False,
    ),
    FimFamily(
        name="codegemma",
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        also="<|file_separator|>",
        stops=("<|file_separator|>",),
    ),
    FimFamily(
        name="qwen",  # also Granite 3 and later
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        stops=("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|filename|>", "<|reponame|>"),
    ),
    FimFamily(
        name="deepseek",
        prefix="<｜fim▁begin｜>",
        suffix="<｜fim▁hole｜>",
        middle="<｜fim▁end｜>",
        modes=("psm",),
        stops=("<|EOT|>",),
    ),
    FimFamily(name="codellama", prefix="▁<PRE>", suffix="▁<SUF>", middle="▁<MID>", stops=("▁<EOT>",)),
    FimFamily(name="codestral", prefix="[PREFIX]", suffix="[SUFFIX]", middle=None, stops=("[MIDDLE]",), modes=("spm",)),
)

# Square brackets and words are ordinary code, so Codestral's tokens count only where the files declare them special.
ALWAYS_CONTROL: frozenset[str] = frozenset(
    spelling for family in FIM_FAMILIES if family.name != "codestral" for spelling in (*family.sentinels, *family.stops)
) | {"<|endoftext|>", "<|im_end|>"}

END_TOKENS: tuple[str, ...] = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|EOT|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "▁<EOT>",
    "<EOT>",
)
FILE_SEPARATORS: tuple[str, ...] = ("<file_sep>", "<|file_sep|>", "<|file_separator|>")
