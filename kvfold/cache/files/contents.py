"""Files that are read only if not one bit of them has changed.

A file is a safetensors file. Its metadata hold its kind and version, plain data as JSON, and a SHA-256 of the whole
file, computed with zeros in place of the checksum's own digits. A checksum is no signature, so loading also checks
everything that it takes out of `Contents` against what it must be.
"""

import errno
import hashlib
import json
import mmap
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version as package_version
from math import prod
from reprlib import repr as short
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvfold.cache.files.paths import check_input, replacing_path
from kvfold.formats.numbers import LARGEST

T = TypeVar("T")

FLOATS = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
"""Floating-point dtypes by torch's names."""


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype, as in `FLOATS`."""
    return str(dtype).removeprefix("torch.")


_UNKNOWN = "0" * 64
_CHECKSUM = re.compile(rb'"sha256":"([0-9a-f]{64})"')  # never within a string: JSON escapes quotes there


@dataclass(eq=False)
class Contents:
    """Plain data and tensors of one object in a file, including those of its parts.

    Saving puts them in. Loading takes each out, once, and says what it must be like; `done` raises if anything is left.
    """

    data: dict[str, Any] = field(default_factory=dict)  # values that go into JSON
    # Tensors by name; names of those in part `p` start with `p.`.
    tensors: dict[str, Tensor] = field(default_factory=dict)
    where: str = ""  # names of the parts that lead here, for messages

    def put(self, name: str, part: "Contents") -> None:
        """Add a part."""
        self.data[name] = part.data
        self.tensors |= {f"{name}.{key}": tensor for key, tensor in part.tensors.items()}

    def part(self, name: str) -> "Contents":
        """Take a part out."""
        data = self.take(name, dict)
        own = [key for key in self.tensors if key.startswith(f"{name}.")]
        tensors = {key.removeprefix(f"{name}."): self.tensors.pop(key) for key in own}
        return Contents(data, tensors, f"{self.where}{name}.")

    def take(self, name: str, kind: type[T]) -> T:
        """Take out a value of exactly the type `kind`."""
        value = self.data.pop(name, None)
        if type(value) is not kind:
            raise ValueError(f"{self.where}{name} is {short(value)}, which is no {kind.__name__}")
        return value

    def lacks(self, name: str) -> bool:
        """Whether `name` is there and null; then it is taken out."""
        if name not in self.data or self.data[name] is not None:
            return False
        del self.data[name]
        return True

    def number(self, name: str, least: int = 0, most: int = LARGEST) -> int:
        """Take out a whole number."""
        return self._within(name, self.take(name, int), least, most)

    def numbers(self, name: str, count: int | None = None, least: int = 0, most: int = LARGEST) -> list[int]:
        """Take out a list of whole numbers, `count` of them if that is given."""
        values = self.take(name, list)
        if (count is not None and len(values) != count) or any(type(value) is not int for value in values):
            raise ValueError(f"{self.where}{name} is {short(values)}, which are no {count or ''} whole numbers")
        return [self._within(name, value, least, most) for value in values]

    def _within(self, name: str, value: int, least: int, most: int) -> int:
        if not least <= value <= most:
            raise ValueError(f"{self.where}{name} is {short(value)}, which is not between {least} and {most}")
        return value

    def dtype(self, name: str) -> torch.dtype:
        """Take out a floating-point dtype."""
        value = self.take(name, str)
        if value not in FLOATS:
            raise ValueError(f"{self.where}{name} is {short(value)}, which is none of {', '.join(FLOATS)}")
        return FLOATS[value]

    def tensor(self, name: str, dtypes: Collection[torch.dtype], shape: Sequence[int | None]) -> Tensor:
        """Take out a tensor, finite, with one of `dtypes` and the shape `shape`; None there stands for any length."""
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            raise ValueError(f"{self.where}{name} is missing")
        fits = len(shape) == tensor.ndim and all(
            length in (None, own) for length, own in zip(shape, tensor.shape, strict=True)
        )
        strides = prod(max(length, 1) for length in tensor.shape)  # empty tensors have strides, too
        if not fits or strides >= 2**63 or tensor.dtype not in dtypes:
            raise ValueError(
                f"{self.where}{name} is {tensor.dtype} of the shape {tuple(tensor.shape)}, in the place of "
                f"{' or '.join(map(str, dtypes))} of the shape {tuple(shape)}"
            )
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(f"{self.where}{name} holds a NaN or an infinity")
        return tensor

    def done(self) -> None:
        """Raise if something has not been taken out."""
        left = [*self.data, *self.tensors]
        if left:
            raise ValueError(f"{self.where}{left[0]} has no place here")


def write(path: str | os.PathLike[str], kind: str, version: int, contents: Contents) -> None:
    """Write `contents` into a file of kind `kind`, whole or not at all; tensors may lie anywhere.

    Raises ValueError if a tensor has a floating-point dtype that is none of `FLOATS`, OSError if the file cannot be
    written.
    """
    tensors: dict[str, Tensor] = {}
    storages = set()
    for name, tensor in contents.tensors.items():
        if tensor.is_floating_point() and tensor.dtype not in FLOATS.values():
            raise ValueError(f"{name} is {tensor.dtype}: a file holds {', '.join(FLOATS)} and integers")
        own = tensor.detach().cpu().contiguous()
        storage = own.untyped_storage().data_ptr()
        tensors[name] = own.clone() if storage in storages else own  # safetensors refuses shared memory
        storages.add(storage)
    metadata = {
        "kind": kind, "version": str(version), "kvfold": package_version("kvfold"),
        "data": json.dumps(contents.data), "sha256": _UNKNOWN,
    }  # fmt: skip
    with replacing_path(path) as scratch:
        try:
            save_file(tensors, scratch, metadata)
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error)) from error
        with open(scratch, "r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as raw:
            header = _header(raw)
            # safetensors shuffles metadata (its issue 584). In a fixed order, equal contents make equal files.
            entries = json.loads(raw[header]) | {"__metadata__": metadata}
            text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
            raw[header] = text.ljust(len(raw[header]))
            digits, checksum = _checksum(raw)
            raw[digits] = checksum
            file.seek(header.start)
            file.write(raw[header])


def read(path: str | os.PathLike[str], kind: str, version: int) -> Contents:
    """What `write` wrote, with tensors on the CPU.

    Raises FileNotFoundError if there is no such file, ValueError if it is of another kind or version, or damaged.
    """
    check_input(path)
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            metadata = check(raw, kind, version)
        data = json.loads(metadata.get("data", "null"))
        if not isinstance(data, dict):
            raise ValueError("the file's data are no JSON object")
        with safe_open(path, framework="pt") as opened:
            if opened.metadata() != metadata:
                raise ValueError("the file was replaced while it was read")
            # safetensors' own tensors keep the file mapped.
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    except (ValueError, SafetensorError, TypeError, RecursionError) as error:  # torch and JSON raise the last two
        raise ValueError(f"path = {str(path)!r}: {error}") from None
    return Contents(data, tensors)


def check(raw: bytearray | mmap.mmap, kind: str, version: int) -> dict[str, str]:
    """Metadata of the bytes of a file; raises ValueError if they are not what `write` wrote."""
    try:
        metadata = json.loads(raw[_header(raw)].decode()).get("__metadata__", {})
        found_kind, found_version = metadata.get("kind"), metadata.get("version")
    except (ValueError, AttributeError, RecursionError):
        raise ValueError("the file is damaged, or no safetensors file") from None
    if found_kind != kind:
        raise ValueError(f"the file is no {kind}: its kind is {short(found_kind)}")
    if found_version != str(version):
        raise ValueError(
            f"the file is of version {short(found_version)}, this kvfold reads version {version}: "
            f"kvfold {short(metadata.get('kvfold'))} wrote it"
        )
    digits, checksum = _checksum(raw)
    if raw[digits] != checksum:
        raise ValueError("the file is damaged: its checksum is not that of its content")
    return metadata


def _header(raw: bytearray | mmap.mmap) -> slice:
    """Where a safetensors file's JSON is."""
    return slice(8, 8 + int.from_bytes(raw[:8], "little"))


def _checksum(raw: bytearray | mmap.mmap) -> tuple[slice, bytes]:
    """Where a file's checksum is, and what it must be: the SHA-256 of the file with zeros there."""
    found = list(_CHECKSUM.finditer(raw[_header(raw)]))
    if len(found) != 1:
        raise ValueError("the file is damaged: it has no checksum")
    start, stop = (_header(raw).start + at for at in found[0].span(1))
    digest = hashlib.sha256(raw[:start] + _UNKNOWN.encode())
    digest.update(memoryview(raw)[stop:])
    return slice(start, stop), digest.hexdigest().encode()
