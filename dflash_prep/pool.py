"""What there is to plan: lengths, loss tokens, anchors and sources, from token stores or from a table of lengths alone."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dflash_prep.errors import UserError
from dflash_prep.files import check_regular, check_utf8, digest, resolved
from dflash_prep.rng import stream
from dflash_prep.stores import Stores

HOLDOUT_STREAM = 5
LONGEST = 2**24  # tokens; costs of longer rows would not fit the planner's integers


@dataclass(frozen=True)
class Pool:
    """Every sample that could be planned. Each array has a row a sample."""

    origin: dict  # how a plan states where this came from
    fingerprint: str
    length: np.ndarray  # int64
    loss_tokens: np.ndarray  # int64
    eligible: np.ndarray  # int64: positions where a block may start
    source: np.ndarray  # int64, into `sources`
    sources: list[str]
    chance: np.ndarray | None  # uint32, of the content: samples below a threshold are held out; None: not asked for

    def __len__(self) -> int:
        return len(self.length)


def from_stores(stores: Stores, chance: bool) -> Pool:
    """The samples of token stores; `chance` tells whether some are to be held out."""
    for part in stores.parts:
        check_utf8(str(resolved(part.path)))
    columns = [part.index["source"] for part in stores.parts]
    source, sources = encode(pa.chunked_array([chunk.cast(pa.string()) for column in columns for chunk in column.chunks]))
    keys = stores.texts("key") if chance else None
    return Pool(
        origin=stores.origin(),
        fingerprint=stores.fingerprint,
        length=stores.column("length"),
        loss_tokens=stores.column("loss_tokens"),
        eligible=stores.column("eligible"),
        source=source,
        sources=sources,
        chance=np.array([int(key[:8], 16) for key in keys], np.uint32) if keys else None,
    )


def from_lengths(path: Path, chance: bool) -> Pool:
    """The samples that a Parquet file lists: `length`, and `loss_tokens` and `source` where it has them.

    Missing loss tokens are the whole length. They are taken to lie in one span, whose last position no block starts at. With
    no content to hash, who is held out is drawn by row number.
    """
    table = read_lengths(path)
    length = whole_numbers(path, table, "length", 1)
    loss = whole_numbers(path, table, "loss_tokens", 0) if "loss_tokens" in table.column_names else length
    if (worst := int((loss - length).argmax())) >= 0 and loss[worst] > length[worst]:
        raise UserError(
            f"{path}: row {worst + 1} has {loss[worst]} loss_tokens of {length[worst]}; give no more than its length"
        )
    if "source" in table.column_names:
        source, sources = encode(names(path, table))
    else:
        source, sources = np.zeros(len(length), np.int64), [""]
    fingerprint = digest(length.tobytes(), loss.tobytes(), source.tobytes(), "\0".join(sources).encode())
    place = str(resolved(path))
    check_utf8(place)
    return Pool(
        origin={"lengths": {"path": place, "fingerprint": fingerprint}},
        fingerprint=fingerprint,
        length=length,
        loss_tokens=loss,
        eligible=np.maximum(loss - 1, 0),
        source=source,
        sources=sources,
        chance=(stream((HOLDOUT_STREAM,), len(length)) >> np.uint64(32)).astype(np.uint32) if chance else None,
    )


def read_lengths(path: Path) -> pa.Table:
    """The columns of a table of lengths."""
    check_regular(path)
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            known = [name for name in ("length", "loss_tokens", "source") if name in names]
            if twice := [name for name in known if names.count(name) > 1]:
                raise UserError(f"{path}: has several columns '{twice[0]}'; leave one")
            table = file.read(known)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; name a Parquet file with a column 'length'") from None
    except (OSError, pa.ArrowException) as fault:
        raise UserError(f"{path}: cannot be read as Parquet ({fault}); write it with a column 'length'") from None
    if "length" not in table.column_names:
        raise UserError(f"{path}: has no column 'length'; give the tokens of each sample there")
    if not len(table):
        raise UserError(f"{path}: lists no sample; give a row a sample")
    return table


def whole_numbers(path: Path, table: pa.Table, name: str, least: int) -> np.ndarray:
    """A column of whole numbers as int64, each at least `least`."""
    column = table[name]
    if not pa.types.is_integer(column.type) or column.null_count:
        raise UserError(f"{path}: column '{name}' is {column.type} with {column.null_count} nulls; give whole numbers")
    if pc.max(column).as_py() > LONGEST or pc.min(column).as_py() < least:
        raise UserError(f"{path}: column '{name}' holds numbers outside {least} to {LONGEST}; correct them")
    return column.cast(pa.int64()).to_numpy()


def names(path: Path, table: pa.Table) -> pa.ChunkedArray:
    """The column of sources as text; none where it is null."""
    try:
        return table["source"].cast(pa.string()).fill_null("")
    except pa.ArrowException:
        raise UserError(f"{path}: column 'source' is {table['source'].type}; give each sample's source as text") from None


def encode(column: pa.ChunkedArray) -> tuple[np.ndarray, list[str]]:
    """Names as numbers, int64 [rows], and the names in alphabetical order."""
    coded = column.combine_chunks().dictionary_encode()
    names = coded.dictionary.to_pylist()
    rank = np.argsort(np.argsort(np.array(names, object), kind="stable"), kind="stable")
    return rank[coded.indices.to_numpy()], sorted(names)
