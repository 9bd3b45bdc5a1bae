"""Against loops: the model continues prompts greedily, and what it repeats there is made unlikely.

This is sequence-level unlikelihood (Welleck et al. 2019, arXiv 1908.04319, section 5.2), the last stage of a run: the
penalized tokens come from the model's own completions, so loops of any length are seen, not only those of a line.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from writehead.build import make_cache
from writehead.kernels import CacheView, Group
from writehead.models.decoder import Decoder
from writehead.train.bodies import alone, find_bodies
from writehead.train.config import TrainConfig
from writehead.train.corpus import SourceFile
from writehead.train.vocabulary import END_OF_TEXT_ID, encode_texts

NGRAM = 8
"""Tokens that must come again before they count: a line or so. Shorter repetitions are ordinary code."""

PROMPT_TOKENS = 256
"""The end of a prompt that is kept, or half of the context if that is less."""

BODIES_PER_FILE = 4
"""Functions that one step takes from a file at most: a step then parses some files, not the corpus."""


class LoopStage:
    """The prompts and the loss of one step. Both follow from the seed and the step's number, so a run resumes exactly.

    A context too short for PROMPT_TOKENS and `loop_tokens` shortens first the prompts, to its half, then the
    completions, to what is left.
    """

    def __init__(self, files: Sequence[SourceFile], tokenizer: Tokenizer, config: TrainConfig) -> None:
        self._files = [file for file in files if file.path.endswith(".py")]
        self._tokenizer, self._config = tokenizer, config
        self._prompt_tokens = min(PROMPT_TOKENS, config.context // 2)
        self._new = min(config.loop_tokens, config.context - self._prompt_tokens)

    def due(self, *, step: int, fraction: float) -> bool:
        """Whether the step of this number, from 1, at this fraction of the run trains against loops."""
        share = self._config.loop_share
        return share > 0 and fraction >= 1 - share and step % self._config.loop_every == 0

    def loss(self, model: Decoder, *, step: int) -> tuple[Tensor, float]:
        """The weighted loss of a step, and the share of completed tokens that repeat."""
        prompts = self.prompts(step)
        completions = greedy(model, prompts, self._new)
        loss = loop_loss(model, prompts, completions, getattr(torch, self._config.dtype))
        return loss * self._config.loop_weight, share_repeated(completions)

    def prompts(self, step: int) -> list[list[int]]:
        """At most `loop_batch` prompts from random training files: headers of functions, half of them after their file.

        As in `bodies`, a prompt opens with end-of-text and loses its beginning where it is too long. There are fewer
        prompts, or none, if the files that a step looks at have few functions.
        """
        rng = random.Random(f"{self._config.seed}/loops/{step}")
        count = self._config.loop_batch
        texts: list[str] = []
        for file in rng.sample(self._files, min(count, len(self._files))):
            bodies = find_bodies(file)
            for body in rng.sample(bodies, min(BODIES_PER_FILE, count - len(texts), len(bodies))):
                texts.append((body if rng.random() < 0.5 else alone(body)).prompt)
            if len(texts) == count:
                break
        encoded = encode_texts(self._tokenizer, texts)
        return [[END_OF_TEXT_ID, *ids][-self._prompt_tokens :] for ids in encoded]


@torch.inference_mode()
def greedy(model: Decoder, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """The likeliest `new` tokens after each prompt, or fewer, the last of which is then end-of-text.

    Prompts have at least one token; the longest must leave `new` positions of the context.
    """
    if not prompts:
        return []
    lengths = [len(prompt) for prompt in prompts]
    config, count = model.config, len(prompts)
    assert max(lengths) + new <= config.max_positions
    cache = make_cache(config, num_rows=count, capacity=max(lengths) + new, dtype=torch.float32)
    # The first step reads the prompts, sequence by sequence; every later one a token of each.
    ids = torch.tensor([token for prompt in prompts for token in prompt])
    slots = torch.cat([torch.arange(n) for n in lengths])
    rows = torch.arange(count).repeat_interleave(torch.tensor(lengths))
    groups = tuple(Group(num_new=n, rows=slice(i, i + 1), lengths=(n,)) for i, n in enumerate(lengths))
    ends = torch.tensor(lengths).cumsum(0) - 1
    made: list[Tensor] = []
    ended = torch.zeros(count, dtype=torch.bool)
    while len(made) < new and not ended.all():
        view = CacheView(keys=cache.keys, values=cache.values, rows=rows, slots=slots, groups=groups)
        ids = model.logits(model.hidden(ids, slots, view)[ends]).argmax(-1)
        made.append(ids)
        ended |= ids == END_OF_TEXT_ID
        slots = torch.tensor(lengths) + len(made) - 1
        rows = ends = torch.arange(count)
        groups = (Group(num_new=1, rows=slice(0, count), lengths=tuple(n + len(made) for n in lengths)),)
    return [_until_end(tokens) for tokens in torch.stack(made, 1).tolist()]


def _until_end(tokens: list[int]) -> list[int]:
    """Tokens up to the first end-of-text and with it."""
    return tokens[: tokens.index(END_OF_TEXT_ID) + 1] if END_OF_TEXT_ID in tokens else tokens


def repeated(completion: Sequence[int], n: int = NGRAM) -> list[bool]:
    """Which tokens belong to an n-gram that began earlier in the completion too; its first occurrence is not marked."""
    marked = [False] * len(completion)
    seen: set[tuple[int, ...]] = set()
    for start in range(len(completion) - n + 1):
        gram = tuple(completion[start : start + n])
        if gram in seen:
            marked[start : start + n] = [True] * n
        seen.add(gram)
    return marked


def share_repeated(completions: Sequence[Sequence[int]]) -> float:
    """Repeated tokens among all of them; 0 if there are none."""
    return sum(sum(repeated(c)) for c in completions) / max(1, sum(len(c) for c in completions))


def loop_loss(
    model: Decoder, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], dtype: torch.dtype
) -> Tensor:
    """Sum of -log(1 - p) over the repeated tokens, divided by the number of all completed tokens: a scalar in fp32.

    It is zero, without a graph, when nothing repeats. Products run in `dtype`. With z a token's logit and o the
    logsumexp of all others, -log(1 - p) is softplus(z - o): exact, and with a gradient, also where p rounds to one.
    """
    places = [
        (row, len(prompt) + i - 1, token)  # the hidden state before a token predicts it
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        for i, (token, again) in enumerate(zip(completion, repeated(completion), strict=True))
        if again
    ]
    if not places:
        return torch.zeros(())
    sequences = [torch.tensor([*prompt, *c]) for prompt, c in zip(prompts, completions, strict=True)]
    # Attention is causal: what stands after a sequence's end changes nothing before it.
    inputs = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=END_OF_TEXT_ID)[:, :-1]
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        hidden = model.hidden(inputs, torch.arange(inputs.shape[1]))
    assert model.lm_head is None, "the loss reads the tied head"
    rows, slots, tokens = torch.tensor(places).unbind(1)
    logits = F.linear(hidden[rows, slots].to(dtype), model.get_parameter("embed.weight").to(dtype)).float()
    others = logits.scatter(1, tokens[:, None], -torch.inf).logsumexp(1)
    picked = logits.gather(1, tokens[:, None])[:, 0]
    return F.softplus(picked - others).sum() / sum(len(c) for c in completions)
