"""How long from process start to the first token, and how much memory it takes on the way.

    python benchmarks/startup.py MODEL [--weights fp32] [--prompt-tokens 16] [--rounds 5] [--pause 4]

Alternates five processes: `import torch`; reading the checkpoint's files; the first token of a prompt; touching as
much memory as the weights take, for the first time and with nothing else to do, in huge and in small pages. Prints the
medians, the excess of the third over the first two, and the peak of anonymous memory over the weights' size at the
compute dtype; ends with one JSON line. The first round warms the page cache and is not counted. Each process starts
after a pause, so that none finds memory which the one before it has just freed: a virtual machine may hand that back to
its host and pay for it again. What the last two take is the machine's share of the excess.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

FIRST_TOKEN = """
import json, sys
from writehead import LLM, SamplingParams
from writehead.build import num_weight_bytes, open_source
from writehead.kernels import parse_format
model, weights, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
llm = LLM(model, weights=weights)
prompt = [100 + i for i in range(count)]
next(iter(llm.stream(prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))))
size = num_weight_bytes(open_source(model), parse_format(weights, packs_floats=True))
print(json.dumps({"weights_bytes": size}), flush=True)
"""

TOUCH_MEMORY = """
import mmap, sys, threading
size = int(sys.argv[1])
block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
if sys.argv[2] == "huge":
    block.madvise(mmap.MADV_HUGEPAGE)
import ctypes
start = ctypes.addressof(ctypes.c_char.from_buffer(block))
half = size // 2
threads = [threading.Thread(target=ctypes.memset, args=(start + i * half, 1, half)) for i in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("done", flush=True)
"""


def run(command: list[str], pause: float) -> tuple[float, int, str]:
    """Seconds until the process prints its line or ends, its peak of anonymous memory in bytes, and the line."""
    time.sleep(pause)
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    peak, line = 0, ""
    while not line and process.poll() is None:
        peak = max(peak, anonymous_bytes(process.pid))
        time.sleep(0.005)
        line = process.stdout.readline() or ""
    seconds = time.perf_counter() - start
    line = line or process.stdout.read() or ""
    if process.wait() != 0:
        sys.exit(f"{command[0]} failed with exit code {process.returncode}")
    return seconds, peak, line


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process, from Linux's /proc."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    return next((int(row.split()[1]) * 1024 for row in status.splitlines() if row.startswith("RssAnon")), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--weights", default="fp32")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=4.0, help="seconds before each process")
    args = parser.parse_args()
    files = [str(f) for f in sorted(args.model.glob("*")) if f.suffix in (".safetensors", ".bin", ".gguf")]
    commands = {
        "import_torch": [sys.executable, "-c", "import torch; print('done', flush=True)"],
        "read_file": ["sh", "-c", 'cat "$@" > /dev/null; echo done', "sh", *files],
        "first_token": [
            sys.executable, "-c", FIRST_TOKEN, str(args.model), args.weights, str(args.prompt_tokens),
        ],
        "touch_huge_pages": [sys.executable, "-c", TOUCH_MEMORY, "{weights}", "huge"],
        "touch_small_pages": [sys.executable, "-c", TOUCH_MEMORY, "{weights}", "small"],
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    peak, weights = 0, 0
    for round_ in range(args.rounds + 1):
        for name, command in commands.items():
            elapsed, anonymous, line = run([word.replace("{weights}", str(weights)) for word in command], args.pause)
            if round_:
                seconds[name].append(elapsed)
            if name == "first_token":
                peak, weights = max(peak, anonymous), json.loads(line)["weights_bytes"]
    medians = {name: round(statistics.median(values), 3) for name, values in seconds.items()}
    excess = statistics.median(
        f - t - r for f, t, r in zip(seconds["first_token"], seconds["import_torch"], seconds["read_file"], strict=True)
    )
    print(", ".join(f"{name} {value} s" for name, value in medians.items()))
    print(f"first token over import torch plus reading: {excess:+.2f} s (median of {args.rounds} rounds)")
    print(f"peak anonymous memory / weights at {args.weights}: {peak / weights:.3f}")
    print(json.dumps({**medians, "excess_s": round(excess, 3), "memory_ratio": round(peak / weights, 4)}))


if __name__ == "__main__":
    main()
