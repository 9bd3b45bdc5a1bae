"""`writehead chat`: what the model is given is the history, in its own template."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.unit.cli.conftest import Run
from writehead import LLM, SamplingParams
from writehead.engine.engine import Engine, Event

OPTIONS = ("--max-tokens", "6", "--ignore-eos")
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(chat_model: str) -> LLM:
    return LLM(chat_model)


def answer(llm: LLM, prompt: str) -> str:
    """The library's continuation of a prompt that stands in the template already."""
    return llm.generate([prompt], PARAMS)[0].outputs[0].text


def test_a_piped_conversation_keeps_its_history(run: Run, chat_model: str, llm: LLM) -> None:
    done = run("chat", "-m", chat_model, *OPTIONS, stdin=b"hi\n\nand?\n")
    first = answer(llm, "u:hi\na:")
    second = answer(llm, f"u:hi\na:{first}\nu:and?\na:")
    assert (done.code, done.out, done.err) == (0, f"{first}\n{second}\n", "")


def test_system_reset_and_exit(run: Run, chat_model: str, llm: LLM) -> None:
    lines = b"hi\r\n/reset\nhi\n/exit\nnever\n"
    done = run("chat", "-m", chat_model, "--system", "be brief", *OPTIONS, stdin=lines)
    expected = answer(llm, "s:be brief\nu:hi\na:")
    assert (done.code, done.out) == (0, f"{expected}\n{expected}\n")


def test_a_model_without_a_template(run: Run, tiny_model: str) -> None:
    done = run("chat", "-m", tiny_model, stdin=b"hi\n")
    assert (done.code, done.out) == (5, "")
    assert done.err == (
        f"error: {tiny_model} has no chat template, so it was not tuned for conversation; complete code with "
        "`writehead generate`, or choose a model of the instruct kind\n"
    )


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """A person at the terminal who types these lines."""
    rest: Iterator[Any] = iter(lines)

    def read(_: str) -> str:
        line = next(rest, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)


def test_a_message_that_is_too_long_is_dropped_by_a_person_and_an_error_in_a_pipe(
    run: Run, chat_model: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "x = 1 + 23456; " * 40
    typed(monkeypatch, long, "hi")
    done = run("chat", "-m", chat_model, *OPTIONS)
    assert (done.code, done.out) == (0, answer(llm, "u:hi\na:") + "\n\n")
    assert done.err.endswith("shorten it (/reset forgets the conversation)\n")
    done = run("chat", "-m", chat_model, *OPTIONS, stdin=long.encode() + b"\nhi\n")
    assert (done.code, done.out) == (2, "")
    assert done.err.endswith("shorten it\n")


def test_an_interrupt_ends_the_answer_and_a_second_one_the_conversation(
    run: Run, chat_model: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, steps = Engine.step, 0

    def interrupted(self: Engine) -> list[Event]:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise KeyboardInterrupt
        return real(self)

    first = llm.generate(["u:hi\na:"], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))[0].outputs[0].text
    second = answer(llm, f"u:hi\na:{first}\nu:go on\na:")
    monkeypatch.setattr(Engine, "step", interrupted)
    typed(monkeypatch, "hi", "go on", KeyboardInterrupt)
    done = run("chat", "-m", chat_model, *OPTIONS)
    assert (done.code, done.out) == (130, f"{first}\n{second}\n\n")


def test_text_that_is_not_utf8(run: Run, chat_model: str) -> None:
    done = run("chat", "-m", chat_model, stdin=b"\xff\n")
    assert (done.code, done.err) == (2, "error: stdin: is not UTF-8 text (byte 0); convert it to UTF-8 first\n")


def test_a_model_without_numbers_is_an_error(run: Run, chat_model: str, tmp_path: Path) -> None:
    shutil.copytree(chat_model, tmp_path / "m")
    state = load_file(tmp_path / "m/model.safetensors")
    state["transformer.ln_f.weight"].fill_(float("nan"))
    save_file(state, tmp_path / "m/model.safetensors")
    done = run("chat", "-m", tmp_path / "m", stdin=b"hi\nhi\n")
    assert (done.code, done.out) == (4, "")
    assert done.err.startswith("error: the model's logits leave no token to choose: they are NaN or infinite; check")
