"""Other engines as the children of a benchmark. This file runs by itself, in any environment that has the engine:

    python peer_process.py transformers|ctranslate2|llamacpp|openvino

It reads requests from stdin and answers on stdout, a line of JSON each (worker.py): load, open, decode, prefill, close.
Every engine decodes the same number of greedy tokens for the same random prompts, past any end of text, on all cores.
Seconds of decode are those of one step, the mean of the steps asked for.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FIRST_ID = 5
"""The first ids are control tokens in most vocabularies."""


class NotHereError(Exception):
    """The engine cannot do this here; the message is the reason."""


def serve(engine: Any, refusals: tuple[type[Exception], ...] = (NotHereError,)) -> None:
    """Answer requests until stdin ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(engine, request.pop("do"))(**request)
        except refusals as error:
            answer = {"refused": " ".join(str(error).split())}
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and "alloc" not in str(error):
                raise
            answer = {"refused": "the system does not grant the memory"}
        print(json.dumps(answer), file=answers, flush=True)


def need(package: str) -> Any:
    """A package, or the reason why the engine is skipped."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise NotHereError(f"{sys.executable} cannot import {package} ({error})") from None


class Engine:
    """What all engines share: the prompts."""

    def load(self, *, model: str, dtype: str, vocab: int, seed: int, threads: int) -> dict[str, Any]:
        """Load the model at a path."""
        self.vocab, self.seed, self.threads = vocab, seed, threads
        note = self._load(model, dtype)
        return {"note": note} if note else {}

    def _load(self, model: str, dtype: str) -> str | None:
        """What is remarkable about how it was loaded."""
        raise NotImplementedError

    def prompts(self, batch: int, length: int) -> Any:
        """int64 [batch, length]."""
        import numpy as np

        return np.random.default_rng(self.seed).integers(FIRST_ID, self.vocab, (batch, length))

    def close(self) -> dict[str, Any]:
        """Forget the sequences."""
        return {}


class Generating(Engine):
    """An engine that only generates whole completions: a step is what n + 1 tokens take longer than one, over n."""

    def open(self, *, batch: int, context: int, capacity: int) -> dict[str, Any]:  # noqa: ARG002
        """Remember the work."""
        self.work = self._inputs(self.prompts(batch, context))
        return {}

    def decode(self, *, steps: int) -> dict[str, Any]:
        """Two completions of the same prompts."""
        first = self._seconds(self.work, 1)
        longer = self._seconds(self.work, 1 + steps)
        if longer <= first:
            raise NotHereError(f"{steps} steps are lost in the noise of reading the prompts; use more --steps")
        return {"seconds": (longer - first) / steps}

    def prefill(self, *, batch: int, tokens: int, capacity: int) -> dict[str, Any]:  # noqa: ARG002
        """Until all sequences have their first token."""
        return {"seconds": self._seconds(self._inputs(self.prompts(batch, tokens)), 1)}

    def _inputs(self, ids: Any) -> Any:
        raise NotImplementedError

    def _generate(self, inputs: Any, new: int) -> list[int]:
        """Generate exactly `new` tokens a sequence -> how many each got."""
        raise NotImplementedError

    def _seconds(self, inputs: Any, new: int) -> float:
        start = time.perf_counter()
        counts = self._generate(inputs, new)
        seconds = time.perf_counter() - start
        assert set(counts) == {new}, f"asked for {new} tokens, got {counts}"
        return seconds


class Transformers(Engine):
    """The model's forward pass and its own cache, the argmax of the last logits."""

    def _load(self, model: str, dtype: str) -> None:
        self.torch, library = need("torch"), need("transformers")
        kind = {"fp32": self.torch.float32, "bf16": self.torch.bfloat16}[dtype]
        self.model = library.AutoModelForCausalLM.from_pretrained(model, dtype=kind).eval()
        self.cache = self.next = None

    def open(self, *, batch: int, context: int, capacity: int) -> dict[str, Any]:  # noqa: ARG002
        """Read the prompts."""
        self._read(batch, context)
        return {}

    def decode(self, *, steps: int) -> dict[str, Any]:
        """Go on by some steps."""
        start = time.perf_counter()
        for _ in range(steps):
            self._forward(self.next)
        return {"seconds": (time.perf_counter() - start) / steps}

    def prefill(self, *, batch: int, tokens: int, capacity: int) -> dict[str, Any]:  # noqa: ARG002
        """Read prompts."""
        start = time.perf_counter()
        self._read(batch, tokens)
        seconds = time.perf_counter() - start
        self.close()
        return {"seconds": seconds}

    def close(self) -> dict[str, Any]:
        """Forget the cache."""
        self.cache = self.next = None
        return {}

    def _read(self, batch: int, length: int) -> None:
        self.cache = None
        self._forward(self.torch.from_numpy(self.prompts(batch, length)))

    def _forward(self, ids: Any) -> None:
        with self.torch.inference_mode():
            out = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            self.cache, self.next = out.past_key_values, out.logits[:, -1:].argmax(-1)


class CTranslate2(Generating):
    """A converted directory; tokens go in by their spelling."""

    def _load(self, model: str, dtype: str) -> None:
        library = need("ctranslate2")
        self.generator = library.Generator(model, compute_type=dtype, intra_threads=self.threads, inter_threads=1)
        self.spelling = json.loads((Path(model) / "vocabulary.json").read_text("utf-8"))

    def _inputs(self, ids: Any) -> Any:
        return [[self.spelling[i] for i in row] for row in ids]

    def _generate(self, inputs: Any, new: int) -> list[int]:
        done = self.generator.generate_batch(
            inputs, max_length=new, min_length=new, include_prompt_in_result=False, sampling_topk=1, end_token=[]
        )
        return [len(one.sequences_ids[0]) for one in done]


class OpenVINO(Generating):
    """A directory exported by optimum-cli."""

    def _load(self, model: str, dtype: str) -> None:  # noqa: ARG002 - the export decides
        self.genai, self.openvino = need("openvino_genai"), need("openvino")
        self.pipe = self.genai.LLMPipeline(model, "CPU", ATTENTION_BACKEND="SDPA")

    def _inputs(self, ids: Any) -> Any:
        tensor = self.openvino.Tensor
        return self.genai.TokenizedInputs(tensor(ids), tensor(ids * 0 + 1))

    def _generate(self, inputs: Any, new: int) -> list[int]:
        config = self.genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.do_sample, config.ignore_eos = False, True
        return [len(tokens) for tokens in self.pipe.generate(inputs, config).tokens]


class LlamaCpp(Engine):
    """A GGUF file through llama.cpp's C interface."""

    length: int
    """Tokens that each sequence has."""
    next: list[int]

    def _load(self, model: str, dtype: str) -> str | None:  # noqa: ARG002 - the file decides
        self._start()
        survives = self._survives(model)
        self._open_model(model, extra=survives)
        return None if survives else "without repacked weights (AMX): with them it crashes here"

    def attempt(self, *, model: str, vocab: int, threads: int) -> dict[str, Any]:
        """Read a prompt with repacked weights, in a process that may crash of it."""
        self.vocab, self.seed, self.threads = vocab, 0, threads
        self._start()
        self._open_model(model, extra=True)
        return {"seconds": self._read(1, 64, 66)}

    def _start(self) -> None:
        import ctypes

        self.lib = lib = need("llama_cpp")
        self.silence = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self.silence, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self.context = None

    def _survives(self, model: str) -> bool:
        """Whether another process reads a prompt: builds use instructions that a virtual machine may not grant."""
        request = {"do": "attempt", "model": model, "vocab": self.vocab, "threads": self.threads}
        command = [sys.executable, __file__, "llamacpp"]
        done = subprocess.run(command, input=json.dumps(request), text=True, stdout=subprocess.DEVNULL, check=False)
        return done.returncode >= 0

    def _open_model(self, model: str, *, extra: bool) -> None:
        params = self.lib.llama_model_default_params()
        params.use_extra_bufts = extra
        self.model = self.lib.llama_model_load_from_file(model.encode(), params)
        if not self.model:
            raise NotHereError(f"llama.cpp cannot load {model}")
        self.rows = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))

    def open(self, *, batch: int, context: int, capacity: int) -> dict[str, Any]:
        """Read the prompts."""
        self._read(batch, context, capacity)
        return {}

    def decode(self, *, steps: int) -> dict[str, Any]:
        """Go on by some steps."""
        start = time.perf_counter()
        for _ in range(steps):
            self._decode([(token, self.length, s, True) for s, token in enumerate(self.next)])
            self.next = [self._greedy(s) for s in range(len(self.next))]
            self.length += 1
        return {"seconds": (time.perf_counter() - start) / steps}

    def prefill(self, *, batch: int, tokens: int, capacity: int) -> dict[str, Any]:
        """Read prompts, in a context made before."""
        return {"seconds": self._read(batch, tokens, capacity)}

    def close(self) -> dict[str, Any]:
        """Free the context."""
        if self.context:
            self.lib.llama_free(self.context)
        self.context = None
        return {}

    def _read(self, batch: int, length: int, capacity: int) -> float:
        self.close()
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = batch * capacity, max(512, batch), 512
        params.n_seq_max, params.kv_unified = batch, True
        params.n_threads = params.n_threads_batch = self.threads
        self.context = self.lib.llama_init_from_model(self.model, params)
        if not self.context:
            raise NotHereError(f"llama.cpp makes no context of {batch} x {capacity} tokens")
        ids, self.next, self.length = self.prompts(batch, length), [], length
        start = time.perf_counter()
        for sequence, row in enumerate(ids.tolist()):
            for first in range(0, length, 512):
                part = list(enumerate(row))[first : first + 512]
                self._decode([(token, at, sequence, at == length - 1) for at, token in part])
            self.next.append(self._greedy(len(part) - 1))
        return time.perf_counter() - start

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Run (token, position, sequence, wants logits)."""
        batch = self.lib.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, logits) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        code = self.lib.llama_decode(self.context, batch)
        self.lib.llama_batch_free(batch)
        assert code == 0, f"llama_decode answered {code}"

    def _greedy(self, row: int) -> int:
        import numpy as np

        logits = self.lib.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self.rows,)).argmax())


ENGINES = {"transformers": Transformers, "ctranslate2": CTranslate2, "llamacpp": LlamaCpp, "openvino": OpenVINO}

if __name__ == "__main__":
    del sys.path[0]  # this file's folder: its neighbours have the names of standard modules
    serve(ENGINES[sys.argv[1]]())
