"""Acceptance length of the demo's drafts on all held-out prompts, with a bootstrap confidence interval.

`python benchmarks/acceptance.py [RUN ...]`; by default the two drafts that `make demo` left.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESAMPLES = 10_000


def report(run: str) -> dict:
    """`dflash-eval`'s report of a run's newest draft on every prompt."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [str(Path(sys.executable).parent / "dflash-eval"), "--draft", run, "--prompts", "data/eval.jsonl"]
        subprocess.run([*command, "--max-new-tokens", "64", "--json", str(file)], check=True, cwd=ROOT)
        return json.loads(file.read_text())


def interval(values: list[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the mean, prompts resampled."""
    random = np.random.default_rng(0)
    means = random.choice(values, (RESAMPLES, len(values))).mean(axis=1)
    return tuple(np.quantile(means, [0.025, 0.975]))


def main() -> None:
    """Evaluate each run and print one line for it."""
    lines = []
    for run in sys.argv[1:] or ["demo/untrained", "demo/trained"]:
        result = report(run)
        values = [prompt["acceptance_length"] for prompt in result["prompts"]]
        low, high = interval(values)
        lines.append(
            f"{run}: acceptance {np.mean(values):.3f} (95 % interval {low:.3f} to {high:.3f}; {len(values)} prompts), "
            f"{result['speedup']:.2f}x plain decoding, output {'equal' if result['lossless'] else 'DIFFERENT'}"
        )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
