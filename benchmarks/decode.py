"""Decoding in fp32 against transformers, in one process, alternated.

    python benchmarks/decode.py MODEL [--batches 1,16,64] [--prompt 128] [--rounds 8] [--steps 4]

Both sides read the same random prompts and then decode greedily, `--steps` tokens a turn. transformers is its bare
forward pass with its cache; writehead is its whole engine step (scheduling, sampling and text included). Prints the
median of the rounds' ratios transformers / writehead (above 1: writehead is faster) and one JSON line a batch size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from writehead import LLM, SamplingParams


class Ours:
    """writehead: LLM's own engine, driven a step at a time."""

    def __init__(self, llm: LLM, prompts: list[list[int]], new: int) -> None:
        self.llm = llm
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        self.sequences = [
            s
            for i, p in enumerate(prompts)
            for s in llm.engine.add(llm._intake.request(p, params, where=f"prompt {i}"))
        ]
        while any(s.num_output == 0 for s in self.sequences):
            llm.engine.step()

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self.llm.engine.step()

    def close(self) -> list[list[int]]:
        tokens = [s.output_ids for s in self.sequences]
        for sequence in self.sequences:
            self.llm.engine.cancel(sequence)
        return tokens


class Theirs:
    """transformers: the model's forward pass, the argmax of the last logits, its own cache."""

    @torch.inference_mode()
    def __init__(self, model: torch.nn.Module, prompts: list[list[int]]) -> None:
        self.model = model
        self.cache = DynamicCache()
        out = model(input_ids=torch.tensor(prompts), past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.next = out.logits[:, -1:].argmax(-1)
        self.tokens = [self.next]

    @torch.inference_mode()
    def decode(self, steps: int) -> None:
        for _ in range(steps):
            out = self.model(input_ids=self.next, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            self.next = out.logits[:, -1:].argmax(-1)
            self.tokens.append(self.next)

    def close(self) -> list[list[int]]:
        rows: list[list[int]] = torch.cat(self.tokens, dim=1).tolist()
        return rows


def timed(side: Ours | Theirs, steps: int) -> float:
    start = time.perf_counter()
    side.decode(steps)
    return (time.perf_counter() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    llm = LLM(args.model, weights="fp32", max_model_len=args.prompt + (args.rounds + 1) * args.steps + 2)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    for batch in (int(b) for b in args.batches.split(",")):
        prompts = torch.randint(5, 49000, (batch, args.prompt), generator=generator).tolist()
        ours, theirs = Ours(llm, prompts, (args.rounds + 1) * args.steps + 1), Theirs(model, prompts)
        times = [(timed(ours, args.steps), timed(theirs, args.steps)) for _ in range(args.rounds + 1)][1:]
        ratio = statistics.median(t / o for o, t in times)
        a, b = ours.close(), theirs.close()
        same = sum(x[: len(y)] == y[: len(x)] for x, y in zip(a, b, strict=True))
        print(f"batch {batch}: transformers / writehead = {ratio:.3f}, same tokens in {same} of {batch} sequences")
        record = {
            "batch": batch, "prompt": args.prompt, "ratio": round(ratio, 4), "same_tokens": same,
            "writehead_ms": round(statistics.median(o for o, _ in times) * 1e3, 2),
            "transformers_ms": round(statistics.median(t for _, t in times) * 1e3, 2),
        }  # fmt: skip
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
