"""GGUF files as read-only data: typed metadata, checked tensors, rows dequantized a few at a time.

Whatever is wrong with a file is a `CheckpointError` that names it; a quantization that the `gguf` package cannot undo
is an `UnsupportedModel`. What the metadata and tensors mean for a model is convert.py's business.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType, ReaderTensor
from gguf.constants import GGUFEndian
from gguf.quants import dequantize

from engine.errors import CheckpointError, UnsupportedModel

_CHUNK_ELEMENTS = 1 << 22
"""Elements dequantized at once: 16 MiB of float32, whatever the tensor's size."""

_REPORTED_BYTES = 1 << 16
"""How much of the header is read, some milliseconds of it, between two calls of `on_read`."""

_Value = TypeVar("_Value", str, int, float, bool)


class GgufFile:
    """One GGUF file, memory-mapped for as long as this object lives.

    Attributes:
        path: Where it is.
        tensors: By GGUF name, in file order.
    """

    def __init__(self, path: Path, on_read: Callable[[], None] = lambda: None) -> None:
        """Read the header, which takes a second where a large vocabulary is in it.

        `on_read` is called now and then meanwhile; what it raises gives up.

        Raises:
            CheckpointError: The file cannot be read, is no GGUF file, or ends too early.
        """
        self.path = path
        try:
            self._reader = _BoundedReader(path, on_read)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        except (ValueError, LookupError, TypeError, ArithmeticError, MemoryError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is not a whole GGUF file: {error.args[0] if error.args else error}"
            ) from error
        if self._reader.endianess != GGUFEndian.LITTLE:
            raise UnsupportedModel(f"{path} is a big-endian GGUF file; only little-endian ones are read")
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}
        self._asked: set[str] = set()

    def value(self, key: str, kind: type[_Value], default: _Value | None = None) -> _Value:
        """Return the metadata value of `key`.

        Raises:
            CheckpointError: It is of another kind, or missing and without a default.
        """
        content = self._content(key)
        if content is None:
            if default is None:
                raise CheckpointError(f"{self.path}: metadata {key} is missing")
            return default
        return self._checked(key, content, kind)

    def values(self, key: str, kind: type[_Value]) -> list[_Value] | None:
        """Return the metadata list of `key`, or None where there is none.

        Raises:
            CheckpointError: It is no list, or holds values of another kind.
        """
        content = self._content(key)
        if content is None:
            return None
        if not isinstance(content, list):
            raise CheckpointError(f"{self.path}: metadata {key} must be a list, got {content!r}")
        return [self._checked(key, item, kind) for item in content]

    def has(self, key: str) -> bool:
        """Whether the metadata holds `key`."""
        self._asked.add(key)
        return self._reader.get_field(key) is not None

    def unasked(self, prefix: str) -> list[str]:
        """Return the metadata keys that begin with `prefix` and that nobody has asked for."""
        return sorted(key for key in self._reader.fields if key.startswith(prefix) and key not in self._asked)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, outermost dimension first."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """Return a tensor of one dimension."""
        tensor = self.tensors[name]
        return self._dequantized(tensor, tensor.data)

    def rows(
        self, tensor: ReaderTensor, order: npt.NDArray[np.intp] | None = None, expert: int | None = None
    ) -> Iterator[npt.NDArray[np.float32]]:
        """Dequantize `tensor`, or one expert's matrix of it, a few rows at a time, in the given order of rows.

        Yields:
            Float32 arrays `[num_rows, columns]`, together the whole tensor; one `[columns]` for a vector.

        Raises:
            UnsupportedModel: The quantization is not one that can be undone.
        """
        data = tensor.data if expert is None else tensor.data[expert]
        if data.ndim == 1:
            values = self._dequantized(tensor, data)
            yield values if order is None else values[order]
            return
        num_rows = max(1, _CHUNK_ELEMENTS // int(tensor.shape[0]))
        for start in range(0, len(data), num_rows):
            stop = start + num_rows
            yield self._dequantized(tensor, data[start:stop] if order is None else data[order[start:stop]])

    def _dequantized(self, tensor: ReaderTensor, data: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        try:
            return np.asarray(dequantize(data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError:
            raise UnsupportedModel(
                f"{self.path}: tensor {tensor.name} is stored as {tensor.tensor_type.name}, "
                f"a form the gguf package cannot turn into numbers"
            ) from None

    def _content(self, key: str) -> Any:
        self._asked.add(key)
        field = self._reader.get_field(key)
        if field is None:
            return None
        try:
            return field.contents()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: metadata {key} is not UTF-8: {error}") from error

    def _checked(self, key: str, content: Any, kind: type[_Value]) -> _Value:
        if type(content) is not kind:
            raise CheckpointError(f"{self.path}: metadata {key} must be of type {kind.__name__}, got {content!r}")
        return content


class _BoundedReader(GGUFReader):
    """The package's reader, made to notice the file's end, and to read lists at once instead of item by item.

    Reading past the end yields short arrays there, and a corrupt length then sends it through billions of empty items.
    A vocabulary of 256k tokens takes it half a minute.
    """

    def __init__(self, path: Path, on_read: Callable[[], None]) -> None:
        self._on_read = on_read
        self._reported_end = 0
        super().__init__(path)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        start = int(orig_offs)
        self._report(start)
        if raw_type != GGUFValueType.ARRAY:
            single: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(orig_offs, raw_type)
            return single
        kind, length = self._get(start, np.uint32), self._get(start + 4, np.uint64)
        item, num_items, first = GGUFValueType(int(kind[0])), int(length[0]), start + 12
        if num_items > len(self.data):
            raise ValueError(f"a list of {num_items} values cannot be in {len(self.data)} bytes")
        if item == GGUFValueType.STRING:
            end, items = self._strings(first, num_items)
        elif item in self.gguf_scalar_to_np:
            items = [self._get(first, self.gguf_scalar_to_np[item], num_items)]
            end = first + int(items[0].nbytes)
        else:
            raise ValueError(f"lists of {item.name} are not read")
        return end - start, [kind, length, *items], list(range(2, 2 + len(items))), [GGUFValueType.ARRAY, item]

    def _strings(self, start: int, num_items: int) -> tuple[int, list[npt.NDArray[np.uint8]]]:
        """Return where the strings end, and their bytes."""
        content = np.asarray(self.data)
        buffer = content.data
        length_of = struct.Struct("<Q" if self.byte_order == "I" else ">Q").unpack_from
        items, end = [], start
        for _ in range(num_items):
            self._report(end)
            self._check_end(end + 8)
            begin = end + 8
            end = begin + int(length_of(buffer, end)[0])
            self._check_end(end)
            items.append(content[begin:end])
        return end, items

    def _get(self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Any = None) -> npt.NDArray[Any]:
        self._check_end(int(offset) + np.dtype(dtype).itemsize * int(count))
        values: npt.NDArray[Any] = super()._get(offset, dtype, count, override_order)
        return values

    def _report(self, offset: int) -> None:
        if offset >= self._reported_end:
            self._reported_end = offset + _REPORTED_BYTES
            self._on_read()

    def _check_end(self, end: int) -> None:
        if end > len(self.data):
            raise ValueError(f"it ends after {len(self.data)} bytes where at least {end} are needed (cut short?)")
