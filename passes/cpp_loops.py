"""The loops over the elements of a block, in C++ that Inductor generated: less work in each.

Before: the text of what is done for a block, in which every loop over elements stands for itself. After: the same text,
which computes the same bits, but

- what an earlier loop has computed is kept in an array of one block instead of being computed again (Inductor inlines a
  value into every loop that needs it, a square root, a quotient and a decoded state among them);
- what is the same for all elements (roots and reciprocals of scales, random bits of the row) is computed before the loop.
  The compiler may not do it: for all it knows, the stores in the loop change the scales;
- the vectors take fewer instructions (`cpp_vectors`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qcompile.passes.cpp_vectors import EIGHT_BYTES, RANGE, in_single_vectors, rewrite_constants, rewrite_vectors

HEADER = re.compile(r"for\(int64_t x1=[^\n]*\)\s*(?=\{)")
BLOCK = re.compile(r"\{\s*if\(C10_LIKELY\([^\n]*\)\)\s*(?=\{)")
DEFINITION = re.compile(r"\s*auto (tmp\d+) =(.*);\s*$", re.DOTALL)
# A store of a vector, or of the first elements of one: the value, where to, and which element.
STORE = re.compile(
    r"^\s*(tmp\d+)\.store\((\w+) \+ (static_cast<int64_t>\([^()]*\))(?:, static_cast<int64_t>\(\d+\))?\);\s*$",
    re.MULTILINE,
)
LOAD = re.compile(
    r"\s*at::vec::Vectorized<(\w+)>::loadu\((\w+) \+ (static_cast<int64_t>\([^()]*\))(?:, static_cast<int64_t>\((\d+)\))?\)\s*"
)
LOCAL_INDEX = "static_cast<int64_t>(x1)"
POINTER = re.compile(r"\b(\w+)(?= \+ static_cast|\[static_cast)")
SAME = re.compile(r"\s*\((tmp\d+)\)\s*")
NAME = re.compile(r"\b(?:tmp\d+|x1|tmp_acc\w+)\b")
# More operations than this are kept from an earlier loop: a store and a load are two, and take room in the cache.
WORTH_KEEPING = 3


class NotKnownError(Exception):
    """The code has another form than those this file knows."""


@dataclass(slots=True)
class _Loop:
    """A loop over the elements of a block: the text before it, its head up to its statements, these, and what closes it."""

    before: str
    head: str
    statements: list[str]
    tail: str

    @property
    def elements(self) -> tuple[int, int]:
        """How many it is over, and how many at once."""
        match = RANGE.match(self.head)
        if match is None:
            raise NotKnownError
        return int(match[1]), int(match[2])


@dataclass(frozen=True, slots=True)
class _Value:
    """What a statement of a loop computes: a number that equal values share, its type, and whether elements differ in it."""

    number: int
    type: str
    varies: bool


def rewrite_loops(body: str, locals_: set[str], aliases: dict[str, int]) -> tuple[str, list[str]]:
    """The text of a block with less work in its loops, and declarations of arrays that it needs.

    Args:
        body: C++ for one block.
        locals_: arrays of one block.
        aliases: of each other pointer, which input of the kernel it points to.
    """
    body = in_single_vectors(body)
    loops, rest = _parse(body)
    # what is kept is a float or an int32 per element, in one vector
    is_plain = len({loop.elements for loop in loops}) == 1 and not ("VectorizedN" in body or EIGHT_BYTES.search(body))
    kept = _reuse(loops, locals_, aliases) if is_plain else []
    arrays = [f"alignas(64) float {name}[{loops[0].elements[0]}];" for name in kept]
    return "".join(_text(loop) for loop in loops) + rest, arrays


def end_of_block(text: str, start: int) -> int:
    """Where the block that opens at `start` ends."""
    depth = 0
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return start + match.end()
    raise NotKnownError


def _parse(body: str) -> tuple[list[_Loop], str]:
    loops, position = [], 0
    for header in HEADER.finditer(body):
        if header.start() < position:
            raise NotKnownError
        end = end_of_block(body, header.end())
        block = BLOCK.search(body, header.end(), end)
        if block is None:
            raise NotKnownError
        inner = end_of_block(body, block.end())
        statements = list(_statements(body[block.end() + 1 : inner - 1]))
        loops.append(
            _Loop(
                body[position : header.start()],
                body[header.start() : block.end() + 1],
                statements,
                body[inner - 1 : end],
            )
        )
        position = end
    return loops, body[position:]


def _statements(text: str) -> Iterator[str]:
    """The statements of a block, each with its semicolon."""
    depth, start = 0, 0
    for i, character in enumerate(text):
        depth += (character in "{(") - (character in "})")
        if character == ";" and depth == 0:
            yield text[start : i + 1]
            start = i + 1
    if text[start:].strip():
        raise NotKnownError


# -- What earlier loops have computed --------------------------------------------------------------------------------


class _Numbering:
    """Gives equal values of all loops the same number."""

    def __init__(self, locals_: set[str], aliases: dict[str, int]) -> None:
        self.locals, self.aliases = locals_, aliases
        self.numbers: dict[tuple[object, ...], int] = {}
        self.stored: dict[str, _Value] = {}  # per array of one block, what it holds
        self.written: dict[int | str, int] = {}  # per input of the kernel, and array: how often loops have stored to it

    def loop(self, statements: Sequence[str]) -> dict[str, _Value]:
        values: dict[str, _Value] = {}
        for statement in statements:
            if match := DEFINITION.match(statement):
                values[match[1]] = self._value(match[2], values)
        for statement in statements:  # a loop reads what it stores only in its own iteration
            if match := STORE.match(statement):
                name = match[2]
                if name in self.locals:
                    self.stored[name] = values[match[1]]
                elif name not in self.aliases:
                    raise NotKnownError
                at = self.aliases.get(name, name)
                self.written[at] = self.written.get(at, 0) + 1
        return values

    def _value(self, text: str, values: dict[str, _Value]) -> _Value:
        if (match := LOAD.fullmatch(text)) and match[2] in self.stored:
            return self.stored[match[2]]
        if (match := SAME.fullmatch(text)) and match[1] in values:
            return values[match[1]]
        used = [values[name] for name in dict.fromkeys(NAME.findall(text)) if name in values]
        key = " ".join(NAME.sub(lambda m: f"#{values[m[0]].number}" if m[0] in values else m[0], text).split())
        inputs = [self.aliases.get(name, name) for name in POINTER.findall(text)]
        key = POINTER.sub(lambda m: f"input {self.aliases[m[1]]}" if m[1] in self.aliases else m[1], key)
        epoch = tuple(self.written.get(at, 0) for at in inputs)
        number = self.numbers.setdefault((key, epoch), len(self.numbers))
        return _Value(number, _type(text, used), "x1" in text or "loadu(" in text or any(v.varies for v in used))


def _type(text: str, used: Sequence[_Value]) -> str:
    """`float` or `int32_t` for a vector of these, else empty: a mask, a number, another type."""
    if match := re.match(r"\s*(?:at::vec::)?(?:convert<|cast<|Vectorized<)(\w+)", text):
        return match[1] if match[1] in ("float", "int32_t") else ""
    if "VecMask" in text or "static_cast" in text or not used or "[&]" in text:
        return ""
    if "blendv" in text:
        return used[0].type
    return used[0].type if all(v.type == used[0].type for v in used) else ""


def _reuse(loops: Sequence[_Loop], locals_: set[str], aliases: dict[str, int]) -> list[str]:
    """Let loops load what earlier ones computed, and name the arrays for it."""
    numbering = _Numbering(locals_, aliases)
    values = [numbering.loop(loop.statements) for loop in loops]
    first: dict[int, tuple[int, str]] = {}  # where a value is computed first
    kept: dict[int, str] = {}
    for k, loop in enumerate(loops):
        known = {n: v for n, v in values[k].items() if v.varies and v.type and v.number in first}
        for name in _frontier(loop.statements, values[k], known):
            value = known[name]
            at, source = first[value.number]
            if value.number not in kept:
                kept[value.number] = f"kept{len(kept)}"
                loops[at].statements.append(f"\n{source}.store({kept[value.number]} + {LOCAL_INDEX});")
            _define(loop, name, f" at::vec::Vectorized<{value.type}>::loadu({kept[value.number]} + {LOCAL_INDEX})")
        for name, value in values[k].items():
            first.setdefault(value.number, (k, name))
    return list(kept.values())


def _frontier(statements: Sequence[str], values: dict[str, _Value], known: dict[str, _Value]) -> list[str]:
    """Of the values in `known`, those to load, because what is not known needs them and they are not cheap."""
    operands = {
        m[1]: [n for n in dict.fromkeys(NAME.findall(m[2])) if n in values and values[n].varies]
        for m in map(DEFINITION.match, statements)
        if m
    }
    needed = {
        name
        for statement in statements
        if not (m := DEFINITION.match(statement)) or m[1] not in known
        for name in (operands[m[1]] if m else NAME.findall(statement))
        if name in known
    }
    loaded: list[str] = []
    for name in (n for n in operands if n in needed):  # in order: what is loaded makes the later ones cheaper
        cone, left = set(), [name]
        while left:
            if (at := left.pop()) not in cone and at not in loaded:
                cone.add(at)
                left += operands[at]
        if len(cone) > WORTH_KEEPING:
            loaded.append(name)
    return loaded


def _define(loop: _Loop, name: str, text: str) -> None:
    at = next(i for i, s in enumerate(loop.statements) if (m := DEFINITION.match(s)) and m[1] == name)
    loop.statements[at] = f"\nauto {name} ={text};"


# -- One loop --------------------------------------------------------------------------------------------------------


def _text(loop: _Loop) -> str:
    """The loop, after what is the same for all elements."""
    first, left = _invariants(_used(list(_statements(rewrite_vectors("".join(loop.statements))))))
    tables, left = rewrite_constants(first, left)
    used = set(_used([*first, *left]))  # a chain that became a look-up has links that nothing uses
    first, left = ([s for s in part if s in used] for part in (first, left))
    return "".join([loop.before, "{", *first, *tables, loop.head, *left, loop.tail, "}"])


def _used(statements: Sequence[str]) -> list[str]:
    """Without definitions of what nothing after them uses; ATen's masks are such where a blend compares by itself."""
    names: set[str] = set()
    kept = []
    for statement in reversed(statements):
        match = DEFINITION.match(statement)
        if match is None or match[1] in names:
            kept.append(statement)
            names.update(NAME.findall(statement if match is None else match[2]))
    return kept[::-1]


def _invariants(statements: Sequence[str]) -> tuple[list[str], list[str]]:
    stored = {m[2] for s in statements if (m := STORE.match(s))}
    first: list[str] = []
    left: list[str] = []
    varying = {"x1"}
    for statement in statements:
        match = DEFINITION.match(statement)
        names = set(NAME.findall(match[2])) if match else set()
        loads = set(re.findall(r"(\w+)\[static_cast<int64_t>", match[2])) if match else set()
        if match is None or names & varying or any("acc" in n for n in names) or loads & stored or "loadu(" in match[2]:
            left.append(statement)
            varying.update([match[1]] if match else [])
        else:
            first.append(statement)
    return first, left
