"""Options that several verbs share, and options made from the fields of a dataclass."""

from __future__ import annotations

import codecs
import dataclasses
import inspect
import types
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from writehead.errors import UsageError

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="A checkpoint's directory or file, or a Hub id; default: the model in the box."),
]
ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="A checkpoint's directory or file, or a Hub id; default: the box.")
]
Weights = Annotated[str, typer.Option(help="How weights are held: auto (fp32), fp32, bf16, fp16, int8 or int4.")]
CacheDtype = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        help="How keys and values are held: auto (16 bits, fp32 for fp32), fp32, bf16, fp16 or int8.",
    ),
]
Kernels = Annotated[str, typer.Option(help="Kernel backend; `writehead env` lists them.")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Tokens of prompt and completion together; default: the model's positions.")
]
AcceptConfigKey = Annotated[
    list[str] | None, typer.Option(metavar="KEY", help="Accept a key of config.json that writehead does not know.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

MAX_TEXT_BYTES = 16 << 20

Function = TypeVar("Function", bound=Callable[..., None])


def with_fields(
    cls: type,
    help: Mapping[str, str],
    *,
    defaults: Mapping[str, Any] | None = None,
    flags: Mapping[str, str] | None = None,
) -> Callable[[Function], Function]:
    """Replace a function's `**fields` by one option for each field of the dataclass that `help` describes.

    `defaults` take the place of the dataclass's own; `flags` add a short spelling. typer reads the signature.
    """
    hints = get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.name in help]

    def option(field: dataclasses.Field[Any]) -> inspect.Parameter:
        default = (defaults or {}).get(field.name, field.default)
        names = [f"--{field.name.replace('_', '-')}", *((flags or {}).get(field.name, "").split())]
        kind = _option_type(hints[field.name])
        if kind is bool:
            names[0] += f"/--no-{names[0].removeprefix('--')}" if default else ""
        info = typer.Option(*names, help=help[field.name])
        return inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
            annotation=Annotated[kind, info],
        )

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*own, *map(option, fields)])  # type: ignore[attr-defined]
        return function

    return decorate


def _option_type(hint: Any) -> Any:
    """What the command line reads for a field: a plain type, or a list of them for sequences and mappings."""
    arguments = [a for a in get_args(hint) if a is not type(None)] if _is_union(hint) else [hint]
    optional = len(arguments) < len(get_args(hint)) if _is_union(hint) else False
    sequences = [a for a in arguments if isinstance(get_origin(a), type) and issubclass(get_origin(a), Collection)]
    if sequences:
        item = str if issubclass(get_origin(sequences[0]), Mapping) else get_args(sequences[0])[0]
        return list[item] | None  # type: ignore[valid-type]
    kind = str if get_origin(arguments[0]) is Literal else arguments[0]
    assert kind in (bool, int, float, str, Path), f"no option for {hint}"
    return kind | None if optional else kind


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def read_text(path: Path) -> str:
    """A file as text. Raises UsageError that names it."""
    try:
        with path.open("rb") as file:
            return read_stream(file, str(path))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None


def read_stream(stream: BinaryIO, where: str) -> str:
    """All that comes as text. Raises UsageError for what cannot be a prompt; a device may never end."""
    data = stream.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise UsageError(f"{where}: is longer than {MAX_TEXT_BYTES >> 20} MiB, more than any model reads; cut it")
    return decode(data, where)


def decode(data: bytes, where: str) -> str:
    """UTF-8 bytes as text, without the mark that some editors put first. Raises UsageError that names the place."""
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: is not UTF-8 text (byte {error.start}); convert it to UTF-8 first") from None
