"""`dflash-prep inspect`: what a store or a plan holds, down to the text of one sample and the loss on it."""

from collections.abc import Sequence
from pathlib import Path

from dflash_prep.errors import UserError
from dflash_prep.lookup import Choice, chosen, read_sample, tokenizer_of
from dflash_prep.show import Page, show_sample, show_store
from dflash_prep.shown import check_store
from dflash_prep.store import Store


def inspect(
    path: Path, choice: Choice, step: int | None = None, epoch: int | None = None, data: Sequence[Path] = ()
) -> None:
    """Print what is asked of the store or plan `path`, or an overview; `data` are a plan's stores, if they were moved.

    Raises UserError where there is neither, where it is damaged, and for samples, epochs and steps that it has not.
    """
    if choice.tokens and not choice:
        raise UserError("--tokens shows samples token by token; choose some with --sample, --key, --find or --random")
    if epoch is not None and step is None:
        raise UserError("--epoch says which epoch's step is meant; give --step too")
    if (path / "plan.json").is_file():
        from dflash_prep.inspect_plan import inspect_plan  # what a plan needs takes longer to load than a store to show

        inspect_plan(path, choice, step, epoch, data)
    elif not (path / "store.json").is_file():
        raise UserError(f"{path}: neither a token store nor a plan is here; name the directory of one")
    elif step is not None or data:
        raise UserError(f"{path}: is a store; --step, --epoch and --data are for plans")
    else:
        inspect_store(path, choice)


def inspect_store(path: Path, choice: Choice) -> None:
    """The chosen samples of a store, or an overview of all."""
    store = Store(path)
    if not choice:
        check_store(store)
        show_store(Page(), store)
        return
    numbers = chosen([store], choice)
    tokenizer, page = tokenizer_of([store], choice.tokenizer), Page()
    for number in numbers:
        show_sample(page, read_sample([store], number), tokenizer, choice.tokens)
