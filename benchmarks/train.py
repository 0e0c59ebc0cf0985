"""The trainer measured: layouts, a step's parts, public trainers' steps, and whether a step's composition matters.

`python benchmarks/train.py PART... [--corpus FILE] [--target DIR] [--rivals-python PATH]`. Parts, and their time with the
default sizes on two quiet cores:
- `strategies` (8 minutes): real tokens a second of whole steps in each layout, as ratios to `sorted`;
- `split` (3 minutes): where a step's time goes;
- `rivals` (6 minutes): the draft's training step beside SpecForge's and speculators', and beside the bare matrix products;
  `draft_step.py` says how to make their environment;
- `composition` (15 minutes): hold-out loss of `sorted`, `bucketed` and `packed` on the same tokens, three seeds.

The corpus is the shipped one unless another is named; one with lengths that are more mixed shows more. `gpu.sh` runs the
same on a GPU.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from composition import composition
from draft_rivals import Sizes, compare
from throughput import Setting, split, strategies

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("strategies", "split", "rivals", "composition")


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line; sizes that are not given are each part's own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--corpus", type=Path, default=ROOT / "data/demo.jsonl.zst", metavar="FILE")
    parser.add_argument("--target", metavar="DIR", help="[default: SmolLM2-135M]")
    parser.add_argument("--rivals-python", metavar="PATH", help="Python that can import the public trainers.")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    for name in ("samples", "max-length", "token-budget", "slots", "layers", "block-size"):
        parser.add_argument(f"--{name}", type=int, metavar="N")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="Steps of split.  [default: 4]")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="Counted steps of rivals.  [default: 3]")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="Seeds of composition.  [default: 3]")
    parser.add_argument("--epochs", type=int, default=6, metavar="N", help="Epochs of composition.  [default: 6]")
    parser.add_argument("--small-step", action="store_true", help="Rivals: a step of a moment, to see that all works.")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    """Measure the parts that were asked for."""
    options = parse(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = ("samples", "max_length", "token_budget", "slots", "layers", "block_size")
    given = {name: getattr(options, name) for name in sizes if getattr(options, name) is not None}
    common = {"corpus": options.corpus, "target": options.target, "dtype": getattr(torch, options.dtype)}
    for part in options.parts:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if part == "strategies":
                strategies(Setting(**common | given), folder, device)
            elif part == "split":
                split(Setting(**common | given), folder, device, options.steps)
            elif part == "rivals":
                step = Sizes(64, 8, 4, 2, 640, 192, 256) if options.small_step else Sizes()
                compare(options.rivals_python, step, options.rounds)
            else:
                small = {"samples": 500, "max_length": 512, "token_budget": 640, "slots": 4, "layers": 1, "block_size": 8}
                composition(Setting(**small | common | given), folder, device, options.seeds, options.epochs)


if __name__ == "__main__":
    main()
