"""The report as a page: complete in itself, and it works in a browser, where there is one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_params, set_grads
from torch import nn

import qcompile

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on AdamW, whose first parameter has a name that would end a script."""
    params = make_params((64, 128), (40, 128), (30,))
    names = nn.ParameterDict({"</script><b>": params[0], "narrow": params[1], "bias": params[2]})
    optimizer = torch.optim.AdamW(names.parameters(), lr=1e-2)
    set_grads(params, 0)
    step = torch.compile(optimizer.step, backend="qstate")
    step()
    watch = qcompile.monitor(optimizer)
    step()
    assert len(watch.figures) == 4
    path = tmp_path_factory.mktemp("report") / "report.html"
    qcompile.explain(optimizer).save_html(path)
    return path


def test_it_needs_nothing_else(page_file: Path) -> None:
    text = page_file.read_text()
    assert not re.search(r"""(src|href)=["']|@import|url\(""", text)
    assert text.count("</script>") == 2
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    found = json.loads(data.group(1))
    assert "</script><b>" in {state["param"] for state in found["states"]}
    assert any("#include" in kernel["source"] for kernel in found["kernels"])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 390)])
def test_it_works_in_a_browser(browser: Any, page_file: Path, tmp_path: Path, scheme: str, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: errors.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(page_file.as_uri())
    assert page.inner_text("#shown") == "9 of 9 buffers"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.fill("#search", "exp_avg_sq narrow")
    assert page.inner_text("#shown") == "1 of 9 buffers"
    page.fill("#search", "")
    page.click("#states th:nth-child(6)")
    page.click("#states th:nth-child(6)")
    largest = page.inner_text("#states tbody tr:first-child")
    assert "</script><b>" in largest
    assert "32,768" in largest
    assert page.locator("#flow .load").count() == 5
    assert page.locator("#flow .store").count() == 4
    assert page.locator("#histogram .count").count() == 14
    first = page.inner_text("#errors")
    page.select_option("#buffer", "1")
    assert page.inner_text("#errors") != first
    page.click("#kernels summary >> nth=0")
    page.click("#kernels button >> nth=0")
    page.wait_for_function("document.querySelector('#kernels button').textContent === 'copied'")
    assert "cpp_fused" in page.inner_text("#kernels pre >> nth=0")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", dark))) < 200) == (scheme == "dark")
    assert page.screenshot().startswith(b"\x89PNG")
    assert errors == []
