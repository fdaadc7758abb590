"""report.py: a page from a synthetic output directory, whatever is missing, and sentences that follow the numbers."""

import json
import math
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import cka
import needle
import report
import transplant

NAMES = ["general", "clm", "mlm", "mlm_seed2"]


def write_run(folder, objective, seed=17, end=3.6, steps=(60, 6), init="out/demo/general/final"):
    """A run directory as train.py leaves it: held-out MLM loss from 5.0 to `end`, next-token loss from 8 to about 5."""
    phases = [
        {"name": "phase1", "objective": objective, "mask_prob": None if objective == "clm" else 0.3, "steps": steps[0]},
        {"name": "decay", "objective": "mlm", "mask_prob": 0.15, "steps": steps[1]},
    ]
    plan = {"init_from": init, "tokens_per_step": 8192, "steps": sum(steps), "phases": phases, "parameters": 4.2e6}
    plan |= {"device": "cpu", "dtype": "float32", "torch": "2.13.0", "settings": {"objective": objective, "seed": seed}}
    plan |= {"model": {"num_hidden_layers": 6, "hidden_size": 64, "vocab_size": 4096}}
    plan["settings"]["learning_rate"] = 0.001
    rng, step = random.Random(seed), 0
    clm = {"val_clm": 8.3 if objective == "clm" else None}
    events = [{"kind": "eval", "phase_name": "phase1", "step": 0, "tokens": 0, "val_mlm": 5.0, **clm}]
    for phase in phases:
        goal, name = phase["objective"], phase["name"]
        for k in range(phase["steps"]):
            step += 1
            loss = (5 + 3 * math.exp(-step / 9) if goal == "clm" else end) + rng.gauss(0, 0.05)
            where = {"phase_name": name, "step": step, "tokens": step * 8192}
            events.append({"kind": "step", "objective": goal, "loss": loss, "tok_per_s": 8192.0, **where})
            if (k + 1) % 20 == 0 or k + 1 == phase["steps"]:
                held = {"val_mlm": 5.4, "val_clm": 5.2} if goal == "clm" else {"val_mlm": end, "val_clm": None}
                events.append({"kind": "eval", **where, **held})
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def result_row(model, seed, macro, task="organs", **changes):
    scores = {"macro_f1": macro, "micro_f1": macro, "weighted_f1": macro, "accuracy": macro}
    row = {"model": f"out/demo/{model}/final", "task": task, "seed": seed, "test": scores, "labels": ["a", "b"]}
    row |= {"settings": {"select_by": "macro_f1", "epochs": 3}, "sizes": {"train": 20, "val": 5, "test": 9}}
    row |= {"majority": {"label": "a", "macro_f1": 0.1}, "notes": [], "versions": {"sklearn": "1.9.1"}}
    return row | changes


def cka_result(pair, control=None):
    result = {"model_a": "out/demo/clm/final", "model_b": "out/demo/mlm/final", "control_a": None, "control_b": None}
    if control is not None:
        result |= {"control_a": "out/demo/mlm_seed2/final", "control_b": "out/demo/mlm/final"}
    result |= cka.summarise(np.array(pair), None if control is None else np.array(control))
    result |= {
        "estimator": "linear CKA",
        "pooling": "mean",
        "samples": len(pair),
        "n_texts": 500,
        "pool": 800,
        "notes": [],
    }
    return json.loads(json.dumps(result), parse_constant=lambda nan: None)


def transplant_result():
    """transplant.json as transplant.py writes it: of 20 test texts the host gets 10, the donor 20, the low part 15."""
    gold = np.array(["a", "b"] * 10)
    answers = {
        name: [np.where(np.arange(20) < n, gold, "c")] for name, n in {"host": 10, "donor": 20, "low": 15}.items()
    }
    found = {
        "donor": "clm/final",
        "host": "mlm/final",
        "sizes": "60 train, 20 test",
        "notes": [],
        "parts": {"low": "0-1"},
        "paper": transplant.PAPER,
    }
    found["scores"] = transplant.evaluate(answers, gold)
    return json.loads(json.dumps(found), parse_constant=lambda nan: None)


def needle_result(right):
    """needle.json as needle.py writes it: {model: share of right answers}, for one probe and one control."""
    examples = [{"split": "test", "label": i % 2, "length": needle.lengths[i // 2 % 5],
                 "position": needle.positions[i // 10 % 3]} for i in range(240)]  # fmt: skip
    told = lambda share: needle.score([[e["label"] ^ (i >= 240 * share) for i, e in enumerate(examples)]], examples)  # noqa: E731
    probes = {"tuned probe": {model: told(share) for model, share in right.items()}}
    return {"settings": {"pooling": "cls"}, "controls": {"larger class": told(0.5)}, "probes": probes}


LOW = [[0.20, 0.22, 0.5, 0.5, 0.7, 0.71], [0.22, 0.22, 0.5, 0.52, 0.7, 0.7], [0.21, 0.2, 0.51, 0.5, 0.71, 0.7]]
SEEDS = [[0.02, 0.03, 0.4, 0.4, 0.6, 0.61], [0.02, 0.02, 0.4, 0.42, 0.6, 0.6], [0.03, 0.03, 0.41, 0.4, 0.6, 0.6]]


@pytest.fixture
def demo(tmp_path):
    """An output directory with four runs, scores for three seeds each, and CKA."""
    write_run(tmp_path / "general", "mlm", init="scratch", end=4.1)
    write_run(tmp_path / "clm", "clm", end=3.5)
    write_run(tmp_path / "mlm", "mlm", end=3.6)
    write_run(tmp_path / "mlm_seed2", "mlm", seed=42, end=3.62)
    means = {"general": 0.50, "mlm_seed2": 0.585, "mlm": 0.58, "clm": 0.61}
    rows = [result_row(name, s, mean + s / 1000) for name, mean in means.items() for s in (1, 2, 3)]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "cka").mkdir()
    (tmp_path / "cka" / "cka.json").write_text(json.dumps(cka_result(LOW, SEEDS)))
    (tmp_path / "transplant").mkdir()
    (tmp_path / "transplant" / "transplant.json").write_text(json.dumps(transplant_result()))
    (tmp_path / "needle").mkdir()
    found = needle_result({"clm/final": 0.75, "mlm/final": 0.52})
    (tmp_path / "needle" / "needle.json").write_text(json.dumps(found))
    (tmp_path / "needle" / "needle.png").write_bytes(b"\x89PNG")
    return tmp_path


def make(folder):
    text = report.build(folder, NAMES, "general")
    assert not re.search(r"\b(nan|inf|None)\b", text), text
    return text


def say(sentences):
    return " ".join(sentences)


# --- the page


def test_page_and_figures(demo):
    text = make(demo)
    for heading in ("What happened", "Losses", "Downstream: organs", "CKA", "Transplants", "Needle in", "Settings"):
        assert f"\n## {heading}" in text
    assert "## Missing" not in text
    assert "4.20M parameters (6 layers of width 64, vocabulary 4,096)" in text
    assert "`clm`, from `out/demo/general/final`: CLM, 0.49M tokens in 60 steps, then MLM at 15%, 0.05M tokens" in text
    assert "| `clm` | 540,672 | 1.1 | 5.000 | 3.500 | 5.200 |" in text  # 66 steps of a second each
    assert "| `clm` | 3 | 61.20 | 0.10 | 0.25 | 61.20 | 61.20 |" in text
    assert "| `objective` | `clm` | `mlm` | `mlm` |" in text
    assert "| `seed` | `17` | `17` | `42` |" in text
    assert "The same in all: `learning_rate=0.001`" in text
    assert "torch 2.13.0, sklearn 1.9.1" in text
    assert re.search(r"^\| low 0-1 \|.* -12 \|$", text, re.MULTILINE)  # the paper's recovery, last
    assert "| clm/final | tuned probe | 75.0 | 69.2 | 80.1 |" in text
    assert "2 probes answer 240 test examples; above 50%, which is chance: clm/final (tuned probe) 75.0%" in text
    models = re.findall(r"^\| `(\w+)` \| 3 \|", text, re.MULTILINE)
    assert models == NAMES  # in the order of --runs, not of the file
    shown = re.findall(r"!\[\w+\]\((.+?)\)", text)
    drawn = [f"figures/{name}.png" for name in ("losses", "clm", "scores_organs")]
    assert shown == [*drawn, "cka/cka.png", "transplant/transplant.png", "needle/needle.png"]  # the stages' own
    for name in drawn:
        assert (demo / name).read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (demo / name).with_suffix(".svg").read_text()
        json.loads((demo / name).with_suffix(".json").read_text())
    assert not list(demo.rglob("*.tmp"))


def test_figure_data(demo):
    make(demo)
    losses = json.loads((demo / "figures" / "losses.json").read_text())
    assert set(losses) == {"clm", "mlm", "mlm_seed2"}  # the pretraining run is on another corpus
    assert losses["clm"]["held_out"][-1] == [540672, 3.5]
    assert len(losses["mlm"]["training"]) == 66
    clm = json.loads((demo / "figures" / "clm.json").read_text())
    assert len(clm["training"]) == 60  # the causal phase alone
    assert clm["ln_vocab"] == pytest.approx(math.log(4096))


@pytest.mark.parametrize(
    "gone",
    [[], ["results.jsonl"], ["cka"], ["needle"], ["clm"], ["mlm_seed2"], ["general", "mlm", "results.jsonl"]]
    + [["mlm/plan.json"]]
    + [["clm/log.jsonl", "cka"], NAMES, [*NAMES, "cka", "needle", "results.jsonl"]],
)
def test_missing_parts(demo, gone):
    for name in gone:
        path = demo / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    text = make(demo)
    assert ("## Missing" in text) == bool(gone)
    for name in gone:
        assert Path(name).name in text.split("## Missing")[1]


def test_damaged_and_unfinished_files(demo):
    log = demo / "clm" / "log.jsonl"
    log.write_text("\n".join(log.read_text().splitlines()[:30]) + '\n{"kind": "st')
    (demo / "cka" / "cka.json").write_text('{"layers": [')
    (demo / "mlm" / "log.jsonl").write_text("")
    text = make(demo)
    assert "`clm/log.jsonl`: a damaged line was left out" in text
    assert "`cka/cka.json`: a damaged line was left out" in text
    assert "**It stopped at step 28 of 66.**" in text
    assert "## CKA" not in text


def test_resumed_log_counts_each_step_once(demo):
    """Killed at step 50, resumed from step 40: the log has 41..50 twice, and the later lines count."""
    log = demo / "mlm" / "log.jsonl"
    lines = log.read_text().splitlines()
    step = [json.loads(line).get("step") for line in lines]
    killed = [json.loads(line) | {"loss": 99.0} for line, s in zip(lines, step, strict=True) if 40 < s <= 50]
    before = [line for line, s in zip(lines, step, strict=True) if s <= 40]
    after = [line for line, s in zip(lines, step, strict=True) if s > 40]
    log.write_text("\n".join([*before, *map(json.dumps, killed), *after]) + "\n")
    run = report.read_run(demo / "mlm", [])
    assert [event["step"] for event in run["steps"]] == list(range(1, 67))
    assert max(event["loss"] for event in run["steps"]) < 10
    assert [event["step"] for event in run["evals"]] == [0, 20, 40, 60, 66]


def test_scores_of_one_protocol_and_last_row(tmp_path):
    rows = [result_row("mlm", 1, 0.1, settings={"epochs": 99}), result_row("mlm", 1, 0.2), result_row("mlm", 1, 0.3)]
    rows += [result_row("clm", 1, 0.4), result_row("clm", 1, 0.9, task="other")]
    rows[3]["model"] = "answerdotai/ModernBERT-base"
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    tasks = report.read_scores(path, NAMES, [])
    models = tasks["organs"]["models"]
    assert list(models) == ["mlm", "answerdotai/ModernBERT-base"]
    assert report.points(models["mlm"]) == {1: 30}
    assert tasks["organs"]["left_out"] == 1
    assert list(tasks["other"]["models"]) == ["clm"]


def test_from_the_shell(demo, tmp_path):
    script = Path(report.__file__).resolve()
    for folder, code in ((demo, 0), (tmp_path / "nothing", 1)):
        command = [sys.executable, script, f"--out_dir={folder}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
    assert (demo / "report.md").read_text() == make(demo)
    assert "--out_dir=" in done.stderr.splitlines()[-1]


def test_prints_what_happened(demo, monkeypatch, capsys):
    monkeypatch.setattr(report, "out_dir", str(demo))
    report.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("- Causal phase of `clm`")
    assert lines[-2].startswith("- Scale: 4.20M parameters and 0.54M tokens here")
    assert "report.md" in lines[-1]


# --- the sentences, in every direction


def scored(**by_model):
    return {name: {s: result_row(name, s, x) for s, x in enumerate(values)} for name, values in by_model.items()}


def test_score_sentences():
    mlm = [0.50, 0.52, 0.54]
    better = say(report.say_scores("t", scored(clm=[0.53, 0.56, 0.57], mlm=mlm), "clm", "mlm"))
    assert "+3.33 points" in better
    assert "scores higher, as in the paper" in better
    assert "higher in 3 of 3" in better
    worse = say(report.say_scores("t", scored(clm=[0.47, 0.48, 0.51], mlm=mlm), "clm", "mlm"))
    assert "-3.33 points" in worse
    assert "scores lower, against the paper" in worse
    noise = say(report.say_scores("t", scored(clm=[0.60, 0.50, 0.54], mlm=mlm), "clm", "mlm"))
    assert "within noise" in noise
    assert "the paper" not in noise
    one = say(report.say_scores("t", scored(clm=[0.6], mlm=[0.5]), "clm", "mlm"))
    assert "no interval" in one
    assert "within noise" in one
    apart = {"clm": {1: result_row("clm", 1, 0.5)}, "mlm": {2: result_row("mlm", 2, 0.5)}}
    assert "no seed in common" in say(report.say_scores("t", apart, "clm", "mlm"))


def test_score_sentences_against_seed_noise_start_and_majority():
    models = scored(clm=[0.53, 0.56, 0.57], mlm=[0.50, 0.52, 0.54], second=[0.51, 0.53, 0.55], base=[0.4, 0.41, 0.42])
    text = say(report.say_scores("t", models, "clm", "mlm", "second", "base"))
    assert "larger than the 1.00 points" in text
    assert "no larger" not in text
    assert "where it started, is +14.33 points" in text
    assert ": a gain." in text
    models |= scored(second=[0.40, 0.42, 0.44], base=[0.65, 0.65, 0.66])
    text = say(report.say_scores("t", models, "clm", "mlm", "second", "base"))
    assert "no larger than the 10.00 points" in text
    assert ": a loss." in text
    assert "say nothing" not in text
    assert "say nothing" in say(report.say_scores("t", scored(clm=[0.1, 0.1], mlm=[0.08, 0.1]), "clm", "mlm"))


def test_interval_is_the_paired_t_interval():
    a, b = np.array([0.61, 0.58, 0.63, 0.6]), np.array([0.58, 0.57, 0.58, 0.6])
    low, high = 100 * np.array(stats.ttest_rel(a, b).confidence_interval(0.95))
    assert report.interval(list(100 * (a - b)))[0] == f"{100 * (a - b).mean():+.2f} points (95% t interval " + (
        f"{low:+.2f} to {high:+.2f})"
    )
    assert [report.interval(v)[1] for v in ([1, 1.1, 1.2], [-1, -1.1, -1.2], [1, -1, 1], [5])] == [1, -1, 0, 0]


def run_like(name, losses, clm=False, vocab=1000, evals=(5.0, 3.0)):
    objective = "clm" if clm else "mlm"
    steps = [{"step": i, "objective": objective, "loss": x, "phase_name": "phase1"} for i, x in enumerate(losses)]
    held = [{"val_mlm": x, "phase_name": name} for x, name in zip(evals, ("phase1", "decay"), strict=False)]
    return {"name": name, "plan": {"model": {"vocab_size": vocab}}, "steps": steps, "evals": held}


def test_loss_sentences():
    assert "1.91 below ln(vocabulary) = 6.91" in report.say_clm(run_like("clm", [7.0, 6.0, 5.0], clm=True))
    assert "not below (0.59 above)" in report.say_clm(run_like("clm", [7.0, 8.0, 7.5], clm=True))
    assert "fell: 5.000 to 3.000" in report.say_held_out(run_like("mlm", [5.0]))
    assert "did not fall: 3.000 to 3.500" in report.say_held_out(run_like("mlm", [5.0], evals=(3.0, 3.5)))
    assert "5.000 after the causal phase" in report.say_held_out(run_like("clm", [5.0], clm=True))
    assert "no two held-out" in report.say_held_out(run_like("mlm", [5.0], evals=()))


@pytest.mark.parametrize(
    ("end", "second", "words"),
    [
        (3.0, 3.41, "lower than that of `mlm`; two MLM runs that differ in their seed alone are 0.010 apart. The"),
        (3.0, 3.41, "in favour of the detour, but one pair of runs gives no interval"),
        (3.9, 3.41, "against the detour"),
        (3.3, 3.8, "within seed noise"),
        (3.3, None, "no yardstick"),
    ],
)
def test_loss_difference_sentences(end, second, words):
    detour, twin = run_like("clm", [5.0], clm=True, evals=(5.0, end)), run_like("mlm", [5.0], evals=(5.0, 3.4))
    other = run_like("mlm_seed2", [5.0], evals=(5.0, second)) if second else None
    assert words in say(report.say_loss_difference(detour, twin, other))


def test_cka_sentences():
    same = say(report.say_cka(cka_result(LOW, SEEDS), NAMES))
    assert "`clm` and `mlm` diverge by 47.3% over all layers" in same
    assert "in the low layers (mean of 1 - CKA), two MLM seeds by 2.5%" in same
    assert same.count("more than seed noise") == 4
    assert "8.47 low, 1.25 mid, 1.17 late" in same
    assert "stand out most, as in the paper" in same
    opposite = say(report.say_cka(cka_result(SEEDS, LOW), NAMES))
    assert opposite.count("less than seed noise") == 4
    assert "do not stand out most, unlike in the paper" in opposite
    assert say(report.say_cka(cka_result(LOW, LOW), NAMES)).count("no clear difference") == 4
    alone = say(report.say_cka(cka_result(LOW), NAMES))
    assert "without a control" in alone
    assert "the paper" not in alone
    assert "no interval" in say(report.say_cka(cka_result(LOW[:1], SEEDS[:1]), NAMES))
    undefined = np.full((3, 6), np.nan)
    assert "undefined over all layers" in say(report.say_cka(cka_result(undefined, SEEDS), NAMES))


def test_page_with_undefined_layers(demo):
    pair = np.array(LOW)
    pair[:, :3] = np.nan
    (demo / "cka" / "cka.json").write_text(json.dumps(cka_result(pair, SEEDS)))
    assert "| layer 1 | - | - | - | 2.67 | - |" in make(demo)


def freeze(folder, name, layers, phase, score, objective="clm", init="out/demo/general/final"):
    """A run with frozen layers beside the others of the demo, scored for the three seeds."""
    write_run(folder / name, objective, init=init)
    plan = json.loads((folder / name / "plan.json").read_text())
    for part in plan["phases"]:
        part["frozen"] = layers if part["name"] == phase else ""
    (folder / name / "plan.json").write_text(json.dumps(plan))
    with open(folder / "results.jsonl", "a") as file:
        for seed in (1, 2, 3):
            file.write(json.dumps(result_row(name, seed, score + seed / 1000)) + "\n")


def test_freezing(demo):
    """Table 5 and Figure 1b: bars by what was frozen when, differences paired by seed, the paper's beside."""
    freeze(demo, "exp1", "0-1", "phase1", 0.582)
    freeze(demo, "exp2", "0-1", "decay", 0.60, objective="mlm", init="out/demo/clm/phase1")  # branched off the detour
    freeze(demo, "exp3", "2-3", "phase1", 0.62)
    text = report.build(demo, [*NAMES, "exp1", "exp2", "exp3"], "general")
    page = text.split("## Freezing")[1].split("##")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")][2:]
    assert lines[0] == ["MLM twin", "58.20", "0.10", "0.25", "-", "-3.00 ± 0.00", "58.9", "-"]
    assert lines[1][0] == "detour, 0-1 frozen in phase 1" and lines[1][4:] == [
        "+0.20 ± 0.00",
        "-2.80 ± 0.00",
        "59.3",
        "+0.4",
    ]
    assert lines[2][0] == "detour, 0-1 frozen in decay" and lines[2][4:] == [
        "+2.00 ± 0.00",
        "-1.00 ± 0.00",
        "61.2",
        "+2.3",
    ]
    assert lines[3][0] == "detour, 2-3 frozen in phase 1" and lines[3][6:] == ["61.2", "+2.3"]
    assert lines[4][0] == "detour, nothing frozen" and lines[4][4:6] == ["+3.00 ± 0.00", "-"]
    assert "- Detour, 0-1 frozen in phase 1: +0.20 points" in text and "The paper has +0.4." in text
    data = json.loads((demo / "figures" / "freezing.json").read_text())
    assert list(data) == [line[0] for line in lines]
    assert data["MLM twin"]["2"] == pytest.approx(58.2)
    assert "`clm` minus `mlm`" in text  # a frozen run never stands for the detour or its twin


def test_freezing_needs_the_whole_comparison(demo):
    assert "## Freezing" not in make(demo)
    freeze(demo, "exp1", "0-1", "phase1", 0.582)
    shutil.rmtree(demo / "clm")
    assert "## Freezing" not in report.build(demo, [*NAMES, "exp1"], "general")


def test_several_comparisons_stand_beside_the_papers(demo):
    large = cka_result([[0.5, 0.6, 0.7]] * 3, [[0.4, 0.5, 0.6]] * 3) | {"trajectory": [{"tokens": 1}]}
    (demo / "cka_large").mkdir()
    (demo / "cka_large" / "cka.json").write_text(json.dumps(large | {"paper": cka.PAPER}))
    text = make(demo)
    assert "![trajectory](cka_large/trajectory.png)" in text and "![cka_large](cka_large/cka.png)" in text
    assert "| `cka`, 6 layers | 47." in text and "| `cka_large`, 3 layers | 60.00 | 0.00 | 0.00 | 50.00 |" in text
    assert "| paper: ModernCamemBERT large, 350M | 67.2 ± 0.3 |" in text
    assert "| 1.25 | 5 to 44 |" in text  # the low block's ratio and the paper's


# --- curves of runs that are named one by one


def curves_of(*folders, expect=0):
    command = [sys.executable, Path(report.__file__), *folders]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == expect, done.stderr
    return done


def test_curves_of_several_runs_in_one_figure(demo):
    spike = {"kind": "spike", "phase_name": "decay", "step": 63, "tokens": 516096, "loss": 9.0, "rows": [[1, 0]]}
    for run in ("clm", "mlm"):
        log = demo / run / "log.jsonl"
        events = [json.loads(line) for line in log.read_text().splitlines()]
        for event in events:
            if event["kind"] == "step":
                event |= {"grad_norm": 1.0, "lr": 2e-4}
        log.write_text("".join(json.dumps(e) + "\n" for e in [*events, *([spike] if run == "mlm" else [])]))
    done = curves_of(demo / "clm", demo / "mlm", demo / "none")
    assert f"{demo}/clm: step 66 of 66, 0.54M tokens, decay mlm loss 3." in done.stdout
    assert "held-out MLM loss 3.6000, 1 loss spikes" in done.stdout
    assert "left out: `none/plan.json` is not there" in done.stdout
    data = json.loads((demo / "clm/figures/curves.json").read_text())
    assert list(data) == [f"{demo}/clm", f"{demo}/mlm"] and data[f"{demo}/mlm"]["spikes"] == [63]
    assert len(data[f"{demo}/clm"]["loss"]) == 66 and data[f"{demo}/clm"]["lr"][0] == [8192, 2e-4]
    assert (demo / "clm/figures/curves.png").stat().st_size > 10_000
    assert "</svg>" in (demo / "clm/figures/curves.svg").read_text()


def test_curves_of_nothing_are_one_line(tmp_path):
    done = curves_of(tmp_path / "none", expect=1)
    assert "no run of train.py" in done.stderr and "Traceback" not in done.stderr
