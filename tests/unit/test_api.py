"""The offline API on a tiny checkpoint that transformers wrote."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPTBigCodeForCausalLM

from tests import models
from writehead import LLM, RequestOutput, SamplingParams, load
from writehead.engine.engine import Event
from writehead.errors import ModelNotFoundError, PromptError, UsageError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ["def f(", "class Point:\n", "x", "import math\n\n\nfor name in sorted("]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(tiny_model, max_num_seqs=3)


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> Iterator[None]:
    """After every test the engine has no work, no row in use and no queue."""
    yield
    assert llm.engine.step() == []
    assert (llm.engine.scheduler.running, list(llm.engine.scheduler.waiting), llm._events) == ([], [], {})


def tokens(output: RequestOutput) -> list[int]:
    (completion,) = output.outputs
    return completion.token_ids


def test_greedy_tokens_are_those_of_transformers(llm: LLM, tiny_model: Path) -> None:
    reference = GPTBigCodeForCausalLM.from_pretrained(tiny_model)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY), strict=True):
        ids = llm.tokenizer.encode(prompt)
        assert output.prompt_token_ids == ids
        theirs = reference.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=12, do_sample=False,
            eos_token_id=None, pad_token_id=0, suppress_tokens=list(range(models.NUM_TOKENS, models.NUM_ROWS)),
        )  # fmt: skip
        assert tokens(output) == theirs[0, len(ids) :].tolist()
        assert output.outputs[0].text == llm.tokenizer.decode(tokens(output), continuation=True)


def test_load_gives_the_decoder(tiny_model: Path) -> None:
    ids = torch.tensor([[5, 90, 300]])
    with torch.inference_mode():
        theirs, ours = GPTBigCodeForCausalLM.from_pretrained(tiny_model)(ids).logits, load(tiny_model)(ids)
    assert float((ours - theirs).abs().max()) <= 2e-5 * float(theirs.max() - theirs.min())


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    together = llm.generate([*PROMPTS, *PROMPTS], GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert [o.prompt for o in together] == [*PROMPTS, *PROMPTS]
    assert [tokens(o) for o in together] == [tokens(o) for o in alone] * 2


def test_a_seed_gives_the_same_text_in_any_company(llm: LLM) -> None:
    def ask(seed: int, n: int = 1) -> SamplingParams:
        return SamplingParams(temperature=1.2, top_p=0.9, seed=seed, max_tokens=10, ignore_eos=True, n=n)

    alone = [tokens(llm.generate(p, ask(10 + i))[0]) for i, p in enumerate(PROMPTS)]
    mixed = llm.generate([*PROMPTS, "y"], [*(ask(10 + i) for i in range(4)), GREEDY])
    assert [tokens(o) for o in mixed[:4]] == alone
    (three,) = llm.generate(PROMPTS[0], ask(10, n=3))
    assert [c.index for c in three.outputs] == [0, 1, 2]
    assert three.outputs[0].token_ids == alone[0]
    assert len({tuple(c.token_ids) for c in three.outputs}) == 3


def test_prompts_in_every_form(llm: LLM) -> None:
    ids = llm.tokenizer.encode("x")
    forms: list[Any] = ["x", ids, {"prompt": "x"}, {"prompt_token_ids": ids}]
    expected = tokens(llm.generate("x", GREEDY)[0])
    assert [tokens(o) for o in llm.generate(forms, GREEDY)] == [expected] * 4
    assert [o.prompt for o in llm.generate(forms, GREEDY)] == ["x", None, "x", None]
    assert [tokens(o) for o in llm.generate((f for f in forms), GREEDY)] == [expected] * 4
    assert tokens(llm.generate(ids, GREEDY)[0]) == tokens(llm.generate({"prompt": "x"}, GREEDY)[0]) == expected
    assert llm.generate([], GREEDY) == []


def test_a_suffix_fills_in_the_middle(llm: LLM) -> None:
    (output,) = llm.generate({"prompt": "def f(", "suffix": "):\n"}, GREEDY)
    ids = [1, *llm.tokenizer.encode("def f("), 3, *llm.tokenizer.encode("):\n"), 2]
    assert (output.prompt, output.prompt_token_ids) == ("def f(", ids)
    assert tokens(output) == tokens(llm.generate(ids, GREEDY)[0])


def test_every_prompt_is_checked_before_any_is_run(llm: LLM) -> None:
    with pytest.raises(PromptError, match=r"^prompt 1 is empty; give at least one token$"):
        llm.generate(["x", "", "y"], GREEDY)
    with pytest.raises(PromptError, match=rf"^prompt 2 has {models.NUM_POSITIONS} tokens; the limit is 128 "):
        llm.generate(["x", "y", "z" * models.NUM_POSITIONS], GREEDY)
    with pytest.raises(UsageError, match=r"^sampling_params has 1 entries for 2 prompts"):
        llm.generate(["x", "y"], [GREEDY])
    with pytest.raises(PromptError, match=r"^the prompt is empty"):
        llm.stream("")
    assert not llm.engine.scheduler.waiting


def test_the_events_are_the_output(llm: LLM) -> None:
    seen: list[Event] = []
    params = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=9, logprobs=2)
    outputs = llm.generate(PROMPTS, params, on_event=seen.append)
    for output in outputs:
        for completion in output.outputs:
            mine = [e for e in seen if (e.request_id, e.index) == (output.request_id, completion.index)]
            assert "".join(e.text for e in mine) == completion.text
            assert [e.token_id for e in mine] == completion.token_ids
            assert [e.logprobs for e in mine] == completion.logprobs
            assert [e.finish_reason for e in mine] == [None] * (len(mine) - 1) + [completion.finish_reason]


def test_a_listener_that_fails_ends_the_call_and_nothing_else(llm: LLM) -> None:
    countdown = itertools.count()

    def fail(event: Event) -> None:
        if next(countdown) == 5:
            raise RuntimeError(event.request_id)

    with pytest.raises(RuntimeError):
        llm.generate(PROMPTS, GREEDY, on_event=fail)
    assert llm.engine.step() == [], "the rows are free although the traceback still holds the frames"
    assert llm.generate("x", GREEDY)[0].finished


@pytest.mark.parametrize("where", ["decoder.hidden", "decoder.logits", "scheduler.schedule"])
def test_an_interrupt_leaves_the_model_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    expected = [tokens(o) for o in llm.generate(PROMPTS, GREEDY)]
    owner, name = where.split(".")
    target, countdown = getattr(llm.engine, owner), itertools.count()
    original = getattr(target, name)

    def interrupt(*args: Any) -> Any:
        if next(countdown) == 3:
            raise KeyboardInterrupt
        return original(*args)

    stream = llm.stream(PROMPTS[0], GREEDY)
    found = [next(stream).token_id]
    monkeypatch.setattr(target, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert [tokens(o) for o in llm.generate(PROMPTS, GREEDY)] == expected
    assert [*found, *(event.token_id for event in stream)] == expected[0], "an open stream goes on"


def test_a_request_that_nobody_waits_for_is_dropped(llm: LLM) -> None:
    (orphan,) = llm.engine.add(llm._intake.request("x", GREEDY, where="it"))
    llm.generate(PROMPTS, GREEDY)
    assert (orphan.finish_reason, orphan.num_output) == ("abort", 1)


def test_a_stream_is_the_output_piece_by_piece(llm: LLM) -> None:
    (output,) = llm.generate("def f(", GREEDY)
    events = list(llm.stream("def f(", GREEDY))
    assert "".join(e.text for e in events) == output.outputs[0].text
    assert [e.token_id for e in events] == tokens(output)
    assert events[-1].finish_reason == "length"
    assert events[-1].sequence.finish_reason == "length"


def test_a_stream_that_is_closed_frees_its_row(llm: LLM) -> None:
    stream = llm.stream("def f(", GREEDY)
    first = next(stream)
    stream.close()
    assert first.sequence.finish_reason == "abort"
    assert llm.engine.step() == []
    for event in llm.stream("def f(", GREEDY):
        assert event.finish_reason is None
        break
    assert llm.engine.step() == []
    llm.stream("never started", GREEDY)


def test_streams_side_by_side_get_all_of_their_events(llm: LLM) -> None:
    expected = [tokens(o) for o in llm.generate(PROMPTS, GREEDY)]
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
    found: list[list[int | None]] = [[] for _ in PROMPTS]
    for turn in zip(*streams, strict=True):
        for mine, event in zip(found, turn, strict=True):
            mine.append(event.token_id)
    assert found == expected


def test_generate_works_while_a_stream_is_open(llm: LLM) -> None:
    expected = [tokens(o) for o in llm.generate(PROMPTS, GREEDY)]
    stream = llm.stream(PROMPTS[0], GREEDY)
    found = [next(stream).token_id, next(stream).token_id]
    assert [tokens(o) for o in llm.generate(PROMPTS[1:], GREEDY)] == expected[1:]
    found += [event.token_id for event in stream]
    assert found == expected[0]


def test_a_listener_may_use_the_model(llm: LLM) -> None:
    expected = [tokens(o) for o in llm.generate(PROMPTS[:2], GREEDY)]
    inner: list[list[int]] = []

    def listen(event: Event) -> None:
        if event.finish_reason is not None and not inner:
            inner.append(tokens(llm.generate(PROMPTS[1], GREEDY)[0]))

    assert tokens(llm.generate(PROMPTS[0], GREEDY, on_event=listen)[0]) == expected[0]
    assert inner == [expected[1]]


def test_the_model_ends_a_text_unless_told_otherwise(llm: LLM) -> None:
    for stop in (0, 2):  # the end of a text, and a sentinel
        forced = {stop: 1000.0}
        (output,) = llm.generate("x", SamplingParams(logit_bias=forced, max_tokens=5))
        completion = output.outputs[0]
        assert (completion.token_ids, completion.text) == ([stop], "")
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        (output,) = llm.generate("x", SamplingParams(logit_bias=forced, max_tokens=5, ignore_eos=True))
        assert (tokens(output), output.outputs[0].text) == ([stop] * 5, "")
        (output,) = llm.generate("x", SamplingParams(logit_bias=forced, max_tokens=5, min_tokens=2))
        assert (len(tokens(output)), tokens(output).index(stop)) == (3, 2)


def test_progress_is_shown_on_request(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY)
    assert capfd.readouterr() == ("", "")
    llm.generate(PROMPTS, SamplingParams(n=2, max_tokens=2), use_tqdm=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "completions" in err
    assert "8/8" in err


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 1}, {"max_num_seqs": 2, "max_step_tokens": 2}, {"max_model_len": 20}]
)
def test_the_sizes_of_the_engine_change_no_text(llm: LLM, tiny_model: Path, options: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    small = LLM(tiny_model, **options)
    assert [tokens(o) for o in small.generate(PROMPTS[:3], params)] == [
        tokens(o) for o in llm.generate(PROMPTS[:3], params)
    ]


def test_a_text_ends_at_the_limit(llm: LLM, tiny_model: Path) -> None:
    short = LLM(tiny_model, max_model_len=10)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    (output,) = short.generate([5] * 6, params)
    assert (len(tokens(output)), output.outputs[0].finish_reason) == (4, "length")
    assert tokens(output) == tokens(llm.generate([5] * 6, params)[0])[:4]
    (output,) = llm.generate([5] * 127, params)
    assert len(tokens(output)) == 1
    refused: list[Any] = [([5] * 10, "the prompt"), ([[5] * 10], "prompt 0"), ([[5], [5] * 10], "prompt 1")]
    for prompts, name in refused:
        with pytest.raises(PromptError, match=rf"^{name} has 10 tokens; the limit is 10 "):
            short.generate(prompts, params)


def test_a_conversation_that_is_too_long_is_called_by_its_name(tmp_path: Path) -> None:
    models.write_tiny_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    llm = LLM(tmp_path)
    short, long = ([{"role": "user", "content": "1" * count}] for count in (3, 128))
    with pytest.raises(PromptError, match=r"^the prompt has 128 tokens; the limit is 128 "):
        llm.chat(long)
    with pytest.raises(PromptError, match=r"^prompt 1 has 128 tokens; the limit is 128 "):
        llm.chat([short, long])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0; expected a whole number from 1"),
        ({"max_step_tokens": "many"}, "max_step_tokens is 'many'; expected a whole number from 1"),
        ({"max_step_tokens": 32}, "max_step_tokens is 32, less than max_num_seqs, 64; a step advances"),
        ({"max_model_len": True}, "max_model_len is True; expected a whole number from 1"),
        ({"max_model_len": 129}, "max_model_len is 129, but the model has only 128 positions; ask for at most that"),
        ({"weights": "int3"}, "weights: 'int3' is not a format"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype: 'int4' is not one; choose auto, fp32, bf16, fp16, int8"),
        ({"kernels": "magic"}, "kernels: there is no backend 'magic'"),
    ],
)
def test_options_that_cannot_work(tiny_model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        LLM(tiny_model, **options)
    assert str(caught.value).startswith(message)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"nothing-here"):
        LLM(tmp_path / "nothing-here")


def test_the_cache_takes_at_most_half_of_the_memory(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = 2 * 2 * 8 * 4 * models.NUM_POSITIONS  # keys and values, layers, head size, bytes, positions
    sizes = {"SC_PHYS_PAGES": 2 * 5 * row + row, "SC_PAGE_SIZE": 1}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    llm = LLM(tiny_model)
    assert llm.engine.cache.num_rows == 5
    assert llm.engine.cache.num_bytes == 5 * row
    sizes["SC_PHYS_PAGES"] = row
    assert LLM(tiny_model).max_model_len == models.NUM_POSITIONS // 2
    with pytest.raises(UsageError, match=r"one sequence of 65 tokens .* set max_model_len to at most 64$"):
        LLM(tiny_model, max_model_len=65)


def test_the_cache_leaves_room_for_the_weights(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = 2 * 2 * 8 * 4 * models.NUM_POSITIONS
    weights = sum(t.numel() for t in load_file(tiny_model / "model.safetensors").values()) * 4

    def free(number: int) -> None:
        monkeypatch.setattr("writehead.api.free_memory", lambda: number)
        monkeypatch.setattr("writehead.build.free_memory", lambda: number + (2 << 20))  # in whole huge pages

    free(weights + 3 * row + row // 2)
    assert LLM(tiny_model, kernels="reference").engine.cache.num_rows == 3
    free(weights + row // 4)
    assert LLM(tiny_model, kernels="reference").max_model_len == models.NUM_POSITIONS // 4
    with pytest.raises(UsageError, match=r"^one sequence of 33 tokens .* beside the weights .* to at most 32$"):
        LLM(tiny_model, kernels="reference", max_model_len=33)


@pytest.mark.parametrize(
    ("name", "slot"), [("auto", 8 * 4), ("fp32", 8 * 4), ("bf16", 8 * 2), ("fp16", 8 * 2), ("int8", 8 + 4)]
)
def test_a_narrow_cache_has_more_rows(
    llm: LLM, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, name: str, slot: int
) -> None:
    """`slot`: bytes of 8 numbers. There is memory for five sequences of fp32, and a hundred are wanted."""
    row = 2 * 2 * models.NUM_POSITIONS * slot
    sizes = {"SC_PHYS_PAGES": 2 * (5 * 2 * 2 * models.NUM_POSITIONS * 32 + 5), "SC_PAGE_SIZE": 1}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    narrow = LLM(tiny_model, kv_cache_dtype=name, max_num_seqs=100)
    assert narrow.engine.cache.num_rows == 5 * 32 // slot
    assert narrow.engine.cache.num_bytes == row * narrow.engine.cache.num_rows
    params = SamplingParams(max_tokens=1, prompt_logprobs=3)
    ours, theirs = (m.generate([PROMPTS[0]], params)[0].prompt_logprobs or [] for m in (narrow, llm))
    for mine, own in zip(ours[1:], theirs[1:], strict=True):
        assert mine is not None
        assert own is not None
        shared = mine.keys() & own.keys()
        assert all(abs(mine[i].logprob - own[i].logprob) < 0.02 for i in shared)
        assert shared
    sizes["SC_PHYS_PAGES"] = row
    with pytest.raises(UsageError, match=r"one sequence of 65 tokens .* set max_model_len to at most 64$"):
        LLM(tiny_model, kv_cache_dtype=name, max_model_len=65)


def test_memory_without_room_for_a_cache_is_too_little(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("writehead.api.free_memory", lambda: 0)
    monkeypatch.setattr("writehead.build.free_memory", lambda: 2 << 20)  # the huge page of the weights
    sizes = r"the weights need 0\.0 GB of memory in fp32 and the cache of one sequence 0\.0 GB, but 0\.0 GB are free"
    with pytest.raises(UsageError, match=sizes + "; choose weights bf16, or free memory$"):
        LLM(tiny_model)
    assert load(tiny_model).config.num_layers == 2
