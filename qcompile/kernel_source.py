"""Read a generated module: which tensors its kernels take, and how often each is loaded and stored.

Before: the text that Inductor generated, in C++ or Triton, for an update over [n_blocks, columns] tensors. After: one `Access`
per tensor, counted from the statements of the kernels; no number here is an estimate from formats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from qcompile.runtime.launch import Kernel

KERNEL = re.compile(r"^(\w+) = async_compile\.(triton|cpp_pybinding)\((.*?)r?'''\n(.*?)'''", re.MULTILINE | re.DOTALL)
INPUTS = re.compile(r"^ +((?:\w+, )*\w+,?) = args$", re.MULTILINE)
SHAPE = re.compile(r"assert_size_stride\((\w+), \(([^)]*)\)|^ +(\w+) = empty_strided_\w+\(\(([^)]*)\)", re.MULTILINE)
GROUPED = re.compile(r"assert_size_stride_grouped\((.*)\)$", re.MULTILINE)  # torch 2.14: names, sizes, strides
REUSE = re.compile(r"^ +(\w+) = (?:reinterpret_tensor\()?(\w+)(?:, .*\))?; *del \2", re.MULTILINE)
# A pointer of a function for a class: its name and the column of the table.
BOUND = re.compile(
    r"^ +(?:auto )?(\w+) = (?:reinterpret_cast<[^>]*>\(row\[|(?:tl\.\w+\()+row \+ )(\d+)\b.*$", re.MULTILINE
)
LOOP = re.compile(r"for ?\(int64_t x\d+=")

BYTES = {
    **dict.fromkeys(("double", "int64_t", "fp64", "i64", "u64"), 8),
    **dict.fromkeys(("float", "int32_t", "fp32", "i32", "u32"), 4),
    **dict.fromkeys(("Half", "BFloat16", "half", "bfloat16", "int16_t", "fp16", "bf16", "i16", "u16"), 2),
    **dict.fromkeys(("uint8_t", "int8_t", "bool", "i8", "u8", "i1", "fp8e4nv", "fp8e5"), 1),
    **dict.fromkeys(("Float8_e4m3fn", "Float8_e5m2"), 1),
}


@dataclass(frozen=True, slots=True)
class Access:
    """How often one tensor is read and written by the kernels of a module.

    Attributes:
        tensor: its name in the generated `call`: `arg0_1`, or `buf0` for a temporary.
        dtype: as the kernels spell it.
        columns: elements per block of the update: 1 for what is one number per block, 0 for what is one number in all.
        loads, stores: of each element: load and store statements in Triton, loops that have one in C++.
        fetches, writes: the same, where what a C++ kernel reads again of a block that it holds counts once.
    """

    tensor: str
    dtype: str
    columns: int
    loads: int
    stores: int
    fetches: int
    writes: int

    @property
    def bytes(self) -> int:
        """Of one element."""
        return BYTES[self.dtype]

    @property
    def temporary(self) -> bool:
        """Whether the generated code allocates it."""
        return not self.tensor.startswith("arg")


@dataclass(frozen=True, slots=True)
class GeneratedKernel:
    """One kernel of a module and the call of it.

    Attributes:
        name: of the kernel.
        language: "C++" or "Triton".
        text: its source, which for Triton is a module of its own.
        tensors: of each parameter that is a tensor, in order: its name in the kernel, in the wrapper, and its dtype.
        passes: loops over memory in a Triton kernel that does not hold a block: 0 when it is persistent.
    """

    name: str
    language: str
    text: str = field(repr=False)
    tensors: tuple[tuple[str, str, str], ...] = field(repr=False)
    passes: int

    @property
    def pointers(self) -> dict[str, str]:
        """The wrapper's name of each tensor by the kernel's."""
        return {parameter: tensor for parameter, tensor, _ in self.tensors}


@dataclass(frozen=True, slots=True)
class GeneratedModule:
    """All kernels of a module; `inputs` are the names of its arguments, `columns` the elements per block of each tensor."""

    inputs: tuple[str, ...]
    columns: dict[str, int]
    kernels: tuple[GeneratedKernel, ...]

    def accesses(self) -> tuple[Access, ...]:
        """One record per tensor, in the order in which the kernels name them."""
        counts: dict[str, list[int]] = {}
        dtypes: dict[str, str] = {}
        for kernel in self.kernels:
            for parameter, tensor, dtype in kernel.tensors:
                dtypes.setdefault(tensor, dtype)
                found = (
                    _in_cpp(kernel.text, parameter) if kernel.language == "C++" else _in_triton(kernel.text, parameter)
                )
                counts[tensor] = [a + b for a, b in zip(counts.get(tensor, [0] * 4), found, strict=True)]
        return tuple(Access(name, dtypes[name], self.columns[name], *counts[name]) for name in counts)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a kernel moves per element of the parameter, counted from its loads and stores.

    Attributes:
        loaded, stored: by all load and store statements that are reached for an element, temporaries too.
        read, written: the same, where what a C++ kernel touches again of a block that is still in the cache counts once.
        tensors: what was counted.
    """

    loaded: float
    stored: float
    read: float
    written: float
    tensors: tuple[Access, ...] = field(repr=False)

    @property
    def total(self) -> float:
        """Bytes of memory traffic per element."""
        return self.read + self.written


def traffic(kernel: Kernel) -> Traffic:
    """Bytes per element of the parameter that a generated kernel loads and stores, in C++ or Triton.

    Raises `ValueError` where the source is not what this torch's Inductor is known to write.
    """
    accesses = accesses_of(kernel)

    def total(count: str) -> float:
        return sum(getattr(a, count) * a.columns * a.bytes for a in accesses) / kernel.block_size

    return Traffic(total("loads"), total("stores"), total("fetches"), total("writes"), accesses)


def accesses_of(kernel: Kernel) -> tuple[Access, ...]:
    """One record per tensor: of the function for a class, whose pointers are columns of a table, where there is one."""
    module = read_module(kernel.module or kernel.source)
    if not kernel.module:
        return module.accesses()
    dtypes = {tensor: dtype for one in module.kernels for _, tensor, dtype in one.tensors}
    pointers = {int(column): name for name, column in BOUND.findall(kernel.source)}
    counts: dict[str, list[int]] = {}
    for column, at in enumerate(kernel.columns):
        if column in pointers:
            count = _in_cpp if kernel.language == "C++" else _in_triton
            found = count(BOUND.sub("", kernel.source), pointers[column])
        else:  # a scale, stored at the end of each block
            found = (0, 1, 0, 1)
        tensor = module.inputs[at]
        counts[tensor] = [a + b for a, b in zip(counts.get(tensor, [0] * 4), found, strict=True)]
    if unknown := counts.keys() - dtypes.keys():
        raise ValueError(f"the dtype of {', '.join(sorted(unknown))} is not known")
    return tuple(Access(name, dtypes[name], module.columns[name], *counts[name]) for name in counts)


def read_module(source: str) -> GeneratedModule:
    """Take a module apart. Raises `ValueError` where it is not what this torch's Inductor is known to write."""
    inputs = INPUTS.search(source)
    if inputs is None:
        raise ValueError("the generated module has no line `... = args`")
    names = tuple(name for name in inputs[1].replace(",", " ").split())
    columns = dict.fromkeys(names, 0)
    for tensor, shape in _shapes(source):
        sizes = [size.strip() for size in shape.split(",") if size.strip()]
        columns[tensor] = math.prod(map(int, sizes[1:])) if sizes else 0
    same: dict[str, str] = {}
    for match in REUSE.finditer(source):
        same[match[1]] = match[2]
        columns.setdefault(match[1], columns.get(match[2], 0))
    kernels = tuple(_kernels(source, columns))
    return GeneratedModule(names, columns, kernels)


def _shapes(source: str) -> Iterator[tuple[str, str]]:
    """Names of tensors, and their sizes between commas."""
    for match in SHAPE.finditer(source):
        yield match[1] or match[3], match[2] or match[4] or ""
    for call in GROUPED.findall(source):
        names, sizes = ([a for a in _arguments(group[1:-1]) if a] for group in [*_arguments(call)][:2])
        yield from zip(names, (size[1:-1] for size in sizes), strict=True)


def _kernels(source: str, columns: dict[str, int]) -> Iterator[GeneratedKernel]:
    for name, kind, _, text in KERNEL.findall(source):
        language = "Triton" if kind == "triton" else "C++"
        parameters = dict(_triton_parameters(text, name) if language == "Triton" else _cpp_parameters(text))
        for call in re.findall(rf"^ +{name}(?:\.run)?\((.*)\)$", source, re.MULTILINE):
            given = [re.sub(r"^reinterpret_tensor\(|\.item\(\)$", "", a).split(",")[0] for a in _arguments(call)]
            pairs = zip(parameters.items(), given, strict=False)
            tensors = tuple((p, tensor, dtype) for (p, dtype), tensor in pairs if dtype and tensor in columns)
            yield GeneratedKernel(name, language, text, tensors, len(re.findall(r"for r\d_offset in", text)))


def _triton_parameters(text: str, name: str) -> Iterator[tuple[str, str]]:
    """Names and dtypes; a dtype is empty where the parameter is a size."""
    signature = re.search(r"'signature': \{(.*?)\}", text)
    head = re.search(rf"def {name}\((.*?)\):", text)
    assert signature is not None
    assert head is not None
    dtypes = dict(re.findall(r"'(\w+)': '\*?(\w+)'", signature[1]))
    for parameter in (p.split(":")[0].strip() for p in head[1].split(",")):
        yield parameter, dtypes.get(parameter, "") if "_ptr" in parameter else ""


def _cpp_parameters(text: str) -> Iterator[tuple[str, str]]:
    head = re.search(r'extern "C"[^(]*\(([^)]*)\)', text)
    assert head is not None
    for parameter in head[1].split(","):
        words = parameter.replace("*", " * ").split()
        yield words[-1], words[-3].split("::")[-1] if "*" in words else ""


def _arguments(call: str) -> Iterator[str]:
    """The arguments of a call, by the commas that are in no bracket."""
    depth, begin = 0, 0
    for i, c in enumerate(call):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and not depth:
            yield call[begin:i].strip()
            begin = i + 1
    yield call[begin:].strip()


def _in_triton(text: str, parameter: str) -> tuple[int, int, int, int]:
    """Loads and stores of a pointer, twice: what a Triton kernel reads again it reads from memory."""
    body = text[text.index("@triton.jit") :]
    loads = len(re.findall(rf"tl\.load\({parameter}\b", body)) + len(re.findall(rf"= {parameter}$", body, re.MULTILINE))
    stores = len(re.findall(rf"tl\.store\({parameter}\b", body))
    return loads, stores, loads, stores


def _in_cpp(text: str, parameter: str) -> tuple[int, int, int, int]:
    """In how many innermost loops a pointer is loaded and stored, and in how many outermost ones."""
    mentioned = re.compile(rf"\b{parameter}\b")
    stored = re.compile(rf"\.store\(\s*{parameter}\b|^\s*{parameter}\[.*\] [-+*]?= ")
    inner: tuple[set[int], set[int]] = (set(), set())
    outer: tuple[set[int], set[int]] = (set(), set())
    for line, loops in _lines_in_loops(text[text.index("{", text.index('extern "C"')) :]):
        if mentioned.search(line):
            is_store = stored.search(line) is not None
            inner[is_store].add(loops[-1] if loops else 0)
            outer[is_store].add(loops[0] if loops else 0)
    return len(inner[0]), len(inner[1]), len(outer[0]), len(outer[1])


def _lines_in_loops(body: str) -> Iterator[tuple[str, list[int]]]:
    """Lines, with the numbers of the loops over elements around them, outermost first."""
    open_loops: list[tuple[int, int]] = []  # number, depth of its braces
    depth, number, begun = 0, 0, False
    for line in body.splitlines():
        if LOOP.search(line):
            number, begun = number + 1, True
        for c in line:
            if c == "{":
                depth += 1
                if begun:
                    open_loops.append((number, depth))
                    begun = False
            elif c == "}":
                if open_loops and open_loops[-1][1] == depth:
                    open_loops.pop()
                depth -= 1
        yield line, [n for n, _ in open_loops]
