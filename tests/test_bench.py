"""Tests of bench.py: both sides do the same work, tokens are counted as they should be, bad settings are one line."""

import json

import pytest
import torch

import bench

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    sizes = dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24)
    monkeypatch.setitem(bench.SHAPES, "tiny", sizes)
    for name, value in dict(vocab_size=300, tokens=192, repeats=2, memory=False, device="cpu", dtype="float32").items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "cases", ["64", "ragged", "192"])


def test_both_sides_compute_the_same_loss(small, tmp_path, monkeypatch, capsys):
    everywhere = ["ours mlm all-logits", "theirs mlm sdpa all-logits", "ours clm all-logits", "ours mlm recompute"]
    everywhere += ["loss mlm", "loss mlm all-logits"]
    monkeypatch.setattr(bench, "variants", bench.variants + everywhere)
    monkeypatch.setattr(bench, "out", str(tmp_path / "new" / "bench.json"))
    monkeypatch.setattr(bench, "peak_tflops", 100.0)
    bench.main()
    rows = json.loads((tmp_path / "new" / "bench.json").read_text())["rows"]
    assert len(rows) == 3 * 12
    for case in bench.cases:
        losses = {row["variant"]: row["loss"] for row in rows if row["case"] == case}
        mlm = [loss for variant, loss in losses.items() if "s mlm" in variant and "loss" not in variant]
        assert max(mlm) - min(mlm) < 1e-4
        assert abs(losses["loss mlm"] - losses["loss mlm all-logits"]) < 1e-4
        assert abs(losses["ours clm"] - losses["ours clm all-logits"]) < 1e-4
    ours = [row for row in rows if row["variant"].startswith("ours")]
    for row in [row for row in ours if "recompute" not in row["variant"]]:
        objective = row["variant"].split()[1]
        rivals = [r for r in rows if r["case"] == row["case"] and r["variant"].startswith(f"theirs {objective}")]
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / max(r["tokens_per_s"] for r in rivals))
        assert row["mfu"] == pytest.approx(row["tflops"] / 100)
    compared = {row["variant"]: row["compared_with"] for row in rows if "compared_with" in row}
    assert compared["ours mlm recompute"] == "ours mlm" and compared["loss mlm"] == "loss mlm all-logits"
    assert "loss mlm all-logits" not in compared and "theirs mlm sdpa" not in compared
    lines = capsys.readouterr().out.split("\n")
    assert len([line for line in lines if "theirs clm eager" in line]) == 3


def test_a_ragged_batch_counts_real_tokens(monkeypatch):
    batch = bench.make_batch("ragged", CPU)
    assert sum(batch["lengths"]) == len(batch["flat"]) == bench.tokens == batch["mask"].sum()
    assert all(64 <= n <= 512 for n in batch["lengths"][:-1]) and batch["cu_seqlens"][-1] == bench.tokens
    assert torch.equal(batch["rows"][batch["mask"].bool()], batch["flat"])
    assert batch["n_targets"]["mlm"] == (batch["mlm"] != -100).sum() == (batch["row_labels"]["mlm"] != -100).sum()
    assert batch["n_targets"]["clm"] == (batch["clm"] != -100).sum()
    assert bench.make_batch("512", CPU)["mask"] is None


@pytest.mark.parametrize(
    "name, value",
    [("shape", "huge"), ("cases", ["500"]), ("cases", ["8192"]), ("variants", ["ours"]), ("variants", ["theirs mlm"])]
    + [("variants", ["theirs mlm sdpa recompute"]), ("variants", ["loss clm recompute"]), ("variants", ["loss sdpa"])]
    + [("variants", ["hers mlm sdpa"]), ("dtype", "float16"), ("repeats", 0), ("mask_prob", 0.0), ("device", "tpu")],
)
def test_bad_settings_are_one_line(name, value, monkeypatch):
    monkeypatch.setattr(bench, name, value)
    with pytest.raises(SystemExit, match=f"bench.py: --{name}") as stop:
        bench.main()
    assert "\n" not in str(stop.value)
