"""What carries the detour's gain? Parts of one encoder are put into another, and a linear probe on their frozen vectors
says what that is worth (paper, section 5.3 and appendix C, Tables 3 and 6).

    python transplant.py --donor=out/fr_base-clm/final --host=out/fr_base-mlm/final --task=task.jsonl
    python transplant.py ... --parts=each                             # every layer by itself
    python transplant.py ... --parts=embeddings+0-7,attn              # + joins
    python transplant.py --donor=A --host=B --parts=0-7 --save=out/hybrid     # a checkpoint, for finetune.py or cka.py

The probe is a logistic regression on the final norm's output at [CLS], standardised on the training split (P-604). It
has no randomness of its own, so a seed draws which nine tenths of the training texts it sees. Recovery is the share of
the gap between donor and host that a part closes (P-605); its interval, and that of every score, comes from resampling
the test texts, the same for all parts. With a small gap it is wide, and the numbers mean nothing.
Writes transplant.json, transplant.md, transplant.png and .svg, results.jsonl and features/, a cache, to out_dir.
"""

import copy
import json
import os
import re
import shutil
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure  # no pyplot: a Figure renders through Agg and never opens a window
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tabulate import tabulate
from tqdm import tqdm

from checkpoint import load_tokenizer
from configurator import configure
from features import block_bounds, compute, encode
from model import default_device, default_dtype, load_model
from tasks import read_task

donor = None  # checkpoint directory or hub id that gives, in the paper the encoder with the detour
host = None  # the one that takes, its twin without
parts = (
    None  # 0-7 | attn | mlp | embeddings | joined with + | each; None: low,mid,late,attn,mlp, of thirds of the depth
)
task = None  # jsonl file with text, label and split
pool = "cls"  # cls: the first token | mean: over all tokens
seeds = (42, 43, 44)  # P-604
subsample = 0.9  # share of the training texts that a seed draws
C = 1.0  # of the logistic regression: inverse strength of its L2 penalty
max_iter = 5000  # of its solver, lbfgs
max_len = 2048  # tokens, [CLS] and [SEP] included (P-733)
resamples = 1000  # of the test texts, for the intervals
save = None  # also write the encoder with the (single) part to this directory
batch_tokens = 8192  # tokens of one forward pass, for memory only
device = "auto"  # auto: cuda, else mps, else cpu
dtype = "float32"  # of the forward pass: float32 | bfloat16 | auto: what is fast
out_dir = "out/transplant"  # where everything goes

PAPER = {"donor": 100, "low": -12, "mid": 35, "late": -6, "attn": 15, "mlp": 35, "host": 0}  # recovery, Tables 3 and 6


def fail(message):
    raise SystemExit(f"transplant.py: {message}")


# ----------------------------------------------------------------------------------------------------------------------
# The operation


def tensors_of(part, names, n_layers):
    """The names of the tensors that a part such as "0-7", "attn" or "embeddings+3" moves, among `names`. A norm travels
    with what it feeds (P-603). The vocabulary's matrix is tied, so with the embeddings the output's moves too."""
    patterns = []
    for piece in part.split("+"):
        if match := re.fullmatch(r"(\d+)(?:-(\d+))?", piece):
            first, last = int(match[1]), int(match[2] or match[1])
            if not first <= last < n_layers:
                fail(f"--parts={part}: expected layers of 0-{n_layers - 1}")
            patterns += [rf"model\.layers\.{layer}\." for layer in range(first, last + 1)]
        elif piece in ("attn", "mlp"):
            patterns.append(rf"model\.layers\.\d+\.{piece}(_norm)?\.")
        elif piece == "embeddings":
            patterns += [r"model\.embeddings\.", r"decoder\.weight"]
        else:
            fail(f"--parts={part}: expected layers such as 0-7, attn, mlp or embeddings, joined with +, or each")
    return [name for name in names if any(re.match(pattern, name) for pattern in patterns)]


@torch.no_grad()
def transplant(host, donor, part):
    """-> a copy of `host` whose tensors of `part` are those of `donor`. Both stay as they are."""
    hybrid = copy.deepcopy(host)
    weights, taken = hybrid.state_dict(), donor.state_dict()
    for name in tensors_of(part, weights, host.config.num_hidden_layers):
        weights[name].copy_(taken[name])
    return hybrid


# ----------------------------------------------------------------------------------------------------------------------
# The probe


def reduce(output, sizes):
    """The model's output for several texts -> (n, C)."""
    parts = output.last_hidden_state.float().split(sizes)
    return torch.stack([part[0] if pool == "cls" else part.mean(0) for part in parts]).cpu().numpy()


def probe(vectors, labels, split, seed):
    """Vectors (n, C), labels (n,) and {split: rows} -> the answers on the test split for what `seed` draws of train."""
    train, rng = split["train"], np.random.default_rng(seed)
    drawn = np.sort(rng.permutation(train)[: max(2, round(subsample * len(train)))])
    if len(set(labels[drawn])) < 2:
        fail(f"--task={task}: expected two labels or more among the {len(drawn)} training texts that a seed draws")
    model = make_pipeline(StandardScaler(), LogisticRegression(C=C, max_iter=max_iter))
    return model.fit(vectors[drawn], labels[drawn]).predict(vectors[split["test"]])


def macro_f1(gold, answers, weights=None):
    """gold (n,), answers (n,) and how often each counts (..., n) -> macro-F1 (...,) in points of 100, over the labels
    that occur in gold or answers with a weight, scikit-learn's rule."""
    weights = np.ones(len(gold)) if weights is None else weights
    names = sorted({*gold, *answers})
    is_gold, is_answer = (np.array([column == name for name in names]).T.astype(float) for column in (gold, answers))
    total = weights @ is_gold + weights @ is_answer  # 2 TP + FN + FP
    f1 = np.divide(2 * (weights @ (is_gold * is_answer)), total, out=np.zeros_like(total), where=total > 0)
    return 100 * f1.sum(-1) / (total > 0).sum(-1)


def evaluate(answers, gold):
    """{model: [answers of each seed]} -> {model: scores}, with 95% percentile intervals over resampled test texts."""
    rng, n = np.random.default_rng(0), len(gold)
    weights = rng.multinomial(n, np.full(n, 1 / n), size=resamples).astype(float)
    seen = {name: np.array([macro_f1(gold, each) for each in by_seed]) for name, by_seed in answers.items()}
    other = {name: np.mean([macro_f1(gold, each, weights) for each in by_seed], 0) for name, by_seed in answers.items()}

    def interval(values):
        finite = values[np.isfinite(values)]
        return np.percentile(finite, [2.5, 97.5]).tolist() if len(finite) else [float("nan")] * 2

    def recovery(scores):  # P-605
        gap = scores["donor"] - scores["host"]
        with np.errstate(divide="ignore", invalid="ignore"):
            return {name: 100 * (score - scores["host"]) / gap for name, score in scores.items()}

    shares, resampled = recovery({name: scores.mean() for name, scores in seen.items()}), recovery(other)
    return {name: {
        "f1": scores.mean(), "sd": scores.std(ddof=1) if len(scores) > 1 else float("nan"), "by_seed": scores.tolist(),
        "f1_95": interval(other[name]), "difference": scores.mean() - seen["host"].mean(),
        "difference_95": interval(other[name] - other["host"]), "recovery": float(shares[name]),
        "recovery_95": interval(resampled[name]) if name not in ("donor", "host") else [float("nan")] * 2,
    } for name, scores in seen.items()}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Output


def table(found, wanted):
    """Tables 3 and 6, with the paper's recoveries beside; lines that line up, and markdown."""

    def text(value, digits=1):
        return f"{value:.{digits}f}" if np.isfinite(value) else "-"

    lines = [["", "macro-F1", "95%", "SD", "difference", "95%", "recovery %", "95%", "paper's %"]]
    for name, row in found.items():
        shown = name if wanted.get(name, name) == name else f"{name} {wanted[name]}"
        ranges = [" to ".join(map(text, row[key])) for key in ("f1_95", "difference_95", "recovery_95")]
        ranges = ["-" if "-" in limits.split(" to ") else limits for limits in ranges]
        numbers = [text(row["f1"], 2), ranges[0], text(row["sd"], 2), text(row["difference"], 2), ranges[1]]
        lines.append([shown, *numbers, text(row["recovery"]), ranges[2], str(PAPER.get(name, ""))])
    ends = ("left", *["right"] * (len(lines[0]) - 1))
    return tabulate(lines[1:], lines[0], tablefmt="github", colalign=ends, disable_numparse=True)


def what_it_says(found):
    """One sentence: is there a gap that parts could close?"""
    gap, (low, high) = found["donor"]["difference"], found["donor"]["difference_95"]
    say = f"The donor scores {gap:+.2f} points of macro-F1 against the host (95%: {low:+.2f} to {high:+.2f})."
    if low <= 0 <= high:
        return say + " That may be nothing, so recoveries are shares of noise: read the differences alone."
    return say


def draw(found, wanted, path):
    """Macro-F1 of each part between the lines of host and donor."""
    figure = Figure(figsize=(6.4, 1.2 + 0.4 * len(found)), layout="constrained")
    ax = figure.subplots()
    for i, (_, row) in enumerate(found.items()):
        low, high = row["f1_95"]
        ax.errorbar(row["f1"], i, xerr=[[row["f1"] - low], [high - row["f1"]]], fmt="o", color="#0072B2", capsize=4)
    for name, style in (("host", ":"), ("donor", "--")):
        ax.axvline(found[name]["f1"], color="0.4", linestyle=style, linewidth=1)
    names = [name if wanted.get(name, name) == name else f"{name} {wanted[name]}" for name in found]
    ax.set(yticks=range(len(found)), yticklabels=names, xlabel="test macro-F1, 95% over test texts")
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="x", alpha=0.3)
    for suffix in ("png", "svg"):
        figure.savefig(path / f"transplant.{suffix}.tmp", format=suffix, dpi=200)
        os.replace(path / f"transplant.{suffix}.tmp", path / f"transplant.{suffix}")


def write(found, wanted, about):
    """Everything but the rows, which are there already."""
    path = Path(out_dir)
    print("\n".join([table(found, wanted), what_it_says(found), *about["notes"]]))
    draw(found, wanted, path)
    how = f"""Parts of `{donor}` in `{host}`; logistic regression on frozen {pool} vectors, `{task}`, {about["sizes"]},
{len(seeds)} seeds, which draw {subsample:.0%} of the training texts. Recovery is the share of the gap between donor and
host that a part closes. SD is over seeds, intervals are over test texts. The paper's column is its result on DiaMED for
French base models. {". ".join(about["notes"])}"""
    page = ["# Transplants", what_it_says(found), "![](transplant.png)", table(found, wanted), how]
    (path / "transplant.md.tmp").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    os.replace(path / "transplant.md.tmp", path / "transplant.md")
    data = json.loads(
        json.dumps({**about, "parts": wanted, "scores": found, "paper": PAPER}), parse_constant=lambda nan: None
    )
    (path / "transplant.json.tmp").write_text(json.dumps(data, indent=1) + "\n")
    os.replace(path / "transplant.json.tmp", path / "transplant.json")
    print(f"written to {out_dir}: transplant.json, transplant.md, transplant.png, results.jsonl")


def check_settings():
    for key in ("donor", "host"):
        if globals()[key] is None:
            fail(f"--{key}=None: expected a checkpoint, see --help")
    if task is None and save is None:
        fail("--task=None: expected a jsonl file to probe with, or --save=directory to keep the encoder, or both")
    for key, allowed in {"pool": ("cls", "mean"), "dtype": ("float32", "bfloat16", "auto")}.items():
        if globals()[key] not in allowed:
            fail(f"--{key}={globals()[key]}: expected one of {', '.join(allowed)}")
    for key in ("C", "max_iter", "resamples", "batch_tokens"):
        if globals()[key] <= 0:
            fail(f"--{key}={globals()[key]}: expected a number above 0")
    if max_len < 3 or not 0 < subsample <= 1:
        fail(f"--max_len={max_len} --subsample={subsample}: expected 3 or more, and a share above 0 and at most 1")
    if not seeds or not all(isinstance(seed, int) and seed >= 0 for seed in seeds):
        fail(f"--seeds={seeds}: expected whole numbers such as 42,43,44")


def parts_of(n_layers):
    """{name in the table: part}."""
    blocks = {name: f"{first}-{last}" for name, (first, last) in block_bounds(n_layers).items()}
    if parts is None:
        return {**blocks, "attn": "attn", "mlp": "mlp"}
    asked = [str(part).strip() for part in (parts if isinstance(parts, (list, tuple)) else str(parts).split(","))]
    layers = {f"{layer}": f"{layer}" for layer in range(n_layers)}
    wanted = {}
    for name in asked:
        wanted |= layers if name == "each" else {name: blocks.get(name, name)}
    return wanted


def main():
    check_settings()
    models = {key: load_model(globals()[key], key) for key in ("donor", "host")}
    shapes = [{k: tuple(v.shape) for k, v in model.state_dict().items()} for model in models.values()]
    if shapes[0] != shapes[1]:
        fail(f"--donor={donor} --host={host}: expected the same depth, width and vocabulary; a part would not fit")
    n_layers = models["host"].config.num_hidden_layers
    wanted = parts_of(n_layers)
    for part in wanted.values():
        tensors_of(part, [], n_layers)  # what is wrong is said now
    tokenizers = {key: load_tokenizer(globals()[key], key) for key in ("donor", "host")}
    if tokenizers["donor"].get_vocab() != tokenizers["host"].get_vocab():
        fail(f"--donor={donor} --host={host}: expected the same tokenizer, since both read the same ids")
    if save:
        if len(wanted) > 1:
            fail(f"--save={save}: expected one part, got {', '.join(wanted)}; join them with + in --parts")
        if Path(save).exists():
            fail(f"--save={save}: exists; expected a new directory, since a checkpoint there would be lost")
        shutil.rmtree(part := Path(f"{save}.part"), ignore_errors=True)  # whole or not at all
        transplant(models["host"], models["donor"], *wanted.values()).save_pretrained(part)
        tokenizers["host"].save_pretrained(part)
        os.replace(part, save)
        print(f"saved {save}: {host} with {', '.join(wanted)} of {donor}")
    if task is not None:
        run_probes(models, wanted, tokenizers["host"])


def run_probes(models, wanted, tokenizer):
    splits = read_task(task)
    rows = [*splits["train"], *splits["test"]]
    labels = np.array([label for _, label in rows])
    split = {"train": np.arange(len(splits["train"])), "test": np.arange(len(splits["train"]), len(rows))}
    gold = labels[split["test"]]
    bodies = tokenizer([text for text, _ in rows], add_special_tokens=False, verbose=False)["input_ids"]
    cut = sum(len(body) > max_len - 2 for body in bodies)
    documents = encode([text for text, _ in rows], tokenizer, max_len)
    where = default_device() if device == "auto" else torch.device(device)
    kind = default_dtype(where) if dtype == "auto" else getattr(torch, dtype)
    notes = [f"{cut} of {len(rows)} texts are longer than max_len={max_len} tokens and were cut"] * bool(cut)
    unseen = sum(label not in set(labels[split["train"]]) for label in gold)
    notes += [f"{unseen} test texts have a label that train does not have; they count as wrong"] * bool(unseen)
    sizes = ", ".join(f"{len(found):,} {name}" for name, found in split.items())
    settings = {key: globals()[key] for key in ("pool", "subsample", "C", "max_iter", "max_len")} | {"dtype": str(kind)}
    about = {"donor": str(donor), "host": str(host), "task": str(task), "sizes": sizes, "notes": notes}
    about |= {"settings": settings, "versions": {name: version(name) for name in ("torch", "scikit-learn")}}
    print(f"{Path(str(task)).stem}: {len(set(labels))} labels, {sizes}")

    Path(out_dir).mkdir(parents=True, exist_ok=True)
    answers = {}
    options = dict(batch_tokens=batch_tokens, cache=Path(out_dir) / "features")
    everything = {"host": None, "donor": None, **wanted}
    bar = tqdm(total=len(everything) * len(seeds), desc="probes", unit="probe")
    for name, part in everything.items():
        model = models[name] if part is None else transplant(models["host"], models["donor"], part)
        vectors = compute(model, documents, reduce, pool, name, where, kind, **options)
        answers[name] = []
        for seed in seeds:
            answers[name].append(probe(vectors, labels, split, seed))
            row = {"model": f"{host} + {name} of {donor}" if part else str(globals()[name]), "part": part, "seed": seed}
            row |= {
                "task": f"probe_{Path(str(task)).stem}",
                "test": {"macro_f1": macro_f1(gold, answers[name][-1]) / 100},
            }
            with open(Path(out_dir) / "results.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({**about, **row}) + "\n")
            bar.update()
    bar.close()
    write(evaluate(answers, gold), wanted, about | {"seeds": list(seeds)})


if __name__ == "__main__":
    configure(globals())
    main()
