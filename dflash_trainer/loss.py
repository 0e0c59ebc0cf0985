"""Cross-entropy and distillation through a frozen LM head, without ever holding the logits of more than a few rows.

The head takes no gradient, so a chunk's gradient with respect to the hidden states is known as soon as its logits are: with
p and q what draft and target make of a slot, dh = w · (p − onehot) · W for cross-entropy and w · (p − q) · W for KL(q ‖ p).
It is computed in the forward pass, two matrix products a chunk (three with the target's logits), and the logits are dropped;
recomputing them in the backward pass would take one more.

torch's own `linear_cross_entropy` weighs classes, not rows: rows take reduction="none", which recomputes the logits in the
backward pass (1.4 to 1.7 times our time; 1,024 rows of 576, 49,152 classes, float32, one core), and it tells no best token.
"""

from typing import NamedTuple

import torch

CHUNK_ELEMENTS = 1 << 23  # logits of either model held at once


class Teacher(NamedTuple):
    """What the loss's rows are distilled from: the target's final hidden states [rows, H], and the cap of its logits."""

    hidden: torch.Tensor
    cap: float | None = None


class HeadLoss(NamedTuple):
    """Sums over rows, each times its weight, and which rows' largest logit is the label's, bool [rows].

    total = (1 − share) · cross_entropy + share · divergence is the one that takes gradients.
    """

    total: torch.Tensor
    cross_entropy: torch.Tensor
    divergence: torch.Tensor
    hits: torch.Tensor


class ChunkedLoss(torch.autograd.Function):
    """`head_loss`, chunk by chunk."""

    @staticmethod
    def forward(ctx, hidden, head, labels, weights, teacher: Teacher | None, share: float):
        rows = hidden.shape[0]
        cross_entropy, divergence = weights.new_zeros(2)
        wanted = ctx.needs_input_grad[0]  # not in validation, where a product is then saved
        gradient = torch.empty_like(hidden) if wanted else hidden.new_empty(0)
        hits = torch.empty(rows, dtype=torch.bool, device=hidden.device)
        chunk = max(1, CHUNK_ELEMENTS // head.shape[0])
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            draft = Chances.of(hidden[part], head, weights.dtype)
            target = teacher and Chances.of(teacher.hidden[part], head, weights.dtype, teacher.cap)
            hits[part] = draft.best == labels[part]
            cross_entropy += weights[part] @ draft.surprise(labels[part])
            if target:
                divergence += weights[part] @ target.divergence(draft)
            if wanted:
                slope = slope_of(draft, target, labels[part], share)
                gradient[part] = (slope @ head).to(hidden.dtype) * weights[part, None].to(hidden.dtype)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(cross_entropy, divergence, hits)
        return (1 - share) * cross_entropy + share * divergence, cross_entropy, divergence, hits

    @staticmethod
    def backward(ctx, total_gradient: torch.Tensor, *_):
        (gradient,) = ctx.saved_tensors
        return gradient * total_gradient.to(gradient.dtype), None, None, None, None, None


class Chances(NamedTuple):
    """What a model makes of some rows: logits and their softmax [rows, V], the best token and its logarithm [rows].

    Logits are in the head's dtype, all else in that of the sums: a softmax in bfloat16 knows nothing between 0.996 and 1,
    where the slots that a draft is good at lie. A token's log-probability is its distance to the largest logit plus that
    one's, which is at least −log V: no underflow however unlikely the token.
    """

    logits: torch.Tensor
    softmax: torch.Tensor
    best: torch.Tensor
    largest: torch.Tensor
    log_best: torch.Tensor

    @staticmethod
    def of(hidden: torch.Tensor, head: torch.Tensor, dtype: torch.dtype, cap: float | None = None) -> "Chances":
        """Those of hidden states; a cap bends logits to cap · tanh(logit / cap)."""
        logits = hidden.to(head.dtype) @ head.T
        if cap is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        largest, best = logits.max(dim=1)
        softmax = torch.softmax(logits, dim=1, dtype=dtype)
        return Chances(logits, softmax, best, largest.to(dtype), softmax.gather(1, best[:, None]).squeeze(1).log())

    def surprise(self, tokens: torch.Tensor) -> torch.Tensor:
        """−log of the chance of a token a row."""
        logit = self.logits.gather(1, tokens[:, None]).squeeze(1).to(self.largest.dtype)
        return (self.largest - logit) - self.log_best

    def divergence(self, other: "Chances") -> torch.Tensor:
        """KL(self ‖ other), a number a row; leaves these logits spoilt."""
        distance = self.logits.sub_(other.logits).to(self.softmax.dtype)
        mean = torch.einsum("rv,rv->r", self.softmax, distance)
        return (mean - (self.largest - other.largest)) + (self.log_best - other.log_best)


def slope_of(draft: Chances, target: Chances | None, labels: torch.Tensor, share: float) -> torch.Tensor:
    """The loss's derivative by the draft's logits, in their dtype; takes the place of the draft's softmax."""
    slope, label = draft.softmax, labels[:, None]
    if target:
        slope.sub_(target.softmax, alpha=share)
    slope.scatter_add_(1, label, slope.new_full(label.shape, share - 1))
    return slope.to(draft.logits.dtype)


def head_loss(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    teacher: Teacher | None = None,
    share: float = 0.0,
) -> HeadLoss:
    """Weighted sums of rows' cross-entropy and, given a teacher, of their divergence from it: KL(target ‖ draft).

    hidden: [rows, H], takes the gradient; head: [V, H], frozen, in the dtype of the products; labels: int64 [rows];
    weights: [rows], float32 or float64; share: the divergence's part in the total, 0 without a teacher.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return HeadLoss(*ChunkedLoss.apply(hidden, head, labels, weights, teacher, share))
