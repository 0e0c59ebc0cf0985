"""What a run of `dflash-train` came to a second, from its files: `python benchmarks/run_speed.py RUN PLAN TARGET [BUSY]`.

The first half of the steps warms up and does not count. `BUSY` holds a number a line, what `nvidia-smi` gave as utilisation
while the run lasted: the share of the time in which some kernel ran.
"""

import json
import sys
from pathlib import Path
from statistics import mean

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from work import per_anchor, per_token, product_rate, token_length

from dflash_prep.manifest import Plan
from dflash_prep.verify import open_stores
from dflash_trainer.checkpoint import draft_directory
from dflash_trainer.config import DraftConfig


def main(run: str, plan: str, target: str, busy: str | None = None) -> None:
    """Print one line."""
    rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    rows = rows[len(rows) // 2 :]
    tokens, anchors, seconds = (sum(row[key] for row in rows) for key in ("tokens", "anchors", "seconds"))
    waited = sum(row["seconds"] * row["data_wait_share"] for row in rows)
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target)).get_decoder().layers
    config = DraftConfig.load(draft_directory(Path(run)))
    length = token_length(open_stores(Plan(Path(plan)), ()).column("length"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rate = product_rate(device, torch.bfloat16) * max(1, torch.cuda.device_count())
    work = tokens * per_token(layers, config, length) + anchors * per_anchor(config, length)
    line = f"{run}: {tokens / seconds / 1000:.1f} Ktok/s real, {waited / seconds:.2%} waiting for data, "
    line += f"utilisation {work / seconds / rate:.1%} of {rate / 1e12:.1f} TFLOP/s, loss {rows[-1]['loss']:.3f}"
    if busy:
        samples = [float(word) for word in Path(busy).read_text().split()]
        line += f", GPU busy {mean(samples[len(samples) // 2 :] or [0]):.0f} % of the time"
    print(line)


if __name__ == "__main__":
    main(*sys.argv[1:])
