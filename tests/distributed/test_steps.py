"""DDP, FSDP2, meshes of two dimensions and ZeRO-1 on gloo: compiled steps against one process, and against eager ones."""

from __future__ import annotations

from typing import Any

import jobs
import pytest
import torch
from pool import Ranks

STEPS = 100
EVERY = {2: ["ddp", "fsdp", "zero", "offload", "tp"], 4: ["fsdp", "hsdp", "2d"]}
CASES = [(count, how) for count, hows in EVERY.items() for how in hows]


def final(result: dict[str, Any]) -> float:
    return sum(result["losses"][-10:]) / 10


@pytest.fixture(scope="module")
def ranks(two: Ranks, four: Ranks) -> dict[int, Ranks]:
    return {2: two, 4: four}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """One process: eager, and compiled with 8 bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {"eager": jobs.train("alone", None, STEPS), "8bit": jobs.train("alone", "step", STEPS)}
    torch.set_num_threads(threads)
    return found


@pytest.mark.parametrize(
    ("count", "how"),
    [c if c in ((2, "ddp"), (2, "fsdp"), (4, "fsdp")) else pytest.param(*c, marks=pytest.mark.slow) for c in CASES],
)
def test_a_dense_run_is_that_of_one_process(ranks: dict[int, Ranks], alone: Any, count: int, how: str) -> None:
    for result in ranks[count].run("train", how=how, compiled="step", steps=STEPS, recipe="dense"):
        assert final(result) == pytest.approx(final(alone["eager"]), rel=1e-5)
        assert result["graphs"] == 1


@pytest.mark.parametrize(
    ("count", "how"),
    [pytest.param(*c, marks=pytest.mark.slow) if c in ((2, "offload"), (2, "tp")) else c for c in CASES],
)
def test_eight_bits_are_as_good_as_in_one_process(ranks: dict[int, Ranks], alone: Any, count: int, how: str) -> None:
    """With three seeds one process ends 1e-4 to 5e-4 from dense; ranks round other sums, their parts with other random bits."""
    results = ranks[count].run("train", how=how, compiled="step", steps=STEPS)
    for result in results:
        assert final(result) == pytest.approx(final(alone["eager"]), rel=1.5e-3)
        assert result["graphs"] == 1
    formats = [format for result in results for (_, key), format in result["formats"].items() if key == "exp_avg"]
    assert sum("update-linear8" in format for format in formats) >= 3
    held = {"fsdp": 1, "offload": 1, "zero": 1, "hsdp": 2, "ddp": 2}.get(how)  # how many ranks hold each part
    if held is not None:
        assert sum(result["bytes_of_rows"] for result in results) <= 1.01 * held * alone["8bit"]["bytes_of_rows"]


@pytest.mark.parametrize("compiled", ["function", "decorator"])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_compiled_train_step(two: Ranks, compiled: str, how: str) -> None:
    """What DDP and FSDP2 do in hooks is done; Inductor compiles what it can of forward and backward, and sums in other orders."""
    expected = two.run("train", how=how, compiled="step", clip=0.5)
    results = two.run("train", how=how, compiled=compiled, clip=0.5)
    for result, other in zip(results, expected, strict=True):
        assert result["losses"] == pytest.approx(other["losses"], rel=1e-3)
        assert result["bytes"] == other["bytes"]
        if compiled == "decorator":
            assert ("DistributedDataParallel" if how == "ddp" else "DTensors") in result["reason"]


def test_accumulation_without_synchronization(two: Ranks) -> None:
    dense = two.run("train", how="ddp", compiled=None, accumulate=3)[0]
    for result in two.run("train", how="ddp", compiled="step", accumulate=3):
        assert result["losses"] == pytest.approx(dense["losses"], rel=1e-3)


@pytest.mark.parametrize("recipe", ["8bit", pytest.param("zip-sr", marks=pytest.mark.slow)])
def test_replicas_stay_bit_identical(two: Ranks, four: Ranks, recipe: str) -> None:
    first, second = two.run("train", how="ddp", compiled="step", recipe=recipe)
    assert len(first["stored"]) >= 6
    assert_same_bits(first, second)
    parts = four.run("train", how="hsdp", compiled="step", recipe=recipe)
    assert_same_bits(parts[0], parts[2])
    assert_same_bits(parts[1], parts[3])
    keys = [[stored[3][0].item() for stored in part["stored"].values() if len(stored) > 3] for part in parts[:2]]
    assert keys[0]
    assert not set(keys[0]) & set(keys[1]), "different parts are rounded with the same random bits"


def assert_same_bits(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first["stored"].keys() == second["stored"].keys()
    for key, tensors in first["stored"].items():
        assert all(map(torch.equal, tensors, second["stored"][key])), key
    assert all(torch.equal(value, second["params"][key]) for key, value in first["params"].items())


def test_parts_that_are_uneven_or_empty(four: Ranks) -> None:
    """129 rows are 33, 33, 33 and 30; of 3 rows the fourth rank has none."""
    dense = four.run("train", how="fsdp", compiled=None)
    results = four.run("train", how="fsdp", compiled="step", min_numel=0)
    for result, other in zip(results, dense, strict=True):
        assert result["losses"] == pytest.approx(other["losses"], rel=1e-3)
        assert "update-linear8" in result["formats"]["uneven.weight", "exp_avg"]
    assert results[3]["formats"]["few.weight", "exp_avg"] == "0 elements on this rank, fewer than a block of 256"
    assert results[3]["state"]["few.weight.exp_avg"].shape == (0, 129)
    assert results[3]["state"]["uneven.weight.exp_avg"].shape == (30, 64)


def test_mixed_precision_and_kept_parameters(two: Ranks) -> None:
    for how in ("mixed", "kept"):
        dense = two.run("train", how=how, compiled=None)
        for result, other in zip(two.run("train", how=how, compiled="step"), dense, strict=True):
            # bf16 products are off by 4e-3 each
            assert result["losses"] == pytest.approx(other["losses"], rel=2e-2 if how == "mixed" else 1e-3)
            assert "update-linear8" in result["formats"]["wide.weight", "exp_avg"]


def test_an_update_that_mixes_elements_stays_with_dtensor(two: Ranks) -> None:
    """Muon's products run over all ranks; its state stays dense, with the reason. bf16 products round as they are fused."""
    dense = two.run("train", how="fsdp", compiled=None, name="Muon")
    for result, other in zip(two.run("train", how="fsdp", compiled="step", name="Muon"), dense, strict=True):
        assert result["losses"] == pytest.approx(other["losses"], rel=1e-2)
        assert "still to be reduced over ranks" in result["formats"]["wide.weight", "momentum_buffer"]


def test_state_that_is_spread_in_another_way(two: Ranks) -> None:
    for formats in two.run("odd_state"):
        reason = formats["wide.weight", "exp_avg"]
        assert reason == "exp_avg has placements (Replicate(),), and what it is used with (Shard(dim=0),)"
        assert "update-linear8" in formats["narrow.weight", "exp_avg"]


@pytest.mark.parametrize("how", ["fsdp", "tp"])
def test_a_compiled_step_communicates_nothing(two: Ranks, how: str) -> None:
    assert two.run("collectives", how=how, compiled=None) == [[], []]
    assert two.run("collectives", how=how, compiled="step") == [[], []]
    assert any(two.run("collectives", how="zero", compiled=None)), "collectives are not counted at all"
