"""The model in the box: that it is there, small, and better than a compressor on files that it never saw."""

from __future__ import annotations

from pathlib import Path

import pytest

from writehead import LLM, SamplingParams
from writehead.build import BOX
from writehead.cli.train import completer
from writehead.train.bodies import alone, choose_bodies, function_bodies
from writehead.train.config import TrainConfig
from writehead.train.corpus import SourceFile, read_corpus
from writehead.train.evaluate import xz_bits_per_byte
from writehead.train.folder import read_tokenizer


@pytest.fixture(scope="module")
def box() -> LLM:
    return LLM()


@pytest.fixture(scope="module")
def held_out() -> tuple[SourceFile, ...]:
    """Files of this Python's library whose paths were held out; other versions of them were never seen either."""
    config = TrainConfig(out=Path())
    return read_corpus(config.corpus, pattern=config.pattern, held_out=config.held_out).held_out


def test_it_fits_in_sixteen_megabytes() -> None:
    assert sum(file.stat().st_size for file in BOX.rglob("*") if file.is_file()) <= 16_000_000


def test_it_is_multi_query_and_fills_in_the_middle(box: LLM) -> None:
    assert (box.config.family, box.config.num_kv_heads) == ("gpt_bigcode", 1)
    gap = {"prompt": "def area(width, height):\n    return ", "suffix": "\n\n\nprint(area(2, 3))\n"}
    (output,) = box.generate(gap, SamplingParams(temperature=0, max_tokens=24))
    assert output.prompt_token_ids.count(box.fim.prefix_id if box.fim else -1) == 1
    assert output.outputs[0].text


def test_it_needs_fewer_bits_than_xz(box: LLM, held_out: tuple[SourceFile, ...]) -> None:
    """Scored through prompt_logprobs, in pieces that fit the context."""
    files = sorted(held_out, key=lambda file: len(file.text))[:12]
    xz = xz_bits_per_byte([file.text for file in files])
    bits = 0.0
    for file in files:
        ids = box.tokenizer.encode(file.text)
        for at in range(0, len(ids), 900):
            prompt = [0, *ids[at : at + 900]]
            (output,) = box.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=0))
            scores = output.prompt_logprobs or []
            bits -= sum(s[t].logprob for s, t in zip(scores[1:], prompt[1:], strict=True) if s) / 0.6931471805599453
    assert bits < sum(xz.bits)


def test_its_functions_parse(held_out: tuple[SourceFile, ...]) -> None:
    """A sample of the hundred bodies on the model card, with room for another Python's files."""
    bodies = [alone(body) for body in choose_bodies(held_out, 20)]
    result = function_bodies(bodies, read_tokenizer(BOX), completer(BOX), context=1024)
    print(f"{result.num_passed} of {len(result.passed)} parse")
    assert result.num_passed >= 10
