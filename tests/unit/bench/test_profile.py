"""`writehead profile`: the parts add up, cost what the shapes say, and the numbers of the model stay the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.bench.conftest import read_csv
from tests.unit.cli.conftest import Run
from writehead.bench.spans import Recorder, recording
from writehead.bench.subject import Run as Sequences
from writehead.bench.subject import Subject, open_subject

LAYERS, WIDTH = 2, 64
"""Of the shape `tiny`, with 4 heads of 16 and an MLP of 256."""

OPTIONS = ("--batch", "3", "--prompt", "9", "--steps", "4", "--rounds", "2", "--seconds", "0.01", "--buffer", "4")


def tiny() -> Subject:
    """An engine with room for three sequences."""
    return open_subject("random:tiny", weights="fp32", kernels="auto", num_seqs=3, length=40)


def test_parts_add_up(run: Run, tmp_path: Path) -> None:
    done = run("profile", "random:tiny", *OPTIONS, "--csv", tmp_path / "p.csv")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["command"].startswith("writehead profile random:tiny --batch 3 --prompt 9 --steps 4 --rounds 2")
    assert len(read_csv(tmp_path / "p.csv")) == len(found["rows"]) + 1
    for phase in ("prefill", "decode"):
        rows = {(row["op"], row["of"]): row for row in found["rows"] if row["phase"] == phase}
        summary = found[phase]
        assert sum(row["ms"] for row in rows.values()) == pytest.approx(summary["ms"], rel=1e-4)
        assert sum(row["part"] for row in rows.values()) == pytest.approx(1.0, rel=1e-4)
        python = sum(row["part"] for (op, _), row in rows.items() if op == "python")
        assert summary["python"] == pytest.approx(python, rel=1e-4)
        assert all(row["ms"] > 0 for row in rows.values())
        assert [layer["layer"] for layer in summary["layers"]] == [0, 1]
        assert all(0 < layer["kernels_ms"] < layer["ms"] < summary["ms"] for layer in summary["layers"])
        tokens = 3 * (9 if phase == "prefill" else 1)
        up = rows["linear", "mlp.up"]
        assert up["calls"] == LAYERS
        assert up["mbytes"] == pytest.approx(4e-6 * LAYERS * (WIDTH * 256 + 256 + tokens * (WIDTH + 256)))
        assert up["gop_s"] * up["ms"] * 1e6 == pytest.approx(LAYERS * 2 * tokens * WIDTH * 256, rel=1e-4)
        assert rows["cached_attention", "attn"]["calls"] == LAYERS
        assert rows["linear", "lm_head"]["calls"] == 1
        assert rows["layer_norm", "norm"]["calls"] == 1
    assert found["unrecorded_step_ms"] > 0


def test_recording_changes_no_token_and_leaves_no_trace() -> None:
    subject = tiny()
    prompts = subject.prompts([7, 7, 7], 1)

    def tokens(record: bool) -> list[list[int]]:
        run = Sequences(subject.engine, prompts, 6)
        if record:
            with recording(subject.engine, Recorder()):
                run.read_prompts()
                run.decode(5)
        else:
            run.read_prompts()
            run.decode(5)
        run.close()
        return [sequence.output_ids for sequence in run.sequences]

    decoder, kernels = subject.engine.decoder, subject.engine.decoder.kernels
    plain = tokens(record=False)
    assert tokens(record=True) == plain
    assert subject.engine.decoder is decoder
    assert all(vars(module).get("kernels", kernels) is kernels for module in decoder.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in decoder.modules())
    assert [len(ids) for ids in plain] == [6, 6, 6]


def test_the_recorder_is_in_no_span() -> None:
    recorder = Recorder()
    start = recorder.now()
    recorder.add("kernel", "slow", "layers.1.mlp.up", start, cost_of=lambda: sum(range(3_000_000)) and None)  # type: ignore[arg-type, return-value]
    [span] = recorder.spans
    assert (span.layer, span.of) == (1, "mlp.up")
    assert span.duration < 5e6  # the sum takes longer
    assert recorder.now() - start < 5e6


def test_the_trace_nests(run: Run, tmp_path: Path) -> None:
    done = run("profile", "random:tiny", *OPTIONS, "--trace", tmp_path / "t.json")
    assert done.code == 0, done.err
    trace = json.loads((tmp_path / "t.json").read_text())
    events = trace["traceEvents"]
    assert trace["otherData"]["torch"]
    assert {event["ph"] for event in events} == {"X"}
    assert sum(event["cat"] == "step" for event in events) == 1 + 4
    assert sum(event["name"] == "linear mlp.up" for event in events) == LAYERS * (1 + 4)
    ends: list[float] = []
    for event in events:  # in the order of their starts: each ends within the one around it
        while ends and event["ts"] >= ends[-1] - 1e-3:
            ends.pop()
        assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-3, event
        ends.append(event["ts"] + event["dur"])


def test_a_trace_that_cannot_be_written(run: Run) -> None:
    done = run("profile", "random:tiny", *OPTIONS, "--trace", "/no/such/folder/t.json")
    assert (done.code, done.out) == (2, "")
    assert "--trace: /no/such/folder/t.json cannot be written (No such file or directory)" in done.err
