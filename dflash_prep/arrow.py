"""Arrow files of one record batch each."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc

from dflash_prep.errors import UserError
from dflash_prep.files import sync_file


def list_array(values: np.ndarray, lengths: list[int]) -> pa.ListArray:
    """A list<uint32> column over values laid end to end, without a copy."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, pa.uint32()), type=pa.list_(pa.uint32()))


def write_arrow(path: Path, batch: pa.RecordBatch) -> None:
    """Write an Arrow file of one record batch and flush it to the disk."""
    with pa.OSFile(os.fspath(path), "wb") as sink, ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    sync_file(path)


def read_arrow(path: Path) -> pa.RecordBatch:
    """The record batch of an Arrow file, in memory."""
    try:
        with pa.OSFile(os.fspath(path), "rb") as file:
            return ipc.open_file(file).get_batch(0)
    except (OSError, pa.ArrowException) as fault:
        raise UserError(f"{path}: cannot be read ({fault}); remove {path.parent.parent} and tokenize again") from None
