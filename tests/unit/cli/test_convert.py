"""`writehead convert` as a command; tests/unit/test_convert.py holds what it writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.unit.cli.conftest import Run


def test_it_says_what_it_wrote(run: Run, tiny_model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("convert", tiny_model, out)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{out}: gpt_bigcode, 28 tensors, 148 KB in 1 file, float32\n"
    done = run("convert", tiny_model, out)
    assert done.code == 4
    assert done.err.startswith(f"error: {out}: is not empty (config.json, ")
    done = run("convert", tiny_model, out, "--overwrite", "--dtype", "bf16")
    assert done.out == f"{out}: gpt_bigcode, 28 tensors, 73.8 KB in 1 file, bfloat16\n"
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    before, after = (run("generate", "a", "-m", m, "--max-tokens", "3").code for m in (tiny_model, out))
    assert before == after == 0


def test_a_missing_tokenizer_is_pointed_out(run: Run, tiny_model: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(tiny_model) / name, tmp_path / "in")
    done = run("convert", tmp_path / "in", tmp_path / "out")
    assert done.code == 0
    assert (
        done.err == f"{tmp_path}/in has no tokenizer, so {tmp_path}/out has none; add the one of the original model\n"
    )


def test_refusals(run: Run, tiny_model: str, tmp_path: Path) -> None:
    done = run("convert", tiny_model, tmp_path / "out", "--dtype", "int4")
    assert (done.code, done.err) == (2, "error: dtype: 'int4' is not a dtype; choose keep, fp32, bf16, fp16\n")
    (tmp_path / "file").write_text("x")
    done = run("convert", tiny_model, tmp_path / "file")
    assert done.code == 4
    assert "is a file, expected a directory" in done.err
