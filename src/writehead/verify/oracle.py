"""The other side: Hugging Face transformers on the same checkpoint, in the same dtype, eager attention.

Its weights come by the most independent way there is: files that transformers can read, it reads itself. The original
SantaCoder, which it cannot, becomes its multi-head GPT-2 by tiling, without a weight rule of ours. Only what is left
(Megatron, GGUF architectures that it lacks) goes through our rules; `Oracle.origin` says which it was.
"""

from __future__ import annotations

import importlib.util
import inspect
import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor

from writehead import kernels as kernel_backends
from writehead.build import ModelSource, make_decoder
from writehead.checkpoint.files import listing
from writehead.errors import MissingDependencyError, VerificationError

State = dict[str, Tensor]


def require_transformers() -> None:
    """Raise MissingDependencyError unless transformers is installed. Imports nothing."""
    if importlib.util.find_spec("transformers") is None:
        raise MissingDependencyError(
            "verify compares with Hugging Face transformers, which is not installed: pip install 'writehead[hf]'"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines, warnings and progress bars of transformers; what goes wrong comes as an exception."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        # Bars go to whatever sys.stderr is when they start; the bar over a GGUF file has no other switch.
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


class Oracle:
    """A transformers model that gives logits."""

    def __init__(self, model: Any, origin: str) -> None:
        self.model, self.origin = model.eval().requires_grad_(False), origin
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def whole(self, text: list[int]) -> Tensor:
        """fp32 logits [T, V] of one sequence, without a cache."""
        with quiet():
            return self.model(input_ids=torch.tensor([text]), use_cache=False).logits[0].float()  # type: ignore[no-any-return]

    @torch.inference_mode()
    def left_padded(self, texts: Sequence[list[int]]) -> list[Tensor]:
        """fp32 logits [T, V] of each sequence, from one batch padded on the left.

        Positions are given: from 4.54 on GPTBigCode no longer derives them from the mask.
        """
        length = max(map(len, texts))
        ids = torch.tensor([[0] * (length - len(t)) + t for t in texts])
        mask = torch.tensor([[0] * (length - len(t)) + [1] * len(t) for t in texts])
        positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if self._takes_positions else {}
        with quiet():
            logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False, **positions).logits
        return [row[length - len(text) :].float() for row, text in zip(logits, texts, strict=True)]


def load_oracle(source: ModelSource, dtype: torch.dtype) -> Oracle:
    """The checkpoint in transformers. Raises VerificationError if transformers cannot load it."""
    with quiet():
        import transformers

        try:
            model, how = _load(source, dtype)
        except (MissingDependencyError, VerificationError):
            raise
        except Exception as error:  # whatever transformers raises for a checkpoint that it does not understand
            reason = " ".join(str(error).split())[:300]
            raise VerificationError(
                f"{source.path}: transformers {transformers.__version__} cannot load this checkpoint to compare with "
                f"({type(error).__name__}: {reason}); try another version of transformers"
            ) from error
    return Oracle(model, f"transformers {transformers.__version__} ({how})")


def _load(source: ModelSource, dtype: torch.dtype) -> tuple[Any, str]:
    checkpoint = source.checkpoint
    if any(name.endswith(".attn.kv_attn.weight") for name in checkpoint.tensors):
        values = {k: v for k, v in source.values.items() if k != "attention_head_type"}
        return _from_state(values, _santacoder_state(source), dtype), "as multi-head GPT-2, the shared head tiled"
    if checkpoint.format == "gguf" and _reads_gguf(checkpoint.metadata["general.architecture"]):
        file = source.path if source.path.is_file() else checkpoint.path
        return _from_files(str(file.parent), dtype, gguf_file=file.name), "reading the GGUF file itself"
    if checkpoint.format in ("gguf", "megatron"):
        return _from_state(source.values, _converted_state(source, dtype), dtype), "weights converted by writehead"
    if source.path.is_dir():
        safe = checkpoint.format == "safetensors"
        return _from_files(str(source.path), dtype, use_safetensors=safe), "reading the files itself"
    state = {name: checkpoint.read(name) for name in checkpoint.tensors}
    return _from_state(source.values, state, dtype), "tensors read by writehead"


def _reads_gguf(architecture: str) -> bool:
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    if architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        return False
    if importlib.util.find_spec("accelerate") is None:
        raise MissingDependencyError(
            "transformers reads GGUF files only with accelerate, which is not installed: pip install accelerate"
        )
    return True


def _from_files(directory: str, dtype: torch.dtype, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return _complete(
        *AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation="eager", trust_remote_code=False, local_files_only=True,
            output_loading_info=True, **options,
        )
    )  # fmt: skip


def _from_state(values: Any, state: State, dtype: torch.dtype) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    config = AutoConfig.for_model(values["model_type"], **{k: v for k, v in values.items() if k != "model_type"})
    return _complete(
        *MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
    )


def _complete(model: Any, info: Any) -> Any:
    """The model, if it got all its weights: transformers fills gaps with random numbers."""
    gaps = sorted(map(str, {*info["missing_keys"], *info["mismatched_keys"]}))
    if gaps:
        raise VerificationError(
            f"transformers found no fitting weights in this checkpoint for {listing(gaps)}, so there is nothing to "
            "compare with; convert it first: writehead convert"
        )
    return model


def _santacoder_state(source: ModelSource) -> State:
    """The original SantaCoder's tensors with q_attn and kv_attn merged to GPT-2's c_attn, all in [in, out]."""
    read, heads = source.checkpoint.read, source.config.num_heads
    state: State = {}
    for name in source.checkpoint.tensors:
        if ".attn.kv_attn." in name:
            key, value = read(name).chunk(2, dim=-1)
            query = read(name.replace("kv_attn", "q_attn"))
            repeats = (*(1 for _ in key.shape[:-1]), heads)
            merged = torch.cat([query, key.repeat(repeats), value.repeat(repeats)], dim=-1)
            state[name.replace("kv_attn", "c_attn")] = merged
        elif ".attn.q_attn." not in name:
            state[name] = read(name)
    return state


def _converted_state(source: ModelSource, dtype: torch.dtype) -> State:
    """Hugging Face's tensors by our rules, read again from the checkpoint: nothing is taken from a loaded decoder."""
    num_layers, tensors = source.config.num_layers, source.checkpoint.tensors
    shapes = {n: p.shape for n, p in make_decoder(source.config, kernel_backends.load("reference")).named_parameters()}
    loads = {r.target: r for r in source.rules.expand(num_layers, prefix=source.rules.prefix_of(tensors))}
    state: State = {}
    for rule in source.family.rules(source.config).expand(num_layers):
        target = torch.empty(shapes[rule.target], dtype=dtype)
        load = loads[rule.target]
        load.load([source.checkpoint.read(name) for name in load.sources], target)
        state |= rule.export(target)
    return state
