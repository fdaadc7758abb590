"""finetune.py: a tiny random encoder learns a separable task, and the protocol keeps its promises."""

import io
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import precision_recall_fscore_support
from tokenizers import Tokenizer, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

import finetune
from model import ModernBERT, ModernBERTConfig

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CUES = {"liver": ["hepar", "bile"], "eye": ["iris", "retina"], "bone": ["tibia", "femur"]}
FILLER = ["the", "patient", "has", "mild", "severe", "no", "signs", "of", "left", "right"]


def make_tokenizer():
    words = SPECIAL + FILLER + [cue for cues in CUES.values() for cue in cues]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def make_model(seed=0):
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": 2}
    return ModernBERT(ModernBERTConfig(vocab_size=32, local_attention=8, **shape))


def make_rows(counts, seed=0):
    """A text's label is the organ whose cue words stand somewhere among the filler."""
    rng, rows = random.Random(seed), []
    for split, n in counts.items():
        for i in range(n):
            label = list(CUES)[i % 3]
            words = rng.choices(FILLER, k=rng.randint(2, 12)) + rng.choices(CUES[label], k=2)
            rows.append({"text": " ".join(rng.sample(words, len(words))), "label": label, "split": split})
    return rows


def write_task(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    for seed, name in enumerate("ab"):
        make_model(seed).save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture
def run_main(monkeypatch, capsys, checkpoints, tmp_path):
    """finetune.main() with these settings -> the rows of the results file, and everything printed."""
    defaults = {"model": checkpoints / "a", "seeds": "42", "results": tmp_path / "results.jsonl", "device": "cpu"}
    defaults |= {
        "dtype": "float32",
        "epochs": 3,
        "batch_size": 8,
        "learning_rate": 3e-3,
        "max_train": None,
        "max_eval": None,
    }

    def run(**settings):
        for key, value in (defaults | settings).items():
            monkeypatch.setattr(finetune, key, str(value) if isinstance(value, Path) else value)
        finetune.main()
        out, err = capsys.readouterr()
        return [json.loads(line) for line in Path(finetune.results).read_text().splitlines()], out + err

    return run


def test_learns_a_separable_task(run_main, tmp_path):
    task = write_task(tmp_path / "organs.jsonl", make_rows({"train": 120, "val": 30, "test": 60}))
    for pool in ("cls", "mean"):
        rows, out = run_main(task=task, pool=pool, epochs=5)
        row = rows[-1]
        assert row["test"]["macro_f1"] > 0.95
        assert row["majority"]["macro_f1"] == pytest.approx(1 / 6)  # one of three equal classes, F1 = 1/2, 0, 0
    assert set(row["test"]) == {"macro_f1", "micro_f1", "weighted_f1", "accuracy"}
    assert (row["task"], row["seed"], row["labels"]) == ("organs", 42, ["bone", "eye", "liver"])
    assert row["sizes"] == {"train": 120, "val": 30, "test": 60}
    assert row["truncated"] == {"train": 0, "val": 0, "test": 0}
    assert row["settings"]["learning_rate"] == 3e-3
    assert row["versions"]["torch"] == torch.__version__
    assert len(row["val_by_epoch"]) == 5
    assert row["val"]["macro_f1"] == max(row["val_by_epoch"])
    assert row["best_epoch"] == row["val_by_epoch"].index(max(row["val_by_epoch"])) + 1


def test_same_seed_same_numbers(run_main, tmp_path):
    rows = make_rows({"train": 60, "val": 30, "test": 60})
    for row in random.Random(0).sample(rows, 50):
        row["label"] = "eye"  # noise, so that scores are not all 1
    task = write_task(tmp_path / "task.jsonl", rows)
    found = []
    for file, seeds in (("1", "42,43"), ("2", "43"), ("3", "42-43")):
        got, _ = run_main(task=task, seeds=seeds, dropout=0.1, results=tmp_path / file)
        found.append({row["seed"]: (row["test"], row["val_by_epoch"]) for row in got})
    assert found[0] == found[2]
    assert found[1][43] == found[0][43]  # whatever ran before it
    assert found[0][42] != found[0][43]


def test_seed_fixes_the_head(run_main, tmp_path, monkeypatch):
    task = write_task(tmp_path / "task.jsonl", make_rows({"train": 9, "val": 3, "test": 3}))
    heads = []
    original = finetune.make_optimizer
    monkeypatch.setattr(
        finetune, "make_optimizer", lambda c: heads.append(c.linear.weight.detach().clone()) or original(c)
    )
    run_main(task=task, seeds="1,2", epochs=1)
    run_main(task=task, seeds="1,2", epochs=1, results=tmp_path / "again.jsonl")
    assert torch.equal(heads[0], heads[2])
    assert torch.equal(heads[1], heads[3])
    assert not torch.equal(heads[0], heads[1])


def test_rows_are_not_computed_twice(run_main, tmp_path, checkpoints, monkeypatch):
    task = write_task(tmp_path / "task.jsonl", make_rows({"train": 30, "val": 9, "test": 9}))
    first, _ = run_main(task=task, seeds="1-2", epochs=1)
    trained = []
    original = finetune.train_one
    monkeypatch.setattr(finetune, "train_one", lambda *args: trained.append(args[3]) or original(*args))
    again, out = run_main(task=task, seeds="1-3", epochs=1)
    assert trained == [3]
    assert again[:2] == first
    assert [row["seed"] for row in again] == [1, 2, 3]
    assert "seed 1: already in" in out
    run_main(task=task, seeds="1", epochs=1, learning_rate=1e-3)  # another setting is another experiment
    write_task(task, make_rows({"train": 30, "val": 9, "test": 9}, seed=5))  # so is an edited task
    run_main(task=task, seeds="1", epochs=1)
    make_model(7).save_pretrained(tmp_path / "c")  # and so is a retrained checkpoint of the same name
    make_tokenizer().save_pretrained(tmp_path / "c")
    run_main(task=task, model=tmp_path / "c", seeds="1", epochs=1)
    make_model(8).save_pretrained(tmp_path / "c")
    rows, _ = run_main(task=task, model=tmp_path / "c", seeds="1", epochs=1)
    assert trained == [3, 1, 1, 1, 1]
    assert len(rows) == 7


def test_labels_come_from_train_and_unseen_ones_count_as_wrong(run_main, tmp_path):
    rows = make_rows({"train": 90, "val": 30, "test": 30})
    rows += [{"text": "iris femur", "label": "skin", "split": "test"}] * 10
    row = run_main(task=write_task(tmp_path / "task.jsonl", rows), epochs=4)[0][0]
    assert row["labels"] == ["bone", "eye", "liver"]
    assert row["unseen_labels"] == {"val": {}, "test": {"skin": 10}}
    assert row["test"]["accuracy"] <= 30 / 40
    assert row["test"]["macro_f1"] <= 3 / 4  # four classes, one of them with F1 = 0
    assert any("10 examples have a label" in note for note in row["notes"])


def test_test_split_is_used_once_and_after_selection(run_main, tmp_path, monkeypatch):
    task = write_task(tmp_path / "task.jsonl", make_rows({"train": 30, "val": 11, "test": 13}))
    calls = []
    original = finetune.predict

    def spy(classifier, documents, *rest):
        weights = {name: tensor.clone() for name, tensor in classifier.state_dict().items()}
        predicted = original(classifier, documents, *rest)
        calls.append((len(documents), weights, predicted))
        return predicted

    monkeypatch.setattr(finetune, "predict", spy)
    row = run_main(task=task, epochs=4, learning_rate=1e-3)[0][0]
    assert [n for n, *_ in calls] == [11, 11, 11, 11, 13]
    best = calls[row["best_epoch"] - 1][1]  # the test split saw the weights of the selected epoch
    assert all(torch.equal(tensor, best[name]) for name, tensor in calls[-1][1].items())


def test_select_by(run_main, tmp_path, monkeypatch):
    """Three epochs whose validation macro-F1 and accuracy disagree: the setting decides which one is kept."""
    task = write_task(tmp_path / "task.jsonl", make_rows({"train": 9, "val": 3, "test": 3}))
    fake = [{"macro_f1": 0.2, "accuracy": 0.9}, {"macro_f1": 0.6, "accuracy": 0.1}, {"macro_f1": 0.6, "accuracy": 0.3}]
    for select_by, epoch in (("macro_f1", 2), ("accuracy", 1)):  # of equals the first
        values = iter([fake[0], *fake, fake[0]])  # the majority baseline, three epochs, the test split
        monkeypatch.setattr(finetune, "scores", lambda gold, predicted, values=values: next(values))
        row = run_main(task=task, select_by=select_by, seeds="1")[0][-1]
        assert row["best_epoch"] == epoch
        assert row["settings"]["select_by"] == select_by


def test_missing_validation_split_is_a_tenth_of_train(run_main, tmp_path, monkeypatch):
    task = write_task(tmp_path / "task.jsonl", make_rows({"train": 100, "test": 30}))
    rows, out = run_main(task=task, epochs=1)
    assert rows[0]["sizes"] == {"train": 90, "val": 10, "test": 30}
    assert "val = 10% of train" in out
    splits = finetune.read_task(task)
    numbered = {**splits, "train": [(str(i), label) for i, (_, label) in enumerate(splits["train"])]}
    ready, _ = finetune.prepare_splits(numbered)
    assert sorted(ready["train"] + ready["val"]) == sorted(numbered["train"])  # every example on exactly one side
    assert ready["test"] == splits["test"]
    assert finetune.prepare_splits(numbered)[0] == ready


def test_max_train_and_max_eval(run_main, tmp_path, checkpoints):
    task = write_task(tmp_path / "task.jsonl", make_rows({"train": 80, "val": 30, "test": 30}))
    names = f"{checkpoints}/a,{checkpoints}/b"
    rows, out = run_main(task=task, model=names, max_train=40, max_eval=20, epochs=1)
    assert [row["sizes"] for row in rows] == [{"train": 40, "val": 20, "test": 20}] * 2
    assert "train: 40 of 80 examples" in out
    chosen = [finetune.subset(list(range(80)), 40) for _ in range(2)]
    assert chosen[0] == chosen[1] == sorted(set(chosen[0]))


def test_truncation_is_counted():
    documents, cut = finetune.encode([("the " * 5, "x"), ("the " * 6, "x"), ("", "x")], make_tokenizer(), 7)
    the = make_tokenizer().convert_tokens_to_ids("the")
    assert documents == [[2, *[the] * 5, 3], [2, *[the] * 5, 3], [2, 3]]
    assert cut == 1


def test_metrics_by_hand_and_by_sklearn():
    gold = ["a", "a", "a", "b", "b", "unseen"]
    predicted = ["a", "a", "b", "b", "c", "a"]
    got = finetune.scores(gold, predicted)
    f1 = {"a": 2 * 2 / (2 * 2 + 1 + 1), "b": 2 / (2 + 1 + 1), "c": 0, "unseen": 0}  # 2 tp / (2 tp + fp + fn)
    assert got["macro_f1"] == pytest.approx(sum(f1.values()) / 4)
    assert got["weighted_f1"] == pytest.approx((3 * f1["a"] + 2 * f1["b"]) / 6)
    assert got["micro_f1"] == got["accuracy"] == pytest.approx(3 / 6)
    for kind in ("macro", "micro", "weighted"):
        reference = precision_recall_fscore_support(gold, predicted, average=kind, zero_division=0)[2]
        assert got[f"{kind}_f1"] == pytest.approx(reference)


def test_classifier_pools_what_it_says():
    """Against the padded call of the same encoder, one text at a time."""
    encoder = make_model()
    documents = [[2, 6, 7, 3], [2, 3], [2, *range(5, 20), 3]]
    for pool in ("cls", "mean"):
        classifier = finetune.Classifier(encoder, 5, pool, dropout=0.0).eval()
        with torch.no_grad():
            got = classifier(*finetune.flat_batch(documents, torch.device("cpu")))
            for i, ids in enumerate(documents):
                hidden = encoder(torch.tensor([ids])).last_hidden_state[0]
                pooled = hidden[0] if pool == "cls" else hidden.mean(0)
                assert torch.allclose(got[i], classifier.linear(pooled), atol=1e-5)
    predicted = finetune.predict(classifier, documents, list("vwxyz"), torch.device("cpu"), torch.float32)
    assert predicted == ["vwxyz"[i] for i in got.argmax(1)]  # in the order of the documents


def test_optimizer_and_schedule():
    classifier = finetune.Classifier(make_model(), 3, "cls", 0.0)
    decayed, free = finetune.make_optimizer(classifier).param_groups
    assert decayed["weight_decay"] == finetune.weight_decay
    assert free["weight_decay"] == 0
    assert all(p.ndim > 1 for p in decayed["params"])
    trained = {id(p) for group in (decayed, free) for p in group["params"]}
    rest = {name for name, p in classifier.named_parameters() if id(p) not in trained}
    assert rest == {"encoder.head.dense.weight", "encoder.head.norm.weight", "encoder.decoder.bias"}
    factors = [finetune.lr_factor(step, 20, 2) for step in range(20)]
    assert factors[:3] == [0.5, 1.0, 1.0]
    assert np.allclose(np.diff(factors[2:]), -1 / 18)
    assert factors[-1] == pytest.approx(1 / 18)
    assert finetune.lr_factor(0, 5, 0) == 1


def test_tables_closed_form():
    a, b = {1: 0.52, 2: 0.56, 3: 0.60}, {1: 0.50, 2: 0.51, 3: 0.58, 4: 0.9}
    mean, sd, ci = finetune.mean_sd_ci([0.02, 0.05, 0.02])
    assert mean == pytest.approx(0.03)
    assert sd == pytest.approx(np.sqrt(3) / 100)
    assert ci == pytest.approx(4.302653 * sd / np.sqrt(3))
    paired = stats.ttest_rel([a[s] for s in (1, 2, 3)], [b[s] for s in (1, 2, 3)]).confidence_interval(0.95)
    assert paired.high == pytest.approx(mean + ci)
    lines = finetune.tables({"a": a, "b": b})
    assert lines[1].split() == ["a", "3", "56.00", "4.00", f"{4.302653 * 4 / np.sqrt(3):.2f}"]
    assert lines[2].split()[:2] == ["b", "4"]
    assert lines[-1].split() == ["a", "-", "b", "3", "3.00", "1.73", f"{100 * ci:.2f}", "3"]  # the seeds both have
    assert finetune.tables({"a": {1: 0.5}})[-1].split() == ["a", "1", "50.00", "-", "-"]


def test_append_is_whole_lines(tmp_path):
    path = tmp_path / "deep" / "results.jsonl"
    for i in range(3):
        finetune.append_row(path, {"seed": i, "text": "é\n"})
    assert [row["seed"] for row in finetune.read_rows(path)] == [0, 1, 2]
    with pytest.raises(ValueError):
        finetune.append_row(path, {"score": float("nan")})
    assert len(path.read_text().splitlines()) == 3
    path.write_text('{"seed": 1}\n{"seed"\n')
    with pytest.raises(SystemExit, match="line 2"):
        finetune.read_rows(path)


def test_parse_seeds():
    assert finetune.parse_seeds("42-44") == [42, 43, 44]
    assert finetune.parse_seeds("1, 5-6") == [1, 5, 6]
    assert finetune.parse_seeds(7) == [7]
    for bad in ("", "a", "3-1", "1,1"):
        with pytest.raises(SystemExit, match="--seeds="):
            finetune.parse_seeds(bad)


def test_diverged_training_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(finetune, "learning_rate", 1e30)
    monkeypatch.setattr(finetune, "grad_clip", 0.0)
    data = {split: ([[2, 5, 3]] * 8, ["a", "b"] * 4) for split in ("train", "val", "test")}
    with pytest.raises(SystemExit, match="--learning_rate=1e"):
        bar = tqdm(file=io.StringIO())
        finetune.train_one(make_model(), data, ["a", "b"], 1, torch.device("cpu"), torch.float32, bar)


def test_bad_input_is_one_line(run_main, tmp_path):
    good = make_rows({"train": 6, "val": 3, "test": 3})
    task = write_task(tmp_path / "good.jsonl", good)
    no_test = write_task(tmp_path / "no_test.jsonl", good[:9])
    dev = write_task(tmp_path / "dev.jsonl", [*good, {"text": "x", "label": "eye", "split": "dev"}])
    two = write_task(tmp_path / "two.jsonl", [*good, {"text": "x", "label": ["eye", "bone"], "split": "test"}])
    for settings, words in (
        ({"task": tmp_path / "none.jsonl"}, "--task="),
        ({"task": no_test}, "split=test"),
        ({"task": dev}, "line 13"),
        ({"task": two}, "line 13"),
        ({"model": tmp_path / "nothing"}, "--model="),
        ({"pool": "max"}, "--pool=max"),
        ({"select_by": "f1"}, "--select_by=f1"),
        ({"epochs": 0}, "--epochs=0"),
        ({"seeds": "many"}, "--seeds=many"),
    ):
        with pytest.raises(SystemExit) as stop:
            run_main(**{"task": task, "pool": "cls", "select_by": "macro_f1", **settings})
        assert words in str(stop.value)
        assert "\n" not in str(stop.value)
        assert not (tmp_path / "results.jsonl").exists()


def test_from_the_shell(checkpoints, tmp_path):
    task = write_task(tmp_path / "organs.jsonl", make_rows({"train": 24, "val": 6, "test": 6}))
    command = [sys.executable, Path(finetune.__file__).resolve(), f"--model={checkpoints}/a,{checkpoints}/b"]
    command += [f"--task={task}", "--seeds=42-43", "--epochs=1", "--device=cpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert Counter(row["seed"] for row in rows) == {42: 2, 43: 2}
    assert "paired by seed" in done.stdout
