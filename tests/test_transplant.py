"""transplant.py: tensor by tensor what moves, the probe against scikit-learn, the tables by hand, the script."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from test_cka import WORDS, make_tokenizer

import transplant
from features import weights_hash
from finetune import scores
from model import ModernBERT, ModernBERTConfig

SCRIPT = Path(transplant.__file__).resolve()


def make_model(seed, n_layers=6, width=32):
    torch.manual_seed(seed)
    shape = {"hidden_size": width, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": n_layers}
    return ModernBERT(ModernBERTConfig(vocab_size=48, local_attention=8, initializer_range=0.2, **shape)).eval()


def perturbed(seed):
    """No two models share a tensor, norms and biases included."""
    model = make_model(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter), alpha=0.1 * (seed + 1))
    return model


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Two encoders, a shallow one, and a task: which of three words comes up?"""
    folder = tmp_path_factory.mktemp("transplant")
    for name, model in {"a": perturbed(0), "b": perturbed(1), "shallow": make_model(0, n_layers=2)}.items():
        model.save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)
    make_model(0).save_pretrained(folder / "other")
    make_tokenizer(WORDS[::-1]).save_pretrained(folder / "other")
    rng, rows = random.Random(0), []
    for i in range(120):
        label = rng.choice(WORDS[:3])
        text = " ".join(rng.sample([label, *rng.choices(WORDS[3:], k=6)], 7))
        rows.append({"text": text, "label": label, "split": "test" if i % 3 == 0 else "train"})
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


# --- the operation


def expected(part, name):
    """Spelled out: does this tensor move?"""
    layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
    if part == "0-7":
        return layer is not None and layer <= 7
    if part == "2":
        return layer == 2
    if part == "attn":
        return ".attn." in name or "attn_norm" in name
    if part == "mlp":
        return ".mlp." in name or "mlp_norm" in name
    if part == "embeddings":
        return "embeddings" in name or name == "decoder.weight"  # one matrix, tied
    return any(expected(piece, name) for piece in part.split("+"))


@pytest.mark.parametrize("part", ["0-7", "2", "attn", "mlp", "embeddings", "embeddings+2", "attn+mlp"])
def test_exactly_the_parts_tensors_move(part):
    def deep(seed):
        torch.manual_seed(seed)
        shape = dict(hidden_size=16, num_attention_heads=2, intermediate_size=24, num_hidden_layers=11)
        model = ModernBERT(ModernBERTConfig(vocab_size=30, **shape))
        for parameter in model.parameters():
            parameter.data.add_(torch.rand_like(parameter))
        return model

    host, donor = deep(0), deep(1)
    before = weights_hash(host), weights_hash(donor)
    hybrid = transplant.transplant(host, donor, part)
    assert (weights_hash(host), weights_hash(donor)) == before
    moved = 0
    for name, tensor in hybrid.state_dict().items():
        source = donor if expected(part, name) else host
        assert torch.equal(tensor, source.state_dict()[name]), name
        assert not torch.equal(donor.state_dict()[name], host.state_dict()[name]), name
        moved += expected(part, name)
    assert moved
    assert hybrid.decoder.weight is hybrid.model.embeddings.tok_embeddings.weight


def test_all_parts_together_are_the_donor():
    host, donor = perturbed(0), perturbed(1)
    hybrid = transplant.transplant(host, donor, "embeddings+0-5")
    left = {n for n, t in hybrid.state_dict().items() if not torch.equal(t, donor.state_dict()[n])}
    assert left == {"model.final_norm.weight", "head.dense.weight", "head.norm.weight", "decoder.bias"}


# --- the probe and the numbers


def test_macro_f1_is_sklearns():
    rng = np.random.default_rng(0)
    gold, answers = (np.array(list("abcd"))[rng.integers(0, k, 60)] for k in (3, 4))
    assert transplant.macro_f1(gold, answers) == pytest.approx(100 * f1_score(gold, answers, average="macro"))
    assert transplant.macro_f1(gold, answers) == pytest.approx(
        100 * scores(gold, answers)["macro_f1"]
    )  # of finetune.py
    weights = rng.multinomial(60, np.full(60, 1 / 60), size=5)
    for row, value in zip(weights, transplant.macro_f1(gold, answers, weights.astype(float)), strict=True):
        pick = np.repeat(np.arange(60), row)
        assert value == pytest.approx(100 * f1_score(gold[pick], answers[pick], average="macro"))


def test_recovery_by_hand():
    """Scores of 100, 50 and 25 points between which a part recovers exactly a third."""
    gold = np.array(["x", "y"] * 6)
    wrong = np.array(["y", "x"] * 6)

    def right(n):  # n of 12 right, as many of x as of y: macro-F1 = accuracy
        return [np.where(np.arange(12) < n, gold, wrong)]

    found = transplant.evaluate({"host": right(6), "donor": right(12), "low": right(8), "bad": right(4)}, gold)
    assert [round(found[name]["f1"], 6) for name in found] == [50, 100, pytest.approx(200 / 3), pytest.approx(100 / 3)]
    assert found["low"]["recovery"] == pytest.approx(100 / 3)
    assert found["bad"]["recovery"] == pytest.approx(-100 / 3)
    assert (found["host"]["recovery"], found["donor"]["recovery"]) == (0, 100)
    low, high = found["donor"]["difference_95"]
    assert 10 < low < 50 < high < 90
    assert found["host"]["difference_95"] == [0, 0]
    text = transplant.table(found, {"low": "0-7"})
    assert "low 0-7" in text and len({len(line) for line in text.splitlines()}) == 1
    assert "-12" in next(line for line in text.splitlines() if "low 0-7" in line)  # the paper's, beside it


def test_the_probe_standardises_on_train_and_draws_by_seed(monkeypatch):
    """The scale of a dimension does not matter, and a seed changes nothing but the texts that are drawn."""
    rng = np.random.default_rng(0)
    labels = np.array(["a", "b"])[rng.integers(0, 2, 200)]
    vectors = rng.normal(size=(200, 5)) + (labels == "a")[:, None]
    split = {"train": np.arange(120), "test": np.arange(120, 200)}
    answers = transplant.probe(vectors, labels, split, 1)
    assert (answers == labels[120:]).mean() > 0.8
    assert (transplant.probe(vectors * [1e4, 1, 1e-4, 1, 1], labels, split, 1) == answers).all()
    monkeypatch.setattr(transplant, "subsample", 0.2)
    few = [transplant.probe(vectors, labels, split, seed) for seed in (1, 1, 2)]
    assert (few[0] == few[1]).all() and (few[0] != few[2]).any()
    monkeypatch.setattr(transplant, "subsample", 1.0)
    assert (transplant.probe(vectors, labels, split, 1) == transplant.probe(vectors, labels, split, 2)).all()


# --- the script


@pytest.fixture
def run_main(monkeypatch, capsys, here):
    def run(out_dir, **settings):
        values = {"donor": here / "a", "host": here / "b", "task": here / "words.jsonl", "parts": None, "save": None}
        values |= {"out_dir": out_dir, "device": "cpu", "pool": "mean", "resamples": 50, "dtype": "float32", **settings}
        for key, value in values.items():
            monkeypatch.setattr(transplant, key, str(value) if isinstance(value, Path) else value)
        transplant.main()
        return capsys.readouterr().out

    return run


def test_end_to_end(tmp_path, run_main):
    out = run_main(tmp_path)
    found = json.loads((tmp_path / "transplant.json").read_text())
    assert list(found["scores"]) == ["host", "donor", "low", "mid", "late", "attn", "mlp"]
    assert found["parts"]["low"] == "0-1" and found["scores"]["donor"]["recovery"] == pytest.approx(100)
    assert found["scores"]["donor"]["f1"] > 60  # the mean of random vectors still tells which word came up
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 7 * 3 and rows[-1]["task"] == "probe_words"
    by_hand = [100 * row["test"]["macro_f1"] for row in rows if row["part"] == "attn"]
    assert found["scores"]["attn"]["f1"] == pytest.approx(np.mean(by_hand))
    for name in ("transplant.png", "transplant.svg", "transplant.md"):
        assert (tmp_path / name).stat().st_size > 500
    assert not list(tmp_path.glob("*.tmp"))
    assert run_main(tmp_path) == out  # from the cache


def test_each_layer_and_saving(here, tmp_path, run_main):
    run_main(tmp_path, parts="each,embeddings+0-1")
    found = json.loads((tmp_path / "transplant.json").read_text())
    assert list(found["scores"])[2:] == ["0", "1", "2", "3", "4", "5", "embeddings+0-1"]
    out = run_main(tmp_path / "x", parts="embeddings+0-1", save=tmp_path / "hybrid", task=None)
    assert "saved" in out and not (tmp_path / "x").exists()
    saved = ModernBERT.from_pretrained(tmp_path / "hybrid")
    wanted = transplant.transplant(*(ModernBERT.from_pretrained(here / n) for n in "ba"), "embeddings+0-1")
    assert weights_hash(saved) == weights_hash(wanted)


def test_bad_input_is_one_line(here, tmp_path, run_main):
    for change, words in (
        ({"donor": None}, "--donor=None"),
        ({"donor": here / "none"}, "--donor="),
        ({"donor": here / "shallow"}, "expected the same depth"),
        ({"donor": here / "other"}, "expected the same tokenizer"),
        ({"parts": "0-6"}, "--parts=0-6: expected layers of 0-5"),
        ({"parts": "head"}, "--parts=head: expected layers such as"),
        ({"task": None}, "--task=None"),
        ({"task": here / "none.jsonl"}, "--task="),
        ({"save": tmp_path / "s"}, "expected one part, got low, mid, late, attn, mlp"),
        ({"parts": "0", "save": here / "b"}, "exists; expected a new directory"),
        ({"subsample": 0}, "--subsample=0"),
        ({"subsample": 0.9, "seeds": ()}, "--seeds=()"),
    ):
        with pytest.raises(SystemExit) as stop:
            run_main(tmp_path / "out", **change)
        assert words in str(stop.value) and "\n" not in str(stop.value)
        assert not (tmp_path / "out").exists() and not (tmp_path / "s").exists()


def test_from_the_shell(here, tmp_path):
    command = [sys.executable, SCRIPT, f"--donor={here}/a", f"--host={here}/b", "--parts=0-9", "--task=x"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "--parts=0-9" in done.stderr.splitlines()[-1]
