"""One C++ function that updates a whole class, made of the one that Inductor generated for one region.

Before: the module that Inductor generated for an update kernel. After: the text of a function that takes a table with a row
of addresses per region, or None where the module is not of the form that is known here; it then runs as it is.

What changes, beside that the regions are a loop inside:

- All loops over blocks become one: blocks do not depend on each other, so what one loop leaves for the next is of one block.
  Temporaries of the parameter's size become arrays of one block, which stay in the first cache.
- The loops over elements do less (`cpp_loops`).
- Stores that nothing reads are left out.
- The scales are finished (`codecs.finish_scales`) and stored where they belong, instead of returned.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qcompile.passes.cpp_loops import STORE, NotKnownError, end_of_block, rewrite_loops
from qcompile.passes.cpp_vectors import HELPERS
from qcompile.runtime.codecs import LEAST_SCALE
from qcompile.runtime.formats import Format

KERNEL = re.compile(r"^(\w+) = async_compile\.cpp_pybinding\((\[.*?\]), r?'''(.*?)'''\)", re.MULTILINE | re.DOTALL)
SIGNATURE = re.compile(r'extern "C"\s+void\s+kernel\((.*?)\)\s*\{', re.DOTALL)
ROWS = re.compile(
    r"for\(int64_t x0=static_cast<int64_t>\(0L\); x0<static_cast<int64_t>\((.+)\); x0\+=static_cast<int64_t>\((\d+)L\)\)"
)
LOCAL = re.compile(
    r"^\s*(?:std::unique_ptr<([\w:]+) \[\]> buf_(\w+) = std::make_unique<[\w:]+ \[\]>\((\w+)\);|[\w:]+\* (\w+) = buf_\w+\.get\(\);)$"
)
# Of the Python around the kernel: what the caller has checked already.
CHECKS = re.compile(r"\s+(\w+ = \w+\.size\(\)(\[0\])?|\w+ = \w+\[0\]|assert_size_stride(_grouped)?\(.*\)|del \w+|#.*|)")
IGNORED = re.compile(
    r"^\s*(?:[{}]|#pragma (?:omp|GCC) .*|int tid = omp_get_thread_num\(\);|std::atomic<int> inductor_cpu_integer_div_error\{0\};"
    r"|inductor_cpu_integer_div_error_flag = .*;|inductor_cpu_throw_if_integer_div_error\(.*\);)?$"
)
# Elements, in blocks of 256, that one thread updates alone: to wake another takes longer.
ALONE = 1 << 15


# Of each operand whose scales the kernel returns: its format, and which inputs of the kernel the scales are.
Returned = Sequence[tuple[Format, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class ClassFunction:
    """A function over int64 tables.

    Attributes:
        source: the C++ text.
        columns: which input of the kernel each of the first columns of the table is the address of. Two more follow: the
            number of rows (blocks, or elements where nothing is quantized) of the region, and the sum of the units of it and
            the regions before it.
        unit: rows per unit of work.
        wide: the columns whose addresses should be multiples of 16, for accesses of that size.
        warps: of a Triton program, which works on one unit.
    """

    source: str
    columns: tuple[int, ...]
    unit: int
    wide: tuple[int, ...] = ()
    warps: int = 1


@dataclass(frozen=True, slots=True)
class _Pointer:
    """A parameter of Inductor's function: its C++ type, and the input or the temporary (its name) that it is given."""

    name: str
    type: str
    input: int | None
    buffer: str | None


@dataclass(frozen=True, slots=True)
class _Module:
    """What Inductor's module says: text before the function, its pointers and body, widths of temporaries, the returned."""

    prefix: str
    pointers: tuple[_Pointer, ...]
    rows: str
    body: str
    widths: dict[str, int]
    returned: tuple[str, ...]


def rewrite_cpp(source: str, returned: Returned) -> ClassFunction | None:
    """The function for a class, or None where Inductor's module is not of the form that is known."""
    try:
        return _rewritten(_read(source), returned)
    except NotKnownError:
        return None


def _read(source: str) -> _Module:
    found = KERNEL.findall(source)
    if len(found) != 1:
        raise NotKnownError
    name, _, text = found[0]
    call = source[source.index("        args.clear()") :]
    order = re.search(r"^        (.*) = args$", source, re.MULTILINE)
    widths: dict[str, int] = {}
    given: list[str] = []
    returned: tuple[str, ...] | None = None
    for line in call.splitlines()[1:]:
        if match := re.fullmatch(r"\s+(\w+) = empty_strided_cpu\(\(\w+, (\d+)\), \(\d+, 1\), torch\.\w+\)", line):
            widths[match[1]] = int(match[2])
        elif match := re.fullmatch(rf"\s+{name}\((.*)\)", line):
            given = match[1].split(", ")
        elif match := re.fullmatch(r"\s+return \((.*)\)", line):
            returned = tuple(filter(None, match[1].split(", ")))
            break
        elif not CHECKS.fullmatch(line):
            raise NotKnownError
    signature = SIGNATURE.search(text)
    if order is None or returned is None or signature is None:
        raise NotKnownError
    inputs = [n for n in order[1].split(", ") if n]
    pointers = []
    parameters = [p.split() for p in signature[1].split(",")]
    if len(parameters) != len(given) or not set(given[:-1]) <= {*inputs, *widths}:
        raise NotKnownError
    for (*kind, parameter), argument in zip(parameters[:-1], given[:-1], strict=True):
        if not kind[-1].endswith("*"):
            raise NotKnownError
        at = inputs.index(argument) if argument in inputs else None
        pointers.append(_Pointer(parameter, " ".join(kind), at, None if at is not None else argument))
    body = text[signature.end() :]
    prefix = f"{text[: signature.start()]}// {name}, for all regions of a class\n"
    return _Module(prefix, tuple(pointers), parameters[-1][-1], body, widths, returned)


def _rewritten(module: _Module, returned: Returned) -> ClassFunction:
    loops, unit, declared = _loops(module)
    body = "\n".join(loops)
    temporaries = [p for p in module.pointers if p.buffer is not None]
    for pointer in temporaries:
        assert pointer.buffer is not None
        body = _of_one_block(body, pointer.name, module.widths[pointer.buffer])
    given_back = {p.name for p in temporaries if p.buffer in module.returned}
    of_one_block = {p.name for p in temporaries} - given_back | {*declared}
    columns = [p.input for p in module.pointers if p.input is not None]
    inputs = {p.name: p.input for p in module.pointers if p.input is not None}
    body, kept = rewrite_loops(body, of_one_block, inputs)
    body = _without_dead_stores(body, of_one_block)
    stores, scales = _scale_stores(module, returned, len(columns))
    return ClassFunction(
        _text(module, temporaries, [*declared.values(), *kept], body, stores, unit, len(columns) + len(scales) + 2),
        (*columns, *scales),
        unit,
    )


def _loops(module: _Module) -> tuple[list[str], int, dict[str, str]]:
    """The bodies of the loops over rows, their common step, and the declarations of local buffers, by name."""
    text, position = module.body, 0
    bodies: list[str] = []
    steps: set[int] = set()
    declared: dict[str, str] = {}
    while match := ROWS.search(text, position):
        _read_between(text[position : match.start()], declared)
        if match[1] != module.rows:
            raise NotKnownError
        steps.add(int(match[2]))
        end = end_of_block(text, text.index("{", match.end()))
        bodies.append(text[text.index("{", match.end()) : end])
        position = end
    _read_between(text[position:], declared)
    if len(steps) != 1:
        raise NotKnownError
    return bodies, steps.pop(), declared


def _read_between(text: str, declared: dict[str, str]) -> None:
    for line in text.splitlines():
        if match := LOCAL.match(line):
            if match[1] is not None:
                if match[2] in declared:
                    raise NotKnownError
                declared[match[2]] = f"alignas(64) {match[1]} {match[2]}[{match[3]}];"
        elif not IGNORED.match(line):
            raise NotKnownError


def _of_one_block(body: str, name: str, width: int) -> str:
    """The text, with a temporary of all rows as one of the row that is being computed."""
    if width == 1:
        body = body.replace(f"{name}[static_cast<int64_t>(x0)]", f"{name}[0]")
        rest = body.replace(f"{name}[0]", "")
    else:
        body = body.replace(f"{name} + static_cast<int64_t>(x1 + {width}L*x0)", f"{name} + static_cast<int64_t>(x1)")
        rest = body.replace(f"{name} + static_cast<int64_t>(x1)", "")
    if re.search(rf"\b{name}\b", rest):
        raise NotKnownError
    return body


def _without_dead_stores(body: str, temporaries: set[str]) -> str:
    rest = STORE.sub("", body)  # whatever else names an array may read it
    read = {name for name in temporaries if re.search(rf"\b{name}\b", rest)}
    return STORE.sub(lambda m: "" if m[2] in temporaries - read else m[0], body)


def _scale_stores(module: _Module, returned: Returned, column: int) -> tuple[list[str], list[int]]:
    """Statements that finish the scales of a row and store them, and the inputs that they need the addresses of."""
    by_buffer = {p.buffer: p.name for p in reversed(module.pointers) if p.buffer is not None}
    names = [by_buffer[buffer] for buffer in module.returned]
    stores: list[str] = []
    inputs: list[int] = []
    for fmt, scales in returned:
        reduced = [f"{names.pop(0)}[0]" for _ in range(fmt.reductions)]
        for j, value in enumerate(_finished(reduced, fmt)):
            kind = {torch.float32: "float", torch.float16: "at::Half", torch.bfloat16: "at::BFloat16"}.get(
                fmt.scale_dtype
            )
            if kind is None:
                raise NotKnownError
            target = f"reinterpret_cast<{kind}*>(row[{column + len(inputs)}])[x0 * {fmt.scale_count}]"
            stores.append(f"{target} = static_cast<{kind}>({value});")
            inputs.append(scales[j])
    if names:
        raise NotKnownError
    return stores, inputs


def _finished(reduced: Sequence[str], fmt: Format) -> list[str]:
    """`codecs.finish_scales` of one block, as C++."""
    scales = list(reduced)
    if fmt.scaling == "eden":
        peak, square, product = reduced
        scales = [f"({peak} * ({peak} >= {LEAST_SCALE!r}f && {product} > 1e-12f ? {square} / {product} : 1.0f))"]
    if fmt.scale_dtype == torch.float32:
        return scales
    roots = [f"std::sqrt({s})" if fmt.coordinate == "sqrt" else s for s in scales]
    most = f"{torch.finfo(fmt.scale_dtype).max!r}f"
    return [f"({s} > {most} ? {most} : {s})" for s in roots]  # NaN stays, as in torch.clamp


def _text(
    module: _Module,
    temporaries: Sequence[_Pointer],
    declared: Sequence[str],
    body: str,
    stores: Sequence[str],
    unit: int,
    width: int,
) -> str:
    pointers = [p for p in module.pointers if p.input is not None]
    local = [
        f"alignas(64) {p.type.removesuffix('*').removeprefix('const ')} {p.name}[{module.widths[str(p.buffer)]}];"
        for p in temporaries
    ]
    bound = [f"auto {p.name} = reinterpret_cast<{p.type}>(row[{i}]);" for i, p in enumerate(pointers)]
    lines = "\n            "
    return f"""{module.prefix}{HELPERS}extern "C" void kernel(const int64_t* table, const int64_t count)
{{
    // one row of addresses per region, then its number of rows, then the units of work up to its end
    const int64_t total = table[count * {width}L - 1L];
    #pragma omp parallel if(total > {ALONE // unit if unit > 1 else ALONE // 256}L)
    {{
        const int64_t first = total * omp_get_thread_num() / omp_get_num_threads();
        const int64_t last = total * (omp_get_thread_num() + 1) / omp_get_num_threads();
        {lines.join([*declared, *local])}
        for(int64_t region=0; region<count; region+=1)
        {{
            const int64_t* row = table + region * {width}L;
            const int64_t {module.rows} = row[{width - 2}], end = row[{width - 1}];
            const int64_t begin = end - ({module.rows} + {unit - 1}L) / {unit}L;
            if(end <= first || begin >= last) continue;
            const int64_t from = {unit}L * (std::max(first, begin) - begin);
            const int64_t to = std::min({module.rows}, {unit}L * (std::min(last, end) - begin));
            {lines.join(bound)}
            for(int64_t x0=from; x0<to; x0+={unit}L)
            {{
{body}
                {lines.join(stores)}
            }}
        }}
    }}
}}
"""
