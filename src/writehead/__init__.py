"""writehead: multi-query attention turned into speed.

    from writehead import LLM, SamplingParams
    print(LLM().generate("def fibonacci(n):", SamplingParams(temperature=0, max_tokens=64))[0].outputs[0].text)

Names are loaded on first use, so that `import writehead` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from writehead.api import LLM, load
    from writehead.engine.outputs import CompletionOutput, RequestOutput
    from writehead.engine.request import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__", "load"]

__version__ = "0.1.0"

_HOMES = {
    "LLM": "writehead.api",
    "load": "writehead.api",
    "CompletionOutput": "writehead.engine.outputs",
    "RequestOutput": "writehead.engine.outputs",
    "SamplingParams": "writehead.engine.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'writehead' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
