"""The command line as a whole: quick help, one-line errors, exit codes. Few real processes, each costs seconds."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import writehead.cli
from tests.unit.cli.conftest import Run
from writehead import __version__, errors
from writehead.cli import VERBS

HEAVY = ("torch", "numpy", "rich", "transformers", "tokenizers", "safetensors", "huggingface_hub", "gguf", "jinja2")


def process(*arguments: str, **more: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "writehead", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)  # type: ignore[call-overload,no-any-return]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom writehead.cli import main\nassert main(['--help']) == 0\n"
        f"print(sorted(set({HEAVY!r}) & {{name.partition('.')[0] for name in sys.modules}}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert done.stdout.startswith("Usage: writehead [OPTIONS] COMMAND [ARGS]...")
    assert all(f"\n  {verb} " in done.stdout for verb in VERBS)


def test_help_takes_less_than_three_tenths_of_a_second() -> None:
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert process("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.3  # of the processor, so that a busy machine does not count


@pytest.mark.parametrize("verb", VERBS)
def test_a_verbs_help_begins_with_its_line_in_the_list(run: Run, verb: str) -> None:
    done = run(verb, "--help")
    assert done.code == 0
    assert done.out.startswith(f"Usage: writehead {verb} [OPTIONS]")
    assert "".join(VERBS[verb].split()) in "".join(done.out.split())


def test_version_and_no_arguments(run: Run) -> None:
    assert run("--version").out == f"writehead {__version__}\n"
    done = run()
    assert "Usage: writehead" in done.out + done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "a", "--temprature", "1"], "No such option: --temprature"),
        (["generate", "a", "--top-k", "many"], "valid integer"),
        (["generat", "a"], "No such command 'generat'. Did you mean 'generate'?"),
        (["convert", "a"], "OUT"),
        (["train"], "--out"),
    ],
)
def test_usage_errors(run: Run, arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert "Traceback" not in done.err


def damage(kind: str, path: Path) -> None:
    """Break a copy of a checkpoint in one of the ways that happen."""
    weights = path / "model.safetensors"
    data = weights.read_bytes()
    match kind:
        case "truncated":
            weights.write_bytes(data[: len(data) // 2])
        case "corrupt":
            weights.write_bytes(b"\xff" * 8 + data[8:])
        case "empty":
            weights.write_bytes(b"")
        case "no weights":
            weights.unlink()
        case "config":
            (path / "config.json").write_text('{"model_type": "gpt_bigcode"')
        case "kind":
            (path / "config.json").write_text('{"model_type": "t5"}')
        case "tokenizer":
            (path / "tokenizer.json").write_text("{}")
        case "no tokenizer":
            (path / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("truncated", errors.CheckpointError, "model.safetensors"),
        ("corrupt", errors.CheckpointError, "model.safetensors"),
        ("empty", errors.CheckpointError, "model.safetensors"),
        ("no weights", errors.CheckpointError, "holds no checkpoint"),
        ("config", errors.CheckpointError, "config.json: is not valid JSON"),
        ("kind", errors.ConfigError, "model_type is 't5'; writehead knows falcon, "),
        ("tokenizer", errors.TokenizerError, "tokenizer.json"),
        ("no tokenizer", errors.TokenizerError, "has no tokenizer"),
    ],
)
def test_damaged_checkpoints(
    run: Run, tiny_model: str, tmp_path: Path, kind: str, error: type[errors.WriteheadError], message: str
) -> None:
    shutil.copytree(tiny_model, tmp_path / "m")
    damage(kind, tmp_path / "m")
    done = run("generate", "a", "-m", tmp_path / "m")
    assert (done.code, done.out) == (error.exit_code, "")
    assert done.err.startswith("error: ")
    assert message in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("verb", ["generate", "chat", "convert", "inspect", "verify"])
def test_a_model_that_is_not_there(run: Run, verb: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    arguments = {"generate": ["a", "-m", missing], "chat": ["-m", missing], "convert": [missing, str(tmp_path / "out")]}
    done = run(verb, *arguments.get(verb, [missing]))
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith(f"error: {missing}: there is no such file or directory")


def test_a_hub_id_offline(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    done = run("generate", "a", "-m", "bigcode/no-such-model")
    assert (done.code, done.out) == (3, "")
    assert done.err == (
        "error: bigcode/no-such-model: is not in the local cache and downloads are switched off; "
        "go online once, or give a local path\n"
    )


def test_what_we_did_not_foresee_is_one_line_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise KeyError("two\nlines")

    monkeypatch.setattr("writehead.cli.env.gather", broken)
    done = run("env")
    assert (done.code, done.out) == (70, "")
    assert done.err == "internal error: KeyError: 'two\\nlines'; please report it (--debug shows the traceback)\n"
    done = run("env", "--debug")
    assert done.code == 70
    assert done.err.startswith("Traceback (most recent call last):\n")
    assert done.err.endswith("(--debug shows the traceback)\n")


def test_debug_shows_where_an_error_comes_from(run: Run, tmp_path: Path) -> None:
    done = run("inspect", tmp_path / "missing", "--debug")
    assert done.code == 3
    assert "writehead.errors.ModelNotFoundError" in done.err
    assert run("--debug", "inspect", tmp_path / "missing").code == 3


def test_debug_behind_two_dashes_is_a_prompt(run: Run, tiny_model: str) -> None:
    done = run("generate", "-m", tiny_model, "--echo", "--max-tokens", "0", "--", "--debug")
    assert (done.code, done.out) == (0, "--debug")


def test_too_little_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy() -> None:
        raise MemoryError

    monkeypatch.setattr("writehead.cli.env.gather", greedy)
    done = run("env")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert done.err.startswith("error: the memory is not enough")


def test_a_terminal_that_lacks_a_character(tiny_model: str) -> None:
    prompt = "# caf\u00e9 \u20ac"
    arguments = ("generate", prompt, "-m", tiny_model, "--echo", "--max-tokens", "0")
    done = process(*arguments, env={**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}, encoding="latin-1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "# caf\u00e9 \\u20ac", "")


def test_a_closed_pipe_is_quiet(tiny_model: str) -> None:
    command = [sys.executable, "-m", "writehead", "generate", "def f():", "-m", tiny_model, "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait() == 1


def test_interrupting_a_process(chat_model: str) -> None:
    command = [sys.executable, "-m", "writehead", "chat", "-m", chat_model, "--stop", "\n", "--max-tokens", "4"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background inherits "ignore"
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    signal.signal(signal.SIGINT, before)
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"hi\n")
        child.stdin.flush()
        child.stdout.readline()  # the answer; now it waits for the next message
        child.send_signal(signal.SIGINT)
        child.wait()  # with its input still open: the end of it would end the conversation as well
        out, err = child.communicate()
    assert (child.returncode, out.strip(), err) == (130, b"", b"")  # a line's end only if it was at its prompt already


def test_every_verb_is_a_file_and_every_file_a_verb_or_a_helper() -> None:
    files = {path.stem for path in Path(writehead.cli.__file__).parent.glob("*.py")}
    assert files == set(VERBS) | {"__init__", "options", "sampling"}


@pytest.mark.parametrize("buffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_an_output_that_cannot_be_written_is_said(buffered: str) -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": buffered}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "writehead", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=env)
    assert (done.returncode, done.stderr) == (1, "error: the output could not be written (No space left on device)\n")


def test_an_error_that_nobody_can_read_keeps_its_exit_code() -> None:
    command = [sys.executable, "-m", "writehead", "generate", "a", "--temperature", "-1"]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stdout=full, stderr=full, check=False).returncode == 2


def test_streams_that_are_closed_are_no_reason_to_stop() -> None:
    shell = f"{sys.executable} -m writehead --version <&- >&- 2>&-"
    assert subprocess.run(shell, shell=True, check=False).returncode == 0
    shell = f"{sys.executable} -m writehead generate a --temperature -1 2>&-"
    done = subprocess.run(shell, shell=True, check=False, capture_output=True)
    assert (done.returncode, done.stdout) == (2, b"")


@pytest.mark.parametrize(
    "error",
    [
        OSError(12, "Cannot allocate memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64000000000000 bytes."),
    ],
    ids=["system", "torch"],
)
def test_memory_that_others_refuse(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def greedy() -> None:
        raise error

    monkeypatch.setattr("writehead.cli.env.gather", greedy)
    done = run("env")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert done.err.startswith("error: the memory is not enough")


def test_a_name_with_a_line_break_stays_one_line(run: Run) -> None:
    done = run("generate", "-f", "no\nsuch\x1b[1m")
    assert done.err == "error: no\\nsuch\\x1b[1m: cannot be read (No such file or directory)\n"


def test_the_short_way_to_help(run: Run) -> None:
    assert run("-h").out == run("--help").out
    assert run("env", "-h").out == run("env", "--help").out


def test_an_interrupt_while_a_verb_is_loaded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("writehead.cli.import_module", interrupted)
    done = run("env")
    assert (done.code, done.out, done.err) == (130, "", "")
