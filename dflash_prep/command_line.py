"""What commands share: faults of the input as one line, and the kinds of values that options take."""

import functools
import io
import json
import math
import sys
from itertools import pairwise
from pathlib import Path

import click

from dflash_prep.errors import UserError
from dflash_prep.harmless import in_line

MOST_COPIES = 1000
MOST = 2**31  # tokens or anchors: their sums then fit a plan's uint32 columns


def one_line_errors(command):
    """Print a fault of the input as one line and exit with 1."""

    @functools.wraps(command)
    def wrapped(*args, **kwargs):
        if isinstance(sys.stdout, io.TextIOWrapper):  # no terminal's encoding ends a command
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            check_names(kwargs)
            return command(*args, **kwargs)
        except UserError as fault:
            message = str(fault)
        except BrokenPipeError:  # whoever read the output has enough of it: click ends quietly
            raise
        except OSError as fault:  # a path that may not be looked at, or cannot be one; a full disk
            reason = fault.strerror or str(fault)
            message = f"{fault.filename}: {reason}; check the path and its permissions" if fault.filename else reason
        click.echo(f"error: {in_line(' '.join(message.split()))}", err=True)
        sys.exit(1)

    return wrapped


def check_names(arguments: dict[str, object]) -> None:
    """Refuse names that are not UTF-8 before any work is done: they could be neither stored nor printed."""
    from dflash_prep.files import check_utf8

    waiting = list(arguments.values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, str | Path):
            check_utf8(str(value))
        elif isinstance(value, tuple | list | dict):
            waiting += [*value, *value.values()] if isinstance(value, dict) else value


class Filled(click.ParamType):
    """A text that is not empty."""

    name = "text"

    def convert(self, value, param, ctx):
        return value or self.fail("it is empty; leave the option out, or name something.", param, ctx)


class FiniteRange(click.FloatRange):
    """A range of numbers without nan and infinity, which no limit of FloatRange keeps out."""

    def convert(self, value, param, ctx):
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class AutoRange(click.IntRange):
    """A range of whole numbers, or `auto`, which becomes None."""

    def convert(self, value, param, ctx):
        return None if value == "auto" else super().convert(value, param, ctx)


class Bounds(click.ParamType):
    """Rising upper bounds, separated by commas."""

    name = "bounds"

    def convert(self, value, param, ctx):
        bounds = tuple(click.IntRange(1, MOST).convert(part, param, ctx) for part in value.split(","))
        if any(high <= low for low, high in pairwise(bounds)):
            self.fail(f"{value} is not ascending; give rising upper bounds.", param, ctx)
        return bounds


class Weight(click.ParamType):
    """A source and the factor by which it is repeated or thinned: name=2.0."""

    name = "weight"

    def convert(self, value, param, ctx):
        source, sign, factor = value.rpartition("=")
        if not sign or not source:
            self.fail(f"{value} is no weight; give name=factor, such as code=2.0.", param, ctx)
        return source, FiniteRange(0, MOST_COPIES).convert(factor, param, ctx)


class Arguments(click.ParamType):
    """A JSON object whose keys are arguments of a chat template."""

    name = "arguments"

    def convert(self, value, param, ctx):
        if isinstance(value, dict):
            return value
        from dflash_prep.chat import TAKEN

        try:
            arguments = json.loads(value)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            self.fail(f"{value} is no JSON object; give arguments such as '{{\"enable_thinking\": false}}'.", param, ctx)
        if taken := [name for name in TAKEN if name in arguments]:
            self.fail(f"{taken[0]} is what the corpus gives the template; leave it out.", param, ctx)
        return arguments


class Columns(click.ParamType):
    """A corpus' own names for our columns: messages=dialog,prompt=question."""

    name = "columns"

    def convert(self, value, param, ctx):
        if isinstance(value, dict):
            return value
        from dflash_prep.formats import COLUMNS

        pairs = [part.partition("=") for part in value.split(",")]
        for ours, _, theirs in pairs:
            if ours not in COLUMNS or not theirs:
                self.fail(f"{value} maps no columns; give ours=theirs with ours one of {', '.join(COLUMNS)}.", param, ctx)
        return {ours: theirs for ours, _, theirs in pairs}


class Place(click.ParamType):
    """A record of a corpus: chats.jsonl:17."""

    name = "place"

    def convert(self, value, param, ctx):
        if isinstance(value, tuple):
            return value
        source, sign, line = value.rpartition(":")
        if not sign or not source:
            self.fail(f"{value} is no record; give its file and its number there, such as chats.jsonl:17.", param, ctx)
        return source, click.IntRange(1, 2**63 - 1).convert(line, param, ctx)
