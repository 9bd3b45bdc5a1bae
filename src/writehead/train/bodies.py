"""Function bodies: does a model write code that parses, and does it know where a function ends?

A body is cut from a held-out file after the signature and docstring. The prompt is the file up to there, as an editor
would send it, or the function alone at column 0, as a user would type it; without the line break that follows. It opens
as the tokenizer opens every prompt, with end-of-text. The completion ends where the model ends the text, or before its
first line that is indented no deeper than the `def`; it counts if header and completion are one valid function with at
least one statement. A completion that does not end within the limit fails.
"""

from __future__ import annotations

import ast
import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from writehead.train.corpus import SourceFile
from writehead.train.vocabulary import END_OF_TEXT_ID, encode_text

MAX_NEW_TOKENS = 400


@dataclass(frozen=True)
class Body:
    """A function whose body is to be written."""

    path: str
    name: str
    line: int
    prompt: str
    header: str
    """The last lines of the prompt: from `def` on."""
    indent: int
    has_docstring: bool


@dataclass(frozen=True)
class Completion:
    """What a model wrote, and whether it ended the text itself."""

    text: str
    ended: bool


Complete = Callable[[list[list[int]], int], Sequence[Completion]]
"""Greedy completions of prompts (token ids) of at most so many tokens, in order."""


@dataclass(frozen=True)
class BodyResult:
    """How many completions parse, of all and of those with a docstring."""

    bodies: tuple[Body, ...]
    completions: tuple[Completion, ...]
    passed: tuple[bool, ...]

    @property
    def num_passed(self) -> int:
        """Bodies whose completion parses up to the end of the function."""
        return sum(self.passed)

    @property
    def with_docstring(self) -> tuple[int, int]:
        """Passed and all, of the functions that have a docstring."""
        chosen = [ok for ok, body in zip(self.passed, self.bodies, strict=True) if body.has_docstring]
        return sum(chosen), len(chosen)


def function_bodies(bodies: Sequence[Body], tokenizer: Tokenizer, complete: Complete, *, context: int) -> BodyResult:
    """Complete each body greedily and check it. A prompt too long for the context loses its beginning."""
    limit = min(MAX_NEW_TOKENS, context // 2)
    prompts = [[END_OF_TEXT_ID, *encode_text(tokenizer, body.prompt)][limit - context :] for body in bodies]
    completions = tuple(complete(prompts, limit))
    passed = tuple(is_function(b, c) for b, c in zip(bodies, completions, strict=True))
    return BodyResult(tuple(bodies), completions, passed)


def choose_bodies(files: Sequence[SourceFile], count: int) -> list[Body]:
    """The `count` bodies whose path, name and line hash lowest; fewer if there are not so many."""
    found = [body for file in files if file.path.endswith(".py") for body in find_bodies(file)]
    found.sort(key=lambda b: hashlib.sha256(f"{b.path}:{b.name}:{b.line}".encode()).digest())
    return found[:count]


def alone(body: Body) -> Body:
    """The same function at column 0 with nothing before it."""
    lines = [line.removeprefix(" " * body.indent) for line in body.header.split("\n")]
    header = "\n".join(lines)
    return replace(body, prompt=header, header=header, indent=0)


def find_bodies(file: SourceFile) -> list[Body]:
    """Every function of a Python file with at least two statements after its docstring, each on lines of its own."""
    lines = file.text.split("\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nodes = [n for n in ast.walk(ast.parse(file.text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    bodies = []
    for node in nodes:
        has_docstring = ast.get_docstring(node, clean=False) is not None
        end = _header_end(node, lines, has_docstring)
        if len(node.body) - has_docstring < 2 or end is None:
            continue
        bodies.append(
            Body(
                path=file.path,
                name=node.name,
                line=node.lineno,
                prompt="\n".join(lines[:end]),
                header="\n".join(lines[node.lineno - 1 : end]),
                indent=node.col_offset,
                has_docstring=has_docstring,
            )
        )
    return bodies


def _header_end(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], has_docstring: bool) -> int | None:
    """Lines of the file up to the end of the header; None if something else stands on its last line."""
    first = node.body[0]
    if has_docstring:
        end = first.end_lineno
        assert end is not None
        return end if first.end_col_offset == len(lines[end - 1].rstrip().encode()) else None
    end = first.lineno - 1
    while end > node.lineno and (not lines[end - 1].strip() or lines[end - 1].strip().startswith(("#", "@"))):
        end -= 1
    return end if end >= node.lineno and lines[end - 1].rstrip().endswith(":") else None


def is_function(body: Body, completion: Completion) -> bool:
    """Whether header and completion, up to the end of the function, are one valid function."""
    text = until_dedent(completion, body.indent)
    if text is None:
        return False
    source = body.header + text + "\n"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse("if True:\n" + source if body.indent else source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    block = tree.body[0].body if isinstance(tree.body[0], ast.If) else tree.body
    function = block[0]
    return (
        len(block) == 1
        and isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        and len(function.body) - body.has_docstring >= 1
    )


def until_dedent(completion: Completion, indent: int) -> str | None:
    """The completion before its first line indented no deeper than `indent`; None if it never ends."""
    first, *lines = completion.text.split("\n")
    kept = [first]
    for line in lines:
        code = line.lstrip(" \t")
        if code and len(line) - len(code) <= indent:
            return "\n".join(kept)
        kept.append(line)
    return "\n".join(kept) if completion.ended else None
