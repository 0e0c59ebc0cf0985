"""Fixtures of the whole suite: a tiny tokenizer, a tiny store and the real default target where it is installed."""

from pathlib import Path

import pytest
from hypothesis import settings

from dflash_prep.embedded import default_target
from dflash_prep.errors import UserError
from dflash_prep.tokenizer import ChatTokenizer, load_tokenizer
from tests.prep.support import make_store, make_tokenizer

settings.register_profile("repeatable", max_examples=40, deadline=None, derandomize=True)
settings.load_profile("repeatable")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory) -> Path:
    """A directory with a byte-level BPE tokenizer of a few hundred tokens and a ChatML template that begins with BOS."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_directory) -> ChatTokenizer:
    """The tiny tokenizer as this project loads it."""
    return load_tokenizer(str(tiny_directory))


@pytest.fixture(scope="session")
def tiny_reference(tiny_directory):
    """The tiny tokenizer as transformers loads it."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(tiny_directory)


@pytest.fixture(scope="session")
def target_directory() -> Path:
    """The default target's directory."""
    try:
        return default_target()
    except UserError as fault:
        pytest.skip(str(fault))


@pytest.fixture(scope="session")
def target_reference(target_directory):
    """The default target's tokenizer as transformers loads it."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(target_directory)


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory) -> Path:
    """A store of 60 samples of 3 to 90 tokens in several shards."""
    lengths = [3 + 37 * i % 88 for i in range(60)]
    return make_store(tmp_path_factory.mktemp("store") / "tokens", lengths, shard_bytes=2_000)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The directory of real corpora that may lie beside the repository."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("no real corpora beside the repository")
    return path
