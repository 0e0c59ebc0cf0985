"""The default target: its weights are those of the GGUF file, its tokenizer is the one it was trained with."""

import json

import numpy as np
import pytest
from safetensors import safe_open

from dflash_prep import embedded
from dflash_prep.embedded import packaged_gguf, unpermute
from dflash_prep.errors import UserError
from dflash_prep.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def gguf_tensors(target_directory):
    """The GGUF file's tensors by name."""
    gguf = pytest.importorskip("gguf")
    return {tensor.name: tensor for tensor in gguf.GGUFReader(packaged_gguf()).tensors}


def to_bfloat16(weight: np.ndarray) -> np.ndarray:
    """Rounded to nearest even on the bits, as uint16."""
    bits = np.ascontiguousarray(weight, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def stored(directory, name: str) -> np.ndarray:
    """A stored tensor's bfloat16 bits as uint16."""
    path = directory / "model.safetensors"
    data = path.read_bytes()[: 8 + 10**6]
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    entry = header[name]
    assert entry["dtype"] == "BF16"
    start, end = entry["data_offsets"]
    with path.open("rb") as file:
        file.seek(8 + int.from_bytes(data[:8], "little") + start)
        return np.frombuffer(file.read(end - start), np.uint16).reshape(entry["shape"])


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight"),
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
        ("model.layers.29.input_layernorm.weight", "blk.29.attn_norm.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ],
)
def test_weights_equal_the_gguf_file_s(target_directory, gguf_tensors, name, source):
    from gguf.quants import dequantize

    tensor = gguf_tensors[source]
    expected = to_bfloat16(dequantize(tensor.data, tensor.tensor_type))
    assert np.array_equal(stored(target_directory, name), expected)


@pytest.mark.parametrize(("kind", "heads"), [("q", 9), ("k", 3)])
def test_q_and_k_have_their_rotary_halves_back(target_directory, gguf_tensors, kind, heads):
    """Row p of a head's half h was row 2p + h in the GGUF file: the place of each row, computed one by one."""
    from gguf.quants import dequantize

    tensor = gguf_tensors[f"blk.3.attn_{kind}.weight"]
    rows = to_bfloat16(dequantize(tensor.data, tensor.tensor_type))
    size = len(rows) // heads
    order = [head * size + 2 * pair + half for head in range(heads) for half in range(2) for pair in range(size // 2)]
    assert np.array_equal(stored(target_directory, f"model.layers.3.self_attn.{kind}_proj.weight"), rows[order])


def test_unpermute_inverts_the_converter_s_permutation():
    weight = np.arange(24 * 5, dtype=np.float32).reshape(24, 5)
    permuted = weight.reshape(3, 2, 4, 5).swapaxes(1, 2).reshape(24, 5)  # as llama.cpp's converter writes it
    assert np.array_equal(unpermute(permuted, 3), weight)
    assert not np.array_equal(permuted, weight)


def test_every_parameter_of_the_model_is_there(target_directory):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.AutoConfig.from_pretrained(target_directory)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = {name: list(value.shape) for name, value in model.state_dict().items() if name != "lm_head.weight"}
    with safe_open(target_directory / "model.safetensors", "np") as file:
        assert {name: file.get_slice(name).get_shape() for name in file.keys()} == expected  # noqa: SIM118
    assert config.tie_word_embeddings
    assert config.rope_parameters["rope_theta"] == json.loads((target_directory / "config.json").read_text())["rope_theta"]


def test_the_tokenizer_splits_digits_singly_and_knows_its_special_tokens(target_directory):
    tokenizer = load_tokenizer(str(target_directory))
    encode = tokenizer.encoder.encode
    assert encode("in 20245").tokens[-5:] == ["2", "0", "2", "4", "5"]
    assert encode("<|im_start|>user").tokens == ["<|im_start|>", "user"]
    assert {"<|im_start|>", "<|im_end|>"} <= {tokenizer.backend.id_to_token(i) for i in tokenizer.special_ids}


def test_the_target_has_a_chat_template(target_directory):
    tokenizer = load_tokenizer(str(target_directory))
    assert "<|im_start|>" in tokenizer.template
    assert tokenizer.named_tokens["eos_token"] == "<|im_end|>"


def test_it_is_unpacked_once_into_the_user_s_cache(monkeypatch, tmp_path):
    calls = []

    def unpack(source, directory):
        calls.append(source)
        (directory / "config.json").write_text("{}")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(embedded, "packaged_gguf", lambda: tmp_path / "some.gguf")
    monkeypatch.setattr(embedded, "unpack", unpack)
    first = embedded.default_target()
    assert first == embedded.default_target()
    assert first.is_relative_to(tmp_path) and (first / "config.json").is_file()
    assert calls == [tmp_path / "some.gguf"]


def test_a_missing_package_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(embedded, "PACKAGE", "no_such_package_here")
    with pytest.raises(UserError, match="pip install"):
        embedded.default_target()
    assert list(tmp_path.rglob("*.partial")) == []


def test_one_that_another_process_unpacked_meanwhile_is_kept(monkeypatch, tmp_path):
    def unpack(source, directory):
        (directory / "config.json").write_text("ours")
        theirs = tmp_path / "dflash-prep" / f"{embedded.NAME}-{embedded.LAYOUT}"
        theirs.mkdir()
        (theirs / "config.json").write_text("theirs")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(embedded, "packaged_gguf", lambda: tmp_path / "some.gguf")
    monkeypatch.setattr(embedded, "unpack", unpack)
    assert (embedded.default_target() / "config.json").read_text() == "theirs"
    assert list(tmp_path.rglob("*.partial")) == []


def test_without_a_home_directory_the_remedy_is_named(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(embedded.Path, "home", homeless)
    with pytest.raises(UserError, match="set HOME or XDG_CACHE_HOME"):
        embedded.default_target()
