"""features.py: texts read, run once, kept; several processes get what one gets."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import features
from model import ModernBERT, ModernBERTConfig

ROOT = Path(features.__file__).resolve().parent


def make_model(seed=0):
    torch.manual_seed(seed)
    shape = dict(hidden_size=32, num_attention_heads=2, intermediate_size=48, num_hidden_layers=3, local_attention=8)
    return ModernBERT(ModernBERTConfig(vocab_size=64, **shape))


def make_documents(n, seed=0):
    rng = np.random.default_rng(seed)
    return [[2, *rng.integers(5, 64, rng.integers(1, 30)).tolist(), 3] for _ in range(n)]


def first_and_mean(output, sizes):
    parts = output.last_hidden_state.split(sizes)
    return torch.stack([torch.stack([part[0], part.mean(0)]) for part in parts]).numpy()


def test_blocks():
    assert features.block_bounds(22) == {"low": (0, 7), "mid": (8, 14), "late": (15, 21)}  # the paper's
    assert features.block_bounds(28) == {"low": (0, 9), "mid": (10, 18), "late": (19, 27)}
    for n_layers in range(1, 30):
        covered = [i for first, last in features.block_bounds(n_layers).values() for i in range(first, last + 1)]
        assert covered == list(range(n_layers))


def test_texts_of_every_kind(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\n  two \r\nthree", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": " two", "id": 3}\n{"text": "three\\u2028"}\n')
    for name in ("a.txt", "a.jsonl"):
        assert features.read_texts(tmp_path / name, "texts") == ["one", "two", "three"]
    for name in ("b.txt", "a.csv", "."):
        with pytest.raises(SystemExit, match="--texts=.*expected|no tokenizer"):
            features.read_texts(tmp_path / name, "texts")


def test_batches_hold_every_document_once_and_few_tokens():
    documents = make_documents(50)
    for size in (1, 40, 100, 10**6):
        batches = features.batches_of(documents, size)
        assert sorted(i for rows in batches for i in rows) == list(range(50))
        assert all(len(rows) == 1 or sum(len(documents[i]) for i in rows) <= size for rows in batches)
    assert len(documents[features.batches_of(documents, 40)[0][0]]) == max(map(len, documents))
    assert features.batches_of([], 10) == []


def test_compute_against_one_text_at_a_time_and_its_cache(tmp_path):
    model, documents = make_model().train(), make_documents(20)
    options = dict(batch_tokens=60, cache=tmp_path)
    found = features.compute(model, documents, first_and_mean, "x", **options)
    with torch.no_grad():
        for ids, pair in zip(documents, found, strict=True):
            hidden = model.eval()(torch.tensor([ids])).last_hidden_state[0]
            assert np.allclose(pair, torch.stack([hidden[0], hidden.mean(0)]).numpy(), atol=1e-5)
    assert len(list(tmp_path.iterdir())) == 1
    again = features.compute(model, documents, lambda output, sizes: 1 / 0, "x", **options)
    assert np.array_equal(again, found)
    for change in ({"model": make_model(1)}, {"documents": documents[1:]}, {"what": "y"}, {"dtype": torch.bfloat16}):
        arguments = {"model": model, "documents": documents, "reduce": first_and_mean, "what": "x", **options, **change}
        features.compute(**arguments)
    assert len(list(tmp_path.iterdir())) == 5


def test_the_hash_knows_names_and_values():
    a, b = make_model(0), make_model(0)
    assert features.weights_hash(a) == features.weights_hash(b) != features.weights_hash(make_model(1))
    with torch.no_grad():
        b.model.final_norm.weight[3] += 1e-6
    assert features.weights_hash(a) != features.weights_hash(b)


def test_two_processes_get_what_one_gets(tmp_path):
    documents = make_documents(9)
    make_model().save_pretrained(tmp_path / "m")
    (tmp_path / "documents.json").write_text(json.dumps(documents))
    script = tmp_path / "ranks.py"
    script.write_text(f"""
import json, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import numpy as np, torch.distributed as dist
from features import compute
from model import ModernBERT
from test_features import first_and_mean
dist.init_process_group("gloo")
cache = {str(tmp_path / "cache")!r} + str(dist.get_rank())  # as on two machines: what one has, the other does not see
model = ModernBERT.from_pretrained({str(tmp_path / "m")!r})
documents = json.load(open({str(tmp_path / "documents.json")!r}))
# one text: a rank has nothing to do; all again: from the cache
for name, texts in (("all", documents), ("one", documents[:1]), ("again", documents)):
    found = compute(model, texts, first_and_mean, "x", batch_tokens=50, cache=cache)
    np.save({str(tmp_path)!r} + f"/{{name}}{{dist.get_rank()}}.npy", found)
dist.destroy_process_group()
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    model = make_model()
    for name, texts in (("all", documents), ("one", documents[:1]), ("again", documents)):
        alone = features.compute(model, texts, first_and_mean, "x", batch_tokens=50)
        for rank in (0, 1):
            assert np.allclose(np.load(tmp_path / f"{name}{rank}.npy"), alone, atol=1e-6)
    assert len(list((tmp_path / "cache0").glob("*.npy"))) == 2 and not (tmp_path / "cache1").exists()
