"""`writehead bench latency`: its figures agree with each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.bench.conftest import Measure
from tests.unit.cli.conftest import Run
from writehead.build import BOX
from writehead.engine.engine import Engine, Event


def test_figures_agree(measure: Measure, tiny_model: Path) -> None:
    found = measure("latency", "--model", tiny_model, "--prompt", "3,40", "--new", "6", "--rounds", "3")
    assert [row["prompt"] for row in found["rows"]] == [3, 40]
    for row in found["rows"]:
        assert row["tok_s"] == pytest.approx(6 / row["total_s"], rel=1e-4)
        assert row["prompt_tok_s"] == pytest.approx(1e3 * row["prompt"] / row["ttft_ms"], rel=1e-4)
        assert 0 < row["token_ms"] <= row["token_ms_p90"] <= row["token_ms_p99"]
        assert row["total_s"] > row["ttft_ms"] / 1e3
    assert found["seed"] == 0
    assert found["load_seconds"] > 0
    assert found["settings"]["new"] == 6


def test_the_command_repeats_what_was_asked(measure: Measure) -> None:
    found = measure("latency", "-m", "random:tiny", "--new", "1", "--rounds", "1", "--seed", "7", "--prompt", "5")
    command, _, file = found["command"].partition(" --csv ")
    assert command == "writehead bench latency --model random:tiny --prompt 5 --new 1 --rounds 1 --seed 7"
    assert file.endswith("rows.csv")
    assert found["rows"][0]["token_ms"] is None  # there is no token after the first


def test_the_weights_take_their_size(measure: Measure) -> None:
    wide, half, byte = (
        measure("latency", "-m", "random:tiny", "--new", "2", "--rounds", "1", "--weights", w)["weight_bytes"]
        for w in ("fp32", "bf16", "int8")
    )
    parameters = 512 * 64 + 512 * 64 + 2 * (12 * 64**2 - 2 * 48 * 64 + 10 * 64 + 96 - 2 * 64 + 2 * 64 + 64) + 2 * 64
    assert wide == pytest.approx(4 * parameters, rel=0.02)
    assert wide > half > byte > parameters


@pytest.mark.parametrize("verb", ["latency", "throughput"])
def test_the_cache_is_of_the_named_kind(measure: Measure, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    made: list[torch.dtype] = []
    step = Engine.step

    def noted(self: Engine) -> list[Event]:
        made.append(self.cache.keys[0].dtype)
        return step(self)

    monkeypatch.setattr(Engine, "step", noted)
    for model in ("random:tiny", BOX):
        arguments = ("--new", "1", "--rounds", "1", "--prompt", "3,4", "--kv-cache-dtype", "int8")
        measure(verb, "-m", model, *arguments)
        assert set(made) == {torch.int8}, model
        made.clear()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "12,many"], "--prompt is '12,many'; expected whole numbers from 1"),
        (["--prompt", "0"], "--prompt is '0'; expected whole numbers from 1"),
        (["--model", "random:huge"], "'random:huge': 'huge' is neither a shape (tiny, small, gpt2-medium,"),
        (["--model", "random:tiny", "--prompt", "600"], "664 tokens are more than the 512 positions of the model"),
        (["--csv", "/no/such/folder/x.csv"], "--csv: /no/such/folder/x.csv cannot be written (No such file"),
    ],
)
def test_refusals(run: Run, arguments: list[str], message: str) -> None:
    done = run("bench", "latency", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
