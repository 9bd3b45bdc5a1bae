"""One completion alone: how long until its first token, and how long for each one after that."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from writehead.bench.plot import Plot
from writehead.bench.report import Report
from writehead.bench.subject import Run, Subject
from writehead.bench.timing import median, percentile

COLUMNS = {
    "prompt": "tokens of the prompt",
    "new": "tokens generated",
    "ttft_ms": "milliseconds from the request to the first token, median over the rounds",
    "prompt_tok_s": "tokens of the prompt read in a second: prompt / ttft",
    "token_ms": "milliseconds of each further token, median over all of them",
    "token_ms_p90": "90 % of the tokens take no longer",
    "token_ms_p99": "99 % of the tokens take no longer",
    "total_s": "seconds of the whole completion, median over the rounds",
    "tok_s": "tokens generated in a second: new / total",
    "rounds": "completions measured; one more warms up",
}

PLOT = Plot(x="prompt", y="token_ms", label="ms a token (median)")


def measure(subject: Subject, report: Report, *, prompts: Seq[int], new: int, rounds: int) -> None:
    """A row for each length of prompt."""
    for length in prompts:
        [ids] = subject.prompts([length], report.seed)
        firsts: list[float] = []
        tokens: list[float] = []
        totals: list[float] = []
        for number in range(rounds + 1):
            run = Run(subject.engine, [ids], new)
            first, rest = run.read_prompts(), run.decode(new - 1)
            run.close()
            if number:
                firsts.append(first)
                tokens += rest
                totals.append(first + sum(rest))
        report.add(
            prompt=length, new=new, rounds=rounds, ttft_ms=1e3 * median(firsts), prompt_tok_s=length / median(firsts),
            token_ms=1e3 * median(tokens) if tokens else None,
            token_ms_p90=1e3 * percentile(tokens, 0.9) if tokens else None,
            token_ms_p99=1e3 * percentile(tokens, 0.99) if tokens else None,
            total_s=median(totals), tok_s=new / median(totals),
        )  # fmt: skip
