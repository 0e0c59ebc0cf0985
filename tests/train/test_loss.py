"""The chunked losses equal torch's own, value and gradient."""

import pytest
import torch
from torch.nn import functional as F

from dflash_trainer import loss as module
from dflash_trainer.blocks import decay_gamma, slot_weights
from dflash_trainer.loss import Teacher, head_loss

VOCABULARY = 50


def draw(rows: int, scale: float, dtype: torch.dtype = torch.float64):
    """Hidden states, the target's, a head, labels and weights, some of them 0."""
    generator = torch.Generator().manual_seed(rows)
    hidden, states = (scale * torch.randn(rows, 8, generator=generator, dtype=dtype) for _ in range(2))
    head = torch.randn(VOCABULARY, 8, generator=generator, dtype=dtype)
    labels = torch.randint(VOCABULARY, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator, dtype=dtype) * (torch.rand(rows, generator=generator) < 0.8)
    return hidden, states, head, labels, weights


@pytest.mark.parametrize("rows", [0, 1, 5, 64])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("scale", [1.0, 100.0])  # at 100 most tokens' probabilities underflow
@pytest.mark.parametrize(("share", "cap"), [(0.0, None), (1.0, None), (0.5, None), (0.3, 5.0)])
def test_equals_torch(rows, chunk, scale, share, cap, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk * VOCABULARY)
    hidden, states, head, labels, weights = draw(rows, scale)
    mine, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    found = head_loss(mine, head, labels, weights, Teacher(states, cap) if share else None, share)
    logits, targets = theirs @ head.T, states @ head.T
    targets = cap * torch.tanh(targets / cap) if cap else targets
    crossed = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
    log_p, log_q = logits.log_softmax(1), targets.log_softmax(1)
    diverged = (F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(1) * weights).sum()
    expected = (1 - share) * crossed + share * diverged
    (3 * found.total).backward()
    (3 * expected).backward()
    torch.testing.assert_close(found.total, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found.cross_entropy, crossed, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-10)
    assert torch.equal(found.hits, logits.argmax(1) == labels)
    if share:
        torch.testing.assert_close(found.divergence, diverged, rtol=1e-11, atol=1e-11)


def test_a_target_diverges_from_itself_by_nothing():
    hidden, _, head, labels, weights = draw(64, 3.0)
    leaf = hidden.clone().requires_grad_()
    found = head_loss(leaf, head, labels, weights, Teacher(hidden), 1.0)
    found.total.backward()
    assert abs(found.total.item()) < 1e-12
    assert leaf.grad.abs().max() < 1e-12


@pytest.mark.parametrize("share", [0.0, 1.0, 0.5])
def test_bfloat16_is_close_to_float32(share):
    generator = torch.Generator().manual_seed(0)
    hidden, states = (torch.randn(40, 64, generator=generator) for _ in range(2))
    head = torch.randn(500, 64, generator=generator) / 8
    labels, weights = torch.randint(500, (40,), generator=generator), torch.rand(40, generator=generator)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        leaf = hidden.clone().requires_grad_()
        found = head_loss(leaf, head.to(dtype), labels, weights, Teacher(states) if share else None, share)
        found.total.backward()
        results.append((found.total.detach(), leaf.grad))
    assert results[1][0].dtype == torch.float32
    torch.testing.assert_close(*(total for total, _ in results), rtol=1e-2, atol=0)
    assert (results[0][1] - results[1][1]).norm() < 2e-2 * results[0][1].norm()


def test_weights_are_the_papers():
    assert [decay_gamma(size) for size in (8, 10, 16)] == [4, 5, 7]
    assert slot_weights(16)[0] == 1
    assert slot_weights(16)[7] == pytest.approx(0.36787944117)  # exp(−1) one γ further on
