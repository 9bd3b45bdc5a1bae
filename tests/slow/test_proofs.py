"""Proofs of minutes, run by `make proof`: real sizes against transformers, and every figure of the box's card.

The suite has a sample of each: tests/parity/test_gguf.py, tests/unit/verify, tests/unit/test_box.py.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from writehead.build import BOX
from writehead.cli.train import completer
from writehead.train.config import TrainConfig
from writehead.train.corpus import read_corpus
from writehead.train.report import evaluate
from writehead.verify import verify


def test_a_real_instruct_model_equals_transformers(smollm2_gguf: Path) -> None:
    report = verify(smollm2_gguf, max_new_tokens=64)
    print(report.table())
    report.raise_if_failed()


def test_a_model_of_santacoders_size_equals_transformers(tmp_path: Path) -> None:
    config = transformers.GPTBigCodeConfig(
        vocab_size=49280, n_positions=2048, n_embd=2048, n_layer=24, n_head=16, bos_token_id=0, eos_token_id=0
    )
    transformers.GPTBigCodeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    report = verify(tmp_path, max_new_tokens=16)
    print(report.table())
    report.raise_if_failed()


def test_the_box_keeps_its_promises() -> None:
    """On files whose paths were held out, as this Python ships them: never seen, whatever its version.

    The bar for bodies is 50 of 100.
    """
    config = TrainConfig(out=Path())
    held_out = read_corpus(config.corpus, pattern=config.pattern, held_out=config.held_out).held_out
    report = evaluate(BOX, held_out, completer(BOX))
    print(f"bits a byte {report.model.mean:.3f}, xz -9e {report.xz.mean:.3f}, bodies {report.alone.num_passed}")
    assert report.model.mean < report.xz.mean
    assert report.alone.num_passed >= 50
