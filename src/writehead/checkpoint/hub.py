"""From what a user calls a model to a path: a local file or directory, or a download from the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import difflib
import glob
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from writehead.checkpoint.files import listing, quantization, read_index
from writehead.errors import CheckpointError, ModelNotFoundError

_CONNECT_SECONDS = 5.0
_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[\w./-]+\.gguf))?",
    re.ASCII,
)
_HUB_PAGE = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)", re.ASCII)
_PATH_LIKE = re.compile(r"[./~\\].*|.*\\.*|.*/|[A-Za-z]:.*|.*\.(safetensors|bin|gguf|pt|pth|json)", re.DOTALL)
_WEIGHTS: tuple[tuple[re.Pattern[str], str], ...] = (  # in the order of preference, with the suffix of an index
    (re.compile(r"model(-\d+-of-\d+)?\.safetensors"), ".safetensors"),
    (re.compile(r"(?!adapter_)[^/]+\.safetensors"), ".safetensors"),
    (re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin"), ".bin"),
)
_COMPANIONS = re.compile(r"[^/]+\.json|merges\.txt|vocab\.txt|tokenizer\.model|[^/]+\.jinja")


@contextlib.contextmanager
def _progress(wanted: bool) -> Iterator[None]:
    """huggingface_hub shows its progress bars, or not."""
    if wanted or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@dataclass(frozen=True)
class _Request:
    """One Hub model and how to reach it."""

    repo: str
    revision: str | None
    file: str | None
    cache_dir: Path | None
    progress: bool
    endpoint: str | None

    def snapshot(self, files: Sequence[str]) -> Path:
        """The directory with `files`, downloaded where needed; errors are huggingface_hub's."""
        with _progress(self.progress):
            found = huggingface_hub.snapshot_download(
                self.repo,
                revision=self.revision,
                cache_dir=self.cache_dir,
                etag_timeout=_CONNECT_SECONDS,
                allow_patterns=[glob.escape(name) for name in files],
                endpoint=self.endpoint,
            )
        return Path(found)

    def cached(self, file: str) -> Path | None:
        """Where `file` lies in the cache."""
        found = huggingface_hub.try_to_load_from_cache(
            self.repo, file, cache_dir=self.cache_dir, revision=self.revision
        )
        return Path(found) if isinstance(found, str) else None


def resolve(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    offline: bool | None = None,
    progress: bool = True,
    endpoint: str | None = None,
) -> Path:
    """The local path of `model`: an existing path, or `org/name[@revision][:file.gguf]` on the Hub.

    A complete copy in the cache is used without asking the network; name a revision to get a newer one. Otherwise the
    config, the tokenizer and the safetensors are downloaded, or the .bin files where there are no safetensors.
    offline: never use the network (None: as huggingface_hub is configured). endpoint: another Hub server.
    Raises ModelNotFoundError with what to do.
    """
    path = _local(model)
    if path is not None:
        return path
    path = Path(model)
    match = _HUB_ID.fullmatch(model)
    if match is None or _PATH_LIKE.fullmatch(model.partition(":")[0]):
        raise ModelNotFoundError(
            f"{listing([model])}: there is no such file or directory{_suggest(path)}{_hub_hint(model)}"
        )
    request = _Request(match["repo"], revision or match["revision"], match["file"], cache_dir, progress, endpoint)
    cached = _from_cache(request)
    if cached is not None:
        return cached
    if constants.HF_HUB_OFFLINE if offline is None else offline:
        raise ModelNotFoundError(
            f"{model}: is not in the local cache and downloads are switched off; go online once, or give a local path"
        )
    try:
        return _download(request)
    except ModelNotFoundError:
        raise
    except Exception as error:  # huggingface_hub's transport errors have no common base across its versions
        raise ModelNotFoundError(_explain(request, error) + _suggest(path)) from error


def _local(model: str) -> Path | None:
    """The existing path that `model` names; a text that cannot be a path at all is none."""
    try:
        path = Path(model).expanduser()
        return path if model and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, an unknown ~user, a zero byte
        return None


def _suggest(path: Path) -> str:
    """A sibling whose name is close to the one that does not exist."""
    try:
        siblings = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    except OSError:
        siblings = []
    siblings = [name for name in siblings if name != path.name]  # a link that leads nowhere
    close = difflib.get_close_matches(path.name, siblings, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def _hub_hint(model: str) -> str:
    if page := _HUB_PAGE.match(model):
        return f"; a model on the Hub is named org/name: {page[1]}"
    plain = re.fullmatch(r"[\w.-]+", model) and not _PATH_LIKE.fullmatch(model)
    return "; a model on the Hub is named org/name" if plain else ""


def _from_cache(request: _Request) -> Path | None:
    """The cached snapshot if it holds a whole model (or the wanted file)."""
    if request.file is not None:
        parts = [request.cached(part) for part in _gguf_parts(request.file)]
        return None if None in parts else request.cached(request.file)
    config = request.cached("config.json")
    return config.parent if config is not None and _is_complete(config.parent) else None


def _is_complete(snapshot: Path) -> bool:
    """Whether the directory holds all weights of one format."""
    names = [item.name for item in snapshot.iterdir()]
    try:
        for name, suffix in (("model.safetensors", ".safetensors"), ("pytorch_model.bin", ".bin")):
            if (index := snapshot / f"{name}.index.json").is_file():
                return bool(read_index(index, suffix))
            if name in names:
                return True
    except CheckpointError:  # a shard is not there yet
        return False
    single = [name for name in names if _WEIGHTS[1][0].fullmatch(name)]
    return len(single) == 1 and "-of-" not in single[0]


def _download(request: _Request) -> Path:
    api = huggingface_hub.HfApi(endpoint=request.endpoint)
    info = api.model_info(request.repo, revision=request.revision, timeout=_CONNECT_SECONDS)
    names = [sibling.rfilename for sibling in info.siblings or []]
    if request.file is not None:
        wanted = _gguf_parts(request.file)
        if missing := [part for part in wanted if part not in names]:
            raise ModelNotFoundError(
                f"{request.repo}: holds no {listing(missing)}; it has {listing(_ggufs(names)) or 'no GGUF file'}"
            )
        return request.snapshot(wanted) / request.file
    return request.snapshot(_select(request, names))


def _gguf_parts(file: str) -> list[str]:
    """All parts of a split GGUF, or the file itself."""
    match = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.gguf", file)
    if match is None:
        return [file]
    return [f"{match[1]}-{number:05d}-of-{match[2]}.gguf" for number in range(1, int(match[2]) + 1)]


def _ggufs(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.endswith(".gguf")]


def _select(request: _Request, names: Sequence[str]) -> list[str]:
    """The files to download: companions, and the weights of the best format there is."""
    for pattern, suffix in _WEIGHTS:
        weights = [name for name in names if pattern.fullmatch(name)]
        companions = [name for name in names if _COMPANIONS.fullmatch(name)]
        if weights:  # an index of the other format would claim shards that are not downloaded
            return [name for name in companions if not name.endswith(".index.json") or suffix in name] + weights
    if ggufs := _ggufs(names):
        raise ModelNotFoundError(
            f"{request.repo}: holds only GGUF files, name one as {request.repo}:FILE; it has {listing(ggufs)}"
        )
    if "adapter_config.json" in names:
        raise ModelNotFoundError(
            f"{request.repo}: holds an adapter and no model; merge it into its base model (merge_and_unload of peft), "
            "and give the result"
        )
    if (method := quantization(names)) is not None:
        raise ModelNotFoundError(
            f"{request.repo}: holds weights that are quantized by {method}, which writehead does not read; use the "
            "original model, or a GGUF file of it"
        )
    raise ModelNotFoundError(f"{request.repo}: holds no safetensors, pytorch_model.bin or GGUF file")


def _explain(request: _Request, error: Exception) -> str:
    repo, server = request.repo, request.endpoint or constants.ENDPOINT
    match error:
        case errors.GatedRepoError():
            return f"{repo}: is gated; accept its terms at {server}/{repo} and log in with `hf auth login`"
        case errors.RepositoryNotFoundError():
            return f"{repo}: is not on {server}, or it is private; check the name, or log in with `hf auth login`"
        case errors.RevisionNotFoundError():
            return f"{repo}: has no revision {request.revision!r}; check the branch, tag or commit"
        case errors.HFValidationError():
            return f"{repo}: is not a valid name of a model on the Hub, expected org/name"
        case errors.HfHubHTTPError():
            status = getattr(error.response, "status_code", "an error")
            return f"{repo}: {server} answered {status}; try again later, or give a local path"
    reason = " ".join(str(error).split())[:120]
    return (
        f"{repo}: could not be downloaded from {server} ({type(error).__name__}: {reason});"
        " check the network, or give a local path"
    )
