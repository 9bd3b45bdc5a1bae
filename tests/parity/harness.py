"""The oracle and our decoder on the same random weights, and the shortest way to run a decoder on a cache."""

from __future__ import annotations

import copy
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from writehead.cache import KVCache
from writehead.checkpoint.rules import RuleSet, check
from writehead.kernels import CacheView, Group, load
from writehead.models.config import ConfigReader, ModelConfig
from writehead.models.decoder import Decoder
from writehead.models.families import Family, family_of

TOLERANCE = 2e-5
"""Of the range of the logits, in fp32."""

Piece = tuple[int, int, Tensor]
"""Row of the cache, position of the first token, int64 [T] token ids."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A model of transformers and the same one of ours."""

    values: dict[str, Any]
    oracle: Any
    state: dict[str, Tensor]
    """The weights in the names of the family's files."""
    family: Family
    config: ModelConfig
    decoder: Decoder


def read(values: Mapping[str, Any]) -> tuple[Family, ModelConfig]:
    """Read a config as a build does."""
    family, reader = family_of(values), ConfigReader(values)
    config = family.read(reader)
    reader.finish()
    return family, config


def make_oracle(values: Mapping[str, Any]) -> Any:
    """A model of transformers with weights, norms and biases so random that no constant hides a mistake."""
    keys = copy.deepcopy(dict(values))  # transformers writes into nested values
    if keys.pop("attention_head_type", None) == "multiquery":  # transformers has this model only in its later form
        keys["model_type"] = "gpt_bigcode"
    config = AutoConfig.for_model(**keys)
    oracle = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().requires_grad_(False)
    noise = torch.Generator().manual_seed(zlib.crc32(json.dumps(values, sort_keys=True).encode()))
    for name, parameter in oracle.named_parameters():
        if parameter.dim() == 1:
            parameter += 0.2 * torch.randn(parameter.shape, generator=noise)
        else:  # layers that outweigh the embedding, or else greedy tokens repeat
            parameter.normal_(std=0.5 if re.search(r"\.\d+\.", name) else 0.25, generator=noise)
    return oracle


def santacoder_state(state: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    """The weights of a gpt_bigcode MQA model in SantaCoder's original form."""
    original = {}
    for name, tensor in state.items():
        stored = tensor.t().contiguous() if tensor.dim() == 2 and ".h." in name else tensor
        if "attn.c_attn" in name:
            original[name.replace("c_attn", "q_attn")] = stored[..., :width].contiguous()
            original[name.replace("c_attn", "kv_attn")] = stored[..., width:].contiguous()
        else:
            original[name] = stored
    return original


def load_decoder(config: ModelConfig, rules: RuleSet, state: Mapping[str, Tensor], kernels: str) -> Decoder:
    """A decoder with the weights of `state`. Raises CheckpointError if names or shapes differ."""
    with torch.device("meta"):
        decoder = Decoder(config, load(kernels))
    decoder.to_empty(device="cpu").requires_grad_(False)
    parameters = dict(decoder.named_parameters())
    prefix = rules.prefix_of(state)
    expanded = rules.expand(config.num_layers, prefix=prefix)
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    check(expanded, shapes, found, rules.surplus(expanded, state, config.num_layers, prefix), "random weights")
    for rule in expanded:
        rule.load([state[name] for name in rule.sources], parameters[rule.target])
    return decoder


def export(decoder: Decoder, rules: RuleSet) -> dict[str, Tensor]:
    """The weights of a decoder in the names of a checkpoint."""
    parameters = dict(decoder.named_parameters())
    exported: dict[str, Tensor] = {}
    for rule in rules.expand(decoder.config.num_layers):
        exported |= rule.export(parameters[rule.target])
    return exported


def make_pair(values: dict[str, Any]) -> Pair:
    """Both models."""
    oracle = make_oracle(values)
    family, config = read(values)
    state = {n: t for n, t in oracle.state_dict().items() if not (config.tie_embeddings and n == "lm_head.weight")}
    if family.name == "santacoder":
        state = santacoder_state(state, config.hidden_size)
    if family.name == "gpt_neox":  # transformers renames it when it loads and saves
        state = {n.replace("lm_head.", "embed_out."): t for n, t in state.items()}
    decoder = load_decoder(config, family.rules(config), state, "reference")
    return Pair(values, oracle, state, family, config, decoder)


def make_cache(config: ModelConfig, num_rows: int) -> KVCache:
    """An fp32 cache for whole texts."""
    return KVCache(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        slot_size=config.head_dim,
        num_rows=num_rows,
        capacity=config.max_positions,
        dtype=torch.float32,
    )


def step(decoder: Decoder, cache: KVCache, pieces: Sequence[Piece], *, adjacent: bool = False) -> list[Tensor]:
    """One step of some sequences on their rows: the logits [T, V] of each piece, in the order given.

    `adjacent`: the rows of every group are consecutive, and are passed as a slice.
    """
    sizes = sorted({len(ids) for _, _, ids in pieces})
    ordered = [i for size in sizes for i, piece in enumerate(pieces) if len(piece[2]) == size]
    groups = []
    for size in sizes:
        rows = [row for row, _, ids in pieces if len(ids) == size]
        lengths = tuple(start + size for _, start, ids in pieces if len(ids) == size)
        where = slice(rows[0], rows[0] + len(rows)) if adjacent else torch.tensor(rows)
        groups.append(Group(num_new=size, rows=where, lengths=lengths))
    positions = torch.cat([torch.arange(pieces[i][1], pieces[i][1] + len(pieces[i][2])) for i in ordered])
    view = CacheView(
        keys=cache.keys,
        values=cache.values,
        rows=torch.cat([torch.full((len(pieces[i][2]),), pieces[i][0]) for i in ordered]),
        slots=positions,
        groups=tuple(groups),
    )
    ids = torch.cat([pieces[i][2] for i in ordered])
    logits = decoder.logits(decoder.hidden(ids, positions, view)).split([len(pieces[i][2]) for i in ordered])
    return [logits[ordered.index(i)] for i in range(len(pieces))]


def run_chunks(decoder: Decoder, ids: Tensor, chunks: Sequence[int]) -> Tensor:
    """Logits [B, T, V] of a batch of equal lengths [B, T], `chunks` tokens at a time."""
    cache, outputs, first = make_cache(decoder.config, len(ids)), [], 0
    for size in chunks:
        pieces = [(row, first, tokens[first : first + size]) for row, tokens in enumerate(ids)]
        outputs.append(torch.stack(step(decoder, cache, pieces, adjacent=True)))
        first += size
    return torch.cat(outputs, dim=1)


def greedy(decoder: Decoder, prompt: Tensor, num_tokens: int) -> list[int]:
    """The most likely continuation of one prompt [T], a token at a time."""
    cache, tokens = make_cache(decoder.config, 1), prompt.tolist()
    fed = 0
    for _ in range(num_tokens):
        logits = step(decoder, cache, [(0, fed, torch.tensor(tokens[fed:]))])[0]
        fed = len(tokens)
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the range of their logits."""
    return float((ours - theirs).abs().max() / (theirs.max() - theirs.min()))
