"""`writehead generate`: what goes to stdout is the library's completion and nothing else."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.cli.conftest import Run
from writehead import LLM, SamplingParams
from writehead.cli import generate, sampling
from writehead.engine.engine import Engine, Event
from writehead.errors import UsageError

PROMPT = "def distance(self, other):"


@pytest.fixture(scope="module")
def llm(tiny_model: str) -> LLM:
    return LLM(tiny_model)


@pytest.fixture(scope="module")
def complete(llm: LLM) -> Callable[..., str]:
    """The library's completion, with the command line's defaults."""

    def text(prompt: str | dict[str, str], **params: object) -> str:
        wanted = SamplingParams(**{**sampling.DEFAULTS, **params})
        return llm.generate([prompt], wanted)[0].outputs[0].text

    return text


Complete = Callable[..., str]


def test_the_completion_is_the_librarys(run: Run, tiny_model: str, complete: Complete) -> None:
    done = run("generate", PROMPT, "-m", tiny_model)
    assert done.code == 0
    assert done.out == complete(PROMPT)
    assert done.out
    assert done.err == ""
    assert run("generate", PROMPT, "-m", tiny_model, "--no-stream").out == done.out


def test_the_cache_is_the_one_that_was_named(run: Run, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.dtype] = []

    def noted(self: Engine, _: object) -> list[object]:
        made.append(self.cache.keys[0].dtype)
        return []

    monkeypatch.setattr(Engine, "add", noted)
    for name in ("auto", "fp32", "bf16", "fp16", "int8"):
        run("generate", PROMPT, "-m", tiny_model, "--kv-cache-dtype", name)
    assert made == [torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.int8]


def test_sources_of_the_prompt(run: Run, tiny_model: str, complete: Complete, tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("for é in x:\n")
    expected = complete("for é in x:\n", max_tokens=9)
    options = ("-m", tiny_model, "--max-tokens", "9")
    data = "for é in x:\n".encode()
    assert run("generate", "--file", tmp_path / "p.py", *options).out == expected
    assert run("generate", "-", *options, stdin=data).out == expected
    assert run("generate", "-f", "-", *options, stdin=data).out == expected
    assert run("generate", *options, stdin=data).out == expected


def test_every_field_of_the_parameters_is_an_option() -> None:
    assert set(sampling.HELP) == {field.name for field in dataclasses.fields(SamplingParams)}


def test_every_option_reaches_the_parameters(run: Run, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SamplingParams] = []
    real = LLM.generate

    def spy(self: LLM, prompts: object, params: SamplingParams, **more: object) -> object:
        seen.append(params)
        return real(self, prompts, params, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(LLM, "generate", spy)
    given = {
        "n": 2, "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01,
        "typical_p": 0.95, "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.2, "seed": 3,
        "logprobs": 2, "prompt_logprobs": 1,
    }  # fmt: skip
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    arguments += ["--ignore-eos", "--include-stop-str-in-output", "--no-skip-special-tokens", "--echo"]
    arguments += ["--stop=a", "--stop=b", "--stop-token-ids=5", "--stop-token-ids=6", "--logit-bias=7=-1.5"]
    assert run("generate", PROMPT, "-m", tiny_model, *arguments, "--json").code == 0
    expected = SamplingParams(
        **given, ignore_eos=True, include_stop_str_in_output=True, skip_special_tokens=False, echo=True,  # type: ignore[arg-type]
        stop=["a", "b"], stop_token_ids=[5, 6], logit_bias={7: -1.5},
    )  # fmt: skip
    assert {f.name: getattr(seen[0], f.name) for f in dataclasses.fields(expected)} == dataclasses.asdict(expected)
    named = " ".join(arguments).replace("-", "_").replace("no_skip", "skip")
    assert all(f"__{name}" in named for name in sampling.HELP)


def test_a_seed_repeats_a_sample_and_n_samples_differ(run: Run, tiny_model: str) -> None:
    arguments = ("generate", PROMPT, "-m", tiny_model, "--temperature", "1", "--seed", "4", "--max-tokens", "12")
    three = run(*arguments, "-n", "3").out
    assert three == run(*arguments, "-n", "3").out
    assert three.startswith("--- 1 ---\n")
    parts = [part.split(" ---\n", 1)[1] for part in ("\n" + three).split("\n--- ")[1:]]
    assert len(set(parts)) == 3
    assert parts[0].rstrip("\n") == run(*arguments).out.rstrip("\n")


def test_json_has_every_field(run: Run, tiny_model: str, llm: LLM) -> None:
    arguments = ("--max-tokens", "4", "--logprobs", "2", "--prompt-logprobs", "0")
    done = run("generate", PROMPT, "-m", tiny_model, "--json", *arguments)
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=0)
    expected = json.loads(json.dumps(dataclasses.asdict(llm.generate([PROMPT], params)[0])))
    found = json.loads(done.out)
    assert found | {"request_id": 0} == expected | {"request_id": 0}
    assert done.out.count("\n") == 1


def test_echo_and_stop(run: Run, tiny_model: str, complete: Complete) -> None:
    whole = complete(PROMPT, max_tokens=40)
    stop = whole[5:8]
    options = ("-m", tiny_model, "--max-tokens", "40")
    assert run("generate", PROMPT, *options, "--echo").out == PROMPT + whole
    assert run("generate", PROMPT, *options, "--stop", stop).out == whole[: whole.index(stop)]
    assert run("generate", PROMPT, "-m", tiny_model, "--echo", "--max-tokens", "0").out == PROMPT


def test_stats_go_to_stderr(run: Run, tiny_model: str, llm: LLM) -> None:
    done = run("generate", PROMPT, "-m", tiny_model, "--max-tokens", "6", "--ignore-eos", "--stats")
    assert (
        done.out
        == llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))[0].outputs[0].text
    )
    count = len(llm.tokenizer.encode(PROMPT))
    assert f"{count} prompt tokens, first token after " in done.err
    assert " 6 tokens in " in done.err
    assert "tokens/s after the first" in done.err


def test_text_is_written_as_it_comes(run: Run, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[str] = []
    monkeypatch.setattr("builtins.print", lambda *texts, **_: writes.append(texts[0]))
    run("generate", PROMPT, "-m", tiny_model, "--max-tokens", "20", "--ignore-eos")
    assert len(writes) == 20


def test_an_interrupt_prints_what_there_is(run: Run, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = run("generate", PROMPT, "-m", tiny_model, "--ignore-eos", "--max-tokens", "20").out
    real, steps = Engine.step, 0

    def interrupted(self: Engine) -> list[Event]:
        nonlocal steps
        steps += 1
        if steps % 8 == 0:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    arguments = ("generate", PROMPT, "-m", tiny_model, "--ignore-eos", "--max-tokens", "20")
    for more in ([], ["--no-stream"]):
        done = run(*arguments, *more)
        assert done.code == 130
        assert 0 < len(done.out) < len(complete)
        assert complete.startswith(done.out)
    done = run(*arguments, "--json")
    assert done.code == 130
    assert json.loads(done.out)["outputs"][0]["finish_reason"] == "abort"


def test_fill_in_the_middle(run: Run, tiny_model: str, complete: Complete, tmp_path: Path) -> None:
    path = tmp_path / "a:b.py"
    path.write_text("def f(x):\n    return \n\nprint(f(2))\n")
    before, after = "def f(x):\n    return ", "\n\nprint(f(2))\n"
    expected = complete({"prompt": before, "suffix": after}, max_tokens=16)
    options = ("-m", tiny_model, "--max-tokens", "16")
    assert run("generate", "--fim-file", f"{path}:2:12", *options).out == expected
    assert run("generate", before, "--suffix", after, *options).out == expected
    assert expected != complete(before, max_tokens=16)


@pytest.mark.parametrize(
    ("text", "place", "before"),
    [
        ("ab\ncd", "1:1", ""),
        ("ab\ncd", "1:3", "ab"),
        ("ab\ncd", "2:2", "ab\nc"),
        ("ab\ncd", "2:3", "ab\ncd"),
        ("ab\r\ncd\r\n", "1:3", "ab"),
        ("ab\r\ncd\r\n", "3:1", "ab\r\ncd\r\n"),
        ("é€\nx", "1:2", "é"),
        ("", "1:1", ""),
        ("a\n\nb", "2:1", "a\n"),
        ("a\x0cb\u2028c\nd", "2:1", "a\x0cb\u2028c\n"),
    ],
)
def test_the_cursor(text: str, place: str, before: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(text.encode())
    assert generate.split_at_cursor(f"{tmp_path}/f:{place}") == (before, text[len(before) :])


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("f", "expected FILE:LINE:COL"),
        ("f:1", "expected FILE:LINE:COL"),
        (":1:1", "expected FILE:LINE:COL"),
        ("f:x:1", "expected FILE:LINE:COL"),
        ("f:1:-1", "expected FILE:LINE:COL"),
        ("f:1:99999999999999", "expected FILE:LINE:COL"),
        ("f:1:²", "expected FILE:LINE:COL"),
        ("f:0:1", "f has lines 1 to 2, and line 0 was asked for"),
        ("f:3:1", "f has lines 1 to 2, and line 3 was asked for"),
        ("f:1:0", "line 1 of f has columns 1 to 3, and 0 was asked for"),
        ("f:1:4", "line 1 of f has columns 1 to 3, and 4 was asked for"),
        ("missing:1:1", "missing: cannot be read (No such file or directory)"),
    ],
)
def test_a_cursor_that_is_nowhere(place: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f").write_text("ab\ncd")
    with pytest.raises(UsageError) as caught:
        generate.split_at_cursor(place)
    assert message in str(caught.value)


REFUSALS = [
    (["a", "--file", "b"], "PROMPT and --file both give a prompt"),
    (["a", "--fim-file", "b:1:1"], "PROMPT and --fim-file both give a prompt"),
    (["--suffix", "a", "--fim-file", "b:1:1"], "--suffix and --fim-file both say what stands behind the gap"),
    ([], "there is no prompt; give it as an argument, with --file, or through a pipe"),
    (["--file", "missing.py"], "missing.py: cannot be read (No such file or directory)"),
    (["--file", "."], ".: cannot be read (Is a directory)"),
    (["a", "-n", "0"], "n is 0; expected a whole number from 1"),
    (["a", "--temperature", "nan"], "temperature is nan; expected a number"),
    (["a", "--temperature", "-1"], "temperature is -1.0; expected a number"),
    (["a", "--top-p", "0"], "top_p is 0.0; expected a number"),
    (["a", "--max-tokens", "0"], "max_tokens is 0; expected a whole number from 1"),
    (["a", "--stop", ""], "stop holds an empty string"),
    (["a", "--logit-bias", "x=1"], "--logit-bias is 'x=1'; expected ID=BIAS"),
    (["a", "--logit-bias", "1"], "--logit-bias is '1'; expected ID=BIAS"),
    (["a", "--logit-bias", "1=nan"], "logit_bias maps 1 to nan"),
    (["a", "--stop-token-ids", "400"], "stop_token_ids has the token id 400"),
    (["a", "--weights", "int3"], "weights: 'int3' is not a format; choose auto, fp32, bf16, fp16"),
    (["a", "--kv-cache-dtype", "int4"], "kv_cache_dtype: 'int4' is not one; choose auto, fp32, bf16, fp16, int8"),
    (["a", "--kernels", "magic"], "kernels: there is no backend 'magic'"),
    (["a", "--max-model-len", "129"], "max_model_len is 129, but the model has only 128 positions"),
    (["a", "--max-model-len", "0"], "max_model_len is 0; expected a whole number from 1"),
    ([""], "error: the prompt is empty; give at least one token"),
    (["x" * 2000], "error: the prompt has 2000 bytes; the limit is 128 tokens"),
    (["x = 1 + 23456\n" * 40], "the limit is 128 for prompt and completion together, so at most 127 fit"),
    (["\udcff"], "must be valid Unicode"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSALS)
def test_refusals_are_one_line(run: Run, tiny_model: str, arguments: list[str], message: str) -> None:
    done = run("generate", "-m", tiny_model, *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert message in done.err
    assert done.err.count("\n") == 1


def test_text_that_is_not_utf8(run: Run, tiny_model: str, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"# caf\xe9\n")
    message = "is not UTF-8 text (byte 5); convert it to UTF-8 first\n"
    for arguments in (["--file", tmp_path / "latin"], ["--fim-file", f"{tmp_path}/latin:1:1"]):
        done = run("generate", "-m", tiny_model, *arguments)
        assert (done.code, done.err) == (2, f"error: {tmp_path}/latin: {message}")
    done = run("generate", "-m", tiny_model, stdin=b"# caf\xe9\n")
    assert (done.code, done.err) == (2, f"error: stdin: {message}")


def test_a_model_without_fim_tokens_takes_no_suffix(run: Run, tiny_model: str, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(Path(tiny_model) / name)
    spec = (Path(tiny_model) / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(spec.replace("<fim_", "<nothing_"))
    done = run("generate", "-m", tmp_path, "a", "--suffix", "b")
    assert done.code == 2
    assert "the model's vocabulary has no fill-in-the-middle tokens" in done.err


def test_a_model_without_numbers_is_an_error(run: Run, tiny_model: str, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "m")
    state = load_file(tmp_path / "m/model.safetensors")
    state["transformer.ln_f.weight"].fill_(float("nan"))
    save_file(state, tmp_path / "m/model.safetensors")
    done = run("generate", "a", "-m", tmp_path / "m")
    assert (done.code, done.out) == (4, "")
    assert done.err == (
        "error: the model's logits leave no token to choose: they are NaN or infinite; check the weights, or use "
        "--weights fp32 if it was fp16\n"
    )
    done = run("generate", "a", "-m", tmp_path / "m", "--json")
    assert (done.code, json.loads(done.out)["outputs"][0]["finish_reason"]) == (4, "error")


def test_a_file_that_never_ends_is_refused(run: Run, tiny_model: str) -> None:
    done = run("generate", "-f", "/dev/zero", "-m", tiny_model)
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: /dev/zero: is longer than 16 MiB, more than any model reads; cut it\n"


def test_the_mark_of_utf8_is_no_text_and_no_column(
    run: Run, tiny_model: str, complete: Complete, tmp_path: Path
) -> None:
    (tmp_path / "p.py").write_bytes(b"\xef\xbb\xbfx = \n")
    expected = complete("x = \n", max_tokens=5)
    options = ("-m", tiny_model, "--max-tokens", "5")
    assert run("generate", "-f", tmp_path / "p.py", *options).out == expected
    assert run("generate", *options, stdin=b"\xef\xbb\xbfx = \n").out == expected
    assert generate.split_at_cursor(f"{tmp_path / 'p.py'}:1:5") == ("x = ", "\n")
