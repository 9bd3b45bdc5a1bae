"""Every error that writehead raises for a user.

    WriteheadError                 the message is one sentence fit for a terminal
    ├── UsageError                 an argument or option has a value that cannot work (also a ValueError)
    │   └── PromptError            a prompt is empty, too long, or holds ids outside the vocabulary
    ├── ModelNotFoundError         no checkpoint under that path or Hub id, or no network to fetch it
    ├── CheckpointError            a file of the checkpoint is damaged, hostile, incomplete or of an unknown format
    │   └── ConfigError            the model's config asks for something that is unknown or contradicts itself
    ├── TokenizerError             the tokenizer's files are missing or unusable
    ├── MissingDependencyError     an optional package is needed for this and is not installed
    └── VerificationError          a comparison of numbers failed

A message says where, what, what was expected and what to do. `exit_code` is what the command line exits with.
Programmer errors are assertions, not part of this tree.
"""

from __future__ import annotations


class WriteheadError(Exception):
    """Base of all errors meant for users."""

    exit_code = 1


class UsageError(WriteheadError, ValueError):
    """An argument or option has a value that cannot work."""

    exit_code = 2


class PromptError(UsageError):
    """A prompt is empty, too long for the model, or holds ids outside the vocabulary."""


class ModelNotFoundError(WriteheadError):
    """There is no checkpoint under the given path or Hub id, or it cannot be fetched now."""

    exit_code = 3


class CheckpointError(WriteheadError):
    """A checkpoint file is damaged, hostile, incomplete or of an unknown format."""

    exit_code = 4


class ConfigError(CheckpointError):
    """A model config asks for something that writehead does not know, or contradicts itself."""


class TokenizerError(WriteheadError):
    """A tokenizer's files are missing or cannot be used."""

    exit_code = 5


class MissingDependencyError(WriteheadError):
    """An optional package is needed for what was asked and is not installed."""

    exit_code = 6


class VerificationError(WriteheadError):
    """Two computations that must agree do not."""

    exit_code = 7
