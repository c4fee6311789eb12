"""One Triton kernel that updates a whole class in one launch, made of the one that Inductor generated for one region.

Before: the module that Inductor generated for an update kernel. After: the text of a module with a kernel that takes a table with a
row of addresses per region, and for each program which region it works on; or None where the module is not of the form that is
known here; it then runs as it is, once per region.

The body is Inductor's. Only where it begins differs: pointers are loaded from the table (16-byte accesses stay, as long as all
addresses allow them), and a program counts its rows from the first program of its region.
"""

from __future__ import annotations

import ast
import re

from qcompile._compat_inductor import launch_of
from qcompile.passes.rewrite_cpp import ClassFunction

KERNEL = re.compile(r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)'''", re.MULTILINE | re.DOTALL)
DEFINITION = re.compile(r"^def \w+\((.*)\):\n", re.MULTILINE)
SIGNATURE = re.compile(r"'signature': (\{.*?\})")
ROW = re.compile(r"^    xoffset = tl\.program_id\(0\) \* XBLOCK$", re.MULTILINE)
FIXED = re.compile(r"^    XBLOCK: tl\.constexpr = \d+\n", re.MULTILINE)  # where the launch is fixed, as ours is
TYPES = {
    "fp32": "tl.float32",
    "fp16": "tl.float16",
    "bf16": "tl.bfloat16",
    "fp64": "tl.float64",
    "fp8e4nv": "tl.float8e4nv",
    "fp8e5": "tl.float8e5",
    "i8": "tl.int8",
    "u8": "tl.uint8",
    "i16": "tl.int16",
    "i32": "tl.int32",
    "i64": "tl.int64",
    "i1": "tl.int1",
}
SIZES = ("xnumel", "r0_numel")


def rewrite_triton(source: str, block_size: int, parts: int) -> ClassFunction | None:
    """The kernel for a class, or None where Inductor's module is not of the form that is known."""
    found = KERNEL.findall(source)
    order = re.search(r"^ +(.*) = args$", source, re.MULTILINE)
    if len(found) != 1 or order is None:
        return None
    name, text = found[0]
    call = re.findall(rf"^ +{name}\.run\((.*), stream=\w+\)$", source, re.MULTILINE)
    definition, signature = DEFINITION.search(text), SIGNATURE.search(text)
    if len(call) != 1 or definition is None or signature is None or len(ROW.findall(text)) != 1:
        return None
    types = ast.literal_eval(signature[1])
    names = [p.split(":")[0].strip() for p in definition[1].split(",") if "constexpr" not in p]
    inputs = [n for n in order[1].split(", ") if n]
    given = [argument.removesuffix(".item()") for argument in call[0].split(", ")]
    pointers = [n for n in names if n not in SIZES]
    if names[len(pointers) :] != [n for n in SIZES if n in names] or "tl.program_id" in ROW.sub("", text):
        return None
    if not set(given[: len(pointers)]) <= set(inputs) or any(types[n].lstrip("*") not in TYPES for n in pointers):
        return None
    body = FIXED.sub("", text[definition.end() :])
    width = len(pointers) + 2
    along = "r0_1" if "r0_1 = " in body else "x0"
    is_wide = [types[n].startswith("*") and bool(re.search(rf"\b{n} \+ \({along}", body)) for n in pointers]
    bound = [_bind(n, types[n], i, is_wide[i]) for i, n in enumerate(pointers)]
    # what is only stored to is asked for when all else is done: an address takes two registers
    late = [i for i, n in enumerate(pointers) if not re.search(rf"tl\.load\({n}\b|= {n}$", body, re.MULTILINE)]
    if (first_store := body.find("    tl.store(")) > 0:
        body = body[:first_store] + "".join(f"{bound[i]}\n" for i in late) + body[first_store:]
        bound = [line for i, line in enumerate(bound) if i not in late]
    body = ROW.sub("    xoffset = (tl.program_id(0) - begin) * XBLOCK", body)
    start = [
        "    # one row of addresses per region, then its number of rows, then the programs up to its end",
        f"    row = table + tl.load(regions + tl.program_id(0)).to(tl.int64) * {width}",
        *bound,
        f"    xnumel = tl.load(row + {width - 2}).to(tl.int32)",
        f"    begin = tl.load(row + {width - 1}).to(tl.int32) - (xnumel + XBLOCK - 1) // XBLOCK",
    ]
    prefix = "\n".join(
        line for line in text[: text.index("@triton_heuristics")].splitlines() if "set_driver" not in line
    )
    module = f"# {name}, for all regions of a class\n{prefix}\n\n@triton.jit\ndef kernel(table, regions, ALIGN: tl.constexpr, XBLOCK: tl.constexpr):\n"
    columns = tuple(inputs.index(n) for n in given[: len(pointers)])
    rows, warps = launch_of(block_size // parts, parts)
    wide = tuple(i for i, flag in enumerate(is_wide) if flag)
    return ClassFunction(module + "\n".join(start) + "\n" + body, columns, rows, wide, warps)


def _bind(name: str, kind: str, column: int, is_wide: bool) -> str:
    pointer = f"tl.load(row + {column}).to(tl.pointer_type({TYPES[kind.lstrip('*')]}))"
    if not kind.startswith("*"):
        return f"    {name} = tl.load({pointer})"
    return f"    {name} = tl.multiple_of({pointer}, ALIGN)" if is_wide else f"    {name} = {pointer}"
