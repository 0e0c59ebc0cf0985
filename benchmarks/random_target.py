"""A target of a mid size that needs no download: `python benchmarks/random_target.py DIR [--tiny]`.

Qwen3 as its 1.7B has it, 1.5 billion random weights with the shipped tokenizer's vocabulary, in bfloat16. It computes what a
real one computes; what a draft learns from it means nothing.
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_prep.embedded import default_target

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def main() -> None:
    """Write the directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tiny", action="store_true", help="Six small layers, to see that all works.")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = Qwen3Config(**(TINY if options.tiny else SIZES), vocab_size=49_152, tie_word_embeddings=True)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(options.directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(default_target() / name, options.directory)


if __name__ == "__main__":
    main()
