"""Checkpoints of other packages, both ways. The packages' own files where they are installed, else their layout by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_params, set_grads
from torch import Tensor

import qcompile
from qcompile import convert
from qcompile.__main__ import main
from qcompile.convert import LEAST, convert_file, published_map
from qcompile.recipes import RECIPES
from qcompile.runtime.state import QuantizedState

SHAPES = ((64, 96), (5000,), (17,))  # whole blocks of 256; a tail; small


def stock(steps: int = 2) -> dict[str, Any]:
    """What torch.optim.AdamW saves."""
    params = make_params(*SHAPES)
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    for step in range(steps):
        set_grads(params, step)
        optimizer.step()
    return optimizer.state_dict()


def moments(state_dict: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    return [(s["exp_avg"], s["exp_avg_sq"]) for s in state_dict["state"].values()]


def same_values(found: Tensor, expected: Tensor, block: int, step: float) -> None:
    """Within half a step of the largest magnitude of each block: `step` is the widest gap of the levels."""
    assert found.shape == expected.shape
    pad = -expected.numel() % block
    a, b = (torch.nn.functional.pad(x.flatten(), (0, pad)).view(-1, block) for x in (found, expected))
    assert ((a - b).abs() <= (0.5001 * step * b.abs().amax(1, keepdim=True)) + 1e-30).all()


def test_the_published_map() -> None:
    for signed in (True, False):
        values = published_map(signed)
        assert values.shape == (256,)
        assert (values[1:] > values[:-1]).all()
        assert values[-1] == 1
        assert (values == 0).sum() == 1
    # papers.md, section 2: the least magnitudes, and the largest negative one
    assert published_map(True).abs().topk(2, largest=False).values[1].item() == pytest.approx(5.5e-7)
    assert published_map(True)[0].item() == pytest.approx(-0.99296875)
    assert published_map(False)[1].item() == pytest.approx(3.25e-7)


def test_the_published_map_is_that_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    for signed in (True, False):
        torch.testing.assert_close(
            published_map(signed), functional.create_dynamic_map(signed=signed), rtol=1e-6, atol=0
        )


def test_bitsandbytes_and_back() -> None:
    saved = stock()
    theirs = convert.convert(saved, "bitsandbytes")
    large, tail, small = theirs["state"].values()
    assert set(large) == {"step", "state1", "qmap1", "absmax1", "state2", "qmap2", "absmax2"}
    assert (large["state1"].dtype, large["state1"].shape, large["absmax1"].shape) == (torch.uint8, (64, 96), (24,))
    assert tail["absmax2"].shape == (20,), "the last block is short"
    assert small["state1"].dtype == torch.float32
    assert large["step"] == 2
    again = convert.convert(theirs, "torch")
    gap = published_map(True).diff().max().item()
    for (m, v), (m2, v2) in zip(moments(saved), moments(again), strict=True):
        if m.numel() < LEAST:
            assert torch.equal(m, m2)
            assert torch.equal(v, v2)
        same_values(m2, m, 256, gap)
        same_values(v2, v, 256, gap)
    params = make_params(*SHAPES)
    optimizer = torch.optim.AdamW(params)
    optimizer.load_state_dict(again)
    assert optimizer.state[params[0]]["step"].dtype == torch.float32
    set_grads(params, 3)
    optimizer.step()


def test_values_that_were_converted_stay() -> None:
    once = convert.convert(convert.convert(stock(), "bitsandbytes"), "torch")
    twice = convert.convert(convert.convert(once, "bitsandbytes"), "torch")
    for (_, v), (_, v2) in zip(
        moments(once), moments(twice), strict=True
    ):  # the signed map has no -1, and shrinks blocks
        torch.testing.assert_close(v, v2, rtol=2e-7, atol=0)  # two roundings of fp32


def test_old_blocks_of_2048_and_wrapped_state() -> None:
    codes = torch.arange(6144).remainder(256).to(torch.uint8).view(64, 96)
    absmax = torch.tensor([1.0, 2.0, 3.0])
    values = published_map(True)
    quantized = {"state1": codes, "qmap1": values, "absmax1": absmax}
    quantized |= {"state2": codes, "qmap2": published_map(False), "absmax2": absmax}
    group = {"lr": 0.1, "params": [0]}
    plain = {"state": {0: {"step": 5, **quantized}}, "param_groups": [group]}
    wrapped = {"state": {0: {"step": 5, "__bnb_optimizer_quant_state__": quantized}}, "param_groups": [group]}
    expected = values[codes.flatten().int()] * absmax.repeat_interleave(2048)
    for state_dict in (plain, wrapped):
        read = convert.convert(state_dict, "torch")["state"][0]
        assert torch.equal(read["exp_avg"].flatten(), expected)
        assert read["step"] == 5


def test_one_state_needs_to_be_named() -> None:
    saved = {"state": {0: {"step": 1, "state1": torch.ones(3)}}, "param_groups": [{"params": [0]}]}
    with pytest.raises(qcompile.CheckpointError, match=r"has one state, 'state1'.*sgd, lion, rmsprop, adagrad"):
        convert.convert(saved, "torch")
    assert set(convert.convert(saved, "torch", "lion")["state"][0]) == {"step", "exp_avg"}


@pytest.mark.parametrize("recipe", ["8bit", "torchao-4bit", "dettmers-8bit"])
def test_recipes_and_back(recipe: str) -> None:
    saved = stock()
    ours = convert.convert(saved, f"qcompile:{recipe}")
    state = ours["state"][0]
    for key, fmt in (("exp_avg", RECIPES[recipe].first), ("exp_avg_sq", RECIPES[recipe].second)):
        assert fmt is not None
        assert isinstance(state[key], QuantizedState)
        assert (state[key].format.codebook, state[key].format.bits) == (fmt.codebook, fmt.bits)
    assert state["exp_avg"].partner is (state["exp_avg_sq"] if recipe == "8bit" else None)
    back = convert.convert(ours, "torch")
    for (m, v), (m2, v2) in zip(moments(saved), moments(back), strict=True):
        assert type(m2) is Tensor
        # Of the norm. A second moment in pseudo-log has 254 steps for its octaves, here about 20: 6 % each, rounded up or
        # down; 4 bits have 16 levels.
        error = 0.2 if recipe == "torchao-4bit" else 0.03
        assert (m2 - m).norm() <= error * m.norm()
        assert (v2 - v).norm() <= error * v.norm()


@pytest.mark.parametrize("kind", ["8bit", "4bit", "fp8"])
def test_torchao_and_back(kind: str, tmp_path: Path) -> None:
    """Through files, with its own tensors; its optimizer loads them."""
    optim = pytest.importorskip("torchao.optim")
    torch.save({"model": 1, "optimizer": stock()}, tmp_path / "in.pt")
    main(["convert", str(tmp_path / "in.pt"), str(tmp_path / "ao.pt"), "--to", f"torchao-{kind}", "--key", "optimizer"])
    main(["convert", str(tmp_path / "ao.pt"), str(tmp_path / "back.pt"), "--to", "torch", "--key", "optimizer"])
    theirs, back = (torch.load(tmp_path / name) for name in ("ao.pt", "back.pt"))
    assert theirs["model"] == back["model"] == 1
    name = {"8bit": "OptimState8bit", "4bit": "OptimState4bit", "fp8": "OptimStateFp8"}[kind]
    assert type(theirs["optimizer"]["state"][0]["exp_avg"]).__name__ == name
    for (m, v), (m2, v2) in zip(moments(stock()), moments(back["optimizer"]), strict=True):
        assert type(m2) is Tensor
        assert (m2 - m).norm() <= 0.2 * m.norm()
        assert (v2 - v).norm() <= 0.2 * v.norm()
    cls = {"8bit": optim.AdamW8bit, "4bit": optim.AdamW4bit, "fp8": optim.AdamWFp8}[kind]
    optimizer = cls(make_params(*SHAPES), lr=1e-2)
    optimizer.load_state_dict(theirs["optimizer"])


def test_files_of_bitsandbytes(tmp_path: Path) -> None:
    """A file that its optimizer wrote, and one of ours that it goes on from."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    params = make_params(*SHAPES)
    optimizer = bitsandbytes.optim.AdamW8bit(params, lr=1e-2)
    for step in range(2):
        set_grads(params, step)
        optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "in.pt")
    convert_file(tmp_path / "in.pt", tmp_path / "torch.pt", "torch")
    read = torch.load(tmp_path / "torch.pt")
    for (m, v), (m2, v2) in zip(moments(stock()), moments(read), strict=True):
        assert (m2 - m).norm() <= 0.02 * m.norm()  # it was rounded twice, to 8 bits
        assert (v2 - v).norm() <= 0.02 * v.norm()
    convert_file(tmp_path / "torch.pt", tmp_path / "bnb.pt", "bitsandbytes")
    again = bitsandbytes.optim.AdamW8bit(params, lr=1e-2)
    again.load_state_dict(torch.load(tmp_path / "bnb.pt"))
    for p in params:
        theirs = optimizer.state[p]
        assert torch.equal(again.state[p]["state2"], theirs["state2"])
        torch.testing.assert_close(again.state[p].get("absmax2"), theirs.get("absmax2"), rtol=1e-6, atol=0)
        assert again.state[p]["step"] == theirs["step"] == 2
    set_grads(params, 3)
    again.step()


def test_errors_name_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(qcompile.CheckpointError, match=r"there is \['model'\]"):
        convert.convert({"model": 1}, "torch")
    with pytest.raises(qcompile.CheckpointError, match="the target is 'jax'"):
        convert.convert(stock(), "jax")
    with pytest.raises(qcompile.CheckpointError, match="the optimizer is 'adam'"):
        convert.convert(stock(), "torch", "adam")
    with_three = stock()
    with_three["state"][0]["max_exp_avg_sq"] = torch.ones(64, 96)
    with pytest.raises(qcompile.CheckpointError, match="parameter 0 has states exp_avg, exp_avg_sq, max_exp_avg_sq"):
        convert.convert(with_three, "bitsandbytes")
    (tmp_path / "half.pt").write_bytes(b"PK\x03\x04half")
    with pytest.raises(SystemExit):
        main(["convert", str(tmp_path / "half.pt"), str(tmp_path / "out.pt"), "--to", "torch"])
    assert "half.pt cannot be read" in capsys.readouterr().err
    torch.save({"opt": stock()}, tmp_path / "in.pt")
    with pytest.raises(SystemExit):
        main(["convert", str(tmp_path / "in.pt"), str(tmp_path / "out.pt"), "--to", "torch", "--key", "optimizer"])
    assert "no key 'optimizer'" in capsys.readouterr().err
    assert not list(tmp_path.glob("*out.pt*")), "nothing is left of a file that was not written whole"
