"""Text in, ids out, and back.

    Tokenizer      reads a checkpoint's own files or GGUF metadata; text never becomes a control token by accident
    TextStream     the text of a completion as its tokens arrive, cut at stop strings
    detect_fim     how a vocabulary is asked to fill in the middle: FimFormat, fim_prompt, stop_ids
    text.chat      chat templates in a sandbox; a module of its own, so that only a chat pays for importing jinja2

Nothing here knows a model or a device.
"""

from __future__ import annotations

from writehead.text.families import FimMode
from writehead.text.prompt import FimFormat, detect_fim, fim_prompt, stop_ids
from writehead.text.stream import StopStrings, TextStream
from writehead.text.tokenizer import Tokenizer

__all__ = [
    "FimFormat",
    "FimMode",
    "StopStrings",
    "TextStream",
    "Tokenizer",
    "detect_fim",
    "fim_prompt",
    "stop_ids",
]
