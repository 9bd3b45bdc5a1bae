"""The stage against loops: its masks, completions and loss against their definitions, and that loops go away."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.engine import tiny
from writehead import kernels
from writehead.cache import KVCache
from writehead.engine.engine import Engine
from writehead.models.decoder import Decoder
from writehead.train import TrainConfig, train
from writehead.train.corpus import SourceFile, read_corpus
from writehead.train.data import Batch
from writehead.train.folder import read_history
from writehead.train.loops import LoopStage, greedy, loop_loss, repeated, share_repeated
from writehead.train.loss import loss_sum
from writehead.train.state import read_state
from writehead.train.trainer import model_config, optimizer_step
from writehead.train.vocabulary import END_OF_TEXT, train_tokenizer

CONFIG = TrainConfig(out=Path("run"), layers=2, width=32, heads=4, context=64, dtype="float32")
PROMPTS = [
    [0, 5, 6, 7],
    [9],
    [3, 1, 4, 1, 5, 9, 2, 6],
    [0, 20, 21, 22],
    [50, 40],
    [7, 7, 7],
    [33],
    [12, 13, 14, 15, 16],
]


def make_model(*, seed: int = 5) -> Decoder:
    """A decoder of 60 tokens. Seed 5 repeats itself nearly everywhere; seed 3 hardly, and ends one of its texts."""
    model = Decoder(model_config(CONFIG, vocab_size=tiny.NUM_TOKENS), kernels.load("reference"))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.2, generator=generator)
    return model


@pytest.mark.parametrize(
    ("tokens", "n", "expected"),
    [
        ("abcabc", 3, "...111"),
        ("abcabca", 3, "...1111"),
        ("abcxabcx", 3, "....1111"),
        ("abcxabcyabc", 3, "....111.111"),  # y is new, so are the n-grams with it
        ("aaaaa", 3, ".1111"),  # an occurrence may overlap the one before
        ("abab", 3, "...."),
        ("ab", 3, ".."),
        ("", 3, ""),
        ("aba", 1, "..1"),
    ],
)
def test_what_repeats(tokens: str, n: int, expected: str) -> None:
    assert repeated([ord(c) for c in tokens], n) == [c == "1" for c in expected]


def test_eight_tokens_repeat_seven_do_not() -> None:
    assert repeated([*range(7), 99, *range(7)]) == [False] * 15
    assert repeated([*range(8), 99, *range(8)]) == [False] * 9 + [True] * 8
    assert share_repeated([[*range(8), 99, *range(8)], [1, 2, 3]]) == 8 / 20
    assert share_repeated([]) == 0.0


def test_greedy_is_the_engines() -> None:
    model = make_model(seed=3)
    cache = KVCache(num_layers=2, num_kv_heads=1, slot_size=8, num_rows=3, capacity=64, dtype=torch.float32)
    engine = Engine(model, tiny.tokenizer(), cache, max_step_tokens=16)
    asked = [tiny.request(p, id=i, stop_ids=[0], max_tokens=50) for i, p in enumerate(PROMPTS)]
    expected = [sequence.output_ids for sequences in tiny.run(engine, *asked) for sequence in sequences]
    ours = greedy(model, PROMPTS, 50)
    assert ours == expected
    assert {len(tokens) for tokens in ours} > {50}  # some end
    assert all(0 not in tokens[:-1] for tokens in ours)
    assert greedy(model, [], 50) == []


def completions() -> list[list[int]]:
    """Three that repeat 8 of 16, 3 + 8 of 19 and none of 3 tokens."""
    return [[*range(10, 18)] * 2, [*range(20, 31), *range(20, 28)], [1, 2, 0]]


def formula(model: Decoder) -> Tensor:
    """The loss in float64, token by token over whole sequences without padding."""
    wide = model.double()
    total = torch.zeros((), dtype=torch.float64)
    for prompt, completion in zip(PROMPTS, completions(), strict=False):
        ids = torch.tensor([*prompt, *completion])
        probabilities = wide(ids[None])[0].softmax(-1)
        for i in range(len(completion)):
            grams = [completion[s : s + 8] for s in range(len(completion) - 7)]
            if any(s <= i < s + 8 and grams[s] in grams[:s] for s in range(len(grams))):
                total = total - torch.log(1 - probabilities[len(prompt) + i - 1, completion[i]])
    return total / sum(len(c) for c in completions())


def test_the_loss_is_the_unlikelihood_of_what_repeats() -> None:
    model = make_model()
    loss = loop_loss(model, PROMPTS[:3], completions(), torch.float32)
    loss.backward()
    ours = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    near = loop_loss(model, PROMPTS[:3], completions(), torch.bfloat16)
    model.zero_grad()
    expected = formula(model)
    expected.backward()
    assert loss.dtype is near.dtype is torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert near.item() == pytest.approx(expected.item(), rel=0.05)
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(ours[name].double(), p.grad, rtol=1e-3, atol=1e-5 * p.grad.abs().max().item())


def test_a_certain_loop_still_has_a_gradient() -> None:
    """Where p rounds to one, log(1 - p) would be infinite, and clamped its gradient zero."""
    model = make_model()
    (completion,) = greedy(model, [[9]], 60)
    with torch.no_grad():
        for parameter in model.norm.parameters():
            parameter.mul_(1000)
        certainty = model(torch.tensor([[9, *completion[:-1]]])).softmax(-1).amax(-1)
    assert share_repeated([completion]) > 0.5
    assert certainty.eq(1).float().mean() > 0.9
    loss = loop_loss(model, [[9]], [completion], torch.float32)
    (gradient,) = torch.autograd.grad(loss, model.get_parameter("embed.weight"))
    assert 17 < loss.item() < math.inf
    assert gradient.isfinite().all()
    assert gradient[completion[-1]].norm() > 1


def test_nothing_repeated_is_no_loss() -> None:
    loss = loop_loss(make_model(), [[1, 2]], [[*range(20)]], torch.float32)
    assert loss.item() == 0
    assert not loss.requires_grad


def test_a_model_that_trains_on_its_loops_leaves_them() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    shares = []
    for _ in range(40):
        made = greedy(model, PROMPTS, 56)
        shares.append(share_repeated(made))
        loss = loop_loss(model, PROMPTS, made, torch.float32)
        if loss.requires_grad:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert shares[0] > 0.5
    assert sum(shares[-5:]) / 5 < 0.3 * shares[0]


def test_the_extra_loss_adds_its_gradient_before_clipping() -> None:
    model = make_model()
    ids = torch.randint(0, 60, (2, 31), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids[:, :-1], ids[:, 1:])
    both = loss_sum(model, batch, dtype=torch.float32) / 60 + loop_loss(
        model, PROMPTS[:3], completions(), torch.float32
    )
    gradients = torch.autograd.grad(both, list(model.parameters()))
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
    expected = [p.detach() - 0.01 * g / norm for p, g in zip(model.parameters(), gradients, strict=True)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer_step(
        model, optimizer, [batch], clip=0.01, dtype=torch.float32,
        extra=lambda: loop_loss(model, PROMPTS[:3], completions(), torch.float32),
    )  # fmt: skip
    for p, moved in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), moved, rtol=1e-4, atol=1e-6)


def files(config: TrainConfig) -> tuple[SourceFile, ...]:
    return read_corpus(config.corpus, pattern=config.pattern, held_out=config.held_out).train


def test_prompts_are_headers_alone_and_after_their_file(config: TrainConfig) -> None:
    config = dataclasses.replace(config, context=512, loop_batch=24)
    texts = {file.path: file.text for file in files(config)}
    tokenizer = train_tokenizer(texts.values(), vocab_size=300)
    stage = LoopStage(files(config), tokenizer, config)
    prompts = stage.prompts(3)
    assert prompts == LoopStage(files(config), tokenizer, config).prompts(3) != stage.prompts(4)
    assert len(prompts) == 24
    kept = []
    for prompt in prompts:
        assert len(prompt) <= 256
        text = tokenizer.decode(prompt, skip_special_tokens=False)
        kept.append(text.removeprefix(END_OF_TEXT))
        assert kept[-1].endswith('."""')
        assert any(kept[-1] in text for text in texts.values())  # the training files' alone
        assert (0 in prompt) == text.startswith(END_OF_TEXT) == (len(prompt) < 256 or prompt[0] == 0)
    after = [text for text in kept if text.count("def ") > 1]
    assert 4 <= len(after) <= 20


def test_files_without_functions_give_no_prompts(config: TrainConfig) -> None:
    some = (SourceFile("a.py", "x = 1\n", ""), SourceFile("notes.txt", "def f(:", ""))
    tokenizer = train_tokenizer(["x = 1\n"], vocab_size=300)
    stage = LoopStage(some, tokenizer, config)
    assert stage.prompts(1) == []
    loss, share = stage.loss(make_model(), step=1)
    assert (loss.item(), share, loss.requires_grad) == (0, 0, False)


@pytest.mark.parametrize(
    ("share", "every", "steps"),
    [(0.5, 2, [6, 8, 10]), (0.0, 1, []), (1.0, 3, [3, 6, 9]), (0.25, 1, [9, 10])],
)
def test_which_steps_train_against_loops(config: TrainConfig, share: float, every: int, steps: list[int]) -> None:
    config = dataclasses.replace(config, loop_share=share, loop_every=every)
    stage = LoopStage((), train_tokenizer(["x"], vocab_size=300), config)
    assert [n for n in range(1, 11) if stage.due(step=n, fraction=(n - 1) / 10)] == steps


def test_a_run_ends_with_the_stage_and_logs_it(config: TrainConfig, tmp_path: Path) -> None:
    config = dataclasses.replace(config, steps=20, loop_share=0.5, warmup=0, dtype="float32")
    result = train(config, show_progress=False)
    rows = [json.loads(line) for line in (config.out / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "repeated" in row] == [20]
    assert all(0 <= row["repeated"] <= 1 for row in rows if "repeated" in row)
    without = train(dataclasses.replace(config, out=tmp_path / "without", loop_share=0.0), show_progress=False)
    with_it, plain = (read_state(r.state)["model"]["embed.weight"] for r in (result, without))
    assert not torch.equal(with_it, plain)


def test_a_run_from_before_the_stage_resumes(config: TrainConfig) -> None:
    train(dataclasses.replace(config, loop_share=0.0), show_progress=False)
    path = config.out / "train_config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in values.items() if not k.startswith("loop_")}))
    result = train(dataclasses.replace(config, resume=True, steps=10), show_progress=False)
    assert result.steps == 10
    ((step, changed),) = read_history(config.out)
    assert (step, changed["loop_share"], changed["loop_tokens"]) == (6, [None, 0.25], [None, 160])
