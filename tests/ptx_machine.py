"""A machine for PTX in NumPy: runs what Triton compiles for NVIDIA where there is no GPU.

All threads of a program run together, one instruction at a time, so a branch must be the same for all of them. Only
what our kernels need is here; anything else raises. Registers are arrays of unsigned words, one for each thread.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[Any]
SPACE = 1 << 20  # before and between tensors: an address beyond a tensor's bytes is an error


class Memory:
    """Copies of tensors at made-up addresses, and which bytes belong to one."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._spans, self.places, at = [_span(tensor) for tensor in tensors], list[int](), 4096
        for span in self._spans:
            self.places.append(at + span.data_ptr() % 256)
            at = (self.places[-1] + span.nbytes) // 256 * 256 + 1024
        self.bytes, self.known = np.zeros(at, np.uint8), np.zeros(at, bool)
        for place, span in zip(self.places, self._spans, strict=True):
            own = slice(place, place + span.nbytes)
            self.bytes[own], self.known[own] = span.numpy(), True

    def keep(self) -> None:
        """Write what is there now into the tensors."""
        for place, span in zip(self.places, self._spans, strict=True):
            span.copy_(torch.from_numpy(self.bytes[place : place + span.nbytes]))


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes from a tensor's first element to its last."""
    count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((count,), (1,)).view(torch.uint8)


@dataclass
class Statement:
    guard: str
    opcode: str
    operands: list[str]


@dataclass
class Program:
    """A kernel's statements, and where its labels are."""

    statements: list[Statement]
    labels: dict[str, int] = field(default_factory=dict)


def parse(ptx: str) -> Program:
    """A compiled kernel."""
    body = ptx[ptx.index(".entry") :]
    return parse_body(body[body.index("\n{") + 2 :])


def parse_body(body: str) -> Program:
    body = re.sub(r"//[^\n]*|^\s*\.loc.*$", "", body, flags=re.MULTILINE)
    program = Program([])
    for raw in body.split(";"):
        line = " ".join(raw.split()).strip()
        while line[:1] in ("{", "}"):
            line = line[1:].strip()
        while label := re.match(r"(\$\w+):\s*", line):
            program.labels[label[1]] = len(program.statements)
            line = line[label.end() :]
        while line[:1] in ("{", "}"):
            line = line[1:].strip()
        if not line or line.startswith("."):
            continue
        told = re.match(r"(@!?%?\w+\s+)?([\w.:]+)\s*(.*)", line)
        assert told, line
        operands = [x.strip() for x in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{\[]+", told[3])]
        program.statements.append(Statement((told[1] or "").strip(), told[2], [x for x in operands if x]))
    return program


def _float(words: Words) -> Words:
    return words.astype(np.uint32).view(np.float32)


def _bits(numbers: Words) -> Words:
    return np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)


def _halves(words: Words) -> Words:
    """(…, 2) float16."""
    return np.ascontiguousarray(words.astype(np.uint32))[..., None].view(np.float16)


def _from_halves(halves: Words) -> Words:
    return np.ascontiguousarray(halves.astype(np.float16)).view(np.uint32)[..., 0]


SIGNED = {"s32": np.int32, "s64": np.int64, "u32": np.uint32, "u64": np.uint64, "b32": np.uint32, "b64": np.uint64,
          "s16": np.int16, "u16": np.uint16, "b16": np.uint16}  # fmt: skip
COMPARE: dict[str, Callable[[Words, Words], Words]] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
    "ne": lambda x, y: (x < y) | (x > y),
    "leu": lambda x, y: ~(x > y), "geu": lambda x, y: ~(x < y), "gtu": lambda x, y: ~(x <= y),
    "ltu": lambda x, y: ~(x >= y), "equ": lambda x, y: ~((x < y) | (x > y)), "neu": np.not_equal,
}  # fmt: skip
"""Those that end in u are true of a NaN."""


def prmt(a: Words, b: Words, selector: Words) -> Words:
    """`prmt.b32` in its default mode."""
    whole = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    found = np.zeros_like(whole)
    for i in range(4):
        chosen = (selector.astype(np.uint64) >> np.uint64(4 * i)) & np.uint64(15)
        byte = (whole >> (chosen % np.uint64(8) * np.uint64(8))) & np.uint64(255)
        byte = np.where(chosen >= 8, np.where(byte >= 128, np.uint64(255), np.uint64(0)), byte)
        found |= byte << np.uint64(8 * i)
    return found.astype(np.uint32)


def lop3(a: Words, b: Words, c: Words, table: int) -> Words:
    found = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found


def mma(a: Words, b: Words, c: Words, kind: tuple[str, str]) -> Words:
    """`mma` of one warp: registers (count, 32) of fragments of m16n8k*, rows by columns."""
    g, t = np.arange(32) // 4, np.arange(32) % 4
    each = {"s8": 4, "u8": 4, "f16": 2}[kind[0]]
    types: dict[str, Any] = {"s8": np.int8, "u8": np.uint8, "f16": np.float16}
    k = 4 * each * len(b)
    parts = [
        np.ascontiguousarray(x.astype(np.uint32))[..., None].view(types[how])
        for x, how in zip((a, b), kind, strict=True)
    ]
    wide = np.float32 if kind[0] == "f16" else np.int64
    left, right, sums = np.zeros((16, k), wide), np.zeros((k, 8), wide), np.zeros((16, 8), wide)
    for i in range(len(a)):
        for e in range(each):
            left[g + 8 * (i % 2), each * t + e + i // 2 * 4 * each] = parts[0][i, :, e]
    for i in range(len(b)):
        for e in range(each):
            right[each * t + e + i * 4 * each, g] = parts[1][i, :, e]
    out = _float(c) if kind[0] == "f16" else c.astype(np.uint32).view(np.int32)
    for i in range(4):
        sums[g + i // 2 * 8, 2 * t + i % 2] = out[i]
    sums = sums + left @ right
    found = np.stack([sums[g + i // 2 * 8, 2 * t + i % 2] for i in range(4)])
    return _bits(found) if kind[0] == "f16" else found.astype(np.int32).view(np.uint32)


class Machine:
    def __init__(self, program: Program, memory: Memory, params: Sequence[int], threads: int, shared: int) -> None:
        self._program, self._memory, self._params, self._threads = program, memory, params, threads
        self._shared = np.zeros(shared + 16, np.uint8)

    def run_text(self, registers: dict[str, Words]) -> dict[str, Words]:
        """Straight code, from the registers that it reads."""
        self.registers = dict(registers)
        for each in self._program.statements:
            self._step(each, np.ones(self._threads, bool))
        return self.registers

    def run(self, at: tuple[int, int, int], of: tuple[int, int, int]) -> None:
        """The program `at` of a grid."""
        n, self.registers = self._threads, dict[str, Words]()
        self.registers["%tid.x"] = np.arange(n, dtype=np.uint32)
        for i, axis in enumerate("xyz"):
            self.registers[f"%ctaid.{axis}"] = np.full(n, at[i], np.uint32)
            self.registers[f"%nctaid.{axis}"] = np.full(n, of[i], np.uint32)
        self.registers["global_smem"] = np.zeros(n, np.uint32)
        counter = 0
        while counter < len(self._program.statements):
            each = self._program.statements[counter]
            counter += 1
            active = np.ones(n, bool)
            if each.guard:
                active = self.registers[each.guard.lstrip("@!")] ^ each.guard.startswith("@!")
            if each.opcode in ("bra", "bra.uni", "ret"):
                assert active.all() or not active.any(), "threads part ways"
                if active.any():
                    counter = self._program.labels[each.operands[0]] if each.opcode != "ret" else 1 << 60
            else:
                self._step(each, active)

    def _read(self, operand: str) -> Words:
        negative = operand.startswith("-") and not operand[1:2].isdigit()
        if operand.startswith("0f"):
            return np.full(self._threads, int(operand[2:], 16), np.uint32)
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", operand):
            return np.full(self._threads, int(operand, 0) & (2**64 - 1), np.uint64)
        assert not negative
        return self.registers[operand]

    def _write(self, operand: str, value: Words, active: Words) -> None:
        if operand == "_":
            return
        if not active.all():
            value = np.where(active, value, self.registers.get(operand, np.zeros_like(value)))
        self.registers[operand] = value

    def _address(self, operand: str) -> Words:
        base, _, offset = operand.strip("[] ").partition("+")
        found = self._read(base.strip()).astype(np.int64)
        return found + int(offset) if offset.strip() else found

    @staticmethod
    def _check_aligned(space: str, address: Words, size: int, active: Words) -> None:
        """Numbers that are read or written together lie at a multiple of their size, or a GPU stops."""
        assert space != "global" or not (address[active] % size).any(), "not aligned"

    def _gather(self, space: str, address: Words, size: int, active: Words) -> Words:
        memory = self._memory.bytes if space == "global" else self._shared
        at = np.where(active, address, 0)[:, None] + np.arange(size)
        if space == "global":
            assert self._memory.known[at[active]].all(), "reads beyond a tensor"
        return np.ascontiguousarray(memory[at]).view(f"u{size}")[:, 0]

    def _scatter(self, space: str, address: Words, value: Words, size: int, active: Words) -> None:
        memory = self._memory.bytes if space == "global" else self._shared
        at = address[active][:, None] + np.arange(size)
        if space == "global":
            assert self._memory.known[at].all(), "writes beyond a tensor"
        memory[at] = np.ascontiguousarray(value[active].astype(f"u{size}"))[:, None].view(np.uint8)

    def _step(self, each: Statement, active: Words) -> None:
        op, *how = each.opcode.split(".")
        kind = how[-1] if how else ""
        to, *rest = each.operands or [""]
        if op in ("bar", "fence", "membar", "griddepcontrol"):
            return
        if op == "ld":
            self._load(to, rest[0], how, active)
        elif op == "st":
            size = int(kind[1:]) // 8
            values = [x.strip() for x in rest[0].strip("{} ").split(",")]
            self._check_aligned(how[0], self._address(to), size * len(values), active)
            for i, value in enumerate(values):
                self._scatter(how[0].partition(":")[0], self._address(to) + size * i, self._read(value), size, active)
        elif op == "mma":
            self._mma(to, rest, how)
        elif op == "ldmatrix":
            self._matrix(to, rest[0])
        elif op == "shfl":
            self._shuffle(to.partition("|")[0], rest, how, active)
        elif op == "redux":
            lanes = self._read(rest[0]).astype(np.uint32).view(np.int32).reshape(-1, 32)
            assert kind == "s32"
            found = {"max": lanes.max, "min": lanes.min}[how[1]](1)
            self._write(to, np.repeat(found, 32).view(np.uint32), active)
        elif op == "mov" and to.startswith("{"):
            whole = self._read(rest[0]).astype(np.uint32)
            for i, name in enumerate(x.strip() for x in to.strip("{} ").split(",")):
                self._write(name, (whole >> np.uint32(16 * i)) & np.uint32(0xFFFF), active)
        elif op == "mov" and rest[0].startswith("{"):
            low, high = (self._read(x.strip()).astype(np.uint32) for x in rest[0].strip("{} ").split(","))
            self._write(to, low | high << np.uint32(16), active)
        else:
            with np.errstate(all="ignore"):
                self._write(to, self._compute(op, how, kind, [self._read(x) for x in rest], rest), active)

    def _load(self, to: str, place: str, how: list[str], active: Words) -> None:
        if how[0] == "param":
            index = int(re.findall(r"_(\d+)\]", place)[0])
            bits = np.uint64(self._params[index] & (2**64 - 1))
            self._write(
                to,
                np.full(self._threads, bits if how[-1] in ("b64", "u64") else np.uint32(bits & np.uint64(0xFFFFFFFF))),
                active,
            )
            return
        size, space = int(how[-1][1:]) // 8, how[0].partition(":")[0]
        names = [x.strip() for x in to.strip("{} ").split(",")]
        self._check_aligned(space, self._address(place), size * len(names), active)
        for i, name in enumerate(names):
            self._write(name, self._gather(space, self._address(place) + size * i, size, active), active)

    def _mma(self, to: str, rest: list[str], how: list[str]) -> None:
        names = [x.strip() for x in to.strip("{} ").split(",")]
        a, b, c = ([self._read(x.strip()).astype(np.uint32) for x in part.strip("{} ").split(",")] for part in rest)
        kinds = (how[-3], how[-2])
        warps = [slice(32 * w, 32 * w + 32) for w in range(self._threads // 32)]
        found = [mma(*(np.stack([x[warp] for x in part]) for part in (a, b, c)), kinds) for warp in warps]
        for i, name in enumerate(names):
            self.registers[name] = np.concatenate([x[i] for x in found])

    def _matrix(self, to: str, place: str) -> None:
        names, address = [x.strip() for x in to.strip("{} ").split(",")], self._address(place).reshape(-1, 32)
        found = np.zeros((len(names), *address.shape), np.uint32)
        for w in range(len(address)):
            for i in range(len(names)):
                rows = address[w, 8 * i : 8 * i + 8][:, None] + np.arange(16)
                found[i, w] = np.ascontiguousarray(self._shared[rows]).view(np.uint32).reshape(32)
        for name, words in zip(names, found, strict=True):
            self.registers[name] = words.reshape(-1)

    def _shuffle(self, to: str, rest: list[str], how: list[str], active: Words) -> None:
        value, by = self._read(rest[0]).astype(np.uint32), self._read(rest[1]).astype(np.int64)
        lane = np.arange(self._threads)
        source = {"bfly": lane % 32 ^ by, "idx": by % 32, "down": np.minimum(lane % 32 + by, 31)}[how[1]]
        self._write(to, value[lane // 32 * 32 + source], active)

    def _compute(self, op: str, how: list[str], kind: str, x: list[Words], names: list[str]) -> Words:
        if kind == "f32" and op not in ("cvt", "setp", "selp", "mov"):
            return _bits(self._of_floats("nan_max" if "NaN" in how else op, [_float(each) for each in x]))
        if kind == "f16x2" and op != "cvt":
            a = [_halves(each).astype(np.float64) for each in x]
            results = {
                "mul": lambda: a[0] * a[1], "add": lambda: a[0] + a[1], "fma": lambda: a[0] * a[1] + a[2],
                "max": lambda: (np.maximum if "NaN" in how else np.fmax)(a[0], a[1]), "abs": lambda: np.abs(a[0]),
            }  # fmt: skip
            return _from_halves(results[op]())
        if op == "mov":
            return x[0].astype(np.uint64 if kind in ("b64", "u64") else np.uint32) if kind != "pred" else x[0] != 0
        if op == "cvt":
            return self._convert(how, x)
        if op == "setp":
            if kind == "f32":
                return COMPARE[how[0]](_float(x[0]), _float(x[1]))
            return COMPARE[how[0]](*(self._as(each, kind) for each in x[:2]))
        if op == "selp":
            return np.where(
                x[2],
                x[0].astype(np.uint32 if kind.endswith("32") else np.uint64),
                x[1].astype(np.uint32 if kind.endswith("32") else np.uint64),
            )
        if op in ("and", "or", "xor", "not") and kind == "pred":
            return {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}[op](*x)
        if op == "prmt":
            return prmt(*(each.astype(np.uint32) for each in x))
        if op == "lop3":
            return lop3(*(each.astype(np.uint32) for each in x[:3]), int(names[3], 0))
        return self._of_integers(op, how, kind, x)

    @staticmethod
    def _as(words: Words, kind: str) -> Words:
        return words.astype(f"u{int(kind[1:]) // 8}").view(SIGNED[kind])

    def _of_integers(self, op: str, how: list[str], kind: str, x: list[Words]) -> Words:
        wide = "wide" in how
        size = int(kind[1:]) // 8
        a = [self._as(each, kind) for each in x]
        if op in ("shl", "shr"):
            by = np.minimum(x[1].astype(np.uint32), 8 * size - 1).astype(f"u{size}")
            moved = a[0] << by.view(a[0].dtype) if op == "shl" else a[0] >> by.view(a[0].dtype)
            return np.where(
                x[1].astype(np.uint32) < 8 * size, moved, 0 if a[0].dtype.kind == "u" else a[0] >> (8 * size - 1)
            ).view(f"u{size}")
        if op == "bfe":
            start, count = (x[1].astype(np.int64) & 255), (x[2].astype(np.int64) & 255)
            field_ = (x[0].astype(np.int64) >> start) & ((1 << count) - 1)
            if kind == "s32":
                field_ = np.where(field_ >> (count - 1) & 1, field_ - (1 << count), field_)
            return field_.astype(np.int32).view(np.uint32)
        if wide and op in ("mul", "mad"):
            product = a[0].astype(np.int64) * a[1].astype(np.int64)
            return (product + (x[2].view(np.int64) if op == "mad" else 0)).view(np.uint64)
        if "hi" in how:
            assert op == "mul", how
            product = a[0].astype(np.int64) * a[1].astype(np.int64)
            return (product >> 8 * size).astype(a[0].dtype).view(f"u{size}")
        results: dict[str, Callable[[], Words]] = {
            "add": lambda: a[0] + a[1], "sub": lambda: a[0] - a[1], "mul": lambda: a[0] * a[1],
            "mad": lambda: a[0] * a[1] + a[2], "min": lambda: np.minimum(a[0], a[1]),
            "max": lambda: np.maximum(a[0], a[1]), "and": lambda: a[0] & a[1], "or": lambda: a[0] | a[1],
            "xor": lambda: a[0] ^ a[1], "not": lambda: ~a[0], "neg": lambda: -a[0], "abs": lambda: np.abs(a[0]),
            "div": lambda: (np.sign(a[0]) * np.sign(a[1]) * (np.abs(a[0]) // np.maximum(np.abs(a[1]), 1))),
            "rem": lambda: np.fmod(a[0], np.where(a[1] == 0, 1, a[1])),
        }  # fmt: skip
        return results[op]().astype(a[0].dtype).view(f"u{size}")

    @staticmethod
    def _of_floats(op: str, a: list[Words]) -> Words:
        wide = [each.astype(np.float64) for each in a]
        results: dict[str, Callable[[], Words]] = {
            "fma": lambda: wide[0] * wide[1] + wide[2], "mul": lambda: a[0] * a[1], "add": lambda: a[0] + a[1],
            "sub": lambda: a[0] - a[1], "max": lambda: np.fmax(a[0], a[1]), "min": lambda: np.fmin(a[0], a[1]),
            "nan_max": lambda: np.maximum(a[0], a[1]), "abs": lambda: np.abs(a[0]), "neg": lambda: -a[0],
            "ex2": lambda: np.exp2(wide[0]), "rcp": lambda: 1 / wide[0], "div": lambda: wide[0] / wide[1],
        }  # fmt: skip
        return results[op]().astype(np.float32)

    @staticmethod
    def _convert(how: list[str], x: list[Words]) -> Words:
        target, source = how[-2:]
        if (target, source) == ("f16x2", "f32"):  # the first operand is the upper half
            return _from_halves(np.stack((_float(x[1]), _float(x[0])), -1))
        if (target, source) == ("f32", "f16"):
            return _bits(x[0].astype(np.uint16).view(np.float16))
        if (target, source) == ("f32", "bf16"):
            return (x[0].astype(np.uint32) & np.uint32(0xFFFF)) << np.uint32(16)
        if (target, source) == ("f32", "s32"):
            return _bits(x[0].astype(np.uint32).view(np.int32))
        if source in SIGNED and target in SIGNED:
            return Machine._as(x[0], source).astype(SIGNED[target]).view(f"u{int(target[1:]) // 8}")
        raise NotImplementedError(how)


def run(ptx: str, params: Sequence[Any], grid: tuple[int, int, int], threads: int, shared: int) -> None:
    """Run a kernel: tensors on the CPU become addresses, float numbers their bits."""
    memory = Memory([x for x in params if isinstance(x, torch.Tensor)])
    places = iter(memory.places)
    words = [
        next(places) if isinstance(x, torch.Tensor)
        else int(np.float32(x).view(np.uint32)) if isinstance(x, float) else int(x) for x in params
    ]  # fmt: skip
    machine = Machine(parse(ptx), memory, words, threads, shared)
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                machine.run((x, y, z), grid)
    memory.keep()


def run_text(text: str, outputs: int, inputs: Sequence[Words]) -> list[Words]:
    """What a text of inline assembly gives: operands $0, $1, … are its outputs, then its inputs, words of a warp."""
    program = parse_body(re.sub(r"\$(\d+)", r"o\1", text))
    given = {f"o{outputs + i}": x for i, x in enumerate(inputs)}
    registers = Machine(program, Memory([]), [], 32, 0).run_text(given)
    return [registers[f"o{i}"] for i in range(outputs)]
