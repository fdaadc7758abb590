"""Layer by layer, how far apart are two encoders? Divergence = 1 - linear CKA of their hidden states.

    python cka.py --model_a=out/demo/clm/final --model_b=out/demo/mlm/final --texts=out/demo/data/domain
    python cka.py ... --control_a=out/demo/mlm_seed2/final --control_b=out/demo/mlm/final   # the seed-noise control

Both models read the same token ids. A text's feature at layer l is the raw output of block l (P-504: l = 0..L-1, the
embedding output is no layer), averaged over the text's real tokens, [CLS] and [SEP] included. The control pair, two
MLM runs that differ in their seed alone, says how much divergence means nothing (P-507).
Writes cka.json, cka.png and cka.svg to out_dir.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure  # no pyplot: a Figure renders through Agg and never opens a window
from scipy.stats import t as student_t
from tqdm import tqdm

from checkpoint import load_tokenizer
from configurator import configure
from model import default_device, default_dtype, load_model

model_a = None  # checkpoint directory or hub id
model_b = None  # the model that model_a is compared with
control_a = None  # seed-noise control: an MLM run with another seed (P-507); None: no control
control_b = None  # the other side of the control, usually model_b again
texts = None  # held-out texts: .txt (one a line), .jsonl ("text" field), or a prepared data directory (its val split)
n_texts = 500  # texts in each sample (P-505)
seeds = (42, 43, 44)  # each seed draws its own sample of texts; the models stay the same (P-506)
max_len = 512  # tokens of each text that are read (P-505)
batch_size = 8  # texts; for memory only: in float32 no result depends on it
device = "auto"  # auto: cuda, else mps, else cpu
dtype = "float32"  # of the forward pass, float64 after it; bfloat16 moves CKA by some 3e-4; auto: what is fast
out_dir = "out/cka"  # where cka.json and the figure go


def fail(message):
    raise SystemExit(f"cka.py: {message}")


# ----------------------------------------------------------------------------------------------------------------------
# The measure


def linear_cka(X, Y):
    """Linear CKA of X (n, p) and Y (n, q), rows = the same n samples: a float in [0, 1], or nan where undefined.

    Biased (Kornblith) estimator in float64: ||Y'X||_F^2 / (||X'X||_F ||Y'Y||_F) of the column-centred X and Y (P-501).
    Undefined when a side does not vary over the samples (or is not finite): then there is nothing to compare.
    """
    X, Y = (np.asarray(torch.as_tensor(Z, dtype=torch.float64, device="cpu")) for Z in (X, Y))
    if X.ndim != 2 or Y.ndim != 2 or len(X) != len(Y) or len(X) < 2:
        raise ValueError(f"linear_cka: expected (n, p) and (n, q) with n >= 2, got {X.shape} and {Y.shape}")
    X, Y = (centre(Z) for Z in (X, Y))
    if X is None or Y is None:
        return float("nan")
    if len(X) < max(X.shape[1], Y.shape[1]):  # fewer samples than dimensions: the n x n Gram matrices are smaller
        K, L = X @ X.T, Y @ Y.T
        return float((K * L).sum() / (np.linalg.norm(K) * np.linalg.norm(L)))
    return float(np.linalg.norm(Y.T @ X) ** 2 / (np.linalg.norm(X.T @ X) * np.linalg.norm(Y.T @ Y)))


def centre(Z):
    """Column-centred Z with Frobenius norm 1, or None if Z is constant or not finite. CKA ignores scale, and at unit
    norm its fourth powers cannot overflow or underflow (K2)."""
    if not np.isfinite(Z).all():
        return None
    centred = Z - Z.mean(0)
    norm = np.linalg.norm(centred)
    constant = norm <= 1e-12 * np.linalg.norm(Z)  # centring leaves rounding errors of a constant, seldom exact zeros
    return None if constant else centred / norm


def divergences(features_a, features_b, draws, pair="pair"):
    """Features (n_layers, n, C) of two models and the rows of each sample -> 1 - CKA (n_samples, n_layers).

    Warns, naming the layer, where it is undefined.
    """
    result = [[1 - linear_cka(X[rows], Y[rows]) for X, Y in zip(features_a, features_b, strict=True)] for rows in draws]
    result = np.maximum(result, 0)  # rounding may leave CKA(X, X) a hair above 1; nan stays nan
    for layer in np.flatnonzero(np.isnan(result).any(0)):
        message = f"{pair} layer {layer}: constant features, CKA is undefined; every mean leaves the layer out"
        print(f"cka.py: warning: {message}", file=sys.stderr)
    return result


def spread(values):
    """Values over the samples -> mean, SD (n-1) and the half-width of the 95% t interval, nan for a single value."""
    values, n = np.asarray(values, dtype=float), len(values)
    sd = values.std(ddof=1) if n > 1 else float("nan")
    ci95 = sd * student_t.ppf(0.975, n - 1) / n**0.5 if n > 1 else float("nan")  # 2.484 SD for three samples (P-510)
    return {"divergence": values.mean(), "sd": sd, "ci95": ci95, "per_sample": values.tolist()}


def block_bounds(n_layers):
    """{name: (first, last)} of the low, mid and late blocks: the paper's 0-7, 8-14, 15-21 of 22, scaled to n_layers."""
    low, mid = round(n_layers * 8 / 22), round(n_layers * 15 / 22)
    blocks = {"low": (0, low - 1), "mid": (low, mid - 1), "late": (mid, n_layers - 1)}
    return {name: (first, last) for name, (first, last) in blocks.items() if first <= last}


def summarise(pair, control=None):
    """Divergences (n_samples, n_layers) of the pair and of its control -> entries per layer, per block and overall.

    A ratio averages over the samples first and divides then (P-508); a block's ratio is that of the block's means. The
    overall divergence is the mean over layers (P-509). A layer that is undefined in either pair is in no mean.
    """
    n_layers = pair.shape[1]
    undefined = np.isnan(pair).any(0) | (False if control is None else np.isnan(control).any(0))

    def entry(layers):
        kept = [layer for layer in layers if not undefined[layer]] if len(layers) > 1 else list(layers)
        mean = {"layers": [layers[0], layers[-1]], **spread(pair[:, kept].mean(1) if kept else [np.nan])}
        if control is not None:
            mean["control"] = spread(control[:, kept].mean(1) if kept else [np.nan])
            noise = mean["control"]["divergence"]
            mean["ratio"] = mean["divergence"] / noise if noise > 1e-12 else float("nan")  # no noise: no ratio
        return mean

    return {
        "layers": [entry([layer]) for layer in range(n_layers)],
        "blocks": {name: entry(range(first, last + 1)) for name, (first, last) in block_bounds(n_layers).items()},
        "overall": entry(range(n_layers)) | {"left_out": np.flatnonzero(undefined).tolist()},
    }


# ----------------------------------------------------------------------------------------------------------------------
# Texts and features


def read_texts(path):
    """The texts of a .txt file (one a line) or a .jsonl file ("text" field); blank ones are left out."""
    if path.suffix not in (".txt", ".jsonl") or not path.is_file():
        fail(f"--texts={path}: expected a .txt or .jsonl file, or a directory of prepare_data.py")
    lines = path.read_text(encoding="utf-8").split("\n")
    if path.suffix == ".jsonl":
        for number, line in enumerate(lines):
            try:
                lines[number] = str(json.loads(line)["text"]) if line.strip() else ""
            except (ValueError, KeyError, TypeError):
                where = f"--texts={path}: line {number + 1}"
                fail(f'{where}: expected a JSON object with a "text" field')
    return [line.strip() for line in lines if line.strip()]


def encode(lines, tokenizer, max_len):
    """Texts -> [CLS] text [SEP] as lists of ids, cut to max_len with both kept. A text without a token is dropped."""
    bodies = tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"]
    return [[tokenizer.cls_token_id, *body[: max_len - 2], tokenizer.sep_token_id] for body in bodies if body]


def read_documents(data_dir, max_len):
    """The validation documents of a prepared data directory as lists of ids, cut to max_len with [CLS] and [SEP] kept.

    They are held out by construction: prepare_data.py splits by document before anything else.
    """
    try:
        manifest = json.loads((data_dir / "manifest.json").read_text(encoding="utf-8"))
        split, eos = manifest["splits"]["val"], manifest["tokenizer"]["eos_token_id"]
        ids = np.fromfile(data_dir / split["file"], dtype=manifest["dtype"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"--texts={data_dir}: expected a directory of prepare_data.py ({error!r})")
    documents = np.split(ids, np.flatnonzero(ids == eos) + 1)  # cut after every eos; what follows the last one is empty
    return [[*doc[: min(len(doc), max_len) - 1].tolist(), eos] for doc in documents if len(doc) > 2]


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
        pool = read_documents(path, max_len)
        if load_tokenizer(path / "tokenizer", "texts").get_vocab() != first.get_vocab():
            fail(f"--texts={path}: not the tokenizer of {first_name}: prepare the texts with it")
    else:
        lines = read_texts(path)
        pool = encode(lines, first, max_len)
        for name, other in others:  # the same vocabulary may still come with another normalisation or other merges
            if encode(lines, other, max_len) != pool:
                fail(f"{first_name} and {name} have different tokenizers: {wanted}")
    pool = sorted(set(map(tuple, pool)))
    if len(pool) < 3:
        fail(f"--texts={path}: {len(pool)} distinct texts: expected 3 or more, better {n_texts}")
    return pool


@torch.no_grad()
def features(model, documents, batch_size=8, device="cpu", dtype=torch.float32, name="model"):
    """Documents (sequences of ids) -> (n_layers, n, C) float64: the output of each block, averaged over each document's
    tokens. There is no padding to leave out: the model reads one flat stream."""
    model = model.to(device).eval()
    order = sorted(range(len(documents)), key=lambda i: len(documents[i]))
    pooled = None
    for start in tqdm(range(0, len(order), batch_size), desc=f"features of {name}", unit="batch"):
        rows = order[start : start + batch_size]
        lengths = torch.tensor([len(documents[i]) for i in rows])
        ids = torch.tensor([token for i in rows for token in documents[i]], device=device)
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)
        with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = model(ids, cu_seqlens=cu_seqlens, output_hidden_states=True, output_logits=False)
        blocks = out.hidden_states[1:]  # the first entry is the embedding output
        if pooled is None:
            pooled = np.empty((len(blocks), len(documents), blocks[0].shape[-1]))
        for layer, hidden in enumerate(blocks):  # float64 from here on (K2)
            pooled[layer, rows] = [part.mean(0).numpy() for part in hidden.cpu().double().split(lengths.tolist())]
    return pooled


# ----------------------------------------------------------------------------------------------------------------------
# Output


def table(result):
    """The result as lines of a lined-up table, divergences in percent."""
    rows = [(f"layer {layer}", row) for layer, row in enumerate(result["layers"])]
    rows += [(f"{name} {row['layers'][0]}-{row['layers'][1]}", row) for name, row in result["blocks"].items()]
    rows += [("overall", result["overall"])]
    lines = [f"{'':12}{'divergence %':>13}{'SD':>8}{'95% t +-':>10}{'control %':>11}{'ratio':>10}"]
    for name, row in rows:
        numbers = [100 * row["divergence"], 100 * row["sd"], 100 * row["ci95"]]
        numbers += [100 * row.get("control", {}).get("divergence", np.nan), row.get("ratio", np.nan)]
        cells = ["-" if np.isnan(number) else f"{number:.2f}" for number in numbers[:4]] + [f"{numbers[4]:.4g}"]
        lines.append(f"{name:12}{cells[0]:>13}{cells[1]:>8}{cells[2]:>10}{cells[3]:>11}{cells[4]:>10}")
    return lines


def draw_figure(result, path):
    """Divergence per layer of the pair and its control, bars = SD over samples -> path.png and path.svg."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    sides = ("model_a", "model_b", "control_a", "control_b")
    name = {side: "/".join(Path(str(result[side])).parts[-2:]) for side in sides}
    curves = [(f"{name['model_a']} against {name['model_b']}", "#0072B2", "o-", result["layers"])]
    if result["control_a"]:  # blue and vermilion differ for colour-blind eyes, the dashes and squares in grey print
        control = [row["control"] for row in result["layers"]]
        curves.append((f"control: {name['control_a']} against {name['control_b']}", "#D55E00", "s--", control))
    for label, colour, style, rows in curves:
        mean, sd = (np.array([100 * row[key] for row in rows]) for key in ("divergence", "sd"))
        axes.errorbar(range(len(rows)), mean, np.nan_to_num(sd), None, style, color=colour, capsize=3, label=label)
    axes.set(xlabel="layer", ylabel="divergence 1 - CKA (%)", xticks=range(0, len(rows), 1 + len(rows) // 16))
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    figure.legend(frameon=False, loc="outside upper left")
    for suffix in ("png", "svg"):
        figure.savefig(f"{path}.{suffix}.tmp", format=suffix, dpi=200)
        os.replace(f"{path}.{suffix}.tmp", f"{path}.{suffix}")


def check_settings():
    for setting in ("model_a", "model_b", "texts"):
        if globals()[setting] is None:
            fail(f"--{setting}=None: expected a path, see --help")
    if (control_a is None) != (control_b is None):
        fail(f"--control_a={control_a} --control_b={control_b}: expected both or neither")
    for setting, least in (("n_texts", 3), ("max_len", 3), ("batch_size", 1)):
        if globals()[setting] < least:
            fail(f"--{setting}={globals()[setting]}: expected {least} or more")
    if not seeds or not all(isinstance(seed, int) and seed >= 0 for seed in seeds):
        fail(f"--seeds={seeds}: expected whole numbers such as 42,43,44")
    if dtype not in ("float32", "bfloat16", "auto"):
        fail(f"--dtype={dtype}: expected float32, bfloat16 or auto")


def main():
    check_settings()
    where = default_device() if device == "auto" else torch.device(device)
    forward_dtype = default_dtype(where) if dtype == "auto" else getattr(torch, dtype)
    settings = {"model_a": model_a, "model_b": model_b, "control_a": control_a, "control_b": control_b}
    named = {}  # model -> the first setting that names it: control_b is usually model_b, which is run once
    for setting, name in settings.items():
        if name is not None:
            named.setdefault(str(name), setting)
    tokenizers = {name: load_tokenizer(name, setting) for name, setting in named.items()}
    pool = read_pool(Path(str(texts)), tokenizers, max_len)

    n, notes = min(n_texts, len(pool)), []
    draws = [np.sort(np.random.default_rng(seed).choice(len(pool), n, replace=False)) for seed in seeds]
    if n == len(pool):
        notes.append(f"{n} distinct texts for n_texts={n_texts}: every seed draws all of them, so there is one sample")
        draws = draws[:1]
    used = np.unique(draws)  # a text goes through a model once, however many samples it is in
    draws = [np.searchsorted(used, rows) for rows in draws]
    documents = [pool[i] for i in used]
    tokens, top = sum(map(len, documents)), max(map(max, documents))
    print(f"{len(draws)} samples of {n} from {len(pool)} texts; {len(used)} texts, {tokens:,} tokens for each model")
    print(f"forward pass in {str(forward_dtype).removeprefix('torch.')} on {where}")

    pooled = {}
    for name, setting in named.items():
        model = load_model(name, setting)
        if top >= model.config.vocab_size:
            size = model.config.vocab_size
            raise SystemExit(
                f"cka.py: --{setting}={name}: token id {top} but vocab_size {size}: expected its tokenizer"
            )
        pooled[name] = features(model, documents, batch_size, where, forward_dtype, name)
    depths = {name: len(layers) for name, layers in pooled.items()}
    if len(set(depths.values())) > 1:
        fail(f"layers per model {depths}: expected the same depth for all")

    pair = divergences(pooled[str(model_a)], pooled[str(model_b)], draws, "model_a, model_b:")
    control = None
    if control_a is not None:
        control = divergences(pooled[str(control_a)], pooled[str(control_b)], draws, "control_a, control_b:")
    summary = summarise(pair, control)
    if summary["overall"]["left_out"]:
        notes.append(f"layers {summary['overall']['left_out']}: constant features, CKA undefined; no mean has them")
    result = settings | summary
    result |= {"texts": str(texts), "n_texts": n, "pool": len(pool), "samples": len(draws), "seeds": list(seeds)}
    result |= {"tokens": tokens, "max_len": max_len, "hidden_size": pooled[str(model_a)].shape[-1]}
    result |= {"estimator": "linear CKA, biased, float64", "forward_dtype": str(forward_dtype), "notes": notes}
    result |= {"pooling": "mean over a text's tokens, [CLS] and [SEP] included"}

    print("\n".join(table(result)))
    for note in notes:
        print(f"note: {note}")
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    draw_figure(result, out / "cka")
    result = json.loads(json.dumps(result), parse_constant=lambda nan: None)  # JSON itself has no nan: null
    (out / "cka.json.tmp").write_text(json.dumps(result, indent=1) + "\n")
    os.replace(out / "cka.json.tmp", out / "cka.json")
    print(f"written: {out}/cka.json, cka.png, cka.svg")


if __name__ == "__main__":
    configure(globals())
    main()
