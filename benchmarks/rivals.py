"""Public planners, imported and called as their users do. `plan.py` runs this file in an environment that holds them:

    python3 -m venv rivals
    rivals/bin/pip install torch==2.13.0 numba trl==1.16.0 lhotse==1.33.0 urllib3 colorama
    rivals/bin/pip install --no-deps ochat==3.6.1 axolotl==0.19.0

`python rivals.py NAME LENGTHS OUTPUT --epochs E --slots S --token-budget B` writes OUTPUT/epoch-*.parquet (`samples`: a row
a micro-batch, S rows a step) and prints `{"seconds": …, "package": "ochat 3.6.1"}`: planning alone, without imports,
compilation, building the inputs or writing. A step is the S micro-batches that S ranks compute together.
"""

import argparse
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Plan = tuple[float, list[list]]  # seconds; for each epoch its micro-batches, step by step


def ochat(lengths: np.ndarray, epochs: int, slots: int, budget: int) -> Plan:
    """Multipack by its author: a step is as many samples as first-fit decreasing lays into `slots` bins.

    Every rank computes all bins and keeps its own, so the seconds are one rank's.
    """
    from ochat.training_deepspeed.multipack_sampler import MultipackDistributedSampler

    def plan(lengths: np.ndarray, rank: int) -> list[list[np.ndarray]]:
        sampler = MultipackDistributedSampler(lengths, np.ones_like(lengths), budget, slots, rank, seed=0)
        return [sampler.generate_batches(epoch)[0] for epoch in range(epochs)]

    plan(lengths[:1000], 0)  # compiles
    began = time.perf_counter()
    ranks = [plan(lengths, 0)]
    seconds = time.perf_counter() - began
    ranks += [plan(lengths, rank) for rank in range(1, slots)]
    return seconds, [[pack for step in zip(*epoch, strict=True) for pack in step] for epoch in zip(*ranks, strict=True)]


def axolotl(lengths: np.ndarray, epochs: int, slots: int, budget: int) -> Plan:
    """Axolotl's multipack as it sets it up: first fit in groups of 100,000, at most 200 samples a pack, ranks by turns."""
    from axolotl.utils.samplers.multipack import MultipackBatchSampler
    from torch import Generator
    from torch.utils.data import RandomSampler

    def plan(lengths: np.ndarray) -> list[list]:
        order = RandomSampler(lengths, generator=Generator().manual_seed(0))
        sampler = MultipackBatchSampler(order, batch_size=1, batch_max_len=budget, lengths=lengths, bin_size=200)
        result = []
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            result.append([pack for packs in sampler for pack in packs])
        return result

    plan(lengths[:1000])  # compiles
    began = time.perf_counter()
    result = plan(lengths)
    return time.perf_counter() - began, result


def trl(lengths: np.ndarray, epochs: int, slots: int, budget: int) -> Plan:
    """TRL's best-fit decreasing with its defaults: packed once, in windows of 1,000; each epoch shuffles the packs.

    It packs tokens, not lengths, so the seconds include moving them, here one byte each. Which sample of a length went where
    it does not say; any stands for the others.
    """
    from datasets import Dataset, disable_progress_bars
    from trl import pack_dataset

    disable_progress_bars()
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
    tokens = pa.ListArray.from_arrays(offsets, np.zeros(offsets[-1], np.uint8))
    dataset = Dataset(pa.table({"input_ids": tokens}), fingerprint="lengths")  # else it would hash every token
    began = time.perf_counter()
    packed = pack_dataset(dataset, budget, strategy="bfd")
    orders = [np.random.default_rng(epoch).permutation(len(packed)) for epoch in range(epochs)]
    seconds = time.perf_counter() - began
    packed_lengths = packed.with_format("arrow")["seq_lengths"][:].combine_chunks()
    samples = np.empty(len(lengths), np.int64)
    samples[np.argsort(packed_lengths.flatten(), kind="stable")] = np.argsort(lengths, kind="stable")
    packs = np.split(samples, packed_lengths.offsets[1:-1])
    return seconds, [[packs[pack] for pack in order] for order in orders]


def lhotse(lengths: np.ndarray, epochs: int, slots: int, budget: int) -> Plan:
    """Lhotse's dynamic bucketing with shuffling: 30 buckets of equal duration, rows padded to the batch's longest.

    Its buffer of 20,000 mixes a source only in part, so each epoch's source is shuffled before, untimed. Every rank samples
    the batches of all and keeps its own, so the seconds are one rank's.
    """
    from lhotse import CutSet, MonoCut
    from lhotse.dataset.sampling import DynamicBucketingSampler

    class Recorder(DynamicBucketingSampler):
        """Keeps the batches of every rank."""

        def _next_batch(self) -> CutSet:
            batch = super()._next_batch()
            batches.append(batch)
            return batch

    cuts = [MonoCut(str(number), 0, float(length), 0) for number, length in enumerate(lengths)]
    seconds, result = 0.0, []
    for epoch in range(epochs):
        batches = []
        source = CutSet.from_cuts(cuts[number] for number in np.random.default_rng(epoch).permutation(len(cuts)))
        began = time.perf_counter()
        for _ in Recorder(source, max_duration=budget, num_buckets=30, shuffle=True, world_size=slots, rank=0, seed=epoch):
            pass
        seconds += time.perf_counter() - began
        result.append([[int(cut.id) for cut in batch] for batch in batches])
    return seconds, result


RIVALS = {"ochat": ochat, "axolotl": axolotl, "trl": trl, "lhotse": lhotse}
PADDED = {"lhotse"}  # the others lay samples end to end


def write(file: Path, epoch: list, slots: int) -> None:
    """Write an epoch's micro-batches; empty ones fill the last step."""
    epoch = epoch + [[]] * (-len(epoch) % slots)
    offsets = np.append(0, np.cumsum([len(samples) for samples in epoch])).astype(np.int32)
    samples = pa.ListArray.from_arrays(offsets, np.concatenate(epoch).astype(np.uint32))
    pq.write_table(pa.table({"samples": samples}), file)


def main() -> None:
    """Plan by one rival, write what it planned and print its seconds."""
    parser = argparse.ArgumentParser(description="Plan by one public planner.")
    parser.add_argument("name", choices=RIVALS)
    parser.add_argument("lengths", type=Path)
    parser.add_argument("output", type=Path)
    for option in ("--epochs", "--slots", "--token-budget"):
        parser.add_argument(option, type=int, required=True)
    options = parser.parse_args()
    lengths = pq.read_table(options.lengths)["length"].to_numpy().astype(np.int64)
    try:
        seconds, epochs = RIVALS[options.name](lengths, options.epochs, options.slots, options.token_budget)
    except ImportError as fault:
        sys.exit(f"{options.name} cannot be imported: {fault}")
    options.output.mkdir(parents=True, exist_ok=True)
    for number, epoch in enumerate(epochs):
        write(options.output / f"epoch-{number:03d}.parquet", epoch, options.slots)
    print(json.dumps({"seconds": seconds, "package": f"{options.name} {version(options.name)}"}))


if __name__ == "__main__":
    main()
