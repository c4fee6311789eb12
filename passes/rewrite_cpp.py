"""One C++ function that updates a whole class, made of the one that Inductor generated for one region.

Before: the module that Inductor generated for an update kernel. After: the text of a function that takes a table with a row
of addresses per region, or None where the module is not of the form that is known here; it then runs as it is.

What changes, beside that the regions are a loop inside:

- All loops over blocks become one: blocks do not depend on each other, so what one loop leaves for the next is of one block.
  Temporaries of the parameter's size become arrays of one block, which stay in the first cache.
- What is the same for all elements of a block (roots and reciprocals of its scales, random bits of its row) is computed
  before the loop over elements. The compiler may not: for all it knows, the stores in the loop change the scales.
- A bit cast is one instruction instead of a loop over the elements of a vector (design.md, fact 9).
- Stores that nothing reads are left out.
- The scales are finished (`codecs.finish_scales`) and stored where they belong, instead of returned.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from qcompile.runtime.codecs import LEAST_SCALE
from qcompile.runtime.formats import Format

KERNEL = re.compile(r"^(\w+) = async_compile\.cpp_pybinding\((\[.*?\]), r?'''(.*?)'''\)", re.MULTILINE | re.DOTALL)
SIGNATURE = re.compile(r'extern "C"\s+void\s+kernel\((.*?)\)\s*\{', re.DOTALL)
ROWS = re.compile(
    r"for\(int64_t x0=static_cast<int64_t>\(0L\); x0<static_cast<int64_t>\((.+)\); x0\+=static_cast<int64_t>\((\d+)L\)\)"
)
COLUMNS = re.compile(r"for\(int64_t x1=[^\n]*\)\s*(?=\{)")
BLOCK = re.compile(r"\{\s*if\(C10_LIKELY\([^\n]*\)\)\s*(?=\{)")
LOCAL = re.compile(
    r"^\s*(?:std::unique_ptr<([\w:]+) \[\]> buf_(\w+) = std::make_unique<[\w:]+ \[\]>\((\w+)\);|[\w:]+\* (\w+) = buf_\w+\.get\(\);)$"
)
IGNORED = re.compile(
    r"^\s*(?:[{}]|#pragma omp .*|int tid = omp_get_thread_num\(\);|std::atomic<int> inductor_cpu_integer_div_error\{0\};"
    r"|inductor_cpu_integer_div_error_flag = .*;|inductor_cpu_throw_if_integer_div_error\(.*\);)?$"
)
BIT_CAST = re.compile(
    r"\[&\]\(\)\s*\{\s*__at_align__ std::array<(\w+), 16> tmpbuf0;\s*(\w+)\.store\(tmpbuf0\.data\(\), static_cast<int64_t>\(16\)\);"
    r"\s*__at_align__ std::array<(\w+), 16> tmpbuf_out;\s*for \(int i = 0; i < static_cast<int64_t>\(16\); i\+\+\)\s*"
    r"\{\s*tmpbuf_out\[i\] = c10::bit_cast<\w+>\(tmpbuf0\[i\]\);\s*\}\s*"
    r"return at::vec::Vectorized<\w+>::loadu\(tmpbuf_out\.data\(\), static_cast<int64_t>\(16\)\);\s*\}\s*\(\)\s*"
)
COMPARISON = re.compile(r"auto (tmp\d+) = at::vec::VecMask<float,1>\((tmp\d+) (<=|>=|==|<|>) (tmp\d+)\);")
CHOICE = re.compile(r"decltype\((tmp\d+)\)::blendv\((tmp\d+), (tmp\d+), (tmp\d+)\.template cast<float,1>\(\)\)")
# Elements, in blocks of 256, that one thread updates alone: to wake another takes longer.
ALONE = 1 << 15
COMPARISONS = ("<=", ">=", "==", "<", ">")
# `y` where the comparison (its place in COMPARISONS) holds, else `x`.
CHOOSE = """
template <int comparison, typename V>
inline V choose(V a, V b, V x, V y)
{
#if defined(CPU_CAPABILITY_AVX512)
    constexpr int predicates[] = {_CMP_LE_OQ, _CMP_GE_OQ, _CMP_EQ_OQ, _CMP_LT_OQ, _CMP_GT_OQ};
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, predicates[comparison]), x, y);
#else
    const V masks[] = {a <= b, a >= b, a == b, a < b, a > b};
    return V::blendv(x, y, masks[comparison]);
#endif
}
"""
DEFINITION = re.compile(r"\s*auto (tmp\d+) =(.*);\s*$", re.DOTALL)
STORE = re.compile(
    r"^\s*tmp\d+\.store\((\w+) \+ static_cast<int64_t>\([^()]*\)(?:, static_cast<int64_t>\(\d+\))?\);\s*$", re.MULTILINE
)


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


class _NotKnown(Exception):  # noqa: N818
    """The module has another form than those this file knows."""


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
    except _NotKnown:
        return None


def _read(source: str) -> _Module:
    found = KERNEL.findall(source)
    if len(found) != 1:
        raise _NotKnown
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
        elif not re.fullmatch(r"\s+(\w+ = \w+\.size\(\)|\w+ = \w+\[0\]|assert_size_stride\(.*\)|del \w+|#.*|)", line):
            raise _NotKnown
    signature = SIGNATURE.search(text)
    if order is None or returned is None or signature is None:
        raise _NotKnown
    inputs = [n for n in order[1].split(", ") if n]
    pointers = []
    parameters = [p.split() for p in signature[1].split(",")]
    if len(parameters) != len(given) or not set(given[:-1]) <= {*inputs, *widths}:
        raise _NotKnown
    for (*kind, parameter), argument in zip(parameters[:-1], given[:-1], strict=True):
        if not kind[-1].endswith("*"):
            raise _NotKnown
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
    body = _without_dead_stores(body, {p.name for p in temporaries} - given_back | {*declared})
    body = BIT_CAST.sub(r"at::vec::cast<\3, \1>(\2)", body)
    body = _invariants_first(body)
    columns = [p.input for p in module.pointers if p.input is not None]
    stores, scales = _scale_stores(module, returned, len(columns))
    return ClassFunction(
        _text(module, temporaries, declared, body, stores, unit, len(columns) + len(scales) + 2),
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
            raise _NotKnown
        steps.add(int(match[2]))
        end = _end_of_block(text, text.index("{", match.end()))
        bodies.append(text[text.index("{", match.end()) : end])
        position = end
    _read_between(text[position:], declared)
    if len(steps) != 1:
        raise _NotKnown
    return bodies, steps.pop(), declared


def _read_between(text: str, declared: dict[str, str]) -> None:
    for line in text.splitlines():
        if match := LOCAL.match(line):
            if match[1] is not None:
                if match[2] in declared:
                    raise _NotKnown
                declared[match[2]] = f"alignas(64) {match[1]} {match[2]}[{match[3]}];"
        elif not IGNORED.match(line):
            raise _NotKnown


def _end_of_block(text: str, start: int) -> int:
    """Where the block that opens at `start` ends."""
    depth = 0
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return start + match.end()
    raise _NotKnown


def _of_one_block(body: str, name: str, width: int) -> str:
    """The text, with a temporary of all rows as one of the row that is being computed."""
    if width == 1:
        body = body.replace(f"{name}[static_cast<int64_t>(x0)]", f"{name}[0]")
        rest = body.replace(f"{name}[0]", "")
    else:
        body = body.replace(f"{name} + static_cast<int64_t>(x1 + {width}L*x0)", f"{name} + static_cast<int64_t>(x1)")
        rest = body.replace(f"{name} + static_cast<int64_t>(x1)", "")
    if re.search(rf"\b{name}\b", rest):
        raise _NotKnown
    return body


def _without_dead_stores(body: str, temporaries: set[str]) -> str:
    read = {name for name in temporaries if re.search(rf"(?:loadu\({name} \+|= {name}\[)", body)}
    return STORE.sub(lambda m: "" if m[1] in temporaries - read else m[0], body)


def _with_masks(body: str) -> str:
    """Comparisons that only choose between two vectors as masks of bits, where the instruction set has them.

    ATen makes a vector of each comparison, and a mask of the vector for each choice.
    """
    masks = {m[1]: (m[2], m[3], m[4]) for m in COMPARISON.finditer(body)}

    def chosen(match: re.Match[str]) -> str:
        if match[4] not in masks:
            return match[0]
        a, operator, b = masks[match[4]]
        return f"choose<{COMPARISONS.index(operator)}>({a}, {b}, {match[2]}, {match[3]})"

    return CHOICE.sub(chosen, body)


def _invariants_first(body: str) -> str:
    """Compute in front of each loop over the elements of a block what is the same for all of them."""
    out, position = [], 0
    for loop in COLUMNS.finditer(body):
        if loop.start() < position:
            raise _NotKnown
        end = _end_of_block(body, loop.end())
        block = BLOCK.search(body, loop.end(), end)
        if block is None:
            raise _NotKnown
        inner = _end_of_block(body, block.end())
        statements = list(_statements(_with_masks(body[block.end() + 1 : inner - 1])))
        stored = {m[1] for s in statements if (m := STORE.match(s))}
        first: list[str] = []
        left: list[str] = []
        varying: set[str] = set()
        for statement in statements:
            match = DEFINITION.match(statement)
            names = set(re.findall(r"\b(?:tmp\d+|x1|tmp_acc\w+)\b", match[2])) if match else set()
            loads = set(re.findall(r"(\w+)\[static_cast<int64_t>", match[2])) if match else set()
            if (
                match is None
                or names & (varying | {"x1"})
                or any("acc" in n for n in names)
                or loads & stored
                or "loadu(" in match[2]
            ):
                left.append(statement)
                varying.update([match[1]] if match else [])
            else:
                first.append(statement)
        out += [
            body[position : loop.start()],
            "{",
            *first,
            body[loop.start() : block.end() + 1],
            *left,
            body[inner - 1 : end],
            "}",
        ]
        position = end
    return "".join([*out, body[position:]])


def _statements(text: str) -> Iterator[str]:
    """The statements of a block, each with its semicolon."""
    depth, start = 0, 0
    for i, character in enumerate(text):
        depth += (character in "{(") - (character in "})")
        if character == ";" and depth == 0:
            yield text[start : i + 1]
            start = i + 1
    if text[start:].strip():
        raise _NotKnown


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
                raise _NotKnown
            target = f"reinterpret_cast<{kind}*>(row[{column + len(inputs)}])[x0 * {fmt.scale_count}]"
            stores.append(f"{target} = static_cast<{kind}>({value});")
            inputs.append(scales[j])
    if names:
        raise _NotKnown
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
    declared: dict[str, str],
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
    return f"""{module.prefix}{CHOOSE if "choose<" in body else ""}extern "C" void kernel(const int64_t* table, const int64_t count)
{{
    // one row of addresses per region, then its number of rows, then the units of work up to its end
    const int64_t total = table[count * {width}L - 1L];
    #pragma omp parallel if(total > {ALONE // unit if unit > 1 else ALONE // 256}L)
    {{
        const int64_t first = total * omp_get_thread_num() / omp_get_num_threads();
        const int64_t last = total * (omp_get_thread_num() + 1) / omp_get_num_threads();
        {lines.join([*declared.values(), *local])}
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
