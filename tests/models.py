"""Checkpoints small enough for any test, yet real: written by transformers and tokenizers, read like any other."""

from __future__ import annotations

from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>")
"""Ids 0 to 4, spelled as StarCoder spells them; 0 ends a text."""

NUM_TOKENS = 320
NUM_ROWS = 328
"""Rows of the model's vocabulary: the last eight are padding, as in most checkpoints."""

NUM_POSITIONS = 128

_TEXT = '''
def fibonacci(n):
    if n < 2:
        return n
    return fibonacci(n - 1) + fibonacci(n - 2)

class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def distance(self, other):
        """The distance between two points."""
        return math.hypot(self.x - other.x, self.y - other.y)

for name, value in sorted(values.items()):
    print(name, value)
if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
'''


def make_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE of 320 tokens: five special ones, the bytes, and merges that a little Python gives."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    assert tokenizer.get_vocab_size() == NUM_TOKENS, tokenizer.get_vocab_size()
    return tokenizer


def write_tiny_model(directory: Path, *, seed: int = 0, multi_query: bool = True) -> Path:
    """A `gpt_bigcode` checkpoint of 2 layers with random weights, wide enough apart that texts are not one token."""
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    config = GPTBigCodeConfig(
        vocab_size=NUM_ROWS, n_positions=NUM_POSITIONS, n_embd=32, n_layer=2, n_head=4, multi_query=multi_query,
        initializer_range=0.3, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = GPTBigCodeForCausalLM(config)
    model.save_pretrained(directory)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    return directory
