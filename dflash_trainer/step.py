"""One optimizer step: every backward without synchronisation, one reduction, one update.

All gradients and the step's sums lie in one flat buffer in a fixed order, so that a step is a single all-reduce whatever
the ranks held, and an empty slot adds zero without being skipped. The loss is normalised by the weight of the whole step
over all ranks.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from dflash_trainer.draft import DraftModel
from dflash_trainer.launch import others_needed
from dflash_trainer.micro_batch import MicroBatch
from dflash_trainer.objective import SHARES, block_loss
from dflash_trainer.target import FrozenTarget
from dflash_trainer.vitals import Stopwatch, Vitals, peak_memory

BETAS = (0.9, 0.95)  # torch's 0.999 remembers the loud gradients of the first steps for a thousand more


class Recipe(NamedTuple):
    """How the draft is optimised: AdamW without weight decay, linear warm-up, cosine decay to zero, clipping."""

    learning_rate: float = 6e-4
    warmup: float = 0.04  # share of all steps
    clip: float = 1.0
    dtype: torch.dtype = torch.float32  # of the matrix products; parameters stay float32
    loss: str = "ce"  # one of `objective.SHARES`


class StepResult(NamedTuple):
    """What one step came to, over all ranks; `bad_steps` counts the updates that were skipped so far.

    `vitals` are each rank's, in the order of the ranks.
    """

    loss: float
    slot_accuracy: list[float]
    gradient_norm: float
    tokens: int
    padded_tokens: int
    anchors: int
    bad_steps: int
    vitals: list[Vitals]


class GradientBuffer:
    """The gradients of all parameters, and the step's sums behind them, in one flat tensor.

    Each rank's vitals have cells of their own in it, which are zero on all other ranks: their sum gathers them.
    """

    def __init__(self, draft: DraftModel):
        self._parameters = list(draft.parameters())
        slots = draft.config.block_size - 1
        self._sizes = [parameter.numel() for parameter in self._parameters]
        first = self._parameters[0]
        ranks, self._rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self._parts = [5, 1, slots, slots, ranks * len(Vitals._fields)]
        self._flat = torch.zeros(sum(self._sizes) + sum(self._parts), dtype=first.dtype, device=first.device)
        self.gradients = self._flat[: sum(self._sizes)]
        self._sums = self._flat[sum(self._sizes) :]
        # totals: weight, loss, tokens, padded tokens, anchors; stops: how many ranks were asked to stop
        self.totals, self.stops, self.hits, self.counts, vitals = self._sums.split(self._parts)
        self._vitals = vitals.view(ranks, -1)

    def clear(self) -> None:
        """Zero everything and make each parameter's gradient a view into the buffer."""
        self._flat.zero_()
        for parameter, view in zip(self._parameters, self.gradients.split(self._sizes), strict=True):
            parameter.grad = view.view_as(parameter)

    def tell(self, vitals: Vitals) -> None:
        """Write this rank's vitals into its cells."""
        self._vitals[self._rank] = self._vitals.new_tensor(vitals)

    def reduce(self) -> None:
        """Sum over ranks, then divide the gradients by the step's weight."""
        if dist.is_initialized():
            with others_needed():
                dist.all_reduce(self._flat)
        weight = self.totals[0]
        self.gradients /= torch.where(weight > 0, weight, 1)

    def read(self, norm: torch.Tensor) -> list[list[float]]:
        """The gradient's norm, totals, stops, hits, counts and vitals on the CPU: a device is waited for only once."""
        return [part.tolist() for part in torch.cat([norm[None], self._sums]).cpu().split([1, *self._parts])]


class Stepper:
    """Takes optimizer steps of a draft.

    A step whose loss or gradient is not finite is a bad one: it counts as a step, but changes neither parameters nor
    moments. `bad_in_a_row` were the last ones; `stopping` says whether any rank was asked to stop during the last step.
    """

    def __init__(self, draft: DraftModel, target: FrozenTarget, recipe: Recipe, total_steps: int):
        self.draft, self.target, self.recipe = draft, target, recipe
        self._total_steps = total_steps
        self._buffer = GradientBuffer(draft)
        self.optimizer = torch.optim.AdamW(
            draft.parameters(), lr=recipe.learning_rate, betas=BETAS, weight_decay=0.0, fused=True
        )
        self.bad_steps = self.bad_in_a_row = 0
        self.stopping = False
        self._stopwatch = Stopwatch(self._buffer.gradients.device)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a 0-based step: it spans the whole plan."""
        warmup = math.ceil(self.recipe.warmup * self._total_steps)
        if step < warmup:
            return self.recipe.learning_rate * (step + 1) / warmup
        progress = (step - warmup) / max(1, self._total_steps - warmup)
        return self.recipe.learning_rate * (1 + math.cos(math.pi * progress)) / 2

    def accumulate(self, batch: MicroBatch) -> None:
        """Add one micro-batch's gradient and sums to the buffer."""
        totals = self._buffer.totals
        totals[2:5] += totals.new_tensor([batch.tokens, batch.input_ids.numel(), batch.blocks])
        if not batch.blocks:
            self.target.stand_by()
            return
        with self.autocast():
            loss = block_loss(self.draft, self.target, batch, SHARES[self.recipe.loss])
        loss.total.backward()
        totals[0] += loss.weight
        totals[1] += loss.total.detach()
        self._buffer.hits += loss.hits
        self._buffer.counts += loss.counts

    def autocast(self) -> torch.autocast:
        """The precision of the matrix products."""
        device = self._buffer.gradients.device
        return torch.autocast(device.type, self.recipe.dtype, enabled=self.recipe.dtype == torch.bfloat16)

    def rehearse(self, batch: MicroBatch) -> None:
        """Compute one micro-batch's gradient and forget it; room for moments that are yet to come is held meanwhile."""
        unseen = [parameter for parameter in self.draft.parameters() if parameter not in self.optimizer.state]
        moments = [torch.empty_like(parameter) for parameter in unseen for _ in range(2)]
        self._buffer.clear()
        self.accumulate(batch)
        self._buffer.clear()
        self.optimizer.zero_grad()
        del moments

    def gradient(
        self, batches: list[MicroBatch], asked: Callable[[], bool] = lambda: False, waited: float = 0.0
    ) -> GradientBuffer:
        """This step's gradient over all ranks, from this rank's micro-batches, for which it `waited` so many seconds.

        `asked`: whether this rank is to stop.
        """
        self._stopwatch.start()
        self._buffer.clear()
        for batch in batches:
            self.accumulate(batch)
        self._buffer.stops += asked()
        self._buffer.tell(Vitals(self._stopwatch.stop(), waited, peak_memory(self._buffer.gradients.device)))
        self._buffer.reduce()
        return self._buffer

    def step(
        self,
        number: int,
        batches: list[MicroBatch],
        asked: Callable[[], bool] = lambda: False,
        waited: float = 0.0,
    ) -> StepResult:
        """Take the 0-based step `number` with this rank's micro-batches; see `gradient`."""
        buffer = self.gradient(batches, asked, waited)
        norm = buffer.gradients.norm()
        (size,), totals, (stops,), hits, counts, vitals = buffer.read(norm)
        weight, loss, tokens, padded, anchors = totals
        if math.isfinite(loss) and math.isfinite(size):
            self._update(number, norm)
            self.bad_in_a_row = 0
        else:
            self.bad_steps += 1
            self.bad_in_a_row += 1
        self.stopping = stops > 0
        return StepResult(
            loss=loss / weight if weight else 0.0,
            slot_accuracy=[hit / max(count, 1) for hit, count in zip(hits, counts, strict=True)],
            gradient_norm=size,
            tokens=int(tokens),
            padded_tokens=int(padded),
            anchors=int(anchors),
            bad_steps=self.bad_steps,
            vitals=[Vitals(*cells) for cells in zip(*[iter(vitals)] * len(Vitals._fields), strict=True)],
        )

    def _update(self, number: int, norm: torch.Tensor) -> None:
        """Clip the gradient, whose norm is given, and let the optimizer use it."""
        self._buffer.gradients *= torch.clamp(self.recipe.clip / (norm + 1e-6), max=1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(number)
        self.optimizer.step()

    def bad_slots(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Those of the last step's micro-batches whose own loss or gradient is not finite, each computed once more."""
        found = []
        for batch in batches:
            self._buffer.clear()
            self.accumulate(batch)
            if not (self._buffer.totals[1].isfinite() and self._buffer.gradients.norm().isfinite()):
                found.append(batch)
        return found
