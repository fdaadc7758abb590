"""cka.py: the estimator against closed forms and its definition, the features, and the script from end to end."""

import itertools
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import t as student_t
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import cka
from features import compute
from model import ModernBERT, ModernBERTConfig

SCRIPT = Path(cka.__file__).resolve()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [first + last for first in ("bra", "cle", "dri", "fo", "gu", "ka") for last in ("ne", "sto", "ti", "lum", "x")]


def make_tokenizer(words=WORDS, lowercase=False):
    vocab = {word: i for i, word in enumerate(SPECIAL + words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def make_model(seed, n_layers=3):
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": n_layers}
    return ModernBERT(ModernBERTConfig(vocab_size=48, local_attention=8, initializer_range=0.2, **shape)).eval()


def make_texts(n, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(2, 40))) for _ in range(n)]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Three tiny checkpoints a, b, c with one tokenizer, and 60 texts."""
    folder = tmp_path_factory.mktemp("cka")
    for seed, name in enumerate("abc"):
        make_model(seed).save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)
    lines = [json.dumps({"text": text}) for text in make_texts(60)]
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def run_main(monkeypatch, capsys):
    """cka.main() with these settings -> the result in cka.json, stdout, stderr."""

    keys = ("estimator", "standardise", "drop_dims", "bootstrap", "tokens", "trajectory", "reference", "ref_mode")
    defaults = {key: getattr(cka, key) for key in keys}
    defaults |= {"start": None, "control_a": None, "control_b": None, "n_texts": 40, "dtype": "float32"}

    def run(out_dir, **settings):
        for key, value in {"out_dir": out_dir, "device": "cpu", **defaults, **settings}.items():
            monkeypatch.setattr(cka, key, str(value) if isinstance(value, Path) else value)
        cka.main()
        captured = capsys.readouterr()
        return json.loads((Path(out_dir) / "cka.json").read_text()), captured.out, captured.err

    return run


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


# --- the estimator


def test_closed_form():
    assert cka.linear_cka([[1.0], [2], [3]], [[1.0], [4], [9]]) == pytest.approx(48 / 49, abs=1e-14)


@pytest.mark.parametrize(("n", "p", "q"), [(50, 7, 11), (20, 40, 9), (10, 64, 64)])  # feature and Gram route
def test_equals_the_hsic_definition(n, p, q):
    X = gaussian(n, p) + 3
    Y = gaussian(n, q, seed=1) + np.pad(X, ((0, 0), (0, q)))[:, :q] - 5
    H = np.eye(n) - 1 / n  # the centring matrix: HSIC(K, L) = tr(KHLH) / (n-1)^2
    K, L = X @ X.T, Y @ Y.T
    hsic = np.trace(K @ H @ L @ H) / np.sqrt(np.trace(K @ H @ K @ H) * np.trace(L @ H @ L @ H))
    assert cka.linear_cka(X, Y) == pytest.approx(hsic, abs=1e-12)
    assert cka.linear_cka(torch.tensor(Y), torch.tensor(X)) == pytest.approx(hsic, abs=1e-12)


def test_invariances():
    X, Y = gaussian(80, 6), gaussian(80, 5, seed=1)
    Y[:, :3] += X[:, :3]
    value = cka.linear_cka(X, Y)
    orthogonal, _ = np.linalg.qr(gaussian(6, 6, seed=2))
    assert cka.linear_cka(X @ orthogonal, Y) == pytest.approx(value, abs=1e-12)
    assert cka.linear_cka(-7.5 * X + 100, Y) == pytest.approx(value, abs=1e-10)
    assert cka.linear_cka(X, X) == pytest.approx(1, abs=1e-10)
    stretched = cka.linear_cka(X @ np.diag([1, 1, 1, 1, 1, 30]), Y)  # invertible, yet not orthogonal
    assert abs(stretched - value) > 0.05


def test_scale_and_precision():
    X, Y = gaussian(40, 60), gaussian(40, 60, seed=1)
    assert cka.linear_cka(X * 1e-6, Y) == pytest.approx(cka.linear_cka(X * 1e6, Y), abs=1e-9)
    assert cka.linear_cka(X * 1e-120, Y) == pytest.approx(cka.linear_cka(X * 1e120, Y), abs=1e-9)
    half = torch.tensor(X * 1e-4).half()  # its Gram matrix would underflow in half precision
    assert cka.linear_cka(half, half) == pytest.approx(1, abs=1e-10)


def test_independent_gaussians():
    """Unrelated features are far from 0 when n is not much larger than p: about p / (n + p) = 0.606 here. The debiased
    estimator says 0."""
    X, Y = gaussian(500, 768), gaussian(500, 768, seed=1)
    assert abs(cka.linear_cka(X, Y, debiased=True)) < 0.01
    n, p = 499, 768  # E tr(KL) = n p^2 and E tr(K^2) ~ n p^2 + n^2 p for centred Gram matrices of n - 1 dimensions
    assert cka.linear_cka(X, Y) == pytest.approx(n * p**2 / (n * p**2 + n**2 * p), abs=0.01)


def test_debiased_is_the_u_statistic():
    """HSIC as an average over all ordered quadruples of different texts (Song et al. 2012, eq. 4)."""
    K, L = (Z @ Z.T for Z in (gaussian(7, 3), gaussian(7, 4, seed=1)))
    for A, B in ((K, L), (K, K)):
        terms = [A[i, j] * (B[i, j] + B[q, r] - 2 * B[i, q]) for i, j, q, r in itertools.permutations(range(7), 4)]
        assert cka.unbiased_hsic(A, B) == pytest.approx(np.mean(terms), rel=1e-12)
    X, Y = gaussian(30, 5), gaussian(30, 5, seed=1)
    assert cka.linear_cka(X, X, debiased=True) == pytest.approx(1, abs=1e-12)
    assert cka.linear_cka(X * 1e-100, Y, True) == pytest.approx(cka.linear_cka(X, Y + 7, True), abs=1e-9)


def test_one_huge_dimension_rules_cka_until_it_is_left_out_or_scaled(monkeypatch):
    """K2: near-copies, but for one independent dimension of scale 1e3."""
    X = gaussian(200, 20)
    Y = X + 0.1 * gaussian(200, 20, seed=1)
    alike = cka.linear_cka(X, Y)
    X[:, 3], Y[:, 5] = 1e3 * gaussian(200, seed=2), 1e3 * gaussian(200, seed=3)
    plain = cka.divergences(X[None], Y[None], [range(200)])[0, 0]
    assert alike > 0.98 and plain > 0.9
    assert cka.top_share(X) > 0.99 > 0.25 > cka.top_share(gaussian(200, 20))
    monkeypatch.setattr(cka, "drop_dims", 1)
    dropped = cka.divergences(X[None], Y[None], [range(200)])[0, 0]
    without = cka.linear_cka(np.delete(X, 3, 1), np.delete(Y, 5, 1))
    assert dropped == pytest.approx(1 - without) and dropped < 0.15
    monkeypatch.setattr(cka, "drop_dims", 0)
    monkeypatch.setattr(cka, "standardise", True)
    scaled = cka.divergences(X[None], Y[None], [range(200)])[0, 0]
    assert scaled == pytest.approx(1 - cka.linear_cka(X / X.std(0), Y / Y.std(0))) and scaled < 0.2


@pytest.mark.parametrize("estimator", ["biased", "debiased"])
def test_bootstrap_sd_is_that_of_fresh_texts(estimator, monkeypatch):
    """The SD over resamples of one sample, against the SD over many samples drawn anew."""
    monkeypatch.setattr(cka, "estimator", estimator)

    def sample(seed):
        X = gaussian(150, 6, seed=seed)
        return X[None], (X @ np.diag([1, 2, 3, 0, 0, 0]) + gaussian(150, 6, seed=9000 + seed))[None]

    fresh = [cka.divergences(*sample(seed), [range(150)])[0, 0] for seed in range(300)]
    within = [cka.resampled(*sample(seed), np.arange(150), 100).std() for seed in range(300, 310)]
    assert np.mean(within) == pytest.approx(np.std(fresh), rel=0.2)


def test_bootstrap_of_the_excess_over_the_control():
    """Pair and control read the same resampled texts: a control that is the pair leaves no excess and no doubt."""
    A, B = gaussian(2, 60, 5), gaussian(2, 60, 5, seed=1)
    C = A + gaussian(2, 60, 5, seed=2)
    draws, rows = [range(60)], np.arange(60)
    pair, noise = (cka.divergences(A, other, draws) for other in (B, C))
    ours, theirs = (cka.resampled(A, other, rows, 60) for other in (B, C))
    same = cka.summarise(pair, pair, ours, cka.resampled(A, B, rows, 60))["overall"]
    assert (same["excess"], same["excess_bootstrap95"]) == (0, 0)
    found = cka.summarise(pair, noise, ours, theirs)["overall"]
    assert found["excess"] == pytest.approx(pair.mean() - noise.mean())
    assert found["excess_bootstrap95"] == pytest.approx(1.96 * (ours.mean(1) - theirs.mean(1)).std(ddof=1))


def test_constant_features_are_nan():
    X = gaussian(30, 4)
    for constant in (np.zeros((30, 4)), np.full((30, 4), 0.1), np.tile(gaussian(1, 4), (30, 1))):
        assert np.isnan(cka.linear_cka(X, constant))
        assert np.isnan(cka.linear_cka(constant, X))
    assert np.isnan(cka.linear_cka(X, X * np.inf))


def test_bad_shapes():
    for X, Y in ((gaussian(3, 2), gaussian(4, 2)), (gaussian(1, 2), gaussian(1, 2)), (gaussian(5), gaussian(5))):
        with pytest.raises(ValueError, match="linear_cka"):
            cka.linear_cka(X, Y)


# --- layers, samples and means


def test_constant_layer_is_named_and_left_out(capsys):
    A, B = gaussian(4, 30, 8), gaussian(4, 30, 8, seed=1)
    whole = cka.divergences(A, B, [range(30), range(20)])
    B[2] = B[2, 0]
    broken = cka.divergences(A, B, [range(30), range(20)], "model_a, model_b:")
    assert "model_a, model_b: layer 2:" in capsys.readouterr().err
    assert np.isnan(broken[:, 2]).all()
    assert np.array_equal(np.delete(broken, 2, 1), np.delete(whole, 2, 1))
    summary = cka.summarise(broken, control=whole)
    assert summary["overall"]["left_out"] == [2]
    assert summary["overall"]["divergence"] == pytest.approx(np.delete(whole, 2, 1).mean())
    assert summary["overall"]["ratio"] == pytest.approx(1)  # the control's mean leaves the same layer out
    assert np.isnan(summary["layers"][2]["divergence"])
    assert np.isnan(summary["layers"][2]["ratio"])


def test_summary_by_hand():
    pair = np.array([[0.2, 0.4, 0.9], [0.4, 0.4, 0.7], [0.3, 0.4, 0.8]])
    control = np.array([[0.1, 0.2, 0.8], [0.1, 0.4, 0.8], [0.1, 0.3, 0.8]])
    summary = cka.summarise(pair, control)
    first = summary["layers"][0]
    assert first["divergence"] == pytest.approx(0.3)
    assert first["sd"] == pytest.approx(0.1)
    assert first["ci95"] == pytest.approx(2.484 * 0.1, abs=1e-4)  # P-510
    assert first["ci95"] == pytest.approx(student_t.interval(0.95, 2, scale=0.1 / np.sqrt(3))[1])
    assert summary["layers"][1]["ratio"] == pytest.approx(0.4 / 0.3)  # the mean of the ratios would be 1.444
    overall = summary["overall"]
    assert overall["divergence"] == pytest.approx(0.5)
    assert overall["per_sample"] == pytest.approx([0.5, 0.5, 0.5])
    assert overall["ratio"] == pytest.approx(0.5 / 0.4)


# --- features


def features_of(model, documents, batch_tokens=16384):
    return np.moveaxis(compute(model, documents, cka.reduce, "", states=True, batch_tokens=batch_tokens), 1, 0)


@pytest.mark.parametrize("tokens", [0, 3])
def test_features_by_hand(tokens, monkeypatch):
    """One text at a time through the padded call, averaged over all its tokens, [CLS] and [SEP] among them; or three
    tokens of each text: the first, the one in the middle, the last."""
    monkeypatch.setattr(cka, "tokens", tokens)
    model, documents = make_model(0), [[2, 7, 8, 9, 3], [2, 9, 3], list(range(2, 39))]
    got = features_of(model, documents, batch_tokens=10)
    assert got.shape == ((4, 3, 3, 32) if tokens else (4, 3, 32))
    assert got.dtype == np.float64
    for i, ids in enumerate(documents):
        with torch.no_grad():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        for layer in range(4):
            state = states[layer][0].double()
            wanted = state[[0, len(ids) // 2, -1]] if tokens else state.mean(0)
            assert np.allclose(got[layer, i], wanted.numpy(), atol=1e-5)


def test_features_do_not_depend_on_batch_or_order():
    a, b = make_model(0), make_model(1)
    documents = cka.encode(make_texts(60), make_tokenizer(), 512)
    shuffled = random.Random(1).sample(documents, len(documents))
    values = []
    for texts, batch_tokens in ((documents, 1), (documents, 100), (documents, 9999), (shuffled, 130)):
        pair = features_of(a, texts, batch_tokens)[1:], features_of(b, texts, batch_tokens)[1:]
        values.append(cka.divergences(*pair, [range(60)])[0])
    assert (values[0] > 1e-3).all()
    for other in values[1:]:
        assert np.abs(other - values[0]).max() < 1e-6


def test_documents_of_a_data_directory(tmp_path):
    ids = np.array([2, 10, 11, 12, 13, 3, 2, 14, 3, 2, 3, 2, 15, 16, 3, 2, 17, 3], dtype=np.uint16)
    ids.tofile(tmp_path / "val.bin")
    manifest = {"dtype": "uint16", "tokenizer": {"eos_token_id": 3}, "splits": {"val": {"file": "val.bin"}}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    pool = cka.read_pool(tmp_path, {"a": make_tokenizer()}, 5)
    assert pool == [(2, 10, 11, 12, 3), (2, 14, 3), (2, 15, 16, 3), (2, 17, 3)]  # cut; the empty one is out
    with pytest.raises(SystemExit, match="tokenizer"):
        cka.read_pool(tmp_path, {"a": make_tokenizer(WORDS[::-1])}, 5)


@pytest.mark.parametrize("other", [make_tokenizer(WORDS[::-1]), make_tokenizer(lowercase=True)])
def test_other_tokenizer_is_refused(tmp_path, other):
    path = tmp_path / "texts.txt"
    path.write_text("Brane cleti\nfolum KAX\nbrane brane\nguti\n")
    assert len(cka.read_pool(path, {"a": make_tokenizer(), "b": make_tokenizer()}, 512)) == 4
    with pytest.raises(SystemExit, match="a and b have different tokenizers"):
        cka.read_pool(path, {"a": make_tokenizer(), "b": other}, 512)


# --- the script


def test_end_to_end(here, tmp_path, run_main):
    settings = {"model_a": here / "a", "model_b": here / "b", "control_a": here / "c", "control_b": here / "b"}
    result, out, _ = run_main(tmp_path, texts=here / "texts.jsonl", **settings)
    assert (result["samples"], result["n_texts"], result["pool"], result["seeds"]) == (3, 40, 60, [42, 43, 44])
    assert len(result["layers"]) == 3
    for row in [*result["layers"], result["overall"]]:
        assert 0 < row["divergence"] < 1
        assert row["ratio"] == pytest.approx(row["divergence"] / row["control"]["divergence"])
        assert row["sd"] > 0  # the samples differ
    assert result["overall"]["divergence"] == pytest.approx(np.mean([row["divergence"] for row in result["layers"]]))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
    by_name = {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines}
    low = by_name["low 0"] if "low 0" in by_name else by_name["low 0-0"]
    assert low["paper's"] == "5 to 44" and by_name["layer 2"]["paper's"] == ""
    assert by_name["overall"]["ratio"] == f"{result['overall']['ratio']:.3g}"
    assert "control 49.7%" in " ".join((tmp_path / "cka.md").read_text().split())
    assert (tmp_path / "cka.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "cka.svg").read_text()
    assert not list(tmp_path.glob("*.tmp"))


def test_sample_does_not_depend_on_file_order_or_copies(here, tmp_path, run_main):
    lines = (here / "texts.jsonl").read_text().splitlines()
    shuffled = tmp_path / "shuffled.jsonl"
    shuffled.write_text("\n".join(random.Random(3).sample(lines, 60) + lines[:5]))
    pair = {"model_a": here / "a", "model_b": here / "b"}
    first, *_ = run_main(tmp_path / "1", texts=here / "texts.jsonl", **pair)
    second, *_ = run_main(tmp_path / "2", texts=shuffled, batch_tokens=90, **pair)
    assert second["pool"] == 60
    for one, two in zip(first["layers"], second["layers"], strict=True):
        assert one["divergence"] == pytest.approx(two["divergence"], abs=1e-6)
        assert "control" not in one


def test_beyond_the_paper_end_to_end(here, tmp_path, run_main):
    """Each switch changes what it should, all is in the page, and nothing else moves."""
    base = {"model_a": here / "a", "model_b": here / "b", "texts": here / "texts.jsonl"}
    plain, *_ = run_main(tmp_path / "0", **base)
    more, out, _ = run_main(tmp_path / "1", **base, start=here / "c", bootstrap=50)
    assert [row["divergence"] for row in more["layers"]] == [row["divergence"] for row in plain["layers"]]
    assert all(0 < row["bootstrap95"] < 0.5 for row in [*more["layers"], more["overall"]])
    against, *_ = run_main(tmp_path / "2", model_a=here / "b", model_b=here / "c", texts=here / "texts.jsonl")
    assert more["from_start"]["model_b"]["overall"]["per_sample"] == pytest.approx(against["overall"]["per_sample"])
    assert list(more["from_start"]) == ["model_a", "model_b"]
    assert "bootstrap +-" in out and "model_a has come" in out
    assert plain["embeddings"]["divergence"] > 0 and all(0 < x <= 1 for x in plain["top_share"]["a"])
    values = {plain["overall"]["divergence"]}
    for switch in ({"estimator": "debiased"}, {"standardise": True}, {"drop_dims": 2}, {"tokens": 3}):
        other, *_ = run_main(tmp_path / "3", **base, **switch)
        values.add(other["overall"]["divergence"])
        page = (tmp_path / "3" / "cka.md").read_text()
        said = {
            "estimator": "debiased",
            "standardise": "variance 1",
            "drop_dims": "without the 2",
            "tokens": "3 evenly",
        }
        assert said[next(iter(switch))] in page and "| overall" in page
    assert len(values) == 5


def test_a_path_is_never_read_as_a_number(here, tmp_path, run_main):
    (tmp_path / "nano").symlink_to(here / "c")
    sides = {"model_a": here / "a", "model_b": here / "b", "texts": here / "texts.jsonl"}
    _, out, _ = run_main(tmp_path / "out", **sides, start=tmp_path / "nano")
    assert f"% from {tmp_path}/nano: low" in out


def test_the_same_weights_in_another_network(here, tmp_path, run_main):
    """Another attention window is another encoder, also for the cache."""
    shutil.copytree(here / "a", tmp_path / "wide")
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config | {"local_attention": 2}))
    result, *_ = run_main(tmp_path, model_a=here / "a", model_b=tmp_path / "wide", texts=here / "texts.jsonl")
    first, second, _ = (row["divergence"] for row in result["layers"])
    assert first == pytest.approx(0, abs=1e-12) and second > 1e-3  # layer 0 sees everything, layer 1 its window


def write_run(folder, steps, seed):
    """A run of train.py as far as cka.py looks: a plan, and checkpoints in phase 1, at its end, in the decay, after."""
    phases = [{"name": "phase1", "tokens_at_end": 1000}, {"name": "decay", "tokens_at_end": 300}]
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({"phases": phases}))
    places = {"step_1": (0, 500), "phase1": (1, 0), **{f"step_{s}": (1, s) for s in steps}, "final": (2, 0)}
    for i, (name, (phase, seen)) in enumerate(places.items()):
        make_model(seed + i).save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)
        torch.save({"place": {"phase": phase, "phase_tokens": seen}}, folder / name / "train_state.pt")


def test_trajectory(here, tmp_path, run_main):
    """Figure 3a: the decay's checkpoints against the twin's after as many tokens, or all against one."""
    write_run(tmp_path / "a", [100, 200], 10)
    write_run(tmp_path / "b", [200, 250], 20)
    assert list(cka.decay_checkpoints(tmp_path / "a", "trajectory")) == [0, 100, 200, 300]
    settings = {"trajectory": tmp_path / "a", "texts": here / "texts.jsonl", "model_a": None, "model_b": None}
    control = {"control_a": here / "a", "control_b": here / "b"}
    matched, out, _ = run_main(tmp_path / "m", **settings, **control, reference=tmp_path / "b")
    assert [point["tokens"] for point in matched["trajectory"]] == [0, 200, 300]
    assert (matched["model_a"], matched["model_b"]) == (str(tmp_path / "a/final"), str(tmp_path / "b/final"))
    for point, name in zip(matched["trajectory"], ("phase1", "step_200", "final"), strict=True):
        sides = {"model_a": tmp_path / "a" / name, "model_b": tmp_path / "b" / name}
        pair, *_ = run_main(tmp_path / "p", texts=here / "texts.jsonl", **sides)
        assert point["divergence"] == pytest.approx(pair["overall"]["divergence"])
        assert point["by_layer"] == pytest.approx([row["divergence"] for row in pair["layers"]])
    assert "Along the decay (0 to 300 tokens)" in out and (tmp_path / "m" / "trajectory.png").exists()
    fixed, *_ = run_main(tmp_path / "f", **settings, reference=tmp_path / "b/phase1", ref_mode="fixed")
    assert [point["tokens"] for point in fixed["trajectory"]] == [0, 100, 200, 300]
    assert fixed["trajectory"][0]["divergence"] == pytest.approx(matched["trajectory"][0]["divergence"])


def test_few_texts_are_one_sample(here, tmp_path, run_main):
    result, out, _ = run_main(tmp_path, model_a=here / "a", model_b=here / "a", texts=here / "texts.jsonl", n_texts=500)
    assert result["samples"] == 1
    assert result["overall"]["sd"] is None
    assert result["overall"]["divergence"] == pytest.approx(0, abs=1e-10)
    assert "60 distinct texts for n_texts=500" in out


def test_constant_layer_end_to_end(here, tmp_path, run_main):
    """A dead network: block outputs are zero. Exit is clean, every layer named, no nan in the JSON."""
    model = make_model(5)
    model.model.embeddings.norm.weight.data.zero_()
    model.save_pretrained(tmp_path / "dead")
    make_tokenizer().save_pretrained(tmp_path / "dead")
    result, out, err = run_main(
        tmp_path / "out", model_a=tmp_path / "dead", model_b=here / "b", texts=here / "texts.jsonl"
    )
    assert result["overall"]["divergence"] is None
    assert result["overall"]["left_out"] == [0, 1, 2]
    assert "layer 1: constant features" in err
    assert "layers [0, 1, 2]: constant features" in out


def test_bad_input_is_one_line(here, tmp_path, run_main):
    good = {"model_a": here / "a", "model_b": here / "b", "texts": here / "texts.jsonl"}
    bad_line = tmp_path / "bad.jsonl"
    bad_line.write_text('{"text": "brane"}\n{"title": "cleti"}\n')
    make_model(0, n_layers=2).save_pretrained(tmp_path / "shallow")
    make_tokenizer().save_pretrained(tmp_path / "shallow")
    for change, words in (
        ({"model_a": here / "none"}, "--model_a="),
        ({"texts": tmp_path / "none.txt"}, "--texts="),
        ({"texts": tmp_path}, "--texts="),
        ({"texts": bad_line}, "line 2"),
        ({"model_b": tmp_path / "shallow"}, "same depth"),
        ({"control_a": here / "c"}, "both or neither"),
        ({"n_texts": 2}, "--n_texts=2"),
        ({"drop_dims": 32}, "--drop_dims=32: expected fewer than the 32 dimensions"),
        ({"drop_dims": 40}, "--drop_dims=40"),
        ({"estimator": "unbiased"}, "--estimator=unbiased: expected one of biased, debiased"),
        ({"bootstrap": 100, "tokens": 4}, "--bootstrap=100 --tokens=4"),
        ({"trajectory": here}, "--reference=None"),
        ({"trajectory": here, "reference": here / "a"}, "--trajectory="),
        ({"dtype": "float8"}, "--dtype=float8"),
    ):
        with pytest.raises(SystemExit) as stop:
            run_main(tmp_path / "out", **{**good, **change})
        assert words in str(stop.value)
        assert "\n" not in str(stop.value)
        assert not (tmp_path / "out").exists()


def test_from_the_shell(here, tmp_path):
    command = [sys.executable, SCRIPT, f"--model_a={here / 'none'}", f"--model_b={here / 'b'}", "--texts=x.txt"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "--model_a=" in done.stderr.splitlines()[-1]
