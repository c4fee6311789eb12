"""Vectors of ATen in C++ that Inductor generated: the same bits in fewer instructions.

Before: statements of a loop over elements. After: the same statements, in which

- comparisons that only choose between two vectors are one comparison and one blend (ATen makes a vector of each comparison);
- bounds that are constants are one instruction (ATen looks for NaN in both operands of a maximum). The reductions of a block
  never see NaN, which is stored as 0, so they need no such look either (`codecs.quantize`);
- a choice among constants by a whole number, one comparison per constant, is a look-up in a table in registers;
- a bit cast is one instruction instead of a loop over the elements of a vector (design.md, fact 9);
- a few bytes are loaded as they are, not through an array.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

RANGE = re.compile(
    r"for\(int64_t x1=static_cast<int64_t>\(0L\); x1<static_cast<int64_t>\((\d+)L\); x1\+=static_cast<int64_t>\((\d+)L\)\)"
)
BIT_CAST = re.compile(
    r"\[&\]\(\)\s*\{\s*__at_align__ std::array<(\w+), \d+> tmpbuf0;\s*(\w+)\.store\(tmpbuf0\.data\(\), static_cast<int64_t>\(\d+\)\);"
    r"\s*__at_align__ std::array<(\w+), \d+> tmpbuf_out;\s*for \(int i = 0; i < static_cast<int64_t>\(\d+\); i\+\+\)\s*"
    r"\{\s*tmpbuf_out\[i\] = c10::bit_cast<\w+>\(tmpbuf0\[i\]\);\s*\}\s*"
    r"return +at::vec::Vectorized(?:<\w+>|N<\w+, ?\d>)::loadu\(tmpbuf_out\.data\(\), static_cast<int64_t>\(\d+\)\);\s*\}\s*\(\)\s*"
)
FEW = re.compile(
    r"at::vec::Vectorized<(u?int8_t|at::BFloat16|at::Half)>::loadu\((\w+ \+ static_cast<int64_t>\([^()]*\)), static_cast<int64_t>\((\d+)\)\)"
)
ARANGE = re.compile(r"at::vec::Vectorized<int32_t>::arange\((tmp\d+), 1\)")
PAIR = re.compile(r"VectorizedN<\w+, ?2>")
# Vectors of half as many elements as one of floats has, which are pairs where those are single.
EIGHT_BYTES = re.compile(r"\b(?:Vectorized|VectorizedN|VecMask|convert|cast)<[^<>]*\b(?:double|int64_t)\b")
# Loads and stores of as many elements as their vector has, whatever the loop's step.
UNCOUNTED = re.compile(r"(?:loadu|\.store)\(\w+ \+ static_cast<int64_t>\([^()]*\)\)")
CONVERTED = re.compile(r"convert<[\w:]+,\d,")
# Types and functions of two vectors, and of one.
IN_PAIRS = [
    (re.compile(r"VectorizedN<(\w+), ?2>"), r"Vectorized<\1>"),
    (re.compile(r"convert<([\w:]+),(?:1,[\w:]+,2|2,[\w:]+,[12])>"), r"convert<\1>"),
    (re.compile(r"\b(VecMask|cast|vec_reduce_all)<(\w+),( ?)2>"), r"\1<\2,\g<3>1>"),
]
NUMBER = re.compile(r"\s*auto (tmp\d+) = static_cast<float>\((-?[\d.e+-]+)\);\s*")
VECTOR = re.compile(r"\s*auto (tmp\d+) = at::vec::Vectorized<float>\((tmp\d+)\);\s*")
WHOLE = re.compile(r"\s*auto (tmp\d+) = at::vec::convert<float>\((tmp\d+)\);\s*")
LINK = re.compile(r"\s*auto (tmp\d+) = choose<1>\((tmp\d+), (tmp\d+), (tmp\d+), (tmp\d+)\);\s*")
ACCUMULATED = re.compile(r"(tmp_acc\d+_vec) = at::vec::(minimum|maximum)\(\1, (tmp\d+)\)")
BOUND = re.compile(r"at::vec::(minimum|maximum)\((tmp\d+), (tmp\d+)\)")
COMPARISON = re.compile(r"auto (tmp\d+) = at::vec::VecMask<float,1>\((tmp\d+) (<=|>=|==|<|>) (tmp\d+)\);")
CHOICE = re.compile(r"decltype\((tmp\d+)\)::blendv\((tmp\d+), (tmp\d+), (tmp\d+)\.template cast<float,1>\(\)\)")
COMPARISONS = ("<=", ">=", "==", "<", ">")

# `look_up`: of a table whose first entry is for numbers up to `least`, and whose last is for `least + most` and more.
# `choose`: `y` where the comparison (its place in COMPARISONS) holds, else `x`. `few`: a vector whose first `count` elements
# are loaded, in one instruction; ATen's copies them into an array, from which the whole vector cannot be forwarded.
HELPERS = """
#if defined(CPU_CAPABILITY_AVX512)
using floats = __m512;
#define WIDE(x) _mm512_castsi128_si512(x)
#elif defined(CPU_CAPABILITY_AVX2) && defined(__GNUC__)
using floats = __m256;
#define WIDE(x) _mm256_castsi128_si256(x)
#endif
template <int comparison, typename V>
inline V choose(V a, V b, V x, V y)
{
#if defined(WIDE)
    const floats l = a, r = b, no = x, yes = y;
    if constexpr (comparison == 0) return floats(l <= r ? yes : no);
    else if constexpr (comparison == 1) return floats(l >= r ? yes : no);
    else if constexpr (comparison == 2) return floats(l == r ? yes : no);
    else if constexpr (comparison == 3) return floats(l < r ? yes : no);
    else return floats(l > r ? yes : no);
#else
    if constexpr (comparison == 0) return V::blendv(x, y, a <= b);
    else if constexpr (comparison == 1) return V::blendv(x, y, a >= b);
    else if constexpr (comparison == 2) return V::blendv(x, y, a == b);
    else if constexpr (comparison == 3) return V::blendv(x, y, a < b);
    else return V::blendv(x, y, a > b);
#endif
}
template <int least, int most>
inline at::vec::Vectorized<float> look_up(at::vec::Vectorized<int32_t> k, const float* table)
{
    using Index = at::vec::Vectorized<int32_t>;
    const Index at = at::vec::minimum(at::vec::maximum(k - Index(least), Index(0)), Index(most));
#if defined(CPU_CAPABILITY_AVX512)
    return _mm512_permutexvar_ps(at, _mm512_load_ps(table));
#elif defined(WIDE)
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(table), at);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(table + 8), at);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
#else
    __at_align__ int32_t indices[Index::size()];
    __at_align__ float values[Index::size()];
    at.store(indices);
    for (int i = 0; i < Index::size(); i++) values[i] = table[indices[i]];
    return at::vec::Vectorized<float>::loadu(values);
#endif
}
template <typename T, int count>
inline at::vec::Vectorized<T> few(const T* from)
{
#if defined(WIDE)
    if constexpr (sizeof(T) * count == 8) return WIDE(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    if constexpr (sizeof(T) * count == 16) return WIDE(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
    return at::vec::Vectorized<T>::loadu(from, count);
}
"""


def in_single_vectors(body: str) -> str:
    """The text of a block with loops over single vectors, and bit casts of these in one instruction."""
    return BIT_CAST.sub(_cast, _of_one_width(body))


def rewrite_vectors(statements: str) -> str:
    """Statements of one loop with masks, loads and counts in fewer instructions."""
    return FEW.sub(r"few<\1, \3>(\2)", ARANGE.sub(_counted, _with_masks(statements)))


def rewrite_constants(first: Sequence[str], left: Sequence[str]) -> tuple[list[str], list[str]]:
    """Statements of a loop that use the constants `first` before it: tables to declare, and the statements, with fewer."""
    constants = _constants(first)
    return _with_tables(constants, _with_bounds(constants, left))


def _of_one_width(body: str) -> str:
    """The text with its loops over pairs of vectors (Inductor's choice beside a 16-bit type) as loops over one.

    Then all loops see the same elements, and one can use what another computed.
    """
    if not PAIR.search(body) or EIGHT_BYTES.search(body) or UNCOUNTED.search(_wide_loops(body)):
        return body
    steps = {int(step) for _, step in RANGE.findall(body)}
    if not 1 <= len(steps) <= 2 or (len(steps) == 2 and max(steps) != 2 * min(steps)):
        return body
    two, one = max(steps), max(steps) // 2
    narrow = body.replace(f"x1+=static_cast<int64_t>({two}L)", f"x1+=static_cast<int64_t>({one}L)")
    narrow = narrow.replace(f", static_cast<int64_t>({two}))", f", static_cast<int64_t>({one}))")
    for pattern, text in IN_PAIRS:
        narrow = pattern.sub(text, narrow)
    return body if "VectorizedN" in narrow or CONVERTED.search(narrow) else narrow


def _wide_loops(body: str) -> str:
    """From the first loop with the largest step on, for each of them up to the next loop."""
    starts = [*(m.start() for m in RANGE.finditer(body)), len(body)]
    steps = [int(step) for _, step in RANGE.findall(body)]
    return "".join(body[a:b] for a, b, s in zip(starts, starts[1:], steps, strict=False) if s == max(steps))


def _cast(match: re.Match[str]) -> str:
    return match[0] if "VectorizedN" in match[0] else f"at::vec::cast<{match[3]}, {match[1]}>({match[2]})"


def _counted(match: re.Match[str]) -> str:
    """Numbers of elements, from a vector that is a constant."""
    return f"at::vec::Vectorized<int32_t>({match[1]}) + at::vec::Vectorized<int32_t>::arange(0, 1)"


def _with_masks(body: str) -> str:
    masks = {m[1]: (m[2], m[3], m[4]) for m in COMPARISON.finditer(body)}

    def chosen(match: re.Match[str]) -> str:
        if match[4] not in masks:
            return match[0]
        a, operator, b = masks[match[4]]
        return f"choose<{COMPARISONS.index(operator)}>({a}, {b}, {match[2]}, {match[3]})"

    return CHOICE.sub(chosen, body)


def _constants(first: Sequence[str]) -> dict[str, str]:
    """The vectors of one number, and that number."""
    numbers = {m[1]: m[2] for s in first if (m := NUMBER.fullmatch(s))}
    vectors = {m[1]: m[2] for s in first if (m := VECTOR.fullmatch(s))}
    return {vector: numbers[number] for vector, number in vectors.items() if number in numbers}


def _with_bounds(constants: dict[str, str], left: Sequence[str]) -> list[str]:
    """Maxima and minima with a constant as one instruction, which gives NaN for NaN as well; and those of the reductions."""
    clamp = {"maximum": "at::vec::clamp_min", "minimum": "at::vec::clamp_max"}

    def bounded(match: re.Match[str]) -> str:
        kind, a, b = match.groups()
        if b in constants:
            return f"{clamp[kind]}({a}, {b})"
        return f"{clamp[kind]}({b}, {a})" if a in constants else match[0]

    reduced = (ACCUMULATED.sub(lambda m: f"{m[1]} = {clamp[m[2]]}({m[3]}, {m[1]})", s) for s in left)
    return [BOUND.sub(bounded, s) for s in reduced]


def _with_tables(constants: dict[str, str], left: list[str]) -> tuple[list[str], list[str]]:
    """Chains that choose a constant by a whole number, one comparison per number, as a look-up; and their tables.

    `a if k < 1 else b if k < 2 else c ...` of up to 16 constants, k converted from integers.
    """
    bytes_ = {m[1] for s in left if (m := re.match(r"\s*auto (tmp\d+) = few<", s))}
    whole = {m[1]: m[2] for s in left if (m := WHOLE.fullmatch(s)) and m[2] not in bytes_}
    links = {m[1]: m.groups()[1:] for s in left if (m := LINK.fullmatch(s))}
    links = {n: v for n, v in links.items() if v[0] in whole and v[1] in constants and v[3] in constants}
    inner = {before for _, _, before, _ in links.values()}
    tables: dict[tuple[str, ...], str] = {}
    for name in (n for n in links if n not in inner):
        x, at = links[name][0], name
        values: list[str] = []
        borders: list[float] = []
        while at in links and links[at][0] == x:
            _, border, at, value = links[at]
            values.insert(0, constants[value])
            borders.insert(0, float(constants[border]))
        least = int(borders[0]) - 1
        if at not in constants or not 3 < len(values) < 16 or borders != [least + 1.0 + i for i in range(len(values))]:
            continue
        values.insert(0, constants[at])
        padded = tuple(values + values[-1:] * (16 - len(values)))
        table = tables.setdefault(padded, f"table{len(tables)}")
        place = next(i for i, s in enumerate(left) if (m := LINK.fullmatch(s)) and m[1] == name)
        left[place] = f"\nauto {name} = look_up<{least}, {len(values) - 1}>({whole[x]}, {table});"
    declared = [
        f"\nalignas(64) static const float {name}[16] = {{{', '.join(f'static_cast<float>({v})' for v in values)}}};\n"
        for values, name in tables.items()
    ]
    return declared, left
