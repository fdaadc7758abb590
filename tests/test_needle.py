"""needle.py: examples of exactly L tokens with query and fact intact, controls at chance, probes, the whole script."""

import functools
import json
import lzma
import math
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import needle
from configurator import configure
from features import weights_hash
from model import ModernBERT, ModernBERTConfig

SCRIPT = Path(needle.__file__).resolve()
CORPORA = os.environ.get("DETOUR_CORPORA")
SUBJECTS = [
    "the river",
    "an old bridge",
    "our neighbour",
    "la cathédrale",
    "le vieux port",
    "this library",
    "a lighthouse",
]
VERBS = ["stands near", "was built before", "looks like", "domine", "rappelle", "belongs to", "is older than"]
THINGS = ["the market", "a quiet garden", "the railway", "une colline", "les remparts", "its own shadow", "the harbour"]


def write_texts(count, seed=0):
    draw = random.Random(seed)
    sentence = lambda i: f"{draw.choice(SUBJECTS)} {i} {draw.choice(VERBS)} {draw.choice(THINGS)}.".capitalize()  # noqa: E731
    return [" ".join(sentence(i) for _ in range(draw.randint(3, 9))) for i in range(count)]


@pytest.fixture(scope="module")
def tokenizer():
    bpe = Tokenizer(models.BPE(unk_token="[UNK]"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [s.format(*(lexicon[0] for lexicon in rest)) for s, *rest in needle.FACTS["fr"].values()]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(write_texts(50) + words, trainer)
    names = dict(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **names)


@pytest.fixture
def small(monkeypatch, tmp_path):
    for key, value in dict(
        n=600, lengths=(96, 128), dtype="float32", device="cpu", out_dir=str(tmp_path / "out")
    ).items():
        monkeypatch.setattr(needle, key, value)


# ----------------------------------------------------------------------------------------------------------------------
# Facts


@pytest.mark.parametrize("language", ["fr", "en"])
def test_facts_are_eight_kinds_with_two_to_four_values(language):
    assert len(needle.FACTS[language]) == 8
    for sentence, *lexicons in needle.FACTS[language].values():
        assert 2 <= len(lexicons) <= 4 and sentence.count("{}") == len(lexicons) and sentence.endswith(".")
        assert all(len(set(lexicon)) == len(lexicon) >= 4 for lexicon in lexicons)
    assert needle.FACTS["fr"].keys() == needle.FACTS["en"].keys()


def test_every_french_filling_elides_and_contracts():
    """No "de amoxicilline", no "à le", no "une" before a masculine noun of the lexicons."""
    for sentence, *lexicons in needle.FACTS["fr"].values():
        for values in zip(*([lexicon[i % len(lexicon)] for i in range(64)] for lexicon in lexicons), strict=True):
            text = sentence.format(*values)
            assert not re.search(r"\b(?:de|le|la|que|ne|se) [aeiouyhéèêàâîôûœ]", text), text
            assert not re.search(r"\b(?:à le|à les|de le|de les)\b", text), text


def test_english_articles_fit():
    for sentence, *lexicons in needle.FACTS["en"].values():
        for i in range(8):
            text = sentence.format(*(lexicon[i % len(lexicon)] for lexicon in lexicons)).lower()
            assert not re.search(r"\ba [aeiou]", text), text
            assert not re.search(r"\ban [^aeiou]", text), text


@pytest.mark.parametrize("language", ["fr", "en"])
def test_pairs_differ_in_every_value_come_in_both_orders_and_keep_to_their_split(language, monkeypatch):
    monkeypatch.setattr(needle, "language", language)
    facts = {}
    for split in needle.SPLITS:
        for kind, pairs in needle.fact_pairs(split).items():
            assert pairs and len(set(pairs)) == len(pairs) and {(b, a) for a, b in pairs} == set(pairs), (split, kind)
            _, *lexicons = needle.FACTS[language][kind]
            for a, b in random.Random(0).sample(pairs, min(20, len(pairs))):
                for lexicon in lexicons:
                    longest = [max((v for v in lexicon if v in text), key=len) for text in (a, b)]
                    assert longest[0] != longest[1], (a, b)
            facts.setdefault(split, set()).update(a for a, _ in pairs)
    assert not facts["train"] & facts["val"] and not facts["train"] & facts["test"] and not facts["val"] & facts["test"]
    assert len(facts["train"]) > len(facts["val"]) > 50


# ----------------------------------------------------------------------------------------------------------------------
# Examples


def check_example(example, tokenizer):
    """N1, N2: the length, the special tokens, the query, the fact in one piece where it belongs."""
    ids, query = example["ids"], example["query"]
    assert len(ids) == example["length"] and ids[0] == tokenizer.cls_token_id and ids[-1] == tokenizer.sep_token_id
    assert ids.count(tokenizer.cls_token_id) == 1 and ids.count(tokenizer.sep_token_id) == 2
    head = len(query) + 2
    assert ids[1 : head - 1] == query and ids[head - 1] == tokenizer.sep_token_id
    at, document = example["at"], ids[head:-1]
    asked = tokenizer.decode(query)
    hidden = tokenizer.decode(ids[at : at + len(query) + 30]).lstrip()
    assert (hidden.startswith(asked)) == (example["label"] == 1)
    assert tokenizer.decode(document).count(asked) == example["label"]
    if example["position"] == "start":
        assert at == head
    if example["position"] == "middle":
        assert abs(at - head - len(document) / 2) < 60
    return hidden


@pytest.mark.parametrize("language", ["fr", "en"])
def test_every_length_and_position_holds_query_and_fact(language, tokenizer, small, monkeypatch):
    for key, value in dict(language=language, lengths=(512, 1024, 2048, 4096, 8192), n=210).items():
        monkeypatch.setattr(needle, key, value)
    examples = needle.make_examples(write_texts(300), tokenizer)
    facts = {split: {a for pairs in needle.fact_pairs(split).values() for a, _ in pairs} for split in needle.SPLITS}
    for example in examples:
        hidden = check_example(example, tokenizer)
        found = [fact for fact in facts[example["split"]] if hidden.startswith(fact)]
        assert found, hidden  # a negative holds a whole fact too, of its split
        if example["position"] == "end":
            size = len(tokenizer(" " + max(found, key=len), add_special_tokens=False)["input_ids"])
            assert example["at"] + size == example["length"] - 1
    assert {(e["length"], e["position"]) for e in examples} == {
        (x, p) for x in needle.lengths for p in needle.positions
    }


@pytest.mark.skipif(not CORPORA, reason="DETOUR_CORPORA is not set: no tokenizers of real models")
@pytest.mark.parametrize("name, words", [("modernbert_rebuilt", 50368), ("camembertv2", 32768)])
@pytest.mark.parametrize("language", ["fr", "en"])
def test_real_tokenizers(name, words, language, small, monkeypatch, tmp_path):
    """What the models of the paper read: byte-level BPE, and WordPiece."""
    for key, value in dict(language=language, lengths=(512, 1024, 2048, 4096, 8192), n=210).items():
        monkeypatch.setattr(needle, key, value)
    (tmp_path / "t.json").write_bytes(lzma.open(f"{CORPORA}/tokenizers/{name}/tokenizer.json.xz").read())
    names = dict(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "t.json"), **names)
    examples = needle.make_examples(write_texts(200), tokenizer)
    ids_of = functools.cache(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
    facts = {(split, kind): sorted({a for a, _ in pairs}) for split in needle.SPLITS
             for kind, pairs in needle.fact_pairs(split).items()}  # fmt: skip
    for example in examples:
        ids, query, at = example["ids"], example["query"], example["at"]
        assert len(ids) == example["length"] and max(ids) < words
        assert ids[0] == tokenizer.cls_token_id and ids[-1] == tokenizer.sep_token_id == ids[len(query) + 1]
        assert ids.count(tokenizer.cls_token_id) == 1 and ids.count(tokenizer.sep_token_id) == 2
        assert ids[1 : 1 + len(query)] == query
        there = [fact for fact in facts[example["split"], example["kind"]]
                 if ids[at : at + len(ids_of(" " + fact))] == ids_of(" " + fact)]  # fmt: skip
        assert len(there) == 1 and (ids_of(there[0]) == query) == (example["label"] == 1)  # in one piece


def test_examples_are_balanced_and_splits_share_no_text(tokenizer, small):
    texts = write_texts(300)
    examples = needle.make_examples(texts, tokenizer)
    assert Counter(e["split"] for e in examples) == {"train": 420, "val": 90, "test": 90}
    for split in needle.SPLITS:
        cells = Counter((e["length"], e["position"], e["label"]) for e in examples if e["split"] == split)
        assert len(cells) == 12 and max(cells.values()) - min(cells.values()) <= 1
    documents = needle.haystack_sentences(texts, tokenizer)
    sentences = {split: {tuple(s) for d in found for s in d} for split, found in documents.items()}
    assert not sentences["train"] & sentences["test"] and not sentences["train"] & sentences["val"]
    assert needle.make_examples(texts, tokenizer) == examples


def test_sentences_with_a_value_of_a_fact_are_no_haystack(tokenizer, small):
    texts = [f"Text {i} is calm. La morphine {i} calme. It ends {i} here." for i in range(60)]
    kept = needle.haystack_sentences(texts, tokenizer)
    assert all(len(document) == 2 for documents in kept.values() for document in documents)


# ----------------------------------------------------------------------------------------------------------------------
# Controls, probes, scores


def test_words_alone_know_nothing(tokenizer, small, monkeypatch):
    """A bag of the words of the whole input is at chance, and so is one of the query alone."""
    monkeypatch.setattr(needle, "n", 1800)
    monkeypatch.setattr(needle, "lengths", (96,))
    found = needle.controls(needle.make_examples(write_texts(300), tokenizer))
    for control in ("bag of words", "query alone"):
        assert found[control]["low"] <= 0.5 <= found[control]["high"], found[control]
    assert found["larger class"]["accuracy"] >= 0.5


def fake_examples(count):
    splits = ["train"] * 14 + ["val"] * 3 + ["test"] * 3
    return [{"label": i % 2, "split": splits[i // 2 % 20], "length": (96, 128)[i // 40 % 2],
             "position": needle.positions[i // 80 % 3], "ids": [0]} for i in range(count)]  # fmt: skip


def test_the_answer_scores_100_and_noise_scores_chance(small):
    examples = fake_examples(1200)
    labels = torch.tensor([e["label"] for e in examples]).float()
    noise = torch.randn(1200, 16, generator=torch.Generator().manual_seed(0))
    told = torch.cat((noise, labels[:, None]), 1)
    for vectors, wanted in ((told, 1.0), (noise, 0.5)):
        found = needle.score([needle.tuned_probe(vectors, examples, seed)[1] for seed in (1, 2)], examples)
        assert found["low"] <= wanted <= found["high"] and found["n"] == 180
        assert wanted < 1 or found["accuracy"] == 1
    assert found["confusion"][0][0] + found["confusion"][0][1] == 90
    assert sum(cell["n"] for cell in found["cell"].values()) == sum(x["n"] for x in found["length"].values()) == 180


def test_a_random_encoder_scores_chance(tokenizer, small):
    """The vectors of untrained weights hold next to nothing of a fact: whoever scores above has learned something."""
    examples = needle.make_examples(write_texts(200), tokenizer)
    vectors = needle.features("random", tiny_model(), examples, torch.device("cpu"), torch.float32)
    found = needle.score([needle.tuned_probe(vectors, examples, seed)[1] for seed in (1, 2)], examples)
    assert found["low"] <= 0.5 <= found["high"], found


def test_wilson_intervals():
    right = np.array([[1] * 140 + [0] * 85])
    found = needle.accuracy(right)
    z, p, size = 1.959963984540054, 140 / 225, 225
    centre, half = p + z * z / (2 * size), z * math.sqrt(p * (1 - p) / size + z * z / (4 * size * size))
    scale = 1 + z * z / size
    assert found["low"] == pytest.approx((centre - half) / scale) and found["high"] == pytest.approx(
        (centre + half) / scale
    )
    assert needle.accuracy(np.repeat(right, 3, 0))["low"] == found["low"]  # seeds share the examples


def test_the_probe_is_the_papers(monkeypatch):
    probe = needle.make_probe(24)
    assert [type(layer).__name__ for layer in probe] == ["Dropout", "Linear", "GELU", "Dropout", "Linear"]
    seen = {}
    adamw = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda p, lr: seen.update(p=list(p), lr=lr) or adamw(seen["p"], lr=lr))
    needle.train_probe(torch.randn(400, 24), fake_examples(400), 0, needle.lr, needle.epochs, needle.batch_size)
    assert sum(p.numel() for p in seen["p"]) == 24 * 24 + 24 + 2 * 24 + 2 and seen["lr"] == 2e-5  # N5: nothing else


def tiny_model(seed=0):
    torch.manual_seed(seed)
    shape = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=48, local_attention=16)
    return ModernBERT(ModernBERTConfig(vocab_size=700, **shape, attn_out_dropout=0.5))


@pytest.mark.parametrize("pooling", ["cls", "mean", "max_windows"])
def test_features_are_those_of_one_example_alone_and_the_encoder_stays(pooling, tokenizer, small, monkeypatch):
    """N5: dropout is off, batches do not matter, no weight moves, and the second time they come from the cache."""
    monkeypatch.setattr(needle, "pooling", pooling)
    monkeypatch.setattr(needle, "WINDOW", 50)
    examples = needle.make_examples(write_texts(200), tokenizer)[:20]
    net = tiny_model().train()
    before = weights_hash(net)
    monkeypatch.setattr(needle, "batch_tokens", 500)
    found = needle.features("net", net, examples, torch.device("cpu"), torch.float32)
    assert weights_hash(net) == before and not found.requires_grad
    with torch.no_grad():
        for example, vector in zip(examples, found, strict=True):
            hidden = net.eval()(torch.tensor([example["ids"]]), output_logits=False).last_hidden_state[0]
            windows = [hidden[i : i + 50].mean(0) for i in range(0, len(hidden), 50)]
            wanted = {"cls": hidden[0], "mean": hidden.mean(0), "max_windows": torch.stack(windows).amax(0)}[pooling]
            assert torch.allclose(vector, wanted, atol=1e-5)
    (file,) = (Path(needle.out_dir) / "features").iterdir()
    stamp = file.stat().st_mtime_ns
    assert torch.equal(needle.features("net", net, examples, torch.device("cpu"), torch.float32), found)
    assert file.stat().st_mtime_ns == stamp
    needle.features("net", tiny_model(1), examples, torch.device("cpu"), torch.float32)
    assert len(list((Path(needle.out_dir) / "features").iterdir())) == 2


# ----------------------------------------------------------------------------------------------------------------------
# The script


def run(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("needle", numbered=True)
    for i in (0, 1):
        tiny_model(i).save_pretrained(folder / f"m{i}")
        tokenizer.save_pretrained(folder / f"m{i}")
    (folder / "hay.txt").write_text("\n".join(write_texts(200)), "utf-8")
    (folder / "one.txt").write_text("One text is in one split.\n", "utf-8")
    lines = [json.dumps({"text": text}) for text in write_texts(200)]
    (folder / "hay.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    return folder


QUICK = ("--lengths=96,128", "--n=120", "--seeds=1,2", "--tuned_epochs=2", "--tuned_lrs=1e-3")


def test_the_whole_script(folder, tmp_path):
    arguments = (f"--model={folder}/m0", f"--model={folder}/m1", *QUICK, f"--out_dir={tmp_path}/out")
    done = run(*arguments, f"--haystack={folder}/hay.txt")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (
        len({len(line) for line in lines[:-1]}) == 1
        and "larger class" in done.stdout
        and "m1, tuned probe" in done.stdout
    )
    rows = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 2 * 2 and {row["probe"] for row in rows} == {"paper's probe", "tuned probe"}
    assert all(row["task"] == "needle_fr" and row["test"]["n"] == 18 for row in rows)
    saved = json.loads((tmp_path / "out/needle.json").read_text())
    assert {probe: list(models) for probe, models in saved["probes"].items()} == {
        "paper's probe": ["needle0/m0", "needle0/m1"],
        "tuned probe": ["needle0/m0", "needle0/m1"],
    }
    for name in ("needle.png", "needle.svg", "heatmap.png", "heatmap.svg", "needle.json"):
        assert (tmp_path / "out" / name).stat().st_size > 1000
    assert not list((tmp_path / "out").glob("*.part"))
    again = run(*arguments, f"--haystack={folder}/hay.jsonl")  # the same texts, and the features are there
    assert again.stdout == done.stdout and "features of" not in again.stderr


def test_fine_tuning(folder, tmp_path):
    arguments = (f"--model={folder}/m0", f"--haystack={folder}/hay.txt", *QUICK[1:3], "--lengths=96", "--unfreeze=True")
    done = run(*arguments, "--epochs=1", f"--out_dir={tmp_path}/out", "--n=60")
    assert done.returncode == 0, done.stderr
    assert "m0, fine-tuned" in done.stdout and (tmp_path / "out/needle.png").exists()
    assert weights_hash(tiny_model(0)) == weights_hash(ModernBERT.from_pretrained(folder / "m0"))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--haystack=x.txt"], "--model=None: expected"),
        (["--model={folder}/m0"], "--haystack=None: expected"),
        (["--model={folder}/m0", "--haystack=nothing.txt"], "--haystack=nothing.txt: expected"),
        (["--model={folder}/none", "--haystack={folder}/hay.txt"], "none: no such checkpoint"),
        (
            ["--model={folder}/m0", "--haystack={folder}/hay.txt", "--language=de"],
            "--language=de: expected one of fr, en",
        ),
        (["--model={folder}/m0", "--haystack={folder}/hay.txt", "--lengths=32"], "expected numbers of tokens from 64"),
        (["--model={folder}/m0", "--haystack={folder}/hay.txt", "--n=20"], "--n=20: expected 210 or more"),
        (["--model={folder}/m0", "--haystack={folder}/hay.txt", "--positions=top"], "--positions="),
        (["--model={folder}/m0", "--haystack={folder}/m0/config.json"], "m0/config.json: expected"),
        (["--model={folder}/m0", "--haystack={folder}/one.txt"], "no sentence for the"),
    ],
)
def test_bad_input_is_one_line(arguments, words, folder, tmp_path, monkeypatch):
    values = dict(argument.format(folder=folder).removeprefix("--").split("=", 1) for argument in arguments)
    configure(settings := dict(vars(needle)), [f"--{key}={value}" for key, value in values.items()])
    for key in values:
        monkeypatch.setattr(needle, key, settings[key])
    monkeypatch.setattr(needle, "out_dir", str(tmp_path / "out"))
    with pytest.raises(SystemExit) as stop:
        needle.main()
    assert words in str(stop.value) and "\n" not in str(stop.value)
    assert not (tmp_path / "out" / "needle.json").exists()
