"""Layer by layer, how far apart are two encoders? Divergence = 1 - linear CKA of their hidden states (Figures 3 and 4).

    python cka.py --model_a=out/demo/clm/final --model_b=out/demo/mlm/final --texts=out/demo/data/domain
    python cka.py ... --control_a=out/demo/mlm_seed2/final --control_b=out/demo/mlm/final   # the seed-noise control
    python cka.py --trajectory=out/clm-decay10b --reference=out/mlm-decay10b --texts=texts.jsonl   # along a decay
    torchrun --nproc_per_node=4 cka.py ...                                                  # features on all ranks

Both models read the same token ids. A text's feature at layer l is the raw output of block l (P-504: l = 0..L-1; the
embedding output is shown, but is no layer), averaged over the text's real tokens, [CLS] and [SEP] included. The control
pair, two MLM runs that differ in their seed alone, says how much divergence means nothing (P-507).

The defaults are the paper's. What a careful reader may ask beyond them is a switch each: --estimator=debiased,
--standardise=True, --drop_dims=3, --tokens=8, --bootstrap=200, --start=checkpoint; see the settings.
Writes cka.json, cka.md, cka.png and cka.svg to out_dir, trajectory.png and .svg too, and features/, a cache.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from matplotlib.figure import Figure  # no pyplot: a Figure renders through Agg and never opens a window
from scipy.stats import t as student_t
from tabulate import tabulate
from tqdm import tqdm

from checkpoint import find_checkpoint, load_tokenizer
from configurator import configure
from features import block_bounds, compute, encode, read_documents, read_texts
from model import default_device, default_dtype, load_model

model_a = None  # checkpoint directory or hub id
model_b = None  # the model that model_a is compared with
control_a = None  # seed-noise control: an MLM run with another seed (P-507); None: no control
control_b = None  # the other side of the control, usually model_b again
texts = None  # held-out texts: .txt (one a line), .jsonl ("text" field), or a prepared data directory (its val split)
n_texts = 500  # texts in each sample (P-505)
seeds = (42, 43, 44)  # each seed draws its own sample of texts; the models stay the same (P-506)
max_len = 512  # tokens of each text that are read (P-505)

# along a decay (Figure 3a, P-511)
trajectory = None  # out_dir of a train.py run: its decay's step_*/ and final/; keep them with --keep_ckpts=0
reference = None  # what they are compared with: the out_dir of the twin's run, or one checkpoint with ref_mode=fixed
ref_mode = "matched"  # matched: the twin after as many tokens of its own decay | fixed: one checkpoint for all (X-02)

# beyond the paper
estimator = "biased"  # debiased: unrelated features give 0; biased, 500 texts of 768 dimensions give 0.6 to begin with
standardise = False  # True: every dimension at variance 1, since a few huge ones can rule linear CKA alone (K2)
drop_dims = 0  # leave out the k dimensions of largest variance of each model, for the same reason
tokens = (
    0  # k: no averaging, k tokens of every text, evenly spread, are a row each: averages hide what tokens differ in
)
bootstrap = 0  # resamples of the texts of the first sample, for an interval that says what other texts might have given
start = None  # the checkpoint that all models started from: how far has each come since

batch_tokens = 16384  # tokens of one forward pass; for memory only: in float32 no result depends on it
device = "auto"  # auto: cuda, else mps, else cpu
dtype = "float32"  # of the forward pass, float64 after it; bfloat16 moves CKA by some 3e-4; auto: what is fast
out_dir = "out/cka"  # where everything goes

TOP = 3  # dimensions whose share of the variance is shown
# The paper's French base model, 22 layers (sections 1 and 5.1): ratios by block, and the rest in words.
PAPER = {"low": "5 to 44", "mid": "near 1", "late": "near 1"}
PAPER_SAYS = """In the paper (French base model, 10B + 1B tokens) 56.5% overall after 1.5B tokens of decay, the control
49.7%; the ratio is 5 to 44 in single low layers, above 9 in layers 0-7 together, and near 1 higher up."""


def fail(message):
    raise SystemExit(f"cka.py: {message}")


# ----------------------------------------------------------------------------------------------------------------------
# The measure


def linear_cka(X, Y, debiased=False):
    """Linear CKA of X (n, p) and Y (n, q), rows = the same n samples: a float, or nan where undefined.

    Float64. Biased (Kornblith's, P-501): ||Y'X||_F^2 / (||X'X||_F ||Y'Y||_F) of the column-centred X and Y, in [0, 1].
    Debiased: the same ratio of Song et al.'s unbiased HSIC, which may fall below 0; needs n >= 4.
    Undefined when a side does not vary over the samples (or is not finite): then there is nothing to compare.
    """
    X, Y = (np.asarray(torch.as_tensor(Z, dtype=torch.float64, device="cpu")) for Z in (X, Y))
    if X.ndim != 2 or Y.ndim != 2 or len(X) != len(Y) or len(X) < 2 + 2 * debiased:
        raise ValueError(f"linear_cka: expected (n, p) and (n, q) with n >= 2, debiased 4, got {X.shape} and {Y.shape}")
    X, Y = (centre(Z) for Z in (X, Y))
    if X is None or Y is None:
        return float("nan")
    if debiased:
        K, L = X @ X.T, Y @ Y.T
        own = unbiased_hsic(K, K) * unbiased_hsic(L, L)
        return float(unbiased_hsic(K, L) / own**0.5) if own > 0 else float("nan")
    if len(X) < max(X.shape[1], Y.shape[1]):  # fewer samples than dimensions: the n x n Gram matrices are smaller
        return gram_cka(X @ X.T, Y @ Y.T)
    return float(np.linalg.norm(Y.T @ X) ** 2 / (np.linalg.norm(X.T @ X) * np.linalg.norm(Y.T @ Y)))


def gram_cka(K, L):
    """Biased CKA of centred Gram matrices (n, n)."""
    return float((K * L).sum() / (np.linalg.norm(K) * np.linalg.norm(L)))


def unbiased_hsic(K, L):
    """Song et al. 2012, eq. 5, for Gram matrices (n, n), n >= 4: what a text has in common with itself is left out."""
    n = len(K)
    K, L = (M - np.diag(np.diag(M)) for M in (K, L))
    ends = K.sum() * L.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * K.sum(0) @ L.sum(0)
    return ((K * L).sum() + ends) / (n * (n - 3))


def centre(Z):
    """Column-centred Z with Frobenius norm 1, or None if Z is constant or not finite. CKA ignores scale, and at unit
    norm its fourth powers cannot overflow or underflow (K2)."""
    if not np.isfinite(Z).all():
        return None
    centred = Z - Z.mean(0)
    norm = np.linalg.norm(centred)
    constant = norm <= 1e-12 * np.linalg.norm(Z)  # centring leaves rounding errors of a constant, seldom exact zeros
    return None if constant else centred / norm


def rows_of(layer, rows):
    """A layer's features (n_texts, C) or (n_texts, tokens, C) and the texts of a sample -> (n, C), as set above."""
    Z = np.asarray(layer[rows], dtype=np.float64)
    Z = Z.reshape(-1, Z.shape[-1])
    if drop_dims:
        Z = Z[:, np.sort(np.argsort(Z.var(0))[: Z.shape[1] - drop_dims])]
    if standardise:
        Z = Z - Z.mean(0)
        scale = Z.std(0)
        Z = Z[:, scale > 1e-12 * scale.max()] / scale[scale > 1e-12 * scale.max()]
    return Z


def divergences(features_a, features_b, draws, pair="pair"):
    """Features (n_layers, n, C) of two models and the rows of each sample -> 1 - CKA (n_samples, n_layers).

    Warns, naming the layer, where it is undefined.
    """
    debiased, layers = estimator == "debiased", list(zip(features_a, features_b, strict=True))
    result = [[1 - linear_cka(rows_of(X, rows), rows_of(Y, rows), debiased) for X, Y in layers] for rows in draws]
    result = np.maximum(result, 0)  # rounding may leave CKA(X, X) a hair above 1; nan stays nan
    for layer in np.flatnonzero(np.isnan(result).any(0)):
        message = f"{pair} layer {layer}: constant features, CKA is undefined; every mean leaves the layer out"
        print(f"cka.py: warning: {message}", file=sys.stderr)
    return result


def resampled(features_a, features_b, rows, count):
    """1 - CKA of `count` resamples, with replacement, of the texts in `rows` -> (count, n_layers).

    A text that comes up twice makes both models look alike, so the mean of these is too low; their SD is what counts.
    """
    rng, n = np.random.default_rng(seeds[0]), len(rows)
    picks = [rng.integers(0, n, n) for _ in range(count)]
    result = np.full((count, len(features_a)), np.nan)
    for layer, pair in enumerate(tqdm(list(zip(features_a, features_b, strict=True)), desc="bootstrap", unit="layer")):
        sides = [centre(rows_of(Z, rows)) for Z in pair]
        if sides[0] is None or sides[1] is None:
            continue
        grams = [Z @ Z.T for Z in sides]
        for i, pick in enumerate(picks):
            K, L = (gram[np.ix_(pick, pick)] for gram in grams)
            if estimator == "debiased":
                result[i, layer] = 1 - unbiased_hsic(K, L) / (unbiased_hsic(K, K) * unbiased_hsic(L, L)) ** 0.5
            else:
                K, L = (M - M.mean(0) - M.mean(1, keepdims=True) + M.mean() for M in (K, L))
                result[i, layer] = 1 - gram_cka(K, L)
    return result


def top_share(layer):
    """Features (n_texts, ..., C) of a layer -> the share of their variance that lies in the TOP largest dimensions."""
    variance = layer.reshape(-1, layer.shape[-1]).var(0)
    return float(np.sort(variance)[-TOP:].sum() / variance.sum()) if variance.sum() > 0 else float("nan")


def spread(values):
    """Values over the samples -> mean, SD (n-1) and the half-width of the 95% t interval, nan for a single value."""
    values, n = np.asarray(values, dtype=float), len(values)
    sd = values.std(ddof=1) if n > 1 else float("nan")
    ci95 = sd * student_t.ppf(0.975, n - 1) / n**0.5 if n > 1 else float("nan")  # 2.484 SD for three samples (P-510)
    return {"divergence": values.mean(), "sd": sd, "ci95": ci95, "per_sample": values.tolist()}


def summarise(pair, control=None, resamples=None, control_resamples=None):
    """Divergences (n_samples, n_layers) of the pair and of its control -> entries per layer, per block and overall;
    with the resamples (count, n_layers) of both, also the half-widths of the bootstrap's 95% intervals: of the pair,
    and of its excess over the control. Both must come from the same resampled texts, whose noise then cancels in part.

    A ratio averages over the samples first and divides then (P-508); a block's ratio is that of the block's means. The
    overall divergence is the mean over layers (P-509). A layer that is undefined in either pair is in no mean.
    """
    n_layers = pair.shape[1]
    undefined = np.isnan(pair).any(0) | (False if control is None else np.isnan(control).any(0))

    def entry(layers):
        kept = [layer for layer in layers if not undefined[layer]] if len(layers) > 1 else list(layers)
        mean = {"layers": [layers[0], layers[-1]], **spread(pair[:, kept].mean(1) if kept else [np.nan])}
        if resamples is not None:
            mean["bootstrap95"] = 1.96 * resamples[:, kept].mean(1).std(ddof=1) if kept else float("nan")
        if control is not None:
            mean["control"] = spread(control[:, kept].mean(1) if kept else [np.nan])
            noise = mean["control"]["divergence"]
            mean["excess"] = mean["divergence"] - noise
            if control_resamples is not None:
                excess = (resamples - control_resamples)[:, kept].mean(1)
                mean["excess_bootstrap95"] = 1.96 * excess.std(ddof=1) if kept else float("nan")
            mean["ratio"] = mean["divergence"] / noise if noise > 1e-12 else float("nan")  # no noise: no ratio
        return mean

    return {
        "layers": [entry([layer]) for layer in range(n_layers)],
        "blocks": {name: entry(range(first, last + 1)) for name, (first, last) in block_bounds(n_layers).items()},
        "overall": entry(range(n_layers)) | {"left_out": np.flatnonzero(undefined).tolist()},
    }


# ----------------------------------------------------------------------------------------------------------------------
# Texts and features


def read_pool(path, tokenizers, max_len):
    """All distinct texts at `path` as token ids, sorted, so that a sample depends on the texts and not on their order.

    tokenizers: {model: tokenizer}. Models that would read different ids are refused (K5).
    """
    (first_name, first), *others = tokenizers.items()
    wanted = "CKA needs the same ids for both"
    for name, other in others:
        if other.get_vocab() != first.get_vocab():
            fail(f"{first_name} and {name} have different tokenizers: {wanted}")
    if path.is_dir():
        pool = [[*ids[: min(len(ids), max_len) - 1], ids[-1]] for ids in read_documents(path, "texts")]
        if load_tokenizer(path / "tokenizer", "texts").get_vocab() != first.get_vocab():
            fail(f"--texts={path}: not the tokenizer of {first_name}: prepare the texts with it")
    else:
        lines = read_texts(path, "texts")
        pool = encode(lines, first, max_len)
        for name, other in others:  # the same vocabulary may still come with another normalisation or other merges
            if encode(lines, other, max_len) != pool:
                fail(f"{first_name} and {name} have different tokenizers: {wanted}")
    pool = sorted({tuple(ids) for ids in pool if len(ids) > 2})  # without texts that have no token
    if len(pool) < 4:
        fail(f"--texts={path}: {len(pool)} distinct texts: expected 4 or more, better {n_texts}")
    return pool


def reduce(output, sizes):
    """The model's output for several texts -> float64 from here on (K2): (n, 1 + n_layers, C), each text's mean; or
    (n, 1 + n_layers, tokens, C). Entry 0 is the output of the embeddings."""
    if tokens:
        which = [np.linspace(0, size - 1, tokens).round().astype(int) for size in sizes]
        kept = lambda part, i: part[which[i]]  # noqa: E731
    else:
        kept = lambda part, i: part.mean(0)  # noqa: E731
    states = [[kept(p, i) for i, p in enumerate(h.cpu().double().split(sizes))] for h in output.hidden_states]
    return torch.stack([torch.stack(parts) for parts in states], 1).numpy()


def features(name, setting, documents, where, forward_dtype):
    """A model's features of all documents, layer first: (1 + n_layers, n, ...) float64."""
    model = load_model(name, setting)
    options = dict(states=True, batch_tokens=batch_tokens, cache=Path(out_dir) / "features")
    found = compute(model, documents, reduce, f"cka {tokens}", name, where, forward_dtype, **options)
    return np.moveaxis(found, 1, 0)


def check_shapes(named, documents):
    """{model: setting} -> one line for what cannot be compared, before anything is computed. Widths may differ."""
    depths = {}
    for name, setting in named.items():
        try:
            config = json.loads((find_checkpoint(name) / "config.json").read_text(encoding="utf-8"))
            depths[name], size, width = (config[k] for k in ("num_hidden_layers", "vocab_size", "hidden_size"))
        except (OSError, ValueError, KeyError) as error:
            fail(f"--{setting}={name}: expected a checkpoint ({error})")
        if (top := max(map(max, documents))) >= size:
            fail(f"--{setting}={name}: token id {top} but vocab_size {size}: expected its tokenizer")
        if drop_dims >= width:
            fail(f"--drop_dims={drop_dims}: expected fewer than the {width} dimensions of --{setting}={name}")
    if len(set(depths.values())) > 1:
        fail(f"layers per model {depths}: expected the same depth for all")


def decay_checkpoints(run, setting):
    """The checkpoints of a train.py run's decay -> {tokens of decay: directory}; the end of phase 1 stands at 0."""
    found, folder = {}, Path(str(run))
    try:
        phases = json.loads((folder / "plan.json").read_text(encoding="utf-8"))["phases"]
        decay = [phase["name"] for phase in phases].index("decay")
        for file in folder.glob("[!.]*/train_state.pt"):
            place = torch.load(file, map_location="cpu", weights_only=True, mmap=True)["place"]
            if place["phase"] >= decay:
                ended = place["phase"] > decay
                found[phases[decay]["tokens_at_end"] if ended else place["phase_tokens"]] = file.parent
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        fail(f"--{setting}={run}: expected the out_dir of a train.py run with a decay ({error!r})")
    if not found:
        fail(f"--{setting}={run}: no checkpoint of its decay there; train.py keeps them with --keep_ckpts=0")
    return dict(sorted(found.items()))


def trajectory_pairs():
    """[(tokens of decay, checkpoint, what it is compared with)], by ref_mode."""
    ours = decay_checkpoints(trajectory, "trajectory")
    if ref_mode == "fixed":
        return [(seen, path, Path(str(reference))) for seen, path in ours.items()]
    theirs = decay_checkpoints(reference, "reference")
    pairs = [(seen, path, theirs[seen]) for seen, path in ours.items() if seen in theirs]
    if not pairs:
        fail(f"--reference={reference}: its decay has no checkpoint after as many tokens as one of {trajectory}")
    return pairs


# ----------------------------------------------------------------------------------------------------------------------
# Output


def table(result):
    """Percent, and ratios; lines that line up, and markdown."""
    head = ["", "divergence %", "SD", "95% t +-", "control %", "ratio", f"top {TOP} dims %: a", "b"]
    head.insert(6, "paper's")
    rows = [("embeddings", result["embeddings"], "embeddings")]
    rows += [(f"layer {layer}", row, layer) for layer, row in enumerate(result["layers"])]
    rows += [(f"{name} {row['layers'][0]}-{row['layers'][1]}", row, None) for name, row in result["blocks"].items()]
    rows += [("overall", result["overall"], None)]
    if "bootstrap95" in result["overall"]:
        head.insert(4, "bootstrap +-")
    lines = [head]
    for name, row, layer in rows:
        shares = [np.nan, np.nan]
        if layer is not None:
            shares = [share[0 if layer == "embeddings" else 1 + layer] for share in result["top_share"].values()]
        numbers = [row["divergence"], row["sd"], row["ci95"], row.get("control", {}).get("divergence", np.nan)]
        numbers = [f"{100 * number:.2f}" for number in numbers] + [f"{row.get('ratio', np.nan):.3g}"]
        if "bootstrap95" in result["overall"]:
            numbers.insert(3, f"{100 * row.get('bootstrap95', np.nan):.2f}")
        paper = PAPER.get(name.split()[0], "") if "ratio" in row else ""
        lines.append([name, *numbers, paper, *(f"{100 * share:.0f}" for share in shares)])
    lines = [[cell.replace("nan", "-") for cell in line] for line in lines]
    ends = ("left", *["right"] * (len(head) - 1))
    return tabulate(lines[1:], lines[0], tablefmt="github", colalign=ends, disable_numparse=True)


def shown(value, digits=1, unit="%"):
    return f"{value:.{digits}f}{unit}" if np.isfinite(value) else "undefined"


def what_it_says(result):
    """Sentences computed from the numbers."""
    overall, say = result["overall"], []
    if "ratio" in overall:
        noise = shown(100 * overall["control"]["divergence"])
        say += [
            f"The pair diverges by {shown(100 * overall['divergence'])} over all layers, the control, which differs "
            f"in the seed alone, by {noise}: {shown(overall['ratio'], 2, '')} times."
        ]
        if "excess_bootstrap95" in overall:
            more, width = 100 * overall["excess"], 100 * overall["excess_bootstrap95"]
            ends = f"{shown(more - width, 1, '')} to {shown(more + width, 1, '')}"
            say += [f"The pair's excess over the control is {shown(more, 1, '')} points (95% over texts: {ends})."]
        parts = []
        for name, row in result["blocks"].items():  # the paper's "more than 9" is of the means, its "5 to 44" of each
            first, last = row["layers"]
            each = [x["ratio"] for x in result["layers"][first : last + 1] if np.isfinite(x["ratio"])] or [np.nan]
            ends = f"{shown(min(each), 2, '')} to {shown(max(each), 2, '')}"
            ratio = shown(row["ratio"], 2, "")
            parts.append(f"{ratio} in the {name} layers {first}-{last} (each layer by itself {ends})")
        say += [f"The ratio is {', '.join(parts)}."]
    for name, row in result.get("from_start", {}).items():
        blocks = ", ".join(f"{block} {shown(100 * x['divergence'])}" for block, x in row["blocks"].items())
        way = shown(100 * row["overall"]["divergence"])
        say += [f"{name} has come {way} from {result['start']}: {blocks}."]
    if points := result.get("trajectory"):
        values = [100 * point["divergence"] for point in points]
        say += [
            f"Along the decay ({points[0]['tokens']:,} to {points[-1]['tokens']:,} tokens) the divergence goes from "
            f"{shown(values[0])} to {shown(values[-1])}, between {shown(min(values))} and {shown(max(values))}."
        ]
    return say


def new_figure(width, height, columns=1):
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", alpha=0.3)
    return figure, axes


def save_figure(figure, path):
    for suffix in ("png", "svg"):
        figure.savefig(f"{path}.{suffix}.tmp", format=suffix, dpi=200)
        os.replace(f"{path}.{suffix}.tmp", f"{path}.{suffix}")


def short(path):
    return "/".join(Path(str(path)).parts[-2:])


def draw_layers(result, path):
    """The curves of the pair and its control with what lies between them shaded (Figure 4), bars = SD over samples; and
    their ratio (Figure 3b)."""
    figure, axes = new_figure(10 if result["control_a"] else 6.4, 3.8, 2 if result["control_a"] else 1)
    curves = [(f"{short(result['model_a'])} against {short(result['model_b'])}", "#0072B2", "o-", result["layers"])]
    if result["control_a"]:  # blue and vermilion differ for colour-blind eyes, the dashes and squares in grey print
        control = [row["control"] for row in result["layers"]]
        name = f"control: {short(result['control_a'])} against {short(result['control_b'])}"
        curves.append((name, "#D55E00", "s--", control))
    layers = range(len(result["layers"]))
    for label, colour, style, rows in curves:
        mean, sd = (np.array([100 * row[key] for row in rows]) for key in ("divergence", "sd"))
        axes[0].errorbar(layers, mean, np.nan_to_num(sd), None, style, color=colour, capsize=3, ms=4, label=label)
    axes[0].set_ylabel("divergence 1 - CKA (%)")
    if result["control_a"]:
        pair, noise = (np.array([100 * row["divergence"] for row in rows]) for *_, rows in curves)
        axes[0].fill_between(layers, pair, noise, color="#0072B2", alpha=0.12, label="difference")
        axes[1].plot(layers, [row["ratio"] for row in result["layers"]], "o-", color="black", ms=4)
        axes[1].axhline(1, color="0.4", linestyle=":")
        axes[1].set_ylabel("ratio to the control")
        for i, row in enumerate(result["blocks"].values()):
            ends = row["layers"][0] - 0.3, row["layers"][1] + 0.3
            label = None if i else "of the means of low, mid, late"
            axes[1].hlines(row["ratio"], *ends, color="#009E73", lw=2, label=label)
    for ax in axes:
        ax.set(xlabel="layer", xticks=range(0, len(layers), 1 + len(layers) // 16))
        ax.set_ylim(bottom=0)
    figure.legend(frameon=False, loc="outside upper left", ncols=2, fontsize=9)
    save_figure(figure, path / "cka")


def draw_trajectory(result, path):
    """Figure 3a: divergence along the decay, and the seed-noise control as a dashed line."""
    figure, (ax,) = new_figure(6.4, 3.8)
    points = result["trajectory"]
    values, sd = (np.array([100 * point[key] for point in points]) for key in ("divergence", "sd"))
    label = f"{short(result['trajectory_of'])} against {short(result['reference'])}, {result['ref_mode']}"
    ax.errorbar([point["tokens"] / 1e6 for point in points], values, np.nan_to_num(sd), fmt="o-", color="#0072B2",
                capsize=3, ms=4, label=label)  # fmt: skip
    if result["control_a"]:
        noise = 100 * result["overall"]["control"]["divergence"]
        ax.axhline(noise, color="#D55E00", linestyle="--", label=f"control: another seed, {noise:.1f}%")
    ax.set(xlabel="tokens of decay (million)", ylabel="divergence 1 - CKA, all layers (%)")
    ax.set_ylim(bottom=0)
    ax.set_xlim(left=0)
    figure.legend(frameon=False, loc="outside upper left", fontsize=9)
    save_figure(figure, path / "trajectory")


def write_page(result, path):
    """cka.md: the comparison on one page, to print or to hand on."""
    lines = ["# CKA", "", *(f"- {sentence}" for sentence in what_it_says(result)), "", "![](cka.png)", ""]
    lines += ["![](trajectory.png)", ""] if result.get("trajectory") else []
    pair = f"`{result['model_a']}` against `{result['model_b']}`"
    if result["control_a"]:
        pair += f"; control `{result['control_a']}` against `{result['control_b']}`"
    lines += [table(result), "", f"{pair}. {result['estimator'][0].upper()}{result['estimator'][1:]}; "
              f"{result['pooling']}; {result['samples']} samples of {result['n_texts']} from {result['pool']} texts of "
              f"`{result['texts']}`; forward pass in {result['forward_dtype']}. SD and the t interval are over samples "
              "of texts, not over training runs. The ratio divides the two divergences; for a block, their "
              "means."]  # fmt: skip
    lines += [f"{note}." for note in result["notes"]]
    lines += ["", PAPER_SAYS]
    (path / "cka.md.tmp").write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.replace(path / "cka.md.tmp", path / "cka.md")


def check_settings():
    required = ("trajectory", "reference", "texts") if trajectory else ("model_a", "model_b", "texts")
    for setting in required:
        if globals()[setting] is None:
            fail(f"--{setting}=None: expected a path, see --help")
    if (control_a is None) != (control_b is None):
        fail(f"--control_a={control_a} --control_b={control_b}: expected both or neither")
    choices = {"dtype": ("float32", "bfloat16", "auto"), "estimator": ("biased", "debiased")}
    for setting, allowed in {**choices, "ref_mode": ("matched", "fixed")}.items():
        if globals()[setting] not in allowed:
            fail(f"--{setting}={globals()[setting]}: expected one of {', '.join(allowed)}")
    for setting, least in {"n_texts": 4, "max_len": 3, "batch_tokens": 1, "drop_dims": 0, "tokens": 0}.items():
        if globals()[setting] < least:
            fail(f"--{setting}={globals()[setting]}: expected {least} or more")
    if not seeds or not all(isinstance(seed, int) and seed >= 0 for seed in seeds):
        fail(f"--seeds={seeds}: expected whole numbers such as 42,43,44")
    if bootstrap and (bootstrap < 20 or tokens):
        fail(f"--bootstrap={bootstrap} --tokens={tokens}: expected 20 resamples or more, of averaged texts (tokens=0)")


def draw_samples(n_pool):
    """-> the texts that are read at all, the rows of each sample among them, notes."""
    n = min(n_texts, n_pool)
    draws = [np.sort(np.random.default_rng(seed).choice(n_pool, n, replace=False)) for seed in seeds]
    notes = []
    if n == n_pool:
        notes.append(f"{n} distinct texts for n_texts={n_texts}: every seed draws all of them, so there is one sample")
        draws = draws[:1]
    used = np.unique(draws)  # a text goes through a model once, however many samples it is in
    return used, [np.searchsorted(used, rows) for rows in draws], notes


def compare(sides, draws):
    """{setting: features} -> entries by layer, block and overall, and what else was asked for."""
    a, b, noise_a, noise_b, origin = sides.values()
    pair = divergences(a[1:], b[1:], draws, "model_a, model_b:")
    control = divergences(noise_a[1:], noise_b[1:], draws, "control_a, control_b:") if control_a else None
    resamples = resampled(a[1:], b[1:], draws[0], bootstrap) if bootstrap else None
    noise = resampled(noise_a[1:], noise_b[1:], draws[0], bootstrap) if bootstrap and control_a else None
    result = summarise(pair, control, resamples, noise)
    # the embeddings train too, even where blocks are frozen, and every layer's output moves with them (P-407)
    first = divergences(a[:1], b[:1], draws, "model_a, model_b: before")
    other = divergences(noise_a[:1], noise_b[:1], draws, "control_a, control_b: before") if control_a else None
    result["embeddings"] = summarise(first, other)["overall"]
    result["top_share"] = {"a": [top_share(layer) for layer in a], "b": [top_share(layer) for layer in b]}
    if start:
        others = {k: side for k, side in sides.items() if side is not None and side is not origin}
        if control_a and noise_b is b:  # one model in two places
            others.pop("control_b", None)
        result["from_start"] = {k: summarise(divergences(side[1:], origin[1:], draws, f"{k}, start:"))
                                for k, side in others.items()}  # fmt: skip
    return result


def follow(along, features_of, draws):
    """The points of Figure 3a, one after the other: a run's checkpoints do not all fit into memory."""
    points = []
    for seen, *sides in along:
        a, b = (
            features_of(str(path), setting) for path, setting in zip(sides, ("trajectory", "reference"), strict=True)
        )
        found = summarise(divergences(a[1:], b[1:], draws, f"after {seen:,} tokens of decay:"))
        points.append({"tokens": seen, **found["overall"], "by_layer": [row["divergence"] for row in found["layers"]]})
    return points


def about(documents, draws, pool, notes, forward_dtype):
    """What was measured, and how, in words and numbers."""
    more = (
        f", without the {drop_dims} largest dimensions" * bool(drop_dims) + ", dimensions at variance 1" * standardise
    )
    averaged = "mean over a text's tokens, [CLS] and [SEP] included"
    found = {"texts": str(texts), "n_texts": len(draws[0]), "pool": len(pool), "samples": len(draws)}
    found |= {"seeds": list(seeds), "tokens": sum(map(len, documents)), "max_len": max_len, "notes": notes}
    found |= {
        "estimator": f"linear CKA, {estimator}, float64{more}",
        "forward_dtype": str(forward_dtype).removeprefix("torch."),
    }
    return found | {"pooling": f"{tokens} evenly spread tokens of each text" if tokens else averaged}


def join_ranks(where):
    """Under torchrun, the ranks share the work. -> this rank's device."""
    if "RANK" not in os.environ:
        return where
    dist.init_process_group("gloo")
    if dist.get_rank() > 0:
        sys.stdout = open(os.devnull, "w")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if where.type == "cuda" else where


def main():
    check_settings()
    along = trajectory_pairs() if trajectory else []
    settings = {"model_a": model_a, "model_b": model_b, "control_a": control_a, "control_b": control_b, "start": start}
    if along:  # the pair of the figures by layer is the last one, unless another is named
        settings |= {k: settings[k] or str(v) for k, v in zip(("model_a", "model_b"), along[-1][1:], strict=True)}
    named = {}  # model -> the first setting that names it: control_b is usually model_b, which is run once
    for setting, name in settings.items():
        if name is not None:
            named.setdefault(str(name), setting)
    others = {str(path): "trajectory" for pair in along for path in pair[1:]}
    tokenizers = {name: load_tokenizer(name, setting) for name, setting in {**others, **named}.items()}
    pool = read_pool(Path(str(texts)), tokenizers, max_len)
    used, draws, notes = draw_samples(len(pool))
    documents = [pool[i] for i in used]
    check_shapes({**others, **named}, documents)
    where = join_ranks(default_device() if device == "auto" else torch.device(device))
    forward_dtype = default_dtype(where) if dtype == "auto" else getattr(torch, dtype)
    result = settings | about(documents, draws, pool, notes, forward_dtype) | {"paper": PAPER}
    print(f"{len(draws)} samples of {len(draws[0])} from {len(pool)} texts, {result['tokens']:,} tokens for each model")
    print(f"forward pass in {result['forward_dtype']} on {where}")

    pooled = {name: features(name, setting, documents, where, forward_dtype) for name, setting in named.items()}
    result |= compare({k: None if name is None else pooled[str(name)] for k, name in settings.items()}, draws)
    if along:

        def features_of(path, setting):
            return pooled[path] if path in pooled else features(path, setting, documents, where, forward_dtype)

        result |= {"trajectory": follow(along, features_of, draws), "trajectory_of": str(trajectory)}
        result |= {"reference": str(reference), "ref_mode": ref_mode}
    if result["overall"]["left_out"]:
        notes.append(f"layers {result['overall']['left_out']}: constant features, CKA undefined; no mean has them")
    if not dist.is_initialized() or dist.get_rank() == 0:
        write(result)


def write(result):
    print(table(result))
    print("\n".join([*what_it_says(result), *(f"note: {note}" for note in result["notes"])]))
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    draw_layers(result, out)
    if trajectory:
        draw_trajectory(result, out)
    write_page(result, out)
    result = json.loads(json.dumps(result), parse_constant=lambda nan: None)  # JSON itself has no nan: null
    (out / "cka.json.tmp").write_text(json.dumps(result, indent=1) + "\n")
    os.replace(out / "cka.json.tmp", out / "cka.json")
    print(f"written to {out}: cka.json, cka.md, cka.png" + ", trajectory.png" * bool(trajectory))


if __name__ == "__main__":
    configure(globals())
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
