"""The whole path on the shipped corpus, as `make demo` runs it: tokenize, plan, verify, train, evaluate, one table.

Sized for two CPU cores. Everything it writes goes to `demo/`.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "demo"
# Small in every way that costs time on a CPU: two layers, blocks of four, and taps so low that only 14 of the target's 30
# layers are computed.
DRAFT = {"num_hidden_layers": 2, "block_size": 4, "target_layer_ids": [1, 13]}
STRATEGIES = ("sorted", "shuffled", "bucketed", "packed")
# Many small steps: one micro-batch a step, as small as the longest sample kept allows.
TOKENIZE = ("--max-length", "1024")
PLAN = ("--block-size", "4", "--slots", "1", "--token-budget", "1024", "--anchor-density", "0.4")
TRAIN = ("--lr", "2.5e-3", "--warmup", "0.05")
EVAL = ("--limit", "10", "--max-new-tokens", "64")


def run(*command: str) -> float:
    """Run one of the project's commands, shown as a user would type it; returns its seconds."""
    print(f"\n$ {' '.join(command)}", flush=True)
    began = time.perf_counter()
    subprocess.run([str(Path(sys.executable).parent / command[0]), *command[1:]], check=True, cwd=ROOT)
    return time.perf_counter() - began


def compute_dtype() -> str:
    """bfloat16 where the processor multiplies it in hardware, else float32."""
    return "bfloat16" if torch.cpu._is_amx_tile_supported() else "float32"


def plan(strategy: str, epochs: int) -> float:
    """Plan the demo's store by one strategy; returns the share of real tokens."""
    output = f"demo/plan-{strategy}"
    run(
        "dflash-prep",
        "plan-epochs",
        "--data",
        "demo/tokens",
        "-o",
        output,
        "--epochs",
        str(epochs),
        "--strategy",
        strategy,
        *PLAN,
    )
    epochs = json.loads((ROOT / output / "plan.json").read_text())["epochs"]
    return sum(epoch["tokens"] for epoch in epochs) / sum(epoch["padded_tokens"] for epoch in epochs)


def evaluate(name: str) -> dict:
    """Acceptance length of a run's newest draft."""
    run("dflash-eval", "--draft", f"demo/{name}", "--prompts", "data/eval.jsonl", *EVAL, "--json", f"demo/{name}.json")
    return json.loads((DEMO / f"{name}.json").read_text())


def main() -> None:
    """Run everything and print the table."""
    began = time.perf_counter()
    shutil.rmtree(DEMO, ignore_errors=True)
    DEMO.mkdir()
    (DEMO / "draft.json").write_text(json.dumps(DRAFT))
    run("dflash-prep", "tokenize", "data/demo.jsonl.zst", *TOKENIZE, "-o", "demo/tokens")
    shares = {strategy: plan(strategy, epochs=2) for strategy in STRATEGIES}
    run("dflash-prep", "verify", "demo/plan-packed")
    train = ("dflash-train", "--manifest-dir", "demo/plan-packed", "--draft-config", "demo/draft.json")
    run(*train, "--max-steps", "0", "-o", "demo/untrained")
    run(*train, *TRAIN, "--dtype", compute_dtype(), "-o", "demo/trained")
    before, after = evaluate("untrained"), evaluate("trained")
    table = Table(title="\nShare of real tokens in what is computed")
    for strategy in STRATEGIES:
        table.add_column(strategy, justify="right")
    table.add_row(*(f"{shares[strategy]:.1%}" for strategy in STRATEGIES))
    console = Console()
    console.print(table)
    table = Table(title="Draft on held-out prompts")
    for heading in ("", "acceptance length", "speed against plain decoding", "output equals the target's"):
        table.add_column(heading, justify="right")
    for name, report in (("untrained", before), ("trained", after)):
        table.add_row(
            name, f"{report['acceptance_length']:.3f}", f"{report['speedup']:.2f}x", "yes" if report["lossless"] else "NO"
        )
    console.print(table)
    print(f"{time.perf_counter() - began:.0f} s in all, {torch.get_num_threads()} threads, {compute_dtype()} products")


if __name__ == "__main__":
    main()
