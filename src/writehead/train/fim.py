"""How a source file becomes training text: whole, one function at a time, or as fill-in-the-middle.

A rendering is a list of segments: a string is encoded alone, an int is a token id. Encoding segments apart is what
teaches a model prompts that end anywhere; its own text never crosses a segment's edge.
"""

from __future__ import annotations

import ast
import random
import textwrap
import warnings

from writehead.train.vocabulary import END_OF_TEXT_ID, FIM_MIDDLE_ID, FIM_PREFIX_ID, FIM_SUFFIX_ID

Segment = str | int

FIM_PIECE_CHARS = (400, 3000)
"""Fill-in-the-middle happens inside pieces of a file that fit a context together with their sentinels."""

MAX_FUNCTION_LINES = 6
"""Longer functions are not shown alone: a small model learns where a function ends from those it can hold."""

SEAM_CHARS = 1200
"""Mean distance between two seams: places where text is encoded in two parts, as at the end of a prompt."""


def render(text: str, rng: random.Random, *, fim_rate: float, function_rate: float) -> list[Segment]:
    """One file as training segments; every document in it ends with end-of-text."""
    if rng.random() < fim_rate:
        return [segment for piece in line_pieces(text, rng) for segment in [*fim(piece, rng), END_OF_TEXT_ID]]
    documents = [text]
    if rng.random() < function_rate:
        documents = functions(text) or documents
        rng.shuffle(documents)
    return [segment for document in documents for segment in [*seams(document, rng), END_OF_TEXT_ID]]


def fim(piece: str, rng: random.Random) -> list[Segment]:
    """Cut at two random characters, middle last (arXiv 2207.14255); one half each in PSM and SPM order.

    PSM: <prefix> p <suffix> s <middle> m      SPM: <prefix> <suffix> s <middle> p m  (StarCoder, arXiv 2305.06161)
    """
    first, last = sorted(rng.randint(0, len(piece)) for _ in range(2))
    prefix, middle, suffix = piece[:first], piece[first:last], piece[last:]
    if rng.random() < 0.5:
        return [FIM_PREFIX_ID, prefix, FIM_SUFFIX_ID, suffix, FIM_MIDDLE_ID, middle]
    return [FIM_PREFIX_ID, FIM_SUFFIX_ID, suffix, FIM_MIDDLE_ID, prefix, middle]


def line_pieces(text: str, rng: random.Random) -> list[str]:
    """Cut into runs of whole lines, each of a random length within FIM_PIECE_CHARS where the lines allow it."""
    pieces, start, end = [], 0, 0
    target = rng.randint(*FIM_PIECE_CHARS)
    for line in text.splitlines(keepends=True):
        end += len(line)
        if end - start >= target:
            pieces.append(text[start:end])
            start, target = end, rng.randint(*FIM_PIECE_CHARS)
    return [*pieces, text[start:]] if start < len(text) else pieces


def seams(text: str, rng: random.Random) -> list[Segment]:
    """Cut at random places, mostly where people stop typing: after a line's end or its indentation."""
    cuts, position = [0], 0
    while (position := position + 1 + int(rng.expovariate(1 / SEAM_CHARS))) < len(text):
        kind = rng.random()
        if kind < 0.8:
            position = text.find("\n", position) + 1 or len(text)
        if kind < 0.4:
            position += len(text[position:]) - len(text[position:].lstrip(" "))
        cuts.append(position)
    return [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True) if a < b]


def functions(text: str) -> list[str]:
    """Every short function and method of a Python module at column 0, with decorators; [] if it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines = text.split("\n")
    found: list[str] = []
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            own = lines[first - 1 : node.end_lineno]
            source = textwrap.dedent("\n".join(own) + "\n")
            if len(own) <= MAX_FUNCTION_LINES and source[:1].strip():
                found.append(source)
        elif isinstance(node, ast.ClassDef):
            todo.extend(node.body)
    return found
