"""Cross-entropy through a frozen LM head, without ever holding the logits of more than a few rows.

The head takes no gradient, so a chunk's gradient with respect to the hidden states is known as soon as its logits are:
dh = w · (softmax − onehot) · W. It is computed in the forward pass, two matrix products a chunk, and the logits are dropped;
recomputing them in the backward pass would take three.
"""

import torch

CHUNK_ELEMENTS = 1 << 23  # logits held at once


class HeadCrossEntropy(torch.autograd.Function):
    """Σ weights · cross-entropy(hidden · headᵀ, labels), and which rows' largest logit is the label's."""

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor):
        rows = hidden.shape[0]
        total = hidden.new_zeros((), dtype=weights.dtype)
        wanted = ctx.needs_input_grad[0]  # not in validation, where half of the products is then saved
        gradient = torch.empty_like(hidden) if wanted else hidden.new_empty(0)
        hits = torch.empty(rows, dtype=torch.bool, device=hidden.device)
        chunk = max(1, CHUNK_ELEMENTS // head.shape[0])
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            loss, slope, hits[part] = chunk_loss(hidden[part], head, labels[part], weights[part], wanted)
            total += loss
            if wanted:
                gradient[part] = slope
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(ctx, total_gradient: torch.Tensor, _):
        (gradient,) = ctx.saved_tensors
        return gradient * total_gradient.to(gradient.dtype), None, None, None


def chunk_loss(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, wanted: bool):
    """Loss, gradient (None unless it is wanted) and hits of one chunk.

    Passes over [rows, V] are what costs beside the products, so there are two: the largest logit, and the softmax in the
    logits' own dtype. A label's log-probability is its distance to the largest logit plus that one's, which is at least
    −log V: no underflow however unlikely the label.
    """
    logits = hidden.to(head.dtype) @ head.T
    best, drafted = logits.max(dim=1)
    label = labels[:, None]
    distance = logits.gather(1, label).squeeze(1).to(weights.dtype) - best.to(weights.dtype)
    slope = torch.softmax(logits, dim=1)
    log_best = slope.gather(1, drafted[:, None]).squeeze(1).to(weights.dtype).log()
    loss = -((distance + log_best) * weights).sum()
    if not wanted:
        return loss, None, drafted == labels
    slope.scatter_add_(1, label, slope.new_full(label.shape, -1.0))
    gradient = (slope @ head).to(hidden.dtype) * weights[:, None].to(hidden.dtype)
    return loss, gradient, drafted == labels


def head_cross_entropy(
    hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted cross-entropy sum of rows and, a row, whether it would draft its label.

    hidden: [rows, H], takes the gradient; head: [V, H], frozen, in the dtype of the products; labels: int64 [rows];
    weights: [rows], float32 or float64. Returns a scalar and bool [rows].
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return HeadCrossEntropy.apply(hidden, head, labels, weights)
