"""A trained decoder as a Hugging Face checkpoint that any engine loads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, processors

from writehead.checkpoint.writer import write_safetensors
from writehead.models.decoder import Decoder
from writehead.models.families import FAMILIES
from writehead.train.vocabulary import END_OF_TEXT, END_OF_TEXT_ID


def export(model: Decoder, tokenizer: Tokenizer, out: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write weights (rounded to `dtype`), config and tokenizer into the folder `out`; its other files stay.

    Errors: CheckpointError when the folder cannot be written.
    """
    config, parameters = model.config, dict(model.named_parameters())
    family = FAMILIES[config.family]
    assert family.write is not None, f"{config.family} has no config of its own to write"
    tensors: dict[str, torch.Tensor] = {}
    for rule in family.rules(config).expand(config.num_layers):
        tensors |= rule.export(parameters[rule.target].detach().to(dtype))
    values = family.write(config) | {"dtype": str(dtype).removeprefix("torch.")}
    write_safetensors(out, tensors, config=values, overwrite=True)
    opening = Tokenizer.from_str(tokenizer.to_str())
    # A document began after an end-of-text token while training; without one, a prompt looks like the middle of a file.
    opening.post_processor = processors.TemplateProcessing(
        single=[END_OF_TEXT, "$A"], pair=[END_OF_TEXT, "$A", "$B"], special_tokens=[(END_OF_TEXT, END_OF_TEXT_ID)]
    )
    opening.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "model_max_length": config.max_positions,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
