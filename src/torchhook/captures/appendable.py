"""A safetensors file to which rows are appended: a header of one page, rewritten at each commit, and the rows after it.

After each commit any safetensors reader can open it. The rows start at a page boundary, so that they can be mapped.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from torchhook.core.errors import HarvestError
from torchhook.core.torch_internals import storage_address

PAGE = 4096
_WRITE = 256 * 1024  # bytes: larger writes are slower, and their times vary
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class AppendableTensor:
    """One tensor in a file, to which rows are appended after its last commit.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
    ...     file = AppendableTensor(Path(folder) / "x.safetensors", "values", torch.float16, (3,), pool)
    ...     file.append(torch.ones(2, 3, dtype=torch.float16))
    ...     file.flush(), file.commit()
    ...     file.rows, file.close()
    (None, None)
    (2, None)
    """

    def __init__(
        self,
        path: Path,
        name: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        pool: ThreadPoolExecutor,
        rows: int = 0,
        crc32: int = 0,
    ) -> None:
        """Open `path` and cut it to its first `rows`, whose checksum is `crc32`; `pool` computes further checksums."""
        self.path = path
        self.rows = rows
        self.crc32 = crc32
        self._name = name
        self._dtype = dtype
        self._shape = shape
        self._pool = pool
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            os.truncate(self._file, PAGE + rows * row_bytes(dtype, shape))
            os.lseek(self._file, 0, os.SEEK_END)
            self.commit()
        except BaseException:
            self.close()
            raise

    def append(self, rows: Tensor) -> None:
        """Add `rows` at the end; they count from the next commit on."""
        payload = as_bytes(rows)
        checksum = self._pool.submit(zlib.crc32, payload, self.crc32)
        try:
            start, offset = 0, PAGE + self.rows * row_bytes(self._dtype, self._shape)
            while start < len(payload):  # each write ends at a multiple of _WRITE in the file
                start += os.write(self._file, payload[start : start + _WRITE - (offset + start) % _WRITE])
        finally:
            self.crc32 = checksum.result()  # also on an error: the pool must not read `rows` any longer
        self.rows += len(rows)

    def flush(self) -> None:
        """Wait until everything appended is on disk."""
        os.fsync(self._file)

    def commit(self) -> None:
        """Write the number of rows to the header."""
        os.pwrite(self._file, header(self._name, self._dtype, (self.rows, *self._shape)), 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def header(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """The first page of a file with one tensor: the length of the JSON, then the JSON, padded with spaces.

    >>> header("values", torch.float16, (2, 3))[8:92]
    b'{"values":{"dtype":"F16","shape":[2,3],"data_offsets":[0,12]}}                      '
    """
    size = shape[0] * row_bytes(dtype, shape[1:])
    fields = {name: {"dtype": code_of(dtype), "shape": list(shape), "data_offsets": [0, size]}}
    text = json.dumps(fields, separators=(",", ":")).encode()
    return (PAGE - 8).to_bytes(8, "little") + text.ljust(PAGE - 8)


def row_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """The size of one row."""
    return math.prod(shape) * dtype.itemsize


def code_of(dtype: torch.dtype) -> str:
    """The name of a dtype in safetensors.

    >>> code_of(torch.bfloat16)
    'BF16'
    """
    if dtype not in _CODES:
        raise HarvestError(f"cannot store {dtype}; pass a transform= that converts to {', '.join(map(str, _CODES))}")
    return _CODES[dtype]


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which must outlive the view; do not write to that of a copy on write.

    >>> numbers = torch.tensor([1, 2], dtype=torch.int16)
    >>> bytes(as_bytes(numbers))
    b'\\x01\\x00\\x02\\x00'
    """
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    if not tensor.numel():
        return memoryview(b"")
    address = storage_address(tensor) + int(tensor.storage_offset()) * tensor.itemsize
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(address)).cast("B")
