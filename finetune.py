"""Fine-tunes encoders on a classification task, several seeds each, and compares their test scores.

    python finetune.py --model=out/demo/clm/final,out/demo/mlm/final --task=task.jsonl --seeds=42-44
    python finetune.py --model=answerdotai/ModernBERT-base --task=task.jsonl --results=out/results.jsonl

The task is a jsonl file of {"text": ..., "label": ..., "split": "train" | "val" | "test"}. The protocol is the paper's
French one (P-731, P-735): a linear layer on [CLS], AdamW, 10% warmup and linear decay, the epoch with the best
validation macro-F1; the test split is read once, by the weights of that epoch.
Appends one JSON row per (model, task, seed) to the results file; rows that are already there are not computed again.
"""

import copy
import hashlib
import itertools
import json
import math
import os
import platform
import time
from collections import Counter
from pathlib import Path

import numpy as np
import sklearn
import torch
import torch.nn.functional as F
import transformers
from scipy.stats import t as student_t
from sklearn.metrics import accuracy_score, f1_score
from torch import nn
from tqdm import tqdm

from checkpoint import load_tokenizer
from configurator import configure
from features import flat_batch, weights_hash
from model import default_device, default_dtype, load_model
from tasks import read_task

model = None  # checkpoint directories or hub ids, separated by commas
task = None  # jsonl file with text, label and split
seeds = "42-44"  # 42-44 or 42,43,44; a seed fixes the head's first weights, the order and the dropout (P-737)
results = "results.jsonl"  # rows are appended to this file
pool = "cls"  # cls: the first token (P-731); mean: over all real tokens, [CLS] and [SEP] included
epochs = 15  # P-731
learning_rate = 2e-5  # peak, encoder and head alike (P-731)
batch_size = 4  # texts (P-731)
warmup = 0.1  # share of the steps with a rising learning rate, then linear decay to 0 (P-731)
weight_decay = 0.01  # P-735; none on norms and biases
grad_clip = 1.0  # largest gradient norm, 0: off; the paper names none, 1.0 is what most fine-tuning uses
dropout = 0.0  # on the pooled vector; the paper names none, ModernBERT's own classifier has none
max_len = 2048  # tokens, [CLS] and [SEP] included (P-733); longer texts are cut, counted and reported
select_by = "macro_f1"  # validation metric that picks the epoch (P-739): macro_f1, micro_f1, weighted_f1 or accuracy
max_train = None  # train on at most this many examples, drawn once for all models and seeds; None: all
max_eval = None  # the same for validation and for test
val_fraction = 0.1  # share of train that becomes validation where the task has no validation split
data_seed = 42  # draws that share and the subsets of max_train and max_eval; never the seed of a run
device = "auto"  # auto: cuda, else mps, else cpu
dtype = "auto"  # of matrix products: float32, bfloat16, or auto: bfloat16 where the hardware multiplies it fast

METRICS = ("macro_f1", "micro_f1", "weighted_f1", "accuracy")
# Settings that change a score. They are stored in the row, and a row with other values is another experiment.
IDENTITY = """pool epochs learning_rate batch_size warmup weight_decay grad_clip dropout max_len select_by max_train
    max_eval val_fraction data_seed""".split()


def fail(message):
    raise SystemExit(f"finetune.py: {message}")


# ----------------------------------------------------------------------------------------------------------------------
# The task


def subset(rows, limit):
    """At most `limit` rows, drawn by data_seed alone: every model and every seed of a run sees the same ones."""
    if limit is None or limit >= len(rows):
        return rows
    return [rows[i] for i in sorted(np.random.default_rng(data_seed).permutation(len(rows))[:limit])]


def prepare_splits(splits):
    """Makes a missing validation split out of train, never out of test (F15); applies max_train and max_eval.

    Returns the splits and a sentence for each thing that a reader of the scores should know.
    """
    train, val, test = (splits[split] for split in ("train", "val", "test"))
    notes = []
    if not val:
        n = max(1, round(val_fraction * len(train)))
        shuffled = np.random.default_rng(data_seed).permutation(len(train)).tolist()
        train, val = [train[i] for i in sorted(shuffled[n:])], [train[i] for i in sorted(shuffled[:n])]
        notes.append(f"no validation split: val = {val_fraction:.0%} of train ({n} examples, data_seed={data_seed})")
    if not train:
        fail(f"--task={task}: one training example is not enough for train and validation")
    full = {"train": train, "val": val, "test": test}
    ready = {split: subset(rows, max_train if split == "train" else max_eval) for split, rows in full.items()}
    known = {label for _, label in ready["train"]}
    for split, rows in ready.items():
        if len(rows) < len(full[split]):
            notes.append(f"{split}: {len(rows)} of {len(full[split])} examples (data_seed={data_seed})")
        unseen = sum(label not in known for _, label in rows)
        if unseen:
            notes.append(f"{split}: {unseen} examples have a label that train does not have; they count as wrong")
    return ready, notes


def encode(rows, tokenizer, max_len):
    """[(text, label)] -> [CLS] text [SEP] as lists of ids, longer ones cut to max_len with both kept; and how many."""
    bodies = tokenizer([text for text, _ in rows], add_special_tokens=False, verbose=False)["input_ids"]
    cut = sum(len(body) > max_len - 2 for body in bodies)
    return [[tokenizer.cls_token_id, *body[: max_len - 2], tokenizer.sep_token_id] for body in bodies], cut


# ----------------------------------------------------------------------------------------------------------------------
# The model


class Classifier(nn.Module):
    """A plain linear layer on the pooled output of the final norm: neither the pretrained prediction head nor the
    pooling that a checkpoint's config names takes part (P-731)."""

    def __init__(self, encoder, n_labels, pool, dropout):
        super().__init__()
        self.encoder, self.pool, self.dropout = encoder, pool, dropout
        self.linear = nn.Linear(encoder.config.hidden_size, n_labels)
        nn.init.trunc_normal_(self.linear.weight, std=encoder.config.hidden_size**-0.5)
        nn.init.zeros_(self.linear.bias)

    def forward(self, ids, cu_seqlens):
        """ids (total,), cu_seqlens (n + 1,) -> logits (n, n_labels)."""
        hidden = self.encoder(ids, cu_seqlens=cu_seqlens, output_logits=False).last_hidden_state
        if self.pool == "cls":
            pooled = hidden[cu_seqlens[:-1].long()]
        else:
            pooled = torch.stack([part.mean(0) for part in hidden.split(cu_seqlens.diff().tolist())])
        return self.linear(F.dropout(pooled, self.dropout, self.training))


def lr_factor(step, steps, warmup_steps):
    """Share of the peak in step 0 .. steps-1: up to 1 over warmup_steps, then down towards 0; never 0 itself (T9)."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (steps - step) / (steps - warmup_steps)


@torch.no_grad()
def predict(classifier, documents, labels, where, amp_dtype):
    """The predicted label of each document (list of ids), in their order."""
    classifier.eval()
    order = sorted(range(len(documents)), key=lambda i: len(documents[i]))
    predicted = [None] * len(documents)
    for start in range(0, len(order), 32):
        rows = order[start : start + 32]
        with torch.autocast(where.type, torch.bfloat16, enabled=amp_dtype == torch.bfloat16):
            logits = classifier(*flat_batch([documents[i] for i in rows], where))
        for i, best in zip(rows, logits.argmax(1).tolist(), strict=True):
            predicted[i] = labels[best]
    return predicted


def scores(gold, predicted):
    """The four metrics in [0, 1]. F1 averages run over the labels that occur in gold or predicted, scikit-learn's rule,
    so a label that train does not have counts with F1 = 0."""
    f1 = {kind: f1_score(gold, predicted, average=kind, zero_division=0) for kind in ("macro", "micro", "weighted")}
    return {f"{kind}_f1": float(value) for kind, value in f1.items()} | {"accuracy": accuracy_score(gold, predicted)}


def make_optimizer(classifier):
    """AdamW over encoder and head (the vocabulary's head rests), weight decay on matrices alone (P-735)."""
    weights = [*classifier.encoder.model.parameters(), *classifier.linear.parameters()]
    groups = [{"params": [p for p in weights if p.ndim > 1], "weight_decay": weight_decay}]
    groups += [{"params": [p for p in weights if p.ndim <= 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, fused=True)


def train_one(encoder, data, labels, seed, where, amp_dtype, bar):
    """Fine-tunes a copy of `encoder` -> the outcome, as it goes into the results row.

    data: {split: (documents as lists of ids, gold labels)}. The test split is predicted once, after the selection.
    """
    torch.manual_seed(seed)
    order = torch.Generator().manual_seed(seed)
    classifier = Classifier(copy.deepcopy(encoder), len(labels), pool, dropout).to(where)
    optimizer = make_optimizer(classifier)
    documents, gold = data["train"]
    targets = torch.tensor([labels.index(label) for label in gold])
    steps_per_epoch = math.ceil(len(documents) / batch_size)
    steps, step, history, best = epochs * steps_per_epoch, 0, [], None
    for epoch in range(1, epochs + 1):
        classifier.train()
        total = torch.zeros((), device=where)
        for rows in torch.randperm(len(documents), generator=order).split(batch_size):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * lr_factor(step, steps, round(warmup * steps))
            with torch.autocast(where.type, torch.bfloat16, enabled=amp_dtype == torch.bfloat16):
                logits = classifier(*flat_batch([documents[i] for i in rows.tolist()], where))
            loss = F.cross_entropy(logits.float(), targets[rows].to(where))
            loss.backward()
            if grad_clip:
                nn.utils.clip_grad_norm_(classifier.parameters(), grad_clip)
            optimizer.step()
            optimizer.zero_grad()
            total, step = total + loss.detach(), step + 1
            bar.update()
        if not torch.isfinite(total):
            fail(f"--learning_rate={learning_rate}: the loss is not finite in epoch {epoch} of seed {seed}: lower it")
        val = scores(data["val"][1], predict(classifier, data["val"][0], labels, where, amp_dtype))
        history.append(val[select_by])
        bar.set_postfix_str(f"epoch {epoch} loss {total / steps_per_epoch:.3f} val {select_by} {val[select_by]:.3f}")
        if best is None or val[select_by] > best["val"][select_by]:  # the first of equals
            best = {"epoch": epoch, "val": val, "weights": copy.deepcopy(classifier.state_dict())}
    classifier.load_state_dict(best["weights"])
    test = scores(data["test"][1], predict(classifier, data["test"][0], labels, where, amp_dtype))
    return {"test": test, "val": best["val"], "best_epoch": best["epoch"], "val_by_epoch": history}


# ----------------------------------------------------------------------------------------------------------------------
# Rows


def read_rows(path):
    """The rows of a results file; none if there is no file yet."""
    lines = Path(path).read_text(encoding="utf-8").split("\n") if Path(path).exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError:
            fail(f"--results={path}: line {number} is not JSON: remove that line")
    return rows


def append_row(path, row):
    """One write with O_APPEND: several processes may add rows to one file, and a killed one leaves no half row."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, (json.dumps(row, allow_nan=False) + "\n").encode())
    finally:
        os.close(handle)


def identity(row):
    """What makes two rows the same experiment. The hashes tell a retrained checkpoint or an edited task apart."""
    keys = ("model", "model_sha256", "task", "task_sha256", "seed", "settings")
    return json.dumps([row.get(key) for key in keys], sort_keys=True)


def mean_sd_ci(values):
    """Values over seeds -> mean, SD (n-1), half-width of the 95% t interval of the mean; nan from a single value."""
    n = len(values)
    sd = float(np.std(values, ddof=1)) if n > 1 else math.nan
    return float(np.mean(values)), sd, float(student_t.ppf(0.975, n - 1)) * sd / math.sqrt(n) if n > 1 else math.nan


def tables(by_model):
    """{model: {seed: score in [0, 1]}} -> the lines of two tables in points of 100: each model, and the paired
    differences of each two models over the seeds that both have."""

    def line(name, values, *more):
        numbers = [f"{100 * x:.2f}" if math.isfinite(x) else "-" for x in mean_sd_ci(values)]
        return f"{name:{width}}" + "".join(f"{cell:>10}" for cell in [len(values), *numbers, *more])

    pairs = {f"{a} - {b}": (by_model[a], by_model[b]) for a, b in itertools.combinations(by_model, 2)}
    differences = {name: [a[seed] - b[seed] for seed in a if seed in b] for name, (a, b) in pairs.items()}
    width = max(map(len, [*by_model, *differences]))
    head = "".join(f"{cell:>10}" for cell in ("seeds", "mean", "SD", "95% t +-"))
    lines = [f"{'model':{width}}{head}", *(line(name, list(by_seed.values())) for name, by_seed in by_model.items())]
    rows = [line(name, values, sum(d > 0 for d in values)) for name, values in differences.items() if values]
    return lines + (["", f"{'paired by seed':{width}}{head}{'wins':>10}", *rows] if rows else [])


# ----------------------------------------------------------------------------------------------------------------------
# The script


def parse_seeds(text):
    """'42-44' or '42,44' or both -> a list of ints."""
    try:
        bounds = [part.partition("-") for part in str(text).split(",")]
        found = [seed for first, _, last in bounds for seed in range(int(first), int(last or first) + 1)]
    except ValueError:
        found = []
    if not found or len(set(found)) < len(found):
        fail(f"--seeds={text}: expected different seeds such as 42-44 or 42,43,44")
    return found


def check_settings():
    for key in ("model", "task"):
        if globals()[key] is None:
            fail(f"--{key}=None: expected a path, see --help")
    allowed = {"pool": ("cls", "mean"), "select_by": METRICS, "dtype": ("auto", "float32", "bfloat16")}
    for key, values in allowed.items():
        if globals()[key] not in values:
            fail(f"--{key}={globals()[key]}: expected one of {', '.join(values)}")
    for key, least in {"epochs": 1, "batch_size": 1, "max_len": 3, "max_train": 2, "max_eval": 1}.items():
        if globals()[key] is not None and globals()[key] < least:
            fail(f"--{key}={globals()[key]}: expected {least} or more")
    if not (0 < val_fraction < 1 and 0 <= warmup < 1 and 0 <= dropout < 1):
        fail(f"--val_fraction={val_fraction} --warmup={warmup} --dropout={dropout}: expected shares between 0 and 1")


def describe_task(splits, notes, gold, labels):
    """What a row says about the task; printed, too."""
    majority = Counter(gold["train"]).most_common(1)[0][0]
    baseline = scores(gold["test"], [majority] * len(gold["test"]))
    about = {
        "task": Path(task).stem,
        "task_sha256": hashlib.sha256(Path(task).read_bytes()).hexdigest()[:16],
        "labels": labels,
        "sizes": {split: len(rows) for split, rows in splits.items()},
        "unseen_labels": {s: dict(Counter(label for label in gold[s] if label not in labels)) for s in ("val", "test")},
        "majority": {"label": majority, **baseline},  # what always saying the most frequent training label scores
        "notes": notes,
    }
    print(f"{about['task']}: {len(labels)} labels, " + ", ".join(f"{n} {split}" for split, n in about["sizes"].items()))
    print("".join(f"note: {note}\n" for note in notes), end="")
    print(f"always {majority!r}: macro-F1 {100 * baseline['macro_f1']:.2f}, accuracy {100 * baseline['accuracy']:.2f}")
    return about


def main():
    check_settings()
    where = default_device() if device == "auto" else torch.device(device)
    amp_dtype = default_dtype(where) if dtype == "auto" else getattr(torch, dtype)
    names = [name.strip() for name in (model if isinstance(model, (list, tuple)) else str(model).split(","))]
    all_seeds = parse_seeds(seeds)
    done = {identity(row): row for row in read_rows(results)}
    splits, notes = prepare_splits(read_task(task))
    gold = {split: [label for _, label in rows] for split, rows in splits.items()}
    labels = sorted(set(gold["train"]))  # of the training split alone: what it does not have cannot be learned
    about = describe_task(splits, notes, gold, labels)
    about["settings"] = {key: globals()[key] for key in IDENTITY}
    about["settings"] |= {"dtype": str(amp_dtype).removeprefix("torch."), "device": where.type}
    about["versions"] = {m.__name__: m.__version__ for m in (torch, transformers, sklearn)}
    about["versions"]["python"] = platform.python_version()

    by_model = {name: {} for name in names}
    steps = epochs * math.ceil(len(splits["train"]) / batch_size)
    with tqdm(total=steps * len(names) * len(all_seeds), unit="step") as bar:
        for name in names:
            tokenizer, encoder = load_tokenizer(name), load_model(name)
            encoded = {split: encode(rows, tokenizer, max_len) for split, rows in splits.items()}
            data = {split: (documents, gold[split]) for split, (documents, _) in encoded.items()}
            cut = {split: n for split, (_, n) in encoded.items()}
            if any(cut.values()):
                bar.write(f"{name}: texts cut to {max_len} tokens: {cut}")
            top, size = max(max(ids) for documents, _ in data.values() for ids in documents), encoder.config.vocab_size
            if top >= size:
                fail(f"--model={name}: its tokenizer gives id {top}, its vocabulary has {size}")
            for seed in all_seeds:
                row = {"model": name, "model_sha256": weights_hash(encoder), "seed": seed, "truncated": cut} | about
                bar.set_description(f"{name} seed {seed}")
                if identity(row) in done:
                    row = done[identity(row)]
                    bar.write(f"{name} seed {seed}: already in {results}, not computed again")
                    bar.total -= steps
                else:
                    start = time.time()
                    row |= train_one(encoder, data, labels, seed, where, amp_dtype, bar)
                    row["seconds"] = round(time.time() - start, 1)
                    append_row(results, row)
                by_model[name][seed] = row["test"]["macro_f1"]
                test, val = (f"{100 * row[split]['macro_f1']:.2f}" for split in ("test", "val"))
                bar.write(f"{name} seed {seed}: macro-F1 test {test}, validation {val} (epoch {row['best_epoch']})")
    print(f"\n{about['task']}: test macro-F1 x 100; epochs selected by validation {select_by}")
    print("\n".join(tables(by_model)))


if __name__ == "__main__":
    configure(globals())
    main()
