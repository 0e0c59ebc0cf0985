"""The chunked cross-entropy equals torch's own, value and gradient."""

import pytest
import torch

from dflash_trainer import loss as module
from dflash_trainer.blocks import decay_gamma, slot_weights
from dflash_trainer.loss import head_cross_entropy


@pytest.mark.parametrize("rows", [0, 1, 5, 64])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("scale", [1.0, 100.0])  # at 100 most labels' probabilities underflow
def test_equals_torch(rows, chunk, scale, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk * 50)
    generator = torch.Generator().manual_seed(rows)
    hidden = scale * torch.randn(rows, 8, generator=generator, dtype=torch.float64)
    head = torch.randn(50, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(50, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator, dtype=torch.float64)
    mine, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    total, hits = head_cross_entropy(mine, head, labels, weights)
    logits = theirs @ head.T
    expected = (torch.nn.functional.cross_entropy(logits, labels, reduction="none") * weights).sum()
    (3 * total).backward()
    (3 * expected).backward()
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)
    assert torch.equal(hits, logits.argmax(1) == labels)


def test_bfloat16_is_close_to_float32():
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(40, 64, generator=generator), torch.randn(500, 64, generator=generator) / 8
    labels, weights = torch.randint(500, (40,), generator=generator), torch.rand(40, generator=generator)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        leaf = hidden.clone().requires_grad_()
        total, _ = head_cross_entropy(leaf, head.to(dtype), labels, weights)
        total.backward()
        results.append((total.detach(), leaf.grad))
    assert results[1][0].dtype == torch.float32
    torch.testing.assert_close(*(total for total, _ in results), rtol=1e-2, atol=0)
    assert (results[0][1] - results[1][1]).norm() < 2e-2 * results[0][1].norm()


def test_weights_are_the_papers():
    assert [decay_gamma(size) for size in (8, 10, 16)] == [4, 5, 7]
    assert slot_weights(16)[0] == 1
    assert slot_weights(16)[7] == pytest.approx(0.36787944117)  # exp(−1) one γ further on
