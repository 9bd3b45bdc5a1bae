"""Falcon as first published, before transformers knew it: RefinedWeb is the 40B, RefinedWebModel the 7B and the RW."""

from __future__ import annotations

from dataclasses import replace

from writehead.models.config import ConfigReader, ModelConfig
from writehead.models.families import falcon
from writehead.models.families.base import Family

NEW, OLD = "RefinedWeb", "RefinedWebModel"


def read(config: ConfigReader) -> ModelConfig:
    config.alias(n_head="num_attention_heads", n_layer="num_hidden_layers")
    config.defaults(
        vocab_size=250880, hidden_size=64, num_hidden_layers=2, num_attention_heads=8, bos_token_id=1, eos_token_id=2,
        multi_query=False, parallel_attn=False, new_decoder_architecture=config.get("model_type", str, OLD) == NEW,
    )  # fmt: skip
    model = falcon.read(config)
    for key in ("rope_scaling", "rope_parameters"):
        config.require(key, {})  # its code knows none
    return replace(model, family="refined_web")


FAMILY = Family(name="refined_web", read=read, rules=falcon.rules, model_type=OLD, also=(NEW,), export_as="falcon")
