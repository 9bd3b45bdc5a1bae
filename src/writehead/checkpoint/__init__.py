"""Checkpoints: lazy readers (safetensors, torch .bin, GGUF, Megatron), rules that map names and layouts, a writer."""

from __future__ import annotations

from writehead.checkpoint.contract import Checkpoint, TensorInfo
from writehead.checkpoint.hub import resolve
from writehead.checkpoint.reader import open_checkpoint
from writehead.checkpoint.writer import write_safetensors

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint", "resolve", "write_safetensors"]
