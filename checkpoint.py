"""
The Hugging Face side: config.json, weights, tokenizer and model card, as plain Python values.

A checkpoint is a directory in the hub's own format (config.json, model.safetensors, tokenizer files), so transformers
loads what model.py saves and the other way round. Nothing here knows the network; ModernBERT.from_pretrained and
save_pretrained in model.py are built from these functions. Errors are ValueError or OSError with one line that says
what is wrong.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

# What model.py computes, in the hub's words; a checkpoint that says otherwise is refused instead of misread.
FIXED = {
    "hidden_activation": "gelu",
    "attention_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
    "decoder_bias": True,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "tie_word_embeddings": True,
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "mlp_dropout": 0.0,
}


# ----------------------------------------------------------------------------------------------------------------------
# config.json: transformers 4 and 5 spell the thetas and the pattern of layers differently


def read_config(hf, names):
    """A hub config.json (dict), as written by transformers 4 (`global_rope_theta`) or 5 (`rope_parameters`) -> those of
    our `names` that it sets."""
    if not isinstance(hf, dict):
        raise ValueError("expected a JSON object")
    if hf.get("model_type") != "modernbert":
        raise ValueError(f"model_type={hf.get('model_type')!r}: expected 'modernbert'")
    for key, only in FIXED.items():  # settings of the hub's class that no ModernBERT checkpoint uses
        if hf.get(key, only) != only:
            raise ValueError(f"{key}={hf[key]!r}: model.py only knows {key}={only!r}")
    known = {k: v for k, v in hf.items() if k in names and k != "attn_out_dropout"}
    for key in ("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"):
        if known.get(key) is None:
            known.pop(key, None)
    known.update(read_rope(hf))
    if hf.get("layer_types"):
        known["global_attn_every_n_layers"] = read_layer_types(hf["layer_types"], hf.get("num_hidden_layers"))
    return known


def read_rope(hf):
    """The two thetas. Told twice, they must agree."""
    rope = hf.get("rope_parameters") or {}
    if not rope.keys() <= {"full_attention", "sliding_attention"}:
        raise ValueError(f"rope_parameters={rope}: expected full_attention and sliding_attention")
    thetas = {}
    for kind, old in (("full_attention", "global_rope_theta"), ("sliding_attention", "local_rope_theta")):
        new = rope.get(kind) or {}
        if new.get("rope_type", "default") != "default":
            raise ValueError(f"rope_parameters: rope_type={new['rope_type']!r}: model.py only knows 'default'")
        theta = new.get("rope_theta", hf.get(old))
        if hf.get(old) is not None and theta != hf[old]:
            raise ValueError(f"{old}={hf[old]} but rope_parameters say {theta}: make them agree")
        if theta is not None:
            thetas[old] = float(theta)
    if "local_rope_theta" in hf and hf["local_rope_theta"] is None and not rope:
        thetas["local_rope_theta"] = thetas.get("global_rope_theta", 160000.0)  # transformers 4: null = the global one
    return thetas


def read_layer_types(kinds, n_layers):
    """['full_attention', 'sliding_attention', 'sliding_attention', 'full_attention', ...] -> 3. Only this regular
    pattern exists in both spellings."""
    every = next((i for i in range(1, len(kinds)) if kinds[i] == "full_attention"), len(kinds))
    expected = ["full_attention" if i % every == 0 else "sliding_attention" for i in range(len(kinds))]
    if list(kinds) != expected or n_layers not in (None, len(kinds)):
        raise ValueError(f"layer_types={kinds}: expected {n_layers} of them, a full_attention layer every n, from 0")
    return every


def hub_config(settings):
    """Our settings (dict) -> the hub's config.json in both spellings: transformers 4 ignores the new keys, and without
    the old ones would fall back to default thetas; transformers 5 accepts both."""
    every, n_layers = settings["global_attn_every_n_layers"], settings["num_hidden_layers"]
    rope = {"full_attention": settings["global_rope_theta"], "sliding_attention": settings["local_rope_theta"]}
    hf = {"architectures": ["ModernBertForMaskedLM"], "model_type": "modernbert", **FIXED, **settings}
    del hf["attn_out_dropout"]  # a setting of the run
    hf.update(bos_token_id=settings["cls_token_id"], eos_token_id=settings["sep_token_id"], classifier_pooling="mean")
    hf["layer_types"] = ["sliding_attention" if i % every else "full_attention" for i in range(n_layers)]
    hf["rope_parameters"] = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in rope.items()}
    return hf


# ----------------------------------------------------------------------------------------------------------------------
# Files


def find_checkpoint(name):
    """A directory, or a hub id that is downloaded to the Hugging Face cache -> the folder. Raises OSError."""
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise OSError(f"{name}: no config.json in this directory; expected a checkpoint such as out/my-run/final")
        return Path(name)
    if Path(name).exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise OSError(f"{name}: no such checkpoint directory, and not a hub id of the form owner/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"]))
    except Exception as error:  # the hub's client has a dozen ways to say that there is no network
        reason = str(error).strip().split("\n")[0]
        raise OSError(f"{name}: no such directory, and the hub did not answer for this id ({reason})") from None


def read_weights(folder):
    """All tensors of a safetensors checkpoint, in one file or in the shards that an index lists."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    weights = {}
    for name in names:
        if not (folder / name).is_file():
            raise OSError(f"{folder}: {name} is missing; expected the weights in the safetensors format")
        try:
            weights.update(load_file(folder / name))
        except Exception as error:
            raise OSError(f"{folder / name}: damaged or not a safetensors file ({error})") from None
    return weights


def fit_weights(weights, shapes):
    """Weights of a file -> those of a model with these shapes {name: shape}, in fp32. Raises ValueError that lists
    every missing, unexpected, misshapen and non-finite tensor: a part left at random would ruin a run without a word.

    A model that transformers fine-tuned for sequences or tokens has a classifier where the vocabulary was: classifier.*
    is left to read_weights, and the decoder's bias, which it lost, starts at 0."""
    weights = {k: v for k, v in weights.items() if k != "decoder.weight"}  # tied; some files repeat it
    if "classifier.weight" in weights:
        weights = {k: v for k, v in weights.items() if not k.startswith("classifier.")}
        weights.setdefault("decoder.bias", torch.zeros(shapes["decoder.bias"]))
    problems = [f"missing {k}" for k in shapes if k not in weights]
    problems += [f"unexpected {k}" for k in weights if k not in shapes]
    problems += [
        f"{k} is {tuple(v.shape)}, expected {tuple(shapes[k])}"
        for k, v in weights.items()
        if k in shapes and v.shape != shapes[k]
    ]
    problems += [f"{k} holds NaN or infinity" for k, v in weights.items() if not torch.isfinite(v).all()]
    if problems:
        raise ValueError(f"the weights do not fit this model: {', '.join(problems)}")
    return {k: v.float() for k, v in weights.items()}


def load_tokenizer(name, setting="model"):
    """The tokenizer beside a checkpoint, for scripts: what is wrong becomes one line and a non-zero exit."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name if Path(name).is_dir() else find_checkpoint(name))
    except Exception as error:  # transformers raises a dozen types that mean the same to the reader
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SystemExit(f"--{setting}={name}: no tokenizer there ({reason})") from None


# ----------------------------------------------------------------------------------------------------------------------
# The model card


def model_card(name, plan, manifest, held_out, scores):
    """README.md of a phase end of train.py; the hub reads what is between the dashes. plan and manifest are plan.json
    and manifest.json, held_out the evaluations in log.jsonl, scores the rows of results.jsonl, each maybe none."""
    start, info, settings = plan["init_from"], manifest["splits"]["train"], dict(plan["settings"])
    on_hub = start.count("/") == 1 and start[0] not in "./~" and not Path(start).exists()
    out_dir, data_dir = Path(settings.pop("out_dir")).name, Path(settings.pop("data_dir")).name
    phases = plan["phases"][:1] if name == "phase1" else plan["phases"]
    phases = [[p[k] for k in ("name", "objective", "mask_prob", "tokens_at_end", "steps", "frozen")] for p in phases]
    sources = [[source[k] for k in ("name", "train_tokens", "share")] for source in manifest["sources"]]
    held_out = [*held_out[:1], *{event["phase_name"]: event for event in held_out}.values()]  # first, and end of each
    held_out = [[event[k] for k in ("phase_name", "tokens", "val_mlm", "val_clm")] for event in held_out]
    scores = [[row["model"], row["task"], row["seed"], row["test"]["macro_f1"]] for row in scores]
    tables = card_table("Training", "phase | objective | mask rate | tokens | steps | frozen", phases)
    tables += card_table("Data", "source | tokens | share", sources)
    tables += card_table("Held-out loss, nats a target", "phase | tokens | MLM at 15% | CLM", held_out)
    tables += card_table("Evaluation", "model | task | seed | macro-F1", scores)
    return f"""---
library_name: transformers
pipeline_tag: fill-mask
{f"base_model: {start}" if on_hub else "# base_model: none on the hub"}
tags: [modernbert, continued-pretraining]
# license: yours to choose, within the terms of the start model and of the data
---

# {out_dir}, {name}

A ModernBERT of {plan["parameters"] / 1e6:.1f}M parameters, trained from {start} on {info["tokens"]:,} tokens in
{info["documents"]:,} documents of {data_dir} (sha256 {info["sha256"]}).
`AutoModelForMaskedLM.from_pretrained(...)` loads it in float32 or bfloat16.

{tables}## Recipe

Seeds: {settings["seed"]} (masks, dropout) and {settings["data_seed"]} (order of rows). Hardware:
{plan["world_size"]} x {plan["device"]} ({plan["hardware"]}), {plan["dtype"]}, attention {plan["attention"]}, torch
{plan["torch"]}. All settings:

    {", ".join(f"{key}={value!r}" for key, value in settings.items())}
"""


def card_table(title, head, rows):
    """A titled markdown table of a heading 'a | b' and its rows; nothing without rows."""

    def cell(x):
        return "" if x is None else f"{x:.4f}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else str(x)

    lines = [head, " | ".join("--" for _ in head.split(" | ")), *(" | ".join(map(cell, row)) for row in rows)]
    return f"## {title}\n\n" + "\n".join(f"| {line} |" for line in lines) + "\n\n" if rows else ""
