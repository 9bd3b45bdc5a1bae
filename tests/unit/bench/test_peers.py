"""`writehead bench peers`: a real other engine in a process of its own, and reasons for those that are not here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.bench.conftest import Measure
from tests.unit.cli.conftest import Run
from writehead.bench import peer_process
from writehead.bench.worker import DiedError, RefusedError, Worker

WORK = ("--work", "decode:2x20", "--work", "prefill:50", "--steps", "3", "--rounds", "2")
WAITS = 60


def test_transformers_takes_turns_with_us(measure: Measure, tiny_model: Path) -> None:
    found = measure("peers", "-m", tiny_model, "--peer", "transformers-fp32", "--weights", "fp32,bf16",
                    "--peer-python", sys.executable, *WORK)  # fmt: skip
    assert found["skipped"] == {}
    assert found["settings"]["peer_python"] == sys.executable
    rows = {(row["work"], row["engine"]): row for row in found["rows"]}
    assert set(rows) == {
        (work, engine)
        for work in ("decode:2x20", "prefill:50")
        for engine in ("writehead-fp32", "writehead-bf16", "transformers-fp32")
    }
    for (work, engine), row in rows.items():
        assert (row["status"], row["alternated"]) == ("measured", True)
        tokens = 2 if work.startswith("decode") else 50
        assert row["tok_s"] == pytest.approx(1e3 * tokens / row["ms"], rel=1e-4)
        assert row["ratio"] == 1.0 if engine == "writehead-fp32" else row["ratio"] > 0


def test_what_is_not_here_is_skipped_with_its_reason(measure: Measure, tiny_model: Path, tmp_path: Path) -> None:
    empty = tmp_path / "converted"
    empty.mkdir()
    found = measure(
        "peers", "-m", tiny_model, "--work", "prefill:9", "--rounds", "1", "--peer", "openvino-int4",
        "--peer", f"ctranslate2-int8={empty}",
    )  # fmt: skip
    assert set(found["skipped"]) == {"openvino-int4", "ctranslate2-int8"}
    assert f"there is no model at {tiny_model}-ov-int4; convert one" in found["skipped"]["openvino-int4"]
    assert f"{sys.executable} cannot import ctranslate2 (No module named" in found["skipped"]["ctranslate2-int8"]
    assert [row["status"] for row in found["rows"]] == ["skipped", "skipped", "measured"]


def test_the_child_needs_no_writehead(tiny_model: Path) -> None:
    """Without its own folder and ours on the path, as in another environment; it prints nothing but answers."""
    code = f"""
import runpy, sys
sys.modules['writehead'] = None
sys.argv[1:], sys.path[:0] = ['transformers'], ['']
runpy.run_path({peer_process.__file__!r}, run_name='__main__')
"""
    with Worker("transformers", [sys.executable, "-c", code]) as worker:
        load = {"model": str(tiny_model), "dtype": "fp32", "vocab": 320, "seed": 0, "threads": 1}
        assert worker.ask("load", **load) == {}
        worker.ask("open", batch=2, context=7, capacity=WAITS)
        assert worker.ask("decode", steps=2)["seconds"] > 0
        assert worker.ask("prefill", batch=1, tokens=30, capacity=WAITS)["seconds"] > 0
        assert worker.ask("close") == {}


def test_a_refusal_is_no_death() -> None:
    with Worker("ct2", [sys.executable, peer_process.__file__, "ctranslate2"]) as worker:
        for _ in range(2):
            with pytest.raises(RefusedError, match="cannot import ctranslate2"):
                worker.ask("load", model="x", dtype="int8", vocab=9, seed=0, threads=1)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit('no such device')", "ended with exit code 1: no such device"),
        ("import os; os.kill(os.getpid(), 9)", "killed by the system (SIGKILL), most likely for want of memory"),
        ("import os; os.kill(os.getpid(), 15)", "killed by SIGTERM"),
    ],
)
def test_a_death_says_how(code: str, reason: str) -> None:
    with Worker("x", [sys.executable, "-c", f"input(); {code}"]) as worker:
        with pytest.raises(DiedError) as caught:
            worker.ask("load")
        assert str(caught.value) == reason


def test_the_first_ids_are_never_in_a_prompt() -> None:
    engine = peer_process.Engine()
    engine.vocab, engine.seed = 20, 3
    ids = engine.prompts(50, 10)
    assert (ids.min(), ids.max(), ids.shape) == (5, 19, (50, 10))
    assert (ids == engine.prompts(50, 10)).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer", "vllm"], "--peer is 'vllm'; there are transformers-fp32, transformers-bf16, ctranslate2-int8,"),
        (["--work", "decode:5"], "--work is 'decode:5'; expected decode:BATCHxCONTEXT or prefill:TOKENS"),
        (["--work", "train:5"], "--work is 'train:5'; expected"),
        (["--weights", "fp7"], "weights: 'fp7' is not a format; choose auto, fp32,"),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_refusals(run: Run, tiny_model: Path, arguments: list[str], message: str) -> None:
    done = run("bench", "peers", "-m", str(tiny_model), *arguments)
    assert (done.code, done.out) in ((2, ""), (3, ""))
    assert message in done.err


def test_the_peer_file_imports_the_standard_library_alone() -> None:
    code = f"""
import runpy, sys
runpy.run_path({peer_process.__file__!r})
print({{'torch', 'numpy', 'writehead'}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
