"""Several stores as one: sample numbers run on from store to store."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_prep.errors import UserError
from dflash_prep.store import Store
from dflash_prep.stores import Stores
from tests.prep.support import make_store

PARTS = [[5, 9, 3, 40], [8], [7, 6, 30]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Three stores, two of them in several shards."""
    directory = tmp_path_factory.mktemp("stores")
    return [make_store(directory / str(number), lengths, shard_bytes=100) for number, lengths in enumerate(PARTS)]


@given(chosen=st.lists(st.integers(0, 2), min_size=1, max_size=5))
@settings(max_examples=20)
def test_samples_run_on_from_store_to_store(paths, chosen):
    stores = Stores([paths[number] for number in chosen])
    alone = [(Store(paths[number]), sample) for number in chosen for sample in range(len(PARTS[number]))]
    assert len(stores) == len(alone)
    for index, (store, sample) in enumerate(alone):
        for found, stated in zip(stores.sample(index), store.sample(sample), strict=True):
            assert np.array_equal(found, stated)
    lengths = [length for number in chosen for length in PARTS[number]]
    assert stores.column("length").tolist() == lengths and stores.column("length").dtype == np.int64
    assert stores.column("loss_tokens").tolist() == [length - 1 for length in lengths]
    assert stores.texts("key") == [store.index["key"][sample].as_py() for store, sample in alone]


def test_one_store_is_itself(paths):
    stores, store = Stores(paths[:1]), Store(paths[0])
    assert stores.fingerprint == store.fingerprint
    assert stores.manifest == store.manifest | {"special_tokens": list(store.manifest["special_tokens"])}
    assert stores.path == paths[0]
    assert stores.origin() == {"store": {"path": str(paths[0]), "fingerprint": store.fingerprint}}


def test_several_state_each_of_them(paths):
    stores = Stores(paths)
    assert stores.origin() == {"stores": [{"path": str(path), "fingerprint": Store(path).fingerprint} for path in paths]}
    assert stores.path == paths[0]


def test_the_fingerprint_is_of_all_in_their_order(paths):
    orders = [paths, paths[::-1], paths[:2], paths[1:], [paths[0]] * 2, [paths[0]] * 3]
    assert len({Stores(order).fingerprint for order in orders}) == len(orders)


def edit_manifest(path, change) -> None:
    """Change store.json."""
    manifest = json.loads((path / "store.json").read_text())
    change(manifest)
    (path / "store.json").write_text(json.dumps(manifest))


def test_special_tokens_are_those_of_any(tmp_path):
    one, two = make_store(tmp_path / "one", [5]), make_store(tmp_path / "two", [6])
    edit_manifest(one, lambda manifest: manifest.update(special_tokens={"7": 2}))
    edit_manifest(two, lambda manifest: manifest.update(special_tokens={"9": 1, "7": 4}))
    assert set(Stores([one, two]).manifest["special_tokens"]) == {"7", "9"}


def test_two_tokenizers_do_not_mix(paths, tmp_path):
    other = make_store(tmp_path / "other", [6])
    edit_manifest(other, lambda manifest: manifest["tokenizer"].update(fingerprint="1" * 32))
    with pytest.raises(UserError, match=r"other: was tokenized otherwise than .*; tokenize both with one --tokenizer"):
        Stores([paths[0], other])


def test_two_chat_templates_do_not_mix(tmp_path):
    one, two = make_store(tmp_path / "one", [5]), make_store(tmp_path / "two", [6])
    edit_manifest(one, lambda manifest: manifest.update(chat_template={"fingerprint": "1" * 32}))
    edit_manifest(two, lambda manifest: manifest.update(chat_template={"fingerprint": "2" * 32}))
    with pytest.raises(UserError, match="two: was tokenized otherwise than"):
        Stores([one, two])


def test_a_store_that_is_missing_is_named(paths, tmp_path):
    with pytest.raises(UserError, match="gone: no token store here"):
        Stores([paths[0], tmp_path / "gone"])
