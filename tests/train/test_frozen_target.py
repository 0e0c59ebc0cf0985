"""What a frozen target holds, in which dtype it computes, and in which it hands its features over."""

import gc
import weakref

import pytest
import torch
from conftest import reported, state_of
from test_families import FAMILIES, LAYERS, batch, make
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_trainer.checkpoint import newest_checkpoint
from dflash_trainer.target import FrozenTarget, Taps

LENGTHS = [30, 20, 25]
TOKENS, SIZE = sum(LENGTHS), 32


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, as long as these live; `most` is their largest sum."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def peak(compute) -> int:
    """The most bytes that lived at once of what `compute` made."""
    gc.collect()
    with Live() as live:
        compute()
    return live.most


@pytest.mark.parametrize("select", [None, torch.arange(0, 90, 2)], ids=["all", "some"])
def test_taps_make_nothing_but_their_one_tensor(select):
    layers, hidden = nn.ModuleList(nn.Identity() for _ in range(5)), torch.randn(3, 30, 8)
    taps = Taps(layers, (0, 2, 3))
    taps.select = select

    def forward():
        for layer in layers:
            layer(hidden)

    most = peak(forward)
    found = taps.take()
    assert most == hidden.nbytes + found.nbytes  # what the hooks look at is counted too
    rows = hidden.flatten(0, 1)
    assert torch.equal(found, torch.cat([rows if select is None else rows[select]] * 3, dim=1))


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Qwen3Moe", "Qwen3_5"])
def test_memory_grows_by_the_taps_own_columns_alone(family):
    """No layer's output outlives the next layer: beside the features, the peak is the same for any number of taps."""
    micro_batch, _ = batch(LENGTHS, packed=False)
    beside = []
    for taps in ((0, 3), (0, 1, 3), (0, 1, 2, 3)):
        target = FrozenTarget(make(family), taps)
        features = len(taps) * TOKENS * SIZE * torch.float32.itemsize
        beside.append(peak(lambda target=target: target.features(micro_batch)) - features)
    assert beside[0] == beside[1] == beside[2]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_cut_off_is_freed(family):
    model = make(family)
    layers = list(map(weakref.ref, model.get_decoder().layers))
    norm = weakref.ref(model.get_decoder().norm)
    target = FrozenTarget(model, (0, 1))
    gc.collect()
    assert [layer() is not None for layer in layers] == [True, True] + [False] * (LAYERS - 2)
    assert norm() is None
    assert target.features(batch([5], packed=False)[0]).shape == (5, 2 * SIZE)


@pytest.mark.parametrize("products", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Qwen3"])
def test_the_target_computes_in_its_own_dtype_and_hands_over_that_of_the_products(family, own, products):
    """Whatever the draft's autocast is: transformers' own hidden states, rounded once."""
    model, reference = make(family).to(own), make(family).to(own)
    micro_batch, samples = batch([7, 7], packed=False)
    ids = torch.tensor([list(map(int, sample)) for sample in samples])
    target = FrozenTarget(model, (0, 2), products)
    with torch.autocast("cpu", torch.bfloat16):
        found = target.features(micro_batch)
    hidden = reference(ids, output_hidden_states=True).hidden_states
    expected = torch.cat([hidden[1], hidden[3]], dim=-1).flatten(0, 1).to(products or own)
    assert found.dtype == target.head.dtype == (products or own)
    error = {torch.float32: 1e-5, torch.bfloat16: 0.03}[own]  # another attention kernel
    assert (found.double() - expected.double()).norm() <= max(error, 0.004 * (products is torch.bfloat16)) * expected.norm()
    assert torch.equal(target.head, reference.get_output_embeddings().weight.to(products or own))


@pytest.mark.parametrize("strategy", ["packed", "bucketed"])
def test_runs_in_mixed_dtypes(strategy, make_plan, train_here, tmp_path):
    """A bfloat16 target under a float32 draft and the other way round train, near to a run in float32; a change is said."""
    plan = make_plan(strategy=strategy, token_budget=250, holdout=0.1)
    losses = {}
    for own, products in (("auto", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")):
        run = tmp_path / f"{own}-{products}"
        done = train_here(plan, run, "--dtype", products, "--target-dtype", own, "--max-steps", "3")
        assert done.exit_code == 0, done.output
        losses[own, products] = [row["loss"] for row in reported(run)]
        stated = state_of(newest_checkpoint(run))["target_dtype"]
        assert stated == (products if own == "auto" else own)
        assert "the target runs in" not in done.stdout
    plain = losses.pop(("auto", "float32"))
    for mixed in losses.values():
        assert mixed != plain
        assert mixed == pytest.approx(plain, rel=0.03)
    again = train_here(plan, run, "--dtype", "bfloat16", "--max-steps", "4", "--resume", "auto")
    assert again.exit_code == 0, again.output
    assert "the target runs in bfloat16 from step 3 on; it ran in float32 before" in again.stdout
