"""The public names, frozen: a new one is a decision, a lost one breaks a script."""

from __future__ import annotations

import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import writehead
from writehead import LLM, SamplingParams

NAMES = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__", "load"]


def test_names_are_frozen_and_there() -> None:
    assert writehead.__all__ == NAMES
    assert set(dir(writehead)) == set(NAMES)
    assert all(getattr(writehead, name) is not None for name in NAMES)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'writehead' has no attribute 'LMM'"):
        _ = writehead.LMM


@pytest.mark.parametrize(
    ("door", "parameters"),
    [
        (LLM, "model weights kernels kv_cache_dtype max_model_len max_num_seqs max_step_tokens accept_config_keys"),
        (LLM.generate, "self prompts sampling_params use_tqdm on_event"),
        (LLM.stream, "self prompt sampling_params"),
        (LLM.chat, "self messages sampling_params use_tqdm"),
        (LLM.encode_chat, "self messages"),
        (writehead.load, "model weights kernels accept_config_keys"),
        (
            SamplingParams,
            "n max_tokens min_tokens temperature top_k top_p min_p typical_p repetition_penalty presence_penalty "
            "frequency_penalty logit_bias seed stop stop_token_ids ignore_eos include_stop_str_in_output "
            "skip_special_tokens logprobs prompt_logprobs echo",
        ),
        (
            writehead.CompletionOutput,
            "index text token_ids cumulative_logprob logprobs finish_reason stop_reason",
        ),
        (writehead.RequestOutput, "request_id prompt prompt_token_ids prompt_logprobs outputs finished"),
    ],
)
def test_parameters_are_frozen(door: object, parameters: str) -> None:
    assert list(inspect.signature(door).parameters) == parameters.split()  # type: ignore[arg-type]


def test_importing_writehead_and_its_parameters_imports_no_torch() -> None:
    code = (
        "import sys, writehead; from writehead import SamplingParams; SamplingParams(n=2); "
        "print({'torch', 'numpy', 'tokenizers', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_example_in_the_docstring_runs(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("writehead.build.BOX", tiny_model)
    example = re.findall(r"^    (.*)$", writehead.__doc__ or "", re.MULTILINE)
    assert example[0] == "from writehead import LLM, SamplingParams"
    script = tmp_path / "example.py"
    script.write_text("\n".join(example), "utf-8")
    runpy.run_path(str(script))
    assert len(capsys.readouterr().out) > 1
