"""A step as people read it: a bar and its figures in two lines of a terminal, or one plain line where there is none."""

import sys

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dflash_prep.console import known_width
from dflash_trainer.metrics import StepRow
from dflash_trainer.pace import duration

BAR = 20  # columns


class StepDisplay:
    """Shows each step on standard error: in a terminal in place of the one before it, elsewhere a line each."""

    def __init__(self):
        self._console = known_width(stderr=True)
        self._live = None
        if sys.stderr.isatty() and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()

    def show(self, row: StepRow) -> None:
        """Show a step."""
        if self._live:
            self._live.update(bar(row))
        else:
            print(plain(row), file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last step standing."""
        if self._live:
            self._live.stop()


def plain(row: StepRow) -> str:
    """Everything in one line, however long; what is wrong stands at its end."""
    return "  ".join([f"step {row.step}/{row.last_step}", *course(row), *figures(row), *bad(row)])


def bar(row: StepRow) -> Group:
    """Two lines: how far the run is, and the step's figures. Neither is wrapped, a narrow terminal cuts them."""
    first = Table.grid(padding=(0, 2, 0, 0))
    words = [Text("  ".join(course(row))), *(Text(word, style="bold red") for word in bad(row))]
    parts = [Text(f"step {row.step}/{row.last_step}"), ProgressBar(row.last_step, row.step, BAR), *words]
    for _ in parts:
        first.add_column(no_wrap=True)
    first.add_row(*parts)
    return Group(first, Text("  ".join(figures(row)), no_wrap=True, overflow="ellipsis"))


def course(row: StepRow) -> list[str]:
    """How far and how fast."""
    speed = f"{row.tokens_per_second / 1000:.2f} Ktok/s"
    return [f"epoch {row.epoch + row.epoch_progress:.2f}", speed, f"{duration(row.seconds_left)} left"]


def figures(row: StepRow) -> list[str]:
    """What the step came to; less than 100 columns."""
    return [
        f"loss {row.loss:.3f}",
        f"accepts {row.expected_acceptance:.2f}",
        f"norm {row.gradient_norm:.2g}",
        f"lr {row.learning_rate:.1e}",
        f"pad {row.padding_share:.1%}",
        f"wait {row.data_wait_share:.1%}",
        f"spread {row.rank_spread:.1%}",
        f"{row.memory_bytes / 2**30:.1f} GiB",
    ]


def bad(row: StepRow) -> list[str]:
    """How many updates were skipped, if any."""
    return [f"bad steps {row.bad_steps}"] if row.bad_steps else []
