"""Turns what the other stages wrote into one page: tables, figures, and what happened in plain sentences.

    python report.py --out_dir=out/demo
    python report.py out/run [out/other ...]     # the curves of runs of train.py, also while they go on, in one figure

Reads only files in out_dir: plan.json and log.jsonl of each run, cka/ (and cka_*/, further comparisons), transplant/,
needle/ and results.jsonl. Runs with frozen layers, named in --runs, become the bars of Figure 1b.
Every number and every sentence is computed from them; what is missing is listed, and the rest is written all the same.
Writes out_dir/report.md and out_dir/figures/, each figure as png and svg with its data as json; the curves of runs that
are named one by one go to figures/ in the first of them.
"""

import json
import math
import os
import re
import sys
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure  # no pyplot: a Figure renders through Agg and never opens a window
from scipy.stats import t as student_t

from configurator import configure

out_dir = "out/demo"  # holds the runs; report.md goes here
runs = "general,clm,mlm,mlm_seed2"  # directories of train.py runs in out_dir, in the order of the tables
pretraining = "general"  # the run that made the encoder which the others continue; "" if there is none

# Blue, vermilion, green, purple: apart for colour-blind eyes, and by markers and dashes in grey print.
STYLES = [("#0072B2", "o", "-"), ("#D55E00", "s", "--"), ("#009E73", "^", "-."), ("#CC79A7", "D", ":")]


# Table 4: the paper's overall divergences in percent, with what it prints as their 95% intervals.
PAPER_SIZES = [("ModernCamemBERT base, 150M", 56.5, 0.7), ("ModernCamemBERT large, 350M", 67.2, 0.3)]
PAPER_SIZES += [("Gemma-3, 270M, a decoder that took the opposite detour", 26.3, 1.0)]
# Table 5 and Figure 1b: French base models, mean macro-F1 of eight tasks. (frozen layers, phase) -> F1
PAPER_FREEZE = {"twin": 58.9, ("low", "phase1"): 59.3, ("mid", "phase1"): 61.2, ("low", "decay"): 61.2, "detour": 61.6}


# ----------------------------------------------------------------------------------------------------------------------
# Reading


def read(path, missing):
    """The objects of a jsonl file, or of a json file as a list of one; what cannot be read is noted in `missing`."""
    if not path.is_file():
        missing.append(f"`{path.parent.name}/{path.name}` is not there")
        return []
    text, found = path.read_text(encoding="utf-8"), []
    for line in [text] if path.suffix == ".json" else text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # the last line of a killed run may be cut short
            missing.append(f"`{path.parent.name}/{path.name}`: a damaged line was left out")
    return found


def read_run(folder, missing):
    """A run's plan, step events and eval events, or None. Where a resumed run went back to a checkpoint, the log has
    the steps after that checkpoint twice: the later lines count."""
    plan, events = read(folder / "plan.json", missing), []
    for event in read(folder / "log.jsonl", missing):
        if event["kind"] == "step":
            events = [old for old in events if old["step"] < event["step"]]
        events.append(event)
    kinds = {kind: [event for event in events if event["kind"] == kind] for kind in ("step", "eval", "spike")}
    evals = [event for event in kinds["eval"] if event["val_mlm"] is not None]  # null without a mask token
    run = {"name": folder.name, "steps": kinds["step"], "evals": evals, "spikes": kinds["spike"]}
    return run | {"plan": plan[0]} if plan and kinds["step"] else None


def label(path, names):
    """The run whose directory a checkpoint lies in, else the path itself."""
    return next((name for name in names if name in Path(path).parts[-2:]), str(path))


def read_scores(path, names, missing):
    """results.jsonl -> {task: {"models": {model: {seed: row}}, "row": the last row, "left_out": a count}}.

    Scores compare under equal settings only: rows with other settings than the task's last row are left out. The last
    row of a (model, task, seed) counts.
    """
    rows = read(path, missing)
    tasks = {row["task"]: {"models": {}, "row": row, "left_out": 0} for row in rows}
    for row in rows:
        scored = tasks[row["task"]]
        if row["settings"] == scored["row"]["settings"]:
            scored["models"].setdefault(label(row["model"], names), {})[row["seed"]] = row
        else:
            scored["left_out"] += 1
    for scored in tasks.values():
        scored["models"] = {k: scored["models"][k] for k in [*names, *scored["models"]] if k in scored["models"]}
    return tasks


def mean_sd_ci(values):
    """Values over seeds -> mean, SD (n-1), half-width of the 95% t interval of the mean; nan from a single value."""
    n = len(values)
    sd = float(np.std(values, ddof=1)) if n > 1 else math.nan
    return float(np.mean(values)), sd, float(student_t.ppf(0.975, n - 1)) * sd / math.sqrt(n) if n > 1 else math.nan


def points(by_seed, metric="macro_f1"):
    """{seed: row} -> {seed: test score in points of 100}."""
    return {seed: 100 * row["test"][metric] for seed, row in by_seed.items()}


def causal(run):
    return [step for step in run["steps"] if step["objective"] == "clm"]


def condition(run, causal_runs):
    """Which bar of Figure 1b a run is: a key of PAPER_FREEZE or its like, and words for it; None if it is none. A decay
    that branched off one of `causal_runs` (names) has taken the detour, too."""
    detour = causal(run) or label(run["plan"]["init_from"], causal_runs) in causal_runs
    frozen = {phase["name"]: phase["frozen"] for phase in run["plan"]["phases"] if phase.get("frozen")}
    if not frozen:
        return ("detour", "detour, nothing frozen") if detour else ("twin", "MLM twin")
    layers = re.fullmatch(r"(\d+)-\d+", next(iter(frozen.values())))
    if not detour or len(frozen) > 1 or not layers:
        return None
    phase, text = next(iter(frozen.items()))
    return ("low" if layers[1] == "0" else "mid", phase), f"detour, {text} frozen in {phase.replace('1', ' 1')}"


def read_freezing(continued, tasks):
    """{condition: (words, {seed: mean macro-F1 of the tasks in points})}, the twin first and the detour last, from the
    tasks and seeds that all have; {} if nothing was frozen. Of several runs of one condition the first counts."""
    named, causal_runs = {}, [run["name"] for run in continued if causal(run)]
    for run in continued:
        if (found := condition(run, causal_runs)) and any(run["name"] in scored["models"] for scored in tasks.values()):
            named.setdefault(found[0], (found[1], run["name"]))
    order = ["twin", *(key for key in named if isinstance(key, tuple)), "detour"]
    if len(named) < 3 or not {"twin", "detour"} <= named.keys():
        return {}
    shared = [t["models"] for t in tasks.values() if all(name in t["models"] for _, name in named.values())]
    seeds = [set(models[name]) for models in shared for _, name in named.values()]
    return {
        key: (named[key][0], {seed: float(np.mean([points(models[named[key][1]])[seed] for models in shared]))
                              for seed in sorted(set.intersection(*seeds))})
        for key in order
    } if seeds and set.intersection(*seeds) else {}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# What happened, in sentences


def interval(values):
    """'+1.20 points (95% t interval +0.40 to +2.00)' and the verdict: 0 within noise, else the sign."""
    mean, _, ci = mean_sd_ci(values)
    if len(values) < 2:
        return f"{mean:+.2f} points (a single value, no interval)", 0
    verdict = 0 if abs(mean) <= ci else 1 if mean > 0 else -1
    return f"{mean:+.2f} points (95% t interval {mean - ci:+.2f} to {mean + ci:+.2f})", verdict


def say_clm(run):
    """Did the causal phase learn? Its loss against ln(vocabulary), what guessing evenly costs."""
    losses, chance = [step["loss"] for step in causal(run)], math.log(run["plan"]["model"]["vocab_size"])
    end = float(np.mean(losses[-math.ceil(len(losses) / 20) :]))  # the last 5%: a single step is noisy
    verdict = f"{chance - end:.2f} below" if end < chance else f"not below ({end - chance:.2f} above)"
    return (
        f"Causal phase of `{run['name']}`: the next-token loss went from {losses[0]:.2f} to {end:.2f} nats (mean of "
        f"its last 5% of steps), {verdict} ln(vocabulary) = {chance:.2f}, the loss of guessing evenly."
    )


def say_held_out(run):
    """A run's held-out MLM loss at the start, after a causal phase, and at the end."""
    if len(run["evals"]) < 2:
        return f"`{run['name']}` has no two held-out losses to compare."
    first, last = (run["evals"][i]["val_mlm"] for i in (0, -1))
    verb = "fell" if last < first else "did not fall"
    sentence = f"The held-out MLM loss of `{run['name']}` {verb}: {first:.3f} to {last:.3f} nats"
    between = [event["val_mlm"] for event in run["evals"] if event["phase_name"] == "phase1"]
    return sentence + (f", {between[-1]:.3f} after the causal phase." if causal(run) and between else ".")


def say_loss_difference(detour, twin, second=None):
    """Detour against twin, one run each: the only yardstick is how far two seeds of the twin are apart."""
    if not detour["evals"] or not twin["evals"]:
        return []
    difference = detour["evals"][-1]["val_mlm"] - twin["evals"][-1]["val_mlm"]
    size = f"{abs(difference):.3f} nats {'lower' if difference < 0 else 'higher'}"
    sentence = f"At the end the held-out MLM loss of `{detour['name']}` is {size} than that of `{twin['name']}`"
    if not second or not second["evals"]:
        return [sentence + ". Without a second seed of the twin there is no yardstick: this may be seed noise."]
    noise = abs(second["evals"][-1]["val_mlm"] - twin["evals"][-1]["val_mlm"])
    sentence += f"; two MLM runs that differ in their seed alone are {noise:.3f} apart. "
    if abs(difference) <= noise:
        return [sentence + "The difference is within seed noise."]
    side = "in favour of" if difference < 0 else "against"
    return [sentence + f"The difference is larger, {side} the detour, but one pair of runs gives no interval."]


def paired(models, a, b):
    """Differences a - b in points over the seeds that both have; none if one of the two was not scored."""
    a, b = points(models.get(a, {})), points(models.get(b, {}))
    return [a[seed] - b[seed] for seed in a if seed in b]


def say_scores(task, models, detour, twin, second=None, base=None):
    """The paper's claim: after fine-tuning, the detour scores higher than its MLM twin (C-01)."""
    differences = paired(models, detour, twin)
    if not differences:
        return [f"{task}: `{detour}` and `{twin}` have no seed in common and cannot be compared."]
    text, verdict = interval(differences)
    meaning = {
        0: "This is within noise: it neither shows a gain of the detour nor excludes one.",
        1: "The detour scores higher, as in the paper (+2.8 points on its French tasks).",
        -1: "The detour scores lower, against the paper (+2.8 points on its French tasks).",
    }
    wins = f"higher in {sum(difference > 0 for difference in differences)} of {len(differences)} seeds"
    sentences = [
        f"{task}: test macro-F1 of `{detour}` minus `{twin}`, paired by seed, is {text}, {wins}. {meaning[verdict]} "
        "The spread is over fine-tuning seeds alone: each encoder was trained once."
    ]
    noise = paired(models, second, twin)
    if noise:
        noise, larger = abs(np.mean(noise)), abs(np.mean(differences)) > abs(np.mean(noise))
        sentences.append(
            f"{task}: that difference is {'larger' if larger else 'no larger'} than the {noise:.2f} points between "
            f"`{second}` and `{twin}`, two MLM runs that differ in their seed alone."
        )
    gain = paired(models, detour, base)
    if gain:
        text, verdict = interval(gain)
        meaning = {0: "within noise", 1: "a gain", -1: "a loss"}
        sentences.append(f"{task}: `{detour}` minus `{base}`, where it started, is {text}: {meaning[verdict]}.")
    majority = next(iter(models[detour].values()))["majority"]
    if max(np.mean(list(points(by_seed).values())) for by_seed in models.values()) <= 100 * majority["macro_f1"]:
        sentences.append(f"{task}: no model beats always answering {majority['label']!r}: these scores say nothing.")
    return sentences


def say_cka(cka, names):
    """Does the detour leave a mark beyond seed noise, and a larger one in the low layers (C-06)?"""
    sentences, ratios = [], {}
    pair = f"`{label(cka['model_a'], names)}` and `{label(cka['model_b'], names)}`"
    meaning = {0: "no clear difference", 1: "more than seed noise", -1: "less than seed noise"}
    for name, entry in {"all": cka["overall"], **cka["blocks"]}.items():
        where = "over all layers" if name == "all" else f"in the {name} layers"
        if entry["divergence"] is None:
            sentences.append(f"The CKA of {pair} is undefined {where}.")
            continue
        sentence = f"{pair} diverge by {100 * entry['divergence']:.1f}% {where} (mean of 1 - CKA)"
        control = entry.get("control")
        if not control or control["divergence"] is None:
            sentences.append(f"{sentence}; without a control nothing says how much of it is seed noise.")
            continue
        both = zip(entry["per_sample"], control["per_sample"], strict=True)
        text, verdict = interval([100 * (a - b) for a, b in both])
        sentence += f", two MLM seeds by {100 * control['divergence']:.1f}%"
        sentences.append(f"{sentence}; the difference is {text}: {meaning[verdict]}.")
        ratios[name] = entry["ratio"]
    blocks = {name: ratios[name] for name in cka["blocks"] if ratios.get(name) is not None}
    if "low" in blocks and len(blocks) > 1:
        each = ", ".join(f"{ratio:.2f} {name}" for name, ratio in blocks.items())
        most = "stand out most, as" if blocks["low"] == max(blocks.values()) else "do not stand out most, unlike"
        sentences.append(
            f"Divergence over control by block of layers: {each}; in the paper 5 to 44 low and about 1 above. The low "
            f"layers {most} in the paper. CKA intervals are over samples of texts; with one pair of runs on each side, "
            "none covers the seeds of training."
        )
    return sentences


def say_freezing(freezing):
    """Does a detour with frozen layers still beat the twin? In the paper: not with the low ones frozen in phase 1."""
    sentences, twin = [], freezing.get("twin", ("", {}))[1]
    meaning = {0: "within noise", 1: "a gain that freezing leaves", -1: "a loss"}
    for key, (words, by_seed) in freezing.items():
        if isinstance(key, tuple):
            text, verdict = interval([by_seed[seed] - twin[seed] for seed in twin])
            there = f" The paper has {PAPER_FREEZE[key] - PAPER_FREEZE['twin']:+.1f}." if key in PAPER_FREEZE else ""
            sentences.append(f"{words[0].upper()}{words[1:]}: {text} against the MLM twin, {meaning[verdict]}.{there}")
    return sentences


def say_needle(needle):
    """Which probes answer better than chance, by the lower end of their intervals."""
    found = [(f"{name} ({probe})", s) for probe, models in needle["probes"].items() for name, s in models.items()]
    above = [f"{name} {100 * s['accuracy']:.1f}% ({100 * s['low']:.1f} to {100 * s['high']:.1f})"
             for name, s in found if s["low"] > 0.5]  # fmt: skip
    n, chance = found[0][1]["n"], "50%, which is chance"
    what = f"On the needle task, {len(found)} probes answer {n} test examples"
    return [f"{what}; above {chance}: {', '.join(above)}." if above else f"{what}; none is safely above {chance}."]


def what_happened(continued, tasks, cka, needle, names, base):
    """All sentences that the data allow, in the order of the recipe."""
    whole = [run for run in continued if not any(phase.get("frozen") for phase in run["plan"]["phases"])]
    detour = next((run for run in whole if causal(run)), None)
    twins = [run for run in whole if not causal(run)]
    sentences = [say_clm(detour)] if detour else []
    sentences += [say_held_out(run) for run in continued]
    if detour and twins:
        second = twins[1] if len(twins) > 1 else None
        sentences += say_loss_difference(detour, twins[0], second)
        roles = detour["name"], twins[0]["name"], second and second["name"], base
        for task, scored in tasks.items():
            if roles[0] in scored["models"] and roles[1] in scored["models"]:
                sentences += say_scores(task, scored["models"], *roles)
    sentences += say_freezing(read_freezing(continued, tasks))
    sentences += say_cka(cka, names) if cka else []
    sentences += say_needle(needle) if needle else []
    if continued:
        size, tokens = millions(continued[0]["plan"]["parameters"]), millions(continued[0]["steps"][-1]["tokens"])
        sentences.append(
            f"Scale: {size} parameters and {tokens} tokens here, 136M and 11,000M in the paper's smallest "
            "French run. Nothing on this page confirms or refutes the paper at its own size."
        )
    return sentences


# ----------------------------------------------------------------------------------------------------------------------
# Figures


def new_figure(height, n_rows=1, n_columns=1, **options):
    figure = Figure(figsize=(7.2, height), layout="constrained")  # inches: the width of a printed page
    axes = figure.subplots(n_rows, n_columns, squeeze=False, **options).flatten()
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", alpha=0.3)
    return figure, axes


def save_figure(figure, folder, name, data):
    """Writes folder/name.png, .svg and the plotted numbers as .json -> the markdown that shows the figure."""
    folder.mkdir(parents=True, exist_ok=True)
    for suffix in ("png", "svg"):
        figure.savefig(folder / f"{name}.{suffix}.tmp", format=suffix, dpi=200)
        os.replace(folder / f"{name}.{suffix}.tmp", folder / f"{name}.{suffix}")
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return f"![{name}](figures/{name}.png)"


def running_mean(values, width):
    """The mean of the last `width` values at each place, of fewer at the start."""
    return [float(np.mean(values[max(0, i + 1 - width) : i + 1])) for i in range(len(values))]


def mark_boundary(ax, run):
    """A dotted line where phase 1 ends, and the names of the phases above the axes."""
    end = run["steps"][-1]["tokens"] / 1e6
    boundary = max((s["tokens"] / 1e6 for s in run["steps"] if s["phase_name"] == "phase1"), default=0)
    if 0 < boundary < end:
        ax.axvline(boundary, color="0.4", linestyle=":", linewidth=1)
        style = {"transform": ax.get_xaxis_transform(), "ha": "center", "va": "bottom", "color": "0.3", "fontsize": 9}
        ax.text(boundary / 2, 1.01, "phase 1", **style)
        ax.text((boundary + end) / 2, 1.01, "decay", **style)


def draw_losses(continued, folder):
    """Held-out MLM loss above, training loss below, over tokens, every continued run."""
    figure, (above, below) = new_figure(6.0, 2, sharex=True)
    data = {}
    for run, (colour, marker, dash) in zip(continued, STYLES, strict=False):
        style = {"color": colour, "linestyle": dash, "linewidth": 1.5}
        held = [(event["tokens"], event["val_mlm"]) for event in run["evals"]]
        if held:
            x, y = np.transpose(held)
            above.plot(x / 1e6, y, **style, marker=marker, markersize=4, label=run["name"])
        width = max(1, len(run["steps"]) // 30)  # steps are noisy: without a running mean the runs hide each other
        for name in dict.fromkeys(step["phase_name"] for step in run["steps"]):  # no line across the boundary
            x, y = np.transpose([(s["tokens"] / 1e6, s["loss"]) for s in run["steps"] if s["phase_name"] == name])
            below.plot(x, running_mean(y, width), **style)
        data[run["name"]] = {"held_out": held, "training": [(step["tokens"], step["loss"]) for step in run["steps"]]}
    above.set_ylabel("held-out MLM loss (nats)")
    below.set(ylabel="training loss (nats)", xlabel="tokens (million)")
    for ax in (above, below):
        mark_boundary(ax, continued[0])
    above.legend(frameon=False)
    return save_figure(figure, folder, "losses", data)


def draw_curves(found, folder):
    """Runs over each other: training and held-out losses, gradient norm, learning rate, over tokens."""
    figure, axes = new_figure(6.4, 2, 2, sharex=True)
    titles = "training loss (nats)", "held-out MLM loss (nats)", "gradient norm", "learning rate"
    data = {}
    for (name, run), (colour, marker, dash) in zip(found.items(), cycle(STYLES), strict=False):
        width, curves = max(1, len(run["steps"]) // 50), {}
        for ax, key in zip(axes, ("loss", "val_mlm", "grad_norm", "lr"), strict=True):
            events = run["evals"] if key == "val_mlm" else run["steps"]
            curves[key] = [(event["tokens"], event[key]) for event in events]
            options = {"color": colour, "linestyle": dash, "linewidth": 1.2, "label": name}
            for phase in dict.fromkeys(event["phase_name"] for event in events):  # no line across the boundary
                x, y = np.transpose([(e["tokens"] / 1e6, e[key]) for e in events if e["phase_name"] == phase])
                smooth = y if key in ("val_mlm", "lr") else running_mean(y, width)
                ax.plot(x, smooth, **options, marker=marker if key == "val_mlm" else "", markersize=4)
        for event in run["spikes"]:
            top = {"transform": axes[0].get_xaxis_transform(), "clip_on": False}
            axes[0].plot(event["tokens"] / 1e6, 1, "v", color=colour, **top)
        data[name] = curves | {"spikes": [event["step"] for event in run["spikes"]]}
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title, fontsize=10)
    for ax in axes[2:]:
        ax.set_xlabel("tokens (million)")
    handles = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))  # one for both phases
    figure.legend(handles.values(), handles, frameon=False, loc="outside upper left", fontsize=9)
    return save_figure(figure, folder, "curves", data)


def draw_clm(run, folder):
    """Next-token loss of the causal phase, training and held out, under the line of even guessing."""
    figure, (ax,) = new_figure(3.4)
    chance = math.log(run["plan"]["model"]["vocab_size"])
    training = [(step["tokens"], step["loss"]) for step in causal(run)]
    held = [(event["tokens"], event["val_clm"]) for event in run["evals"] if event.get("val_clm") is not None]
    x, y = np.transpose(training)
    ax.plot(x / 1e6, y, color=STYLES[0][0], linewidth=0.8, alpha=0.7, label="training, each step")
    if held:
        x, y = np.transpose(held)
        ax.plot(x / 1e6, y, color=STYLES[1][0], marker="s", linestyle="--", markersize=5, label="held out")
    ax.axhline(chance, color="0.4", linestyle=":", label=f"ln(vocabulary) = {chance:.2f}")
    ax.set(xlabel="tokens (million)", ylabel="next-token loss (nats)")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, loc="lower left")
    return save_figure(figure, folder, "clm", {"training": training, "held_out": held, "ln_vocab": chance})


def draw_freezing(freezing, folder):
    """Figure 1b: a bar for each condition with its 95% t interval over seeds, and the paper's bars beside."""
    figure, axes = new_figure(1.4 + 0.4 * len(freezing), 1, 2, sharey=True)
    colours = {"twin": "0.6", "detour": STYLES[0][0]}
    ours = [mean_sd_ci(list(by_seed.values())) for _, by_seed in freezing.values()]
    paper = [(PAPER_FREEZE.get(key, math.nan), math.nan, math.nan) for key in freezing]
    for ax, values, title in ((axes[0], ours, "here"), (axes[1], paper, "in the paper")):
        for i, (key, (mean, _, ci)) in enumerate(zip(freezing, values, strict=True)):
            error = None if math.isnan(ci) else ci
            ax.barh(i, mean, xerr=error, color=colours.get(key, STYLES[1][0]), capsize=4, height=0.6)
        ends = [x for mean, _, ci in values for x in (mean - np.nan_to_num(ci), mean + np.nan_to_num(ci))]
        margin = 0.15 * (np.nanmax(ends) - np.nanmin(ends)) or 1  # the bars differ by little: a cut axis, and said so
        ax.set_xlim(max(0, np.nanmin(ends) - margin), np.nanmax(ends) + margin)
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("mean test macro-F1 (axis cut)")
        ax.grid(axis="y", visible=False)
        ax.grid(axis="x", alpha=0.3)
    axes[0].set(yticks=range(len(freezing)), yticklabels=[words for words, _ in freezing.values()])
    axes[0].invert_yaxis()
    return save_figure(figure, folder, "freezing", {words: by_seed for words, by_seed in freezing.values()})


def draw_scores(task, models, folder):
    """Test macro-F1 of each model: the mean with its 95% t interval, and the seeds as small dots below."""
    figure, (ax,) = new_figure(1.0 + 0.5 * len(models))
    data = {name: points(by_seed) for name, by_seed in models.items()}
    for i, by_seed in enumerate(data.values()):
        mean, _, ci = mean_sd_ci(list(by_seed.values()))
        ax.plot(list(by_seed.values()), [i + 0.2] * len(by_seed), ".", color="0.55")
        ax.errorbar(mean, i, xerr=None if math.isnan(ci) else ci, fmt="o", color=STYLES[0][0], capsize=4)
    ax.set(xlabel="test macro-F1 (points of 100)", yticks=range(len(data)), yticklabels=list(data))
    ax.set_ylim(len(data) - 0.5, -0.5)
    ax.set_xlim(max(0, ax.get_xlim()[0]), min(100, ax.get_xlim()[1]))  # t intervals of few seeds know no bounds
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", alpha=0.3)
    return save_figure(figure, folder, f"scores_{task}", data)


# ----------------------------------------------------------------------------------------------------------------------
# The page


def number(value, digits=2):
    """A number as text, - where there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def table(head, rows):
    """A markdown table, the first column to the left, the others to the right."""
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def millions(tokens):
    return f"{tokens / 1e6:,.{1 if tokens >= 1e7 else 2}f}M"


def listed(settings):
    return ", ".join(f"`{key}={value}`" for key, value in settings.items())


def runs_page(found, base):
    """What was trained, from what, for how long, and where the losses stand."""
    plan = next(iter(found.values()))["plan"]
    shape = plan["model"]
    lines = [
        f"A ModernBERT of {millions(plan['parameters'])} parameters ({shape['num_hidden_layers']} layers of width "
        f"{shape['hidden_size']}, vocabulary {shape['vocab_size']:,}), in {plan['dtype']} on {plan['device']}:\n"
    ]
    rows = []
    for name, run in found.items():
        plan, steps, evals = run["plan"], run["steps"], run["evals"] or [{"val_mlm": None}]
        phases = ", then ".join(
            phase["objective"].upper()
            + (f" at {phase['mask_prob']:.0%}" if phase["mask_prob"] else "")
            + f", {millions(phase['steps'] * plan['tokens_per_step'])} tokens in {phase['steps']:,} steps"
            for phase in plan["phases"]
        )
        start = "random weights" if plan["init_from"] == "scratch" else f"`{plan['init_from']}`"
        lines.append(f"- `{name}`, from {start}: {phases}." + (" The others start from it." if name == base else ""))
        if steps[-1]["step"] < plan["steps"]:
            lines[-1] += f" **It stopped at step {steps[-1]['step']:,} of {plan['steps']:,}.**"
        minutes = sum(plan["tokens_per_step"] / step["tok_per_s"] for step in steps) / 60
        clm = [event["val_clm"] for event in evals if event.get("val_clm") is not None] or [None]
        losses = (evals[0]["val_mlm"], evals[-1]["val_mlm"], clm[-1])
        rows.append([f"`{name}`", f"{steps[-1]['tokens']:,}", number(minutes, 1), *(number(x, 3) for x in losses)])
    head = ["run", "tokens", "minutes", "held-out MLM, first", "held-out MLM, last", "held-out CLM, after phase 1"]
    lines += ["\n" + table(head, rows)]
    lines += ["\nLosses in nats. Runs on one corpus share the held-out rows and their masks (15%); across corpora "
              "losses do not compare."]  # fmt: skip
    return "\n".join(lines)


def scores_page(task, scored, folder):
    rows = []
    for name, by_seed in scored["models"].items():
        rest = [np.mean(list(points(by_seed, metric).values())) for metric in ("weighted_f1", "accuracy")]
        rows.append([f"`{name}`", len(by_seed), *map(number, (*mean_sd_ci(list(points(by_seed).values())), *rest))])
    row, sizes = scored["row"], ", ".join(f"{n:,} {split}" for split, n in scored["row"]["sizes"].items())
    notes = [*row["notes"], *([f"{scored['left_out']} rows of other settings left out"] if scored["left_out"] else [])]
    return [
        f"## Downstream: {task}",
        table(["model", "seeds", "macro-F1", "SD", "95% t ±", "weighted F1", "accuracy"], rows),
        draw_scores(task, scored["models"], folder),
        f"{len(row['labels'])} labels; {sizes}. Always answering {row['majority']['label']!r} gives a macro-F1 of "
        f"{100 * row['majority']['macro_f1']:.2f}. Epochs are selected by validation {row['settings']['select_by']}; "
        "SD and interval are over fine-tuning seeds." + "".join(f" {note}." for note in notes),
        f"Settings: {listed(row['settings'])}.",
    ]


def freezing_page(freezing, folder):
    """Table 5: what is left of the detour's gain when layers were frozen."""
    rows, (twin, detour) = [], (freezing[key][1] for key in ("twin", "detour"))
    for key, (words, by_seed) in freezing.items():
        cells = [number(x) for x in mean_sd_ci(list(by_seed.values()))]
        for other in (twin, detour):
            mean, _, ci = mean_sd_ci([by_seed[seed] - other[seed] for seed in by_seed])
            cells.append("-" if by_seed is other else f"{mean:+.2f} ± {number(ci)}")
        paper = PAPER_FREEZE.get(key)
        shift = paper and f"{paper - PAPER_FREEZE['twin']:+.1f}"
        rows.append([words, *cells, number(paper, 1), "-" if key == "twin" or not paper else shift])
    head = ["", "macro-F1", "SD", "95% t ±", "against the twin", "against the detour", "paper's F1", "against its twin"]
    return [
        "## Freezing",
        table(head, rows),
        draw_freezing(freezing, folder),
        "Means over the tasks that all these runs were scored on; differences are paired by seed, ± is a 95% t "
        "interval over fine-tuning seeds, each encoder was trained once. The paper's are means of eight French tasks "
        "and nine seeds; of its first row of frozen layers it says p = 0.25 against the twin, which is no evidence "
        "that the two are equal.",
    ]


def cka_page(comparisons):
    """{directory: cka.json}: each layer by layer, the paper's ratios beside (Figures 3b and 4), and all in Table 4."""
    page = ["## CKA"]
    for folder, cka in comparisons.items():
        rows, paper = [], cka.get("paper", {})
        entries = [(f"layer {i}", entry, "") for i, entry in enumerate(cka["layers"])]
        entries += [(f"{name} {'-'.join(map(str, row['layers']))}", row, paper.get(name, ""))
                    for name, row in cka["blocks"].items()]  # fmt: skip
        for name, entry, there in [*entries, ("all", cka["overall"], "")]:
            percent = [entry["divergence"], entry["sd"], entry["ci95"], entry.get("control", {}).get("divergence")]
            percent = [number(x and 100 * x) for x in percent]
            rows.append([name, *percent, number(entry.get("ratio")), there if "ratio" in entry else ""])
        page += [
            table(["", "divergence %", "SD", "95% t ±", "control %", "ratio", "paper's"], rows),
            f"![{folder}]({folder}/cka.png)",
            *([f"![trajectory]({folder}/trajectory.png)"] if cka.get("trajectory") else []),
            f"`{cka['model_a']}` against `{cka['model_b']}`"
            + (f"; control `{cka['control_a']}` against `{cka['control_b']}`" if cka["control_a"] else "")
            + f". {cka['estimator'][0].upper()}{cka['estimator'][1:]}; {cka['pooling']}; {cka['samples']} samples of "
            f"{cka['n_texts']} from {cka['pool']} held-out texts. SD and interval are over samples of texts, not over "
            "training runs." + "".join(f" {note}." for note in cka["notes"]),
        ]
    rows = []
    for folder, cka in comparisons.items():
        total = cka["overall"]
        percent = [total["divergence"], total["sd"], total["ci95"], total.get("control", {}).get("divergence")]
        rows.append([f"`{folder}`, {len(cka['layers'])} layers", *(number(x and 100 * x) for x in percent)])
    rows += [[f"paper: {name}", f"{mean} ± {ci}", "-", "-", "49.7" if i == 0 else "-"]
             for i, (name, mean, ci) in enumerate(PAPER_SIZES)]  # fmt: skip
    return page + [
        "Over all layers, beside the paper's Table 4. Its ± is printed as a 95% interval over three samples of texts; "
        "that of the base model has the size of an SD, whose t interval would be three times as wide.",
        table(["", "divergence %", "SD", "95% t ±", "control %"], rows),
    ]


def transplant_page(found):
    """Tables 3 and 6: what each part of the donor is worth in the host, in macro-F1 of a probe."""
    rows = []
    for name, row in found["scores"].items():
        numbers = [row["f1"], row["sd"], row["difference"], *row["difference_95"], row["recovery"]]
        part = found["parts"].get(name, name)
        paper = found.get("paper", {}).get(name, "")
        rows.append([name if part == name else f"{name} {part}", *map(number, numbers), paper])
    return [
        "## Transplants",
        table(["", "macro-F1", "SD", "difference", "95% from", "to", "recovery %", "paper's %"], rows),
        "![transplants](transplant/transplant.png)",
        f"Parts of `{found['donor']}` in `{found['host']}`, a linear probe on frozen vectors; {found['sizes']}. SD is "
        "over seeds, intervals are over test texts. The paper's are its recoveries on DiaMED."
        + "".join(f" {note}." for note in found["notes"]),
    ]


def needle_page(needle):
    """Accuracy of every probe with its interval, and by length and position (P-805: few examples each)."""
    entries = [(name, "", entry) for name, entry in needle["controls"].items()]
    entries += [(name, probe, found) for probe, models in needle["probes"].items() for name, found in models.items()]
    slices = [(key, name) for key in ("length", "position") for name in entries[0][2][key]]
    rows = []
    for name, probe, entry in entries:
        total = [100 * entry[key] for key in ("accuracy", "low", "high")]
        rest = [100 * entry[key][part]["accuracy"] for key, part in slices]
        rows.append([name, probe, *(number(value, 1) for value in (*total, *rest))])
    return [
        "## Needle in a haystack",
        table(["", "probe", "accuracy %", "95% from", "to", *(part for _, part in slices)], rows),
        "![needle](needle/needle.png)",
        f"Is the fact that the query states in the document? {entries[0][2]['n']} test examples, answered from the "
        f"encoder's {needle['settings']['pooling']} vector; chance is 50%. Wilson intervals over examples.",
    ]


def settings_page(continued):
    """The settings in which the continued runs differ (C-04: only the objective, or the seed), and those they share."""
    settings = [{k: v for k, v in run["plan"]["settings"].items() if k != "out_dir"} for run in continued]
    shared = {key: value for key, value in settings[0].items() if all(other.get(key) == value for other in settings)}
    rows = [[f"`{key}`", *(f"`{other.get(key)}`" for other in settings)] for key in settings[0] if key not in shared]
    return [table(["", *(f"`{run['name']}`" for run in continued)], rows), f"The same in all: {listed(shared)}."]


def build(folder, names, base):
    """Reads everything under `folder`, draws the figures -> the text of report.md."""
    missing, figures = [], folder / "figures"
    found = {name: run for name in names if (run := read_run(folder / name, missing))}
    continued = [run for name, run in found.items() if name != base]
    tasks = read_scores(folder / "results.jsonl", names, missing)
    cka = next(iter(read(folder / "cka" / "cka.json", missing)), None)
    others = sorted(path.parent for path in folder.glob("cka?*/cka.json"))  # other comparisons: cka_large, cka_debiased
    comparisons = {"cka": cka} | {path.name: next(iter(read(path / "cka.json", missing)), None) for path in others}
    comparisons = {name: found for name, found in comparisons.items() if found}
    needle = next(iter(read(folder / "needle" / "needle.json", missing)), None)
    grafts = next(iter(read(folder / "transplant" / "transplant.json", [])), None)  # not everybody makes some

    page = ["# The detour in numbers", *([runs_page(found, base)] if found else [])]
    sentences = what_happened(continued, tasks, cka, needle, names, base)
    for title, lines in (("What happened", sentences), ("Missing", missing)):
        page += [f"## {title}", "\n".join(f"- {line}" for line in lines)] if lines else []
    if continued:
        page += ["## Losses", draw_losses(continued, figures)]
        page += ["Training curves are running means over a thirtieth of the run. Training losses of different "
                 "objectives or mask rates do not compare; the held-out MLM losses do."]  # fmt: skip
        page += [draw_clm(run, figures) for run in continued if causal(run)][:1]
    for task, scored in tasks.items():
        page += scores_page(task, scored, figures)
    freezing = read_freezing(continued, tasks)
    page += freezing_page(freezing, figures) if freezing else []
    page += cka_page(comparisons) if comparisons else []
    page += transplant_page(grafts) if grafts else []
    page += needle_page(needle) if needle else []
    page += ["## Settings and versions", *settings_page(continued)] if continued else []
    versions = [f"torch {run['plan']['torch']}" for run in found.values()]
    versions += [
        f"{name} {version}" for scored in tasks.values() for name, version in scored["row"]["versions"].items()
    ]
    page += [", ".join(dict.fromkeys(versions)) + "."] if versions else []
    return "\n\n".join(page) + "\n"


def show_curves(folders):
    """One figure of the runs in `folders`, and where each stands."""
    missing = []
    found = {str(folder): run for folder in folders if (run := read_run(folder, missing))}
    if not found:
        raise SystemExit(f"report.py: {folders[0]}: no run of train.py ({'; '.join(missing)}); expected its out_dir")
    draw_curves(found, folders[0] / "figures")
    for name, run in found.items():
        last, held = run["steps"][-1], run["evals"][-1:]
        print(
            f"{name}: step {last['step']:,} of {run['plan']['steps']:,}, {millions(last['tokens'])} tokens, "
            f"{last['phase_name']} {last['objective']} loss {last['loss']:.4f}"
            + (f", held-out MLM loss {held[0]['val_mlm']:.4f}" if held else "")
            + (f", {len(run['spikes'])} loss spikes" if run["spikes"] else "")
        )
    for line in missing:
        print(f"left out: {line}")
    print(f"written: {folders[0] / 'figures' / 'curves.png'}, .svg and .json")


def main():
    folder = Path(out_dir)
    if not folder.is_dir():
        raise SystemExit(f"report.py: --out_dir={out_dir}: no such directory; expected one with runs of train.py in it")
    text = build(folder, [name.strip() for name in runs.split(",") if name.strip()], pretraining)
    (folder / "report.md.tmp").write_text(text, encoding="utf-8")
    os.replace(folder / "report.md.tmp", folder / "report.md")
    print(text.partition("## What happened\n\n")[2].partition("\n\n## ")[0])
    print(f"written: {folder / 'report.md'} and {folder / 'figures'}")


if __name__ == "__main__":
    folders = [arg for arg in sys.argv[1:] if not arg.startswith("-") and Path(arg).suffix != ".py"]
    configure(globals(), [arg for arg in sys.argv[1:] if arg not in folders])
    show_curves([Path(folder) for folder in folders]) if folders else main()
