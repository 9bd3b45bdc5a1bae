"""Function bodies: which are asked for, where the prompt ends, what counts as written."""

from __future__ import annotations

import pytest

from writehead.train.bodies import (
    Body,
    Completion,
    alone,
    choose_bodies,
    find_bodies,
    function_bodies,
    is_function,
    until_dedent,
)
from writehead.train.corpus import SourceFile
from writehead.train.vocabulary import encode_text, train_tokenizer

TEXT = '''import os


def documented(a,
               b):
    """One line.

    More.
    """
    # why
    c = a + b
    return c


class A:
    def method(self):

        # comment
        @decorate
        def inner():
            return 1
        x = inner()
        return x

    async def long(self): x = 1; return x

    def one(self):
        return 1

    def doc_only_one(self):
        """Doc."""
        return 1

    def trailing(self):
        """Doc."""; x = 1
        return x
'''
FILE = SourceFile("a.py", TEXT, "0")


def test_bodies_are_cut_after_signature_and_docstring() -> None:
    bodies = {b.name: b for b in find_bodies(FILE)}
    assert sorted(bodies) == ["documented", "method"]
    first, method = bodies["documented"], bodies["method"]
    assert first.header == 'def documented(a,\n               b):\n    """One line.\n\n    More.\n    """'
    assert first.prompt == "import os\n\n\n" + first.header
    assert (first.indent, first.has_docstring, first.line) == (0, True, 4)
    assert method.header == "    def method(self):"
    assert method.prompt == TEXT[: TEXT.index("def method(self):") + len("def method(self):")]
    assert (method.indent, method.has_docstring) == (4, False)


def test_alone_is_the_function_at_column_0() -> None:
    header = '    def f(self,\n          x):\n        """One.\n\n      More.\n   Less.\n        """'
    body = alone(Body("a.py", "f", 3, "class A:\n" + header, header, 4, True))
    assert body.prompt == body.header == 'def f(self,\n      x):\n    """One.\n\n  More.\n   Less.\n    """'
    assert body.indent == 0
    assert is_function(body, Completion("\n    return x\n\n\ndef g", False))


def body(indent: int = 0, *, docstring: bool = False) -> Body:
    pad = " " * indent
    header = f"{pad}def f(x):" + (f'\n{pad}    """Doc."""' if docstring else "")
    return Body("a.py", "f", 1, header, header, indent, docstring)


@pytest.mark.parametrize(
    ("text", "ended", "indent", "kept"),
    [
        ("\n    return x\n\n\ndef g(", False, 0, "\n    return x\n\n"),
        ("\n    return x\n", True, 0, "\n    return x\n"),
        ("\n    return x\n", False, 0, None),
        ("\n        return x\n    @p", False, 4, "\n        return x"),
        ("\n        return x\n     y", False, 4, None),
    ],
)
def test_until_dedent(text: str, ended: bool, indent: int, kept: str | None) -> None:
    assert until_dedent(Completion(text, ended), indent) == kept


@pytest.mark.parametrize(
    ("text", "ended", "indent", "docstring", "ok"),
    [
        ("\n    return x\n", True, 0, False, True),
        ("\n    return x\n", False, 0, False, False),  # never ends
        ("\n    return (x\n", True, 0, False, False),  # open bracket
        ("\n    return x\n\n\nclass (", False, 0, False, True),  # what follows the function is not judged
        ("\n        return x\n\n    def", False, 4, True, True),
        ("\n        return x\n      y = 1\n", True, 4, False, False),  # a wrong indentation
        ("\n", True, 0, True, False),  # the docstring alone is no body
        ("", True, 0, False, False),
        ("  # a comment\n    return x", True, 0, False, True),
    ],
)
def test_is_function(text: str, ended: bool, indent: int, docstring: bool, ok: bool) -> None:
    assert is_function(body(indent, docstring=docstring), Completion(text, ended)) is ok


def test_choice_depends_on_the_place_alone() -> None:
    other = SourceFile("b.py", TEXT, "1")
    both = choose_bodies([FILE, other], 3)
    assert len(both) == 3
    assert both == choose_bodies([other, FILE], 3)
    assert choose_bodies([SourceFile("a.txt", "not python (", "2")], 3) == []


def test_function_bodies_completes_left_cut_prompts_and_counts() -> None:
    tokenizer = train_tokenizer([TEXT], vocab_size=300)
    seen: list[list[int]] = []

    def complete(prompts: list[list[int]], limit: int) -> list[Completion]:
        seen.extend(prompts)
        texts = [tokenizer.decode(p) for p in prompts]
        assert limit == 20
        return [Completion("\n    return 1" if t.endswith('"""') else "\n        return (", True) for t in texts]

    result = function_bodies(find_bodies(FILE), tokenizer, complete, context=40)
    assert [len(p) for p in seen] == [20, 20]
    assert all(encode_text(tokenizer, b.prompt)[-20:] == p for b, p in zip(result.bodies, seen, strict=True))
    assert result.num_passed == 1
    assert result.with_docstring == (1, 1)
