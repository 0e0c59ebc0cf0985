"""Tables of the training benchmarks."""

import os
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def print_table(title: str, headings: list[str], rows: list[list[str]]) -> None:
    """A table whose first column holds names and whose others hold numbers."""
    table = Table(title=title, box=SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, justify="right" if table.columns else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=max(150, Console().width)).print(table)


def machine() -> str:
    """What computes, in words."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    name = names[0].partition(": ")[2] if names else "unknown processor"
    return f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {name}"
