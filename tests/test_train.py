"""The training loop against closed forms, an independent optimizer, one process against two, and a straight run against
an interrupted one. Everything is fp32 on the CPU with a model of a few thousand weights."""

import hashlib
import json
import math
import multiprocessing.forkserver
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import train
from configurator import configure
from model import IGNORE, ModernBERT, ModernBERTConfig, next_token_labels

ROOT = Path(__file__).resolve().parent.parent
PLAIN = (str, int, float, bool, tuple, type(None))
DEFAULTS = {k: v for k, v in vars(train).items() if k.islower() and k[0] != "_" and isinstance(v, PLAIN)}
SPECIAL = {"cls_token_id": 0, "sep_token_id": 1, "pad_token_id": 2, "mask_token_id": 3, "unk_token_id": 4}
VOCAB = 300
CPU = train.Machine(0, 1, torch.device("cpu"), torch.float32)

TINY = """--vocab_size=320 --hidden_size=32 --num_hidden_layers=4 --num_attention_heads=2 --intermediate_size=48
    --local_attention=16 --block_size=64 --global_batch=8 --micro_batch=3 --warmup_tokens=2048 --learning_rate=2e-3
    --phase1_tokens=5120 --decay_tokens=3072 --eval_every_tokens=1e9 --ckpt_every_tokens=1e9 --eval_rows=6
    --device=cpu --dtype=float32""".split()  # 512 tokens a step: 10 steps of phase 1, 4 of them warmup, then 6 of decay


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """As in the processes that `launch` starts: another number of threads adds up in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def restore_settings():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    vars(train).update(DEFAULTS)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A corpus of counting documents in the format of prepare_data.py: 0 [CLS], 1 [SEP]."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    documents = [(np.cumsum(rng.integers(1, 4, rng.integers(10, 90))) % (VOCAB - 5)) + 5 for _ in range(200)]
    stream = np.concatenate([np.r_[0, d, 1] for d in documents]).astype(np.uint16)
    splits = {}
    for name, part in (("train", stream[:-1000]), ("val", stream[-1000:])):
        part.tofile(folder / f"{name}.bin")
        digest = hashlib.sha256(part.tobytes()).hexdigest()
        splits[name] = {"file": f"{name}.bin", "tokens": len(part), "documents": 1, "sha256": digest}
    names = {"vocab_size": VOCAB, "sha256": "", **SPECIAL, "eos_token_id": 1, "special_ids": [0, 1, 2, 3, 4]}
    manifest = {"format": 1, "tokenizer": names, "dtype": "uint16", "splits": splits, "sources": [], "settings": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 5}}}))
    return folder


def run(*args):
    """train.py in this process."""
    vars(train).update(DEFAULTS)
    configure(vars(train), [*TINY, *map(str, args)])
    return train.main()


def launch(*args, ranks=0, script=ROOT / "train.py", **popen):
    """train.py in a process of its own, or in several under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*(torchrun if ranks else [sys.executable]), str(script), *TINY, *map(str, args)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **popen)


def events(out, kind="step"):
    lines = map(json.loads, (Path(out) / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def error_of(*args):
    with pytest.raises(SystemExit) as stop:
        run(*args)
    assert stop.value.code not in (0, None)
    assert "\n" not in str(stop.value)
    return str(stop.value)


# ----------------------------------------------------------------------------------------------------------------------
# The plan


@pytest.mark.parametrize(
    "config, steps",
    [("fr_base", (3179, 318)), ("fr_large", (7948, 795)), ("en_base_10b", (3179, 318)), ("en_base", (15895, 1590)),
     ("en_large", (15895, 1590))],
)  # fmt: skip
@pytest.mark.parametrize("objective", ["clm", "mlm"])
def test_dry_run_prints_the_papers_arithmetic(config, steps, objective, capsys):
    vars(train).update(DEFAULTS)
    configure(vars(train), [f"config/{config}.py", f"--objective={objective}", "--dry_run=True", "--device=cpu"])
    assert train.main() == 0
    plan = json.loads(capsys.readouterr().out)
    first, decay = plan["phases"]
    assert plan["tokens_per_step"] == 3_145_728
    assert (first["steps"], decay["steps"]) == steps
    assert (first["warmup_steps"], decay["warmup_steps"]) == (32, 0)
    assert (first["objective"], first["mask_prob"]) == (objective, None if objective == "clm" else 0.30)
    assert (decay["objective"], decay["mask_prob"]) == ("mlm", 0.15)
    assert decay["lr_first_step"] == 2e-4 and decay["lr_at_end"] == pytest.approx(2e-5)
    assert first["lr_first_step"] == pytest.approx(2e-4 / 32) and first["lr_at_end"] == 2e-4


def test_dry_run_needs_no_data_and_writes_nothing(tmp_path):
    process = launch("--dry_run=True", f"--data_dir={tmp_path}/none", f"--out_dir={tmp_path}/out", cwd=tmp_path)
    assert process.wait() == 0 and not list(tmp_path.iterdir())


def test_parameters_of_the_configs_are_those_of_the_paper(capsys):
    for config, parameters in (("fr_base", 136_120_832), ("fr_large", 377_841_664), ("en_large", 395_881_664)):
        vars(train).update(DEFAULTS)
        configure(vars(train), [f"config/{config}.py", "--dry_run=True", "--device=cpu"])
        train.main()
        assert json.loads(capsys.readouterr().out)["parameters"] == parameters


def test_warmup_wastes_no_step_and_reaches_the_peak():
    phase = {"name": "phase1", "warmup_steps": 32}
    step = train.global_batch * train.block_size
    rates = [train.get_lr(phase, i * step) for i in range(40)]
    assert rates[0] == pytest.approx(2e-4 / 32) and rates[30] < 2e-4
    assert rates[31] == rates[39] == 2e-4
    assert train.get_lr({"name": "phase1", "warmup_steps": 0}, 0) == 2e-4


def test_decay_follows_the_affine_root(monkeypatch):
    monkeypatch.setattr(train, "global_batch", 1)
    monkeypatch.setattr(train, "block_size", 10)
    phase = {"name": "decay", "tokens": 1000.0}
    table = {0: 2.000e-4, 10: 1.431e-4, 25: 1.100e-4, 50: 7.272e-5, 75: 4.412e-5, 100: 2.000e-5}  # P-206
    for step, lr in table.items():
        assert train.get_lr(phase, step * 10) == pytest.approx(lr, rel=5e-4)
    assert train.get_lr(phase, 1010) == pytest.approx(2e-5)  # the last step may overshoot the budget, never the floor


# ----------------------------------------------------------------------------------------------------------------------
# Rows and masks


def test_each_row_comes_once_per_pass_and_passes_differ():
    first, second = ([r for r, _ in train.rows_of_samples(n * 50, 50, 50, 42)] for n in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50)) and first != second
    assert train.rows_of_samples(45, 10, 50, 42) == [
        *train.rows_of_samples(45, 5, 50, 42),
        *train.rows_of_samples(50, 5, 50, 42),
    ]
    assert [p for _, p in train.rows_of_samples(45, 10, 50, 42)] == [0] * 5 + [1] * 5
    assert train.rows_of_samples(0, 50, 50, 43) != train.rows_of_samples(0, 50, 50, 42)


def test_masking_rates_and_special_tokens():
    special, vocab = [0, 1, 2, 3, 4], 1000
    tokens = np.random.default_rng(0).integers(0, vocab, 1_000_000)
    inputs, labels = train.mask_row(tokens, 0.3, [17, 5, 0], special, 3, vocab)
    ordinary, chosen = ~np.isin(tokens, special), labels != IGNORE
    assert abs(chosen[ordinary].mean() - 0.30) < 0.002
    assert not chosen[~ordinary].any() and (inputs[~chosen] == tokens[~chosen]).all()
    assert (labels[chosen] == tokens[chosen]).all()
    masked, kept = chosen & (inputs == 3), chosen & (inputs == tokens)
    replaced = inputs[chosen & ~masked & ~kept]
    assert abs(masked.sum() / chosen.sum() - 0.8) < 0.005
    assert abs(kept.sum() / chosen.sum() - 0.1) < 0.003
    assert not np.isin(replaced, special).any() and replaced.max() == vocab - 1 and replaced.min() == 5


def test_mask_special_masks_everything(monkeypatch):
    monkeypatch.setattr(train, "mask_special", True)
    _, labels = train.mask_row(np.zeros(10_000, dtype=int), 0.3, [1, 2, 3], [0, 1], 1, 10)
    assert abs((labels != IGNORE).mean() - 0.3) < 0.02


def test_masks_are_addressed():
    tokens = np.arange(5, 105)
    draw = lambda *address: train.mask_row(tokens, 0.3, list(address), [0, 1, 2, 3, 4], 3, 200)[1].tolist()  # noqa: E731
    assert draw(17, 4, 0) == draw(17, 4, 0)
    assert len({tuple(draw(*a)) for a in ((17, 4, 0), (17, 4, 1), (17, 5, 0), (42, 4, 0))}) == 4


def test_a_batch_is_rows_end_to_end_and_documents_can_be_kept_apart(data, monkeypatch):
    monkeypatch.setattr(train, "block_size", 64)
    manifest = json.loads((data / "manifest.json").read_text())
    tokens = np.fromfile(data / "train.bin", dtype=np.uint16)
    batch = train.make_batch(tokens, [(3, 0), (1, 0)], "clm", 1.0, 17, manifest)
    expected = np.r_[tokens[192:256], tokens[64:128]].astype(int)
    assert batch["input_ids"].tolist() == expected.tolist() and batch["is_causal"]
    assert batch["cu_seqlens"].tolist() == [0, 64, 128] and batch["max_seqlen"] == 64
    assert batch["labels"].tolist() == [*expected[1:64], IGNORE, *expected[65:], IGNORE]  # T - 1 targets a row, P-203
    monkeypatch.setattr(train, "mask_documents", True)
    batch = train.make_batch(tokens, [(3, 0), (1, 0)], "clm", 1.0, 17, manifest)
    starts = batch["cu_seqlens"].tolist()
    ends = [i + 1 for i, t in enumerate(expected) if t == 1]
    assert starts == sorted({0, 64, 128, *ends})
    assert all(batch["labels"][s - 1] == IGNORE for s in starts[1:])


# ----------------------------------------------------------------------------------------------------------------------
# One step


def tiny_model(layers=3):
    torch.manual_seed(0)
    return ModernBERT(ModernBERTConfig(VOCAB, 32, layers, 2, 48, local_attention=8))


def grads(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_loss_is_over_all_targets_of_the_step_whatever_the_micro_batches():
    tokens = torch.randint(5, VOCAB, (4, 40))
    labels = torch.full_like(tokens, IGNORE)
    for row, count in enumerate((1, 30, 0, 12)):
        labels[row, :count] = tokens[row, :count]

    def batch(rows):
        cu = torch.arange(0, 40 * len(rows) + 1, 40, dtype=torch.int32)
        return {"input_ids": tokens[rows].flatten(), "labels": labels[rows].flatten(), "cu_seqlens": cu}

    results = []
    for split in ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[2], [0, 1, 3]], [[0, 1, 3], [2]]):
        model = tiny_model()
        loss = train.forward_backward(model, [batch(r) for r in split], 43, CPU)
        results.append((loss / 43, grads(model)))
    for loss, grad in results:
        assert torch.isfinite(grad).all()
        assert loss == pytest.approx(results[0][0], abs=1e-5)
        assert (grad - results[0][1]).norm() < 1e-5 * grad.norm()


def test_no_target_at_all_is_a_loss_of_zero():
    model = tiny_model()
    batch = {"input_ids": torch.randint(5, VOCAB, (40,)), "labels": torch.full((40,), IGNORE)}
    assert train.forward_backward(model, [batch], 0, CPU) == 0.0
    assert grads(model).abs().max() == 0.0


def test_optimizer_is_the_papers_decoupled_adamw(monkeypatch):
    """Against the rule itself in float64: p *= 1 - wd * lr / peak; then Adam without any decay."""
    monkeypatch.setattr(train, "weight_decay", 0.01)
    model = torch.nn.Linear(7, 5)
    p, b = (x.detach().double().numpy().copy() for x in (model.weight, model.bias))
    optimizer = train.make_optimizer(model)
    m, v = np.zeros((2, 5, 7))[0], np.zeros((5, 7))
    mb, vb = np.zeros(5), np.zeros(5)
    rng = np.random.default_rng(0)
    for t in range(1, 61):
        lr = 2e-4 * min(1, t / 8) * (1 if t < 40 else 1 - math.sqrt((t - 40) / 30))
        g, gb = rng.normal(size=(5, 7)), rng.normal(size=5)
        model.weight.grad, model.bias.grad = torch.tensor(g).float(), torch.tensor(gb).float()
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        p *= 1 - 0.01 * lr / 2e-4
        for w, a, s, grad in ((p, m, v, g), (b, mb, vb, gb)):
            a += 0.1 * (grad - a)
            s += 0.02 * (grad**2 - s)
            w -= lr * (a / (1 - 0.9**t)) / (np.sqrt(s / (1 - 0.98**t)) + 1e-6)
    assert np.abs(model.weight.detach().numpy() - p).max() < 1e-6
    assert np.abs(model.bias.detach().numpy() - b).max() < 1e-6  # no decay on biases and norms


def test_norms_and_biases_are_not_decayed_embeddings_are():
    model = tiny_model()
    decayed, plain = (group["params"] for group in train.make_optimizer(model).param_groups)
    names = {id(p): n for n, p in model.named_parameters()}
    assert {names[id(p)] for p in plain} == {n for n in names.values() if "norm" in n or n == "decoder.bias"}
    assert any(p is model.decoder.weight for p in decayed)


def test_evaluation_does_not_depend_on_batches_seeds_or_dropout(data, monkeypatch):
    manifest = json.loads((data / "manifest.json").read_text())
    tokens = np.fromfile(data / "val.bin", dtype=np.uint16)
    model = tiny_model().train()
    losses = []
    for micro, seed in ((1, 17), (4, 17), (64, 42)):
        for key, value in {"micro_batch": micro, "seed": seed, "block_size": 64, "eval_rows": 9}.items():
            monkeypatch.setattr(train, key, value)
        losses.append(train.evaluate(model, tokens, "mlm", manifest, CPU))
    assert model.training and max(losses) - min(losses) < 1e-6
    rows = np.stack([tokens[i * 64 : (i + 1) * 64] for i in (0, 2, 4, 5, 7, 9, 10, 12, 14)]).astype(int)
    clm = train.evaluate(model, tokens, "clm", manifest, CPU)
    logits = model.eval()(torch.tensor(rows), is_causal=True).logits
    reference = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), torch.tensor(rows[:, 1:]).flatten())
    assert clm == pytest.approx(reference.item(), abs=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# Whole runs


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    """A whole CLM run with dropout, for the others to be compared with."""
    out = tmp_path_factory.mktemp("straight") / "run"
    assert run(f"--data_dir={data}", f"--out_dir={out}") == 0
    return out


def test_phases_keep_the_optimizer_and_restart_the_schedule(straight):
    steps = events(straight)
    assert [s["step"] for s in steps] == list(range(1, 17))
    assert [s["phase_step"] for s in steps] == [*range(1, 11), *range(1, 7)]
    assert [s["objective"] for s in steps] == ["clm"] * 10 + ["mlm"] * 6
    assert [s["lr"] for s in steps[:5]] == pytest.approx([5e-4, 1e-3, 1.5e-3, 2e-3, 2e-3])
    decay = [2e-3 * (0.1 + 0.9 * (1 - math.sqrt(i / 6))) for i in range(6)]
    assert [s["lr"] for s in steps[10:]] == pytest.approx(decay)
    before, after = (torch.load(straight / d / "train_state.pt", weights_only=True) for d in ("phase1", "final"))
    assert {s["step"].item() for s in before["optimizer"].values()} == {10.0}
    assert {s["step"].item() for s in after["optimizer"].values()} == {16.0}  # Adam counts on, 11 ... 16
    assert steps[0]["targets"] == 8 * 63 and 0 < steps[10]["targets"] < 0.3 * 512


def test_a_run_learns_and_is_held_to_fixed_rows(straight):
    steps, evals = events(straight), events(straight, "eval")
    assert steps[9]["loss"] < steps[0]["loss"] - 0.1
    assert [(e["phase_name"], e["step"]) for e in evals] == [("phase1", 0), ("phase1", 10), ("decay", 16)]
    assert evals[1]["val_clm"] < evals[0]["val_clm"] and evals[2]["val_mlm"] < evals[1]["val_mlm"]
    assert evals[2]["val_clm"] is None


def test_twins_read_the_same_rows(straight, data, tmp_path):
    run(f"--data_dir={data}", f"--out_dir={tmp_path}/mlm", "--objective=mlm", "--seed=42")
    run(f"--data_dir={data}", f"--out_dir={tmp_path}/other", "--data_seed=1", "--phase1_tokens=512", "--decay_tokens=0")
    rows = [s["rows_hash"] for s in events(straight)]
    assert rows == [s["rows_hash"] for s in events(tmp_path / "mlm")] and len(set(rows)) == 16
    assert events(tmp_path / "other")[0]["rows_hash"] != rows[0]


def test_sigterm_saves_and_a_resumed_run_ends_bit_identical(straight, data, tmp_path):
    out = tmp_path / "run"
    process = launch(f"--data_dir={data}", f"--out_dir={out}")
    for line in process.stdout:
        if "step  6/16" in line:
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stdout.read()
    assert process.wait() == 0 and "go on with --init_from=resume" in rest
    # what SIGTERM cannot announce: a second run is killed for good, in the decay
    process = launch(f"--data_dir={data}", f"--out_dir={out}", "--init_from=resume")
    for line in process.stdout:
        if "decay" in line and "step 13/16" in line:
            process.kill()
            break
    process.wait()
    assert not (out / "final").exists()
    assert run(f"--data_dir={data}", f"--out_dir={out}", "--init_from=resume") == 0
    assert same(weights(out / "final"), weights(straight / "final"))
    keys = ("step", "loss", "lr", "grad_norm", "rows_hash", "targets")
    assert [[s[k] for k in keys] for s in events(out)] == [[s[k] for k in keys] for s in events(straight)]
    assert run(f"--data_dir={data}", f"--out_dir={out}", "--init_from=resume") == 0  # nothing left to do


def test_resume_does_not_depend_on_the_micro_batch(straight, data, tmp_path, monkeypatch):
    out = tmp_path / "run"
    stop_after(5, monkeypatch)
    assert run(f"--data_dir={data}", f"--out_dir={out}", "--dropout=0") == 0 and not (out / "final").exists()
    assert run(f"--data_dir={data}", f"--out_dir={out}", "--dropout=0", "--init_from=resume", "--micro_batch=8") == 0
    run(f"--data_dir={data}", f"--out_dir={tmp_path}/straight", "--dropout=0")
    for a, b in zip(events(out), events(tmp_path / "straight"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5) and a["rows_hash"] == b["rows_hash"]


def stop_after(step, monkeypatch):
    """SIGTERM to this process in the middle of a step."""
    original, calls = train.forward_backward, []

    def wrapped(*args, **kwargs):
        calls.append(0)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    monkeypatch.setattr(train, "forward_backward", wrapped)


def test_a_branched_decay_of_the_same_length_equals_the_continuous_run(straight, data, tmp_path):
    args = (f"--data_dir={data}", f"--init_from={straight}/phase1", "--phase1_tokens=0")
    run(*args, f"--out_dir={tmp_path}/same")
    assert same(weights(tmp_path / "same/final"), weights(straight / "final"))
    run(*args, f"--out_dir={tmp_path}/longer", "--decay_tokens=5120")
    steps = events(tmp_path / "longer")
    assert len(steps) == 10 and steps[0]["lr"] == 2e-3  # a full schedule of its own, not a cut of another
    assert steps[-1]["lr"] == pytest.approx(2e-3 * (0.1 + 0.9 * (1 - math.sqrt(0.9))))


def test_a_decay_without_optimizer_state_is_refused(straight, data, tmp_path):
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / name).write_bytes((straight / "phase1" / name).read_bytes())
    args = (f"--data_dir={data}", f"--init_from={tmp_path}/bare", "--phase1_tokens=0", f"--out_dir={tmp_path}/out")
    assert "--keep_optimizer=False" in error_of(*args)
    assert not (tmp_path / "out" / "log.jsonl").exists() or not events(tmp_path / "out")
    assert run(*args, "--keep_optimizer=False") == 0
    state = torch.load(tmp_path / "out/final/train_state.pt", weights_only=True)
    assert {s["step"].item() for s in state["optimizer"].values()} == {6.0}


def test_phase_1_from_a_checkpoint_takes_weights_only(straight, data, tmp_path):
    run(
        f"--data_dir={data}",
        f"--init_from={straight}/final",
        f"--out_dir={tmp_path}/out",
        "--phase1_tokens=512",
        "--decay_tokens=0",
    )
    step = events(tmp_path / "out")[0]
    assert step["step"] == 1 and step["rows_hash"] == events(straight)[0]["rows_hash"]
    state = torch.load(tmp_path / "out/final/train_state.pt", weights_only=True)
    assert {s["step"].item() for s in state["optimizer"].values()} == {1.0}


def test_two_ranks_compute_what_one_process_computes(data, tmp_path):
    """Accumulation under no_sync, uneven targets (some micro-batches have none), losses over ranks, equal weights."""
    script = tmp_path / "ranks.py"
    script.write_text(
        "import hashlib, os, sys, train\n"
        "from configurator import configure\n"
        "configure(vars(train))\n"
        "evaluate = train.evaluate\n"
        "def report(model, *args):\n"
        "    bits = b''.join(p.detach().numpy().tobytes() for p in model.parameters())\n"
        "    with open('sums' + os.environ['RANK'], 'a') as file:\n"
        "        print(hashlib.sha256(bits).hexdigest(), file=file)\n"
        "    return evaluate(model, *args)\n"
        "train.evaluate = report\n"
        "sys.exit(train.main())\n"
    )
    args = [f"--data_dir={data}", "--dropout=0", "--objective=mlm", "--mask_prob=0.01", "--phase1_tokens=2560"]
    args += ["--decay_tokens=1024", "--global_batch=8"]
    process = launch(*args, "--micro_batch=1", f"--out_dir={tmp_path}/two", ranks=2, script=script, cwd=tmp_path)
    text = process.communicate()[0]
    assert process.returncode == 0, text
    sums = [(tmp_path / f"sums{rank}").read_text().split() for rank in (0, 1)]
    assert sums[0] == sums[1] and len(set(sums[0])) == 3  # at the start and at the end of both phases
    assert run(*args, "--micro_batch=8", f"--out_dir={tmp_path}/one") == 0
    one, two = events(tmp_path / "one"), events(tmp_path / "two")
    for a, b in zip(one, two, strict=True):
        assert (a["targets"], a["rows_hash"]) == (b["targets"], b["rows_hash"])
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
    assert json.loads((tmp_path / "two/plan.json").read_text())["tokens_per_step"] == 512
    state = torch.load(tmp_path / "two/final/train_state.pt", weights_only=True)
    assert all(not name.startswith("module.") for name in state["optimizer"])
    one, two = weights(tmp_path / "one/final"), weights(tmp_path / "two/final")
    assert one.keys() == two.keys() and max((one[k] - two[k]).abs().max().item() for k in one) < 1e-4


def test_ranks_that_do_not_divide_the_batch_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    message = error_of("--dry_run=True")
    assert "--global_batch=8" in message and "3 ranks" in message


@pytest.mark.parametrize("mode", ["skip", "zero_grad"])
def test_frozen_is_bit_identical_and_zeroed_gradients_are_not(mode, data, straight, tmp_path):
    """In the decay, with warm momentum, weight decay, accumulation and clipping: the trap of spec §4."""
    out = tmp_path / "out"
    run(f"--data_dir={data}", f"--init_from={straight}/phase1", "--phase1_tokens=0", f"--out_dir={out}",
        "--freeze_layers=0-1,embeddings", f"--freeze_mode={mode}", "--grad_clip=1.0")  # fmt: skip
    before, after = weights(straight / "phase1"), weights(out / "final")
    frozen = {k for k in before if k.startswith(("model.layers.0.", "model.layers.1.", "model.embeddings."))}
    unchanged = {k for k in before if torch.equal(before[k], after[k])}
    assert unchanged == (frozen if mode == "skip" else set())
    old, new = (
        torch.load(d / "train_state.pt", weights_only=True)["optimizer"] for d in (straight / "phase1", out / "final")
    )
    if mode == "skip":
        assert all(torch.equal(old[k]["exp_avg"], new[k]["exp_avg"]) for k in frozen)


def test_freezing_one_phase_then_training_all(data, tmp_path):
    args = (f"--data_dir={data}", f"--out_dir={tmp_path}/out", "--freeze_layers=2", "--freeze_phase=phase1")
    assert run(*args) == 0
    first = torch.load(tmp_path / "out/phase1/train_state.pt", weights_only=True)["optimizer"]
    last = torch.load(tmp_path / "out/final/train_state.pt", weights_only=True)["optimizer"]
    assert not any(k.startswith("model.layers.2.") for k in first)
    assert {s["step"].item() for k, s in last.items() if k.startswith("model.layers.2.")} == {6.0}
    torch.manual_seed(train.seed)
    start = ModernBERT(train.scratch_config({"tokenizer": SPECIAL})).state_dict()
    after = weights(tmp_path / "out/phase1")
    assert {k for k in after if torch.equal(after[k], start[k])} == {
        k for k in after if k.startswith("model.layers.2.")
    }


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints


def test_a_checkpoint_is_plain_and_readable_by_transformers(straight):
    from transformers import AutoModelForMaskedLM

    folder = straight / "final"
    assert {"config.json", "model.safetensors", "train_state.pt", "tokenizer.json"} <= {
        f.name for f in folder.iterdir()
    }
    theirs, ours = AutoModelForMaskedLM.from_pretrained(folder).eval(), ModernBERT.from_pretrained(folder)
    ids = torch.randint(5, VOCAB, (2, 50))
    with torch.no_grad():
        assert (theirs(ids).logits - ours(ids).logits).abs().max() < 1e-5
    assert ours.config.mask_token_id == 3 and theirs.config.pad_token_id == 2


@pytest.mark.slow
def test_compiled_blocks_train_alike_and_leave_no_prefix(straight, data, tmp_path):
    args = (f"--data_dir={data}", "--phase1_tokens=1024", "--decay_tokens=0", "--dropout=0")
    run(*args, f"--out_dir={tmp_path}/plain")
    assert run(*args, f"--out_dir={tmp_path}/compiled", "--compile=True") == 0
    for a, b in zip(events(tmp_path / "plain"), events(tmp_path / "compiled"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
    assert weights(tmp_path / "plain/final").keys() == weights(tmp_path / "compiled/final").keys()


def test_a_crash_while_saving_leaves_the_last_good_checkpoint(straight, data, tmp_path, monkeypatch):
    out = tmp_path / "run"
    args = (f"--data_dir={data}", f"--out_dir={out}", "--ckpt_every_tokens=1024")
    saves, original = [], torch.save

    def failing(*a, **k):
        saves.append(0)
        if len(saves) == 3:
            raise OSError("No space left on device")
        return original(*a, **k)

    monkeypatch.setattr(torch, "save", failing)
    with pytest.raises(SystemExit, match="No space left"):
        run(*args)
    monkeypatch.setattr(torch, "save", original)
    assert [p.name for p in sorted(out.glob("step_*"))] == ["step_00000002", "step_00000004"]
    assert run(*args, "--init_from=resume") == 0
    assert same(weights(out / "final"), weights(straight / "final"))
    assert len(list(out.glob("step_*"))) == 2  # older ones are gone


def test_weights_that_blow_up_stop_the_run_before_they_are_saved(data, tmp_path, monkeypatch):
    original = train.forward_backward
    monkeypatch.setattr(train, "forward_backward", lambda *a, **k: original(*a, **k) * math.nan)
    assert "expected finite numbers" in error_of(f"--data_dir={data}", f"--out_dir={tmp_path}/out")
    assert not list((tmp_path / "out").glob("*/model.safetensors"))


@pytest.mark.parametrize(
    "args, words",
    [
        (["--objective=mml"], "--objective=mml: expected one of clm, mlm"),
        (["--dtype=bf16"], "--dtype=bf16: expected one of auto"),
        (["--decay_shape=root"], "--decay_shape=root: expected one of sqrt"),
        (["--mask_split=0.8,0.1"], "--mask_split=(0.8, 0.1): expected three shares"),
        (["--mask_prob_end=15"], "--mask_prob_end=15: expected None, or a share"),
        (["--clm_target_share=30.0"], "--clm_target_share=30.0: expected a share"),
        (["--batch_warmup_tokens=999", "--global_batch=4"], "--global_batch=4: expected a multiple of 8"),
        (["--device=gpu"], "--device=gpu: expected one of auto"),
        (["--attention=flash_attn"], "--attention=flash_attn: expected a CUDA device"),
        (["--mask_prob=30"], "--mask_prob=30.0: expected a share"),
        (["--freeze_layers=0-9"], "--freeze_layers=0-9"),
        (["--global_batch=0"], "--global_batch=0: expected"),
        (["--data_dir=nowhere"], "run prepare_data.py first"),
        (["--block_size=8192"], "less than one row"),
        (["--init_from=nowhere"], "--init_from=nowhere: no such checkpoint directory"),
        (["--init_from=resume"], "holds no checkpoint"),
        (["--vocab_size=100"], "its tokenizer has 300 tokens"),
        (["--hidden_size=33"], "hidden_size=33"),
        (["--phase1_tokens=0", "--decay_tokens=0"], "at least one phase"),
    ],
)
def test_bad_settings_are_one_line(args, words, data, tmp_path):
    assert words in error_of(f"--data_dir={data}", f"--out_dir={tmp_path}/out", *args)
    assert not (tmp_path / "out").exists()


def test_an_existing_run_is_not_overwritten(straight, data):
    before = (straight / "log.jsonl").read_bytes()
    assert "--overwrite=True" in error_of(f"--data_dir={data}", f"--out_dir={straight}")
    assert "seed was 17, is 3" in error_of(
        f"--data_dir={data}", f"--out_dir={straight}", "--init_from=resume", "--seed=3"
    )
    assert (straight / "log.jsonl").read_bytes() == before


def test_damaged_files_are_one_line(straight, data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    with open(tmp_path / "data/train.bin", "ab") as f:
        f.write(b"x")
    assert "the manifest says" in error_of(f"--data_dir={tmp_path}/data", f"--out_dir={tmp_path}/out")
    shutil.copytree(straight, tmp_path / "run")
    for folder in ("phase1", "final"):
        state = tmp_path / "run" / folder / "train_state.pt"
        state.write_bytes(state.read_bytes()[:500])
    assert "damaged" in error_of(f"--data_dir={data}", f"--out_dir={tmp_path}/run", "--init_from=resume")
    (tmp_path / "data/tokenizer/tokenizer.json").write_text(json.dumps({"model": {"vocab": {"b": 5}}}))
    (tmp_path / "data/train.bin").write_bytes((data / "train.bin").read_bytes())
    message = error_of(f"--data_dir={tmp_path}/data", f"--out_dir={tmp_path}/out", f"--init_from={straight}/final")
    assert "another vocabulary" in message


def test_next_token_labels_never_cross_a_sequence():
    labels = next_token_labels(torch.arange(7), torch.tensor([0, 3, 7], dtype=torch.int32))
    assert labels.tolist() == [1, 2, IGNORE, 4, 5, 6, IGNORE]


def test_progress_line_tells_the_time_left(straight, data, tmp_path, capsys):
    run(
        f"--data_dir={data}", f"--out_dir={tmp_path}/out", "--phase1_tokens=1024", "--decay_tokens=0", "--peak_tflops=1"
    )
    line = next(line for line in capsys.readouterr().out.splitlines() if "step 1/2" in line)
    assert re.search(
        r"phase1 clm  step 1/2  loss +\d+\.\d+  grad +\S+  lr \S+  +\S+k tok/s  mfu +\S+%  left 0:00:0\d", line
    )


def test_overwrite_never_deletes_what_it_starts_from_nor_what_is_not_its_own(straight, data, tmp_path):
    shutil.copytree(straight, tmp_path / "run")
    shutil.copytree(straight / "final", tmp_path / "run" / "best")
    args = (f"--data_dir={data}", f"--out_dir={tmp_path}/run", "--overwrite=True", "--phase1_tokens=512")
    args += ("--decay_tokens=0",)
    assert "lies in the run" in error_of(*args, f"--init_from={tmp_path}/run/phase1")
    assert run(*args) == 0
    assert (tmp_path / "run/best/model.safetensors").exists() and not (tmp_path / "run/phase1").exists()


def test_a_tokenizer_without_a_mask_can_do_clm_alone(data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["tokenizer"]["mask_token_id"] = None
    (tmp_path / "data/manifest.json").write_text(json.dumps(manifest))
    args = (f"--data_dir={tmp_path}/data", f"--out_dir={tmp_path}/out", "--phase1_tokens=1024")
    assert "no mask token" in error_of(*args)
    assert run(*args, "--decay_tokens=0") == 0
    assert [e["val_mlm"] for e in events(tmp_path / "out", "eval")] == [None, None]


# ----------------------------------------------------------------------------------------------------------------------
# Runs of several ranks, and runs that are killed: forks of a process that has imported everything start in no time

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])


@pytest.fixture(autouse=True, scope="module")
def forks():
    with pytest.MonkeyPatch.context() as patch:  # the process to fork from finds its modules here
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
        multiprocessing.forkserver.ensure_running()


def forked_main(args, env, output, hook, hook_args):
    os.environ.update(env)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    if hook:
        hook(*hook_args)
    configure(vars(train), [*TINY, *args])
    sys.exit(train.main())


def fork(*args, ranks=1, output, hook=None, hook_args=()):
    """train.py in processes forked from a clean one -> the processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    Path(output).touch()
    processes = []
    for rank in map(str, range(ranks)):
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        env = env | {"MASTER_PORT": port} if ranks > 1 else {}
        arguments = list(map(str, args)), env, str(output), hook, hook_args
        process = FORKS.Process(target=forked_main, args=arguments, daemon=True)
        process.start()
        processes.append(process)
    return processes


def run_forked(*args, ranks=1, output, hook=None, hook_args=()):
    """-> exit codes, and what all ranks printed."""
    processes = fork(*args, ranks=ranks, output=output, hook=hook, hook_args=hook_args)
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes], Path(output).read_text()


def sigterm_in_step(step):
    """Hook: this rank gets SIGTERM while it computes its step number `step`; the other ranks only hear of it."""
    if os.environ.get("RANK", "0") == "0":
        original, calls = train.forward_backward, []

        def wrapped(*args):
            calls.append(0)
            if len(calls) == step:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(*args)

        train.forward_backward = wrapped


def close_to(out, reference, keys=("loss", "grad_norm")):
    """Every step the same rows and targets, loss and gradient norm to 1e-5."""
    for a, b in zip(events(out), events(reference), strict=True):
        assert [a[k] for k in ("step", "tokens", "lr", "targets", "rows_hash")] == [
            b[k] for k in ("step", "tokens", "lr", "targets", "rows_hash")
        ]
        for key in keys:
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-5), (a["step"], key)
    one, two = weights(out / "final"), weights(reference / "final")
    assert one.keys() == two.keys() and max((one[k] - two[k]).abs().max().item() for k in one) < 1e-4


SPARSE = ["--objective=mlm", "--mask_prob=0.01", "--dropout=0", "--grad_clip=0.5", "--global_batch=16"]
SPARSE += ["--phase1_tokens=6144", "--decay_tokens=4096"]  # 6 + 4 steps; most micro-batches of one row have no target


@pytest.fixture(scope="module")
def sparse(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("sparse") / "run"
    assert run(f"--data_dir={data}", f"--out_dir={out}", *SPARSE, "--micro_batch=16") == 0
    return out


@pytest.mark.parametrize("ranks, micro", [(1, 1), (1, 5), (2, 1), (2, 3), (2, 8), (4, 1), (4, 4)])
def test_any_shape_of_a_run_computes_the_same(ranks, micro, sparse, data, tmp_path):
    args = (f"--data_dir={data}", f"--out_dir={tmp_path}/run", *SPARSE, f"--micro_batch={micro}", "--check_ranks=1")
    codes, text = run_forked(*args, ranks=ranks, output=tmp_path / "output")
    assert codes == [0] * ranks, text
    close_to(tmp_path / "run", sparse)
    assert json.loads((tmp_path / "run/plan.json").read_text())["grad_accum"] == math.ceil(16 / ranks / micro)


def test_ranks_share_out_the_very_same_rows_and_masks(data, monkeypatch):
    manifest, tokens = json.loads((data / "manifest.json").read_text()), np.fromfile(data / "train.bin", np.uint16)
    settings = {"block_size": 64, "global_batch": 16, "mask_split": (0.5, 0.5, 0.0), "clm_target_share": 0.4}
    for key, value in settings.items():
        monkeypatch.setattr(train, key, value)
    phase = {"name": "phase1", "objective": "mixed", "clm_share": 0.5, "mask_prob": 0.3, "mask_prob_end": 0.1,
             "tokens": 9000}  # fmt: skip
    place, seen = train.Place(phase_tokens=4500, samples=380), set()
    for ranks, micro in ((1, 16), (1, 3), (2, 1), (4, 2)):
        monkeypatch.setattr(train, "micro_batch", micro)
        all_rows = []
        for rank in range(ranks):
            batches, _, _ = train.load_step(tokens, place, phase, replace(CPU, rank=rank, world_size=ranks), manifest)
            for b in batches:
                rows = torch.stack([b["input_ids"], b["labels"]], 1).view(-1, 64, 2)
                all_rows += [(b["is_causal"], row.numpy().tobytes()) for row in rows]
        assert sum(causal for causal, _ in all_rows) == 8
        seen.add(tuple(sorted(all_rows)))
    assert len(seen) == 1


def test_the_number_of_ranks_may_change_across_resumes(sparse, data, tmp_path):
    args = (f"--data_dir={data}", f"--out_dir={tmp_path}/run", *SPARSE, "--micro_batch=2")
    for ranks, step in ((2, 3), (4, 4)):
        codes, text = run_forked(*args, ranks=ranks, output=tmp_path / "out", hook=sigterm_in_step, hook_args=(step,))
        assert codes == [0] * ranks and "stopped by a signal" in text
        args = (*args, "--init_from=resume")
    assert run(*args) == 0
    close_to(tmp_path / "run", sparse)


def disturb_rank_1():
    original = train.take_step

    def wrapped(model, *args):
        event = original(model, *args)
        if os.environ["RANK"] == "1" and args[3].step == 2:
            with torch.no_grad():
                model.head.norm.weight[3] += 1e-6
        return event

    train.take_step = wrapped


def test_ranks_that_drift_apart_are_caught_at_their_step(data, tmp_path):
    args = (f"--data_dir={data}", f"--out_dir={tmp_path}/run", "--check_ranks=1")
    codes, text = run_forked(*args, ranks=2, output=tmp_path / "output", hook=disturb_rank_1)
    assert codes == [1, 1] and "after step 3, ranks [1] hold other weights than rank 0" in text
    assert text.count("train.py: ") == 1 and "Traceback" not in text


@pytest.mark.parametrize("ranks", [1, 2])
def test_frozen_through_ranks_accumulation_clipping_and_a_resume(ranks, data, straight, tmp_path):
    """In the decay: momentum is warm, weight decay is on."""
    args = [f"--data_dir={data}", f"--init_from={straight}/phase1", "--phase1_tokens=0", f"--out_dir={tmp_path}/run"]
    args += ["--freeze_layers=0-1,3", "--grad_clip=0.3", "--micro_batch=1", "--check_ranks=1", "--weight_decay=0.01"]
    codes, text = run_forked(*args, ranks=ranks, output=tmp_path / "out", hook=sigterm_in_step, hook_args=(3,))
    assert codes == [0] * ranks, text
    args[1] = "--init_from=resume"
    codes, text = run_forked(*args, ranks=ranks, output=tmp_path / "out")
    assert codes == [0] * ranks, text
    before, after = weights(straight / "phase1"), weights(tmp_path / "run/final")
    frozen = {k for k in before if k.startswith(("model.layers.0.", "model.layers.1.", "model.layers.3."))}
    assert {k for k in before if torch.equal(before[k], after[k])} == frozen
    old, new = (torch.load(d / "train_state.pt", weights_only=True)["optimizer"] for d in
                (straight / "phase1", tmp_path / "run/final"))  # fmt: skip
    for name in old:  # by name; no optimizer work on what is frozen: its moments and its count of steps stand still
        assert all(torch.equal(old[name][k], new[name][k]) for k in old[name]) == (name in frozen)
        assert new[name]["step"].item() == (10 if name in frozen else 16)


def test_moments_come_back_by_name_and_missing_ones_are_listed(data, tmp_path, monkeypatch, capsys):
    run(f"--data_dir={data}", f"--out_dir={tmp_path}/one", "--freeze_layers=0-1", "--decay_tokens=0")
    saved = torch.load(tmp_path / "one/final/train_state.pt", weights_only=True)["optimizer"]
    restored, original = {}, train.restore

    def spy(state, folder, plan, model, optimizer, rank):
        place = original(state, folder, plan, model, optimizer, rank)
        names = {p: name for name, p in model.named_parameters()}
        restored.update({names[p]: {k: v.clone() for k, v in m.items()} for p, m in optimizer.state.items()})
        return place

    monkeypatch.setattr(train, "restore", spy)
    args = (f"--data_dir={data}", f"--init_from={tmp_path}/one/final", "--phase1_tokens=0", "--decay_tokens=512")
    run(*args, f"--out_dir={tmp_path}/two")
    assert restored.keys() == saved.keys() and all(same(restored[name], saved[name]) for name in saved)
    after = torch.load(tmp_path / "two/final/train_state.pt", weights_only=True)["optimizer"]
    fresh = after.keys() - saved.keys()
    assert fresh == {name for name in after if name.startswith(("model.layers.0.", "model.layers.1."))}
    listed = re.search(r"no optimizer state for (.+); they start with fresh moments", capsys.readouterr().out)[1]
    assert set(listed.split(", ")) == fresh
    assert {after[name]["step"].item() for name in fresh} == {1.0}


def test_the_gradient_norm_excludes_what_is_frozen(data, tmp_path, monkeypatch):
    norms, original = [], train.freeze

    def spy(model, layers):
        names = [n for n, p in model.named_parameters() if not n.startswith(("model.layers.0.", "model.embeddings."))]
        own = dict(model.named_parameters())
        norms.append(math.sqrt(sum(own[n].grad.double().square().sum().item() for n in names)))
        original(model, layers)

    monkeypatch.setattr(train, "freeze", spy)
    run(f"--data_dir={data}", f"--out_dir={tmp_path}/run", "--freeze_layers=0,embeddings", "--grad_clip=0.01")
    assert [e["grad_norm"] for e in events(tmp_path / "run")] == pytest.approx(norms, rel=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# What happens to machines


@pytest.mark.parametrize("kills, steps", [(4, 60), pytest.param(30, 250, marks=pytest.mark.slow)])
def test_kills_lose_nothing_but_the_steps_since_the_last_checkpoint(kills, steps, data, tmp_path):
    """SIGKILL at random moments of a run that saves at every step, and goes on each time."""
    rng, out = random.Random(kills), tmp_path / "run"
    args = [f"--data_dir={data}", f"--phase1_tokens={512 * steps}", f"--out_dir={out}", "--ckpt_every_tokens=1"]
    args += ["--keep_ckpts=1", "--eval_rows=0"]
    stopped, while_saving = [], 0
    for _ in range(kills):
        (process,) = fork(*args, output=tmp_path / "output")
        began, before = time.monotonic(), stopped[-1] if stopped else 0
        while time.monotonic() < began + 20 and process.is_alive():  # until it has taken a step
            if (tmp_path / "output").read_text().count(" step ") > before:
                break
        time.sleep(rng.uniform(0, 0.25))
        process.kill()
        process.join()
        stopped.append((tmp_path / "output").read_text().count(" step "))
        while_saving += bool(list(out.glob(".*.part")))
        whole = list(out.glob("[!.]*/train_state.pt"))
        args[6:] = ["--init_from=resume"] if whole else ["--overwrite=True"]
        for state in whole:
            torch.load(state, weights_only=True)
            load_file(state.parent / "model.safetensors")
    assert while_saving or kills == 4
    print(f"{while_saving} of {kills} kills hit a save")
    codes, text = run_forked(*args, output=tmp_path / "output")
    assert codes == [0] and not (kills > 4 and "this run is finished" in text), text
    args[2], args[3:] = f"--out_dir={tmp_path}/straight", args[4:6]
    assert run(*args) == 0
    assert same(weights(out / "final"), weights(tmp_path / "straight/final"))
    keys = ("step", "loss", "lr", "grad_norm", "rows_hash", "targets")
    assert [[s[k] for k in keys] for s in events(out)] == [[s[k] for k in keys] for s in events(tmp_path / "straight")]
    names = {f.name for f in out.iterdir()}
    assert names == {"phase1", "final", f"step_{steps + 5:08d}", "log.jsonl", "plan.json"}


@pytest.mark.slow
def test_kills_of_two_ranks(data, tmp_path):
    rng, out = random.Random(2), tmp_path / "run"
    args = [f"--data_dir={data}", f"--out_dir={out}", "--ckpt_every_tokens=1", "--keep_ckpts=1"]
    for _ in range(10):
        processes = fork(*args, ranks=2, output=tmp_path / "output")
        time.sleep(rng.uniform(0.3, 1.5))
        for process in processes:
            process.kill()
            process.join()
        args[4:] = ["--init_from=resume"] if list(out.glob("[!.]*/train_state.pt")) else ["--overwrite=True"]
    assert run_forked(*args, ranks=2, output=tmp_path / "output")[0] == [0, 0]
    other = [f"--data_dir={data}", f"--out_dir={tmp_path}/straight"]
    assert run_forked(*other, ranks=2, output=tmp_path / "output")[0] == [0, 0]
    assert same(weights(out / "final"), weights(tmp_path / "straight/final"))


def limit_file_size(n_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))


def test_a_full_disk_stops_the_run_and_leaves_the_older_checkpoint(straight, data, tmp_path):
    out = tmp_path / "run"
    args = (f"--data_dir={data}", f"--out_dir={out}", "--ckpt_every_tokens=1024")
    assert run_forked(*args, output=tmp_path / "a", hook=sigterm_in_step, hook_args=(4,))[0] == [0]
    before = {f: f.read_bytes() for f in (out / "step_00000004").iterdir()}
    codes, text = run_forked(
        *args, "--init_from=resume", output=tmp_path / "b", hook=limit_file_size, hook_args=(200_000,)
    )
    assert codes == [1] and "Traceback" not in text
    assert re.search(r"^train.py: --out_dir=\S+: checkpoint step_00000006 was not written \(.+bytes free", text, re.M)
    assert all(f.read_bytes() == content for f, content in before.items()) and not list(out.glob(".*"))
    if Path("/dev/full").exists():  # not even the log fits
        (out / "log.part").symlink_to("/dev/full")
        assert re.search(r"--out_dir=\S+: .*No space left on device; make room", error_of(*args, "--init_from=resume"))
        (out / "log.part").unlink()
    assert run(*args, "--init_from=resume") == 0
    assert same(weights(out / "final"), weights(straight / "final"))


@pytest.mark.slow
def test_a_full_file_system(data, tmp_path):
    """The real thing, where mounting is allowed: 1 MB, room for one checkpoint."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        args = (f"--data_dir={data}", f"--out_dir={disk}/run", "--ckpt_every_tokens=1024")
        codes, text = run_forked(*args, output=tmp_path / "output")
        assert codes == [1] and "Traceback" not in text, text
        assert re.search(r"checkpoint step_0000000\d was not written \(.+\), with [\d,]{1,7} bytes free there", text)
        step = [p.parent.name for p in (disk / "run").glob("*/train_state.pt")]
        assert step == ["step_00000002"] and ModernBERT.from_pretrained(disk / "run/step_00000002")
    finally:
        subprocess.run(["umount", disk], check=True)


def test_directories_that_cannot_be_written_are_one_line(data, tmp_path):
    (tmp_path / "file").write_text("")
    assert "--out_dir=" in error_of(f"--data_dir={data}", f"--out_dir={tmp_path}/file/run")
    if os.geteuid():  # root writes everywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        assert "Permission denied" in error_of(f"--data_dir={data}", f"--out_dir={tmp_path}/closed/run")


@pytest.mark.parametrize(
    "file, words",
    [
        ("train_state.pt", "damaged"),
        ("model.safetensors", "damaged"),
        ("config.json", "damaged"),
        ("tokenizer.json", "expected a whole checkpoint"),
    ],
)
def test_a_damaged_checkpoint_is_named_with_the_one_to_go_on_from(file, words, straight, data, tmp_path):
    shutil.copytree(straight, tmp_path / "run")
    path = tmp_path / "run/final" / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    args = (f"--data_dir={data}", f"--out_dir={tmp_path}/run", "--init_from=resume")
    message = error_of(*args)
    assert words in message and f"{tmp_path}/run/final" in message
    if file != "tokenizer.json":
        assert f"move it away and resume again, from {tmp_path}/run/phase1 at step 10" in message
    shutil.move(tmp_path / "run/final", tmp_path / "away")
    assert run(*args) == 0
    assert same(weights(tmp_path / "run/final"), weights(straight / "final"))


def test_another_manifest_or_other_data_is_not_resumed(straight, data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    manifest = json.loads((data / "manifest.json").read_text())
    args = (f"--data_dir={tmp_path}/data", f"--out_dir={straight}", "--init_from=resume")
    for change in (
        {"tokenizer": manifest["tokenizer"] | {"special_ids": [0, 1]}},
        {"splits": manifest["splits"] | {"train": manifest["splits"]["train"] | {"sha256": "other"}}},
    ):
        (tmp_path / "data/manifest.json").write_text(json.dumps(manifest | change))
        assert f"the data in {tmp_path}/data is other data" in error_of(*args)
    (tmp_path / "data/manifest.json").write_text('{"form')
    assert "manifest.json is damaged" in error_of(*args)


def slow_writes(seconds):
    original = torch.save

    def wrapped(*args, **kwargs):
        time.sleep(seconds)
        return original(*args, **kwargs)

    train.torch.save = wrapped


def test_training_goes_on_while_a_checkpoint_is_written(straight, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "save", torch.save)
    slow_writes(0.4)
    out = tmp_path / "run"
    args = (f"--data_dir={data}", f"--out_dir={out}", "--ckpt_every_tokens=1536", "--keep_ckpts=0")
    stop_after(4, monkeypatch)  # while step 3 is being written
    assert run(*args) == 0
    printed = capsys.readouterr().out.splitlines()
    saved = next(i for i, line in enumerate(printed) if "step_00000003: training waited" in line)
    assert any("step  4/16" in line for line in printed[:saved])
    assert re.search(r"training waited 0\.[0-2]\d s, written in 0\.[4-9]\d s$", printed[saved])
    assert {p.name for p in out.glob("step_*")} == {"step_00000003", "step_00000004"}
    monkeypatch.undo()
    run(f"--data_dir={data}", f"--out_dir={tmp_path}/quick", "--ckpt_every_tokens=1536", "--keep_ckpts=0")
    # the weights of that moment, not of the end of the writing
    assert same(weights(out / "step_00000003"), weights(tmp_path / "quick/step_00000003"))
    assert run(*args, "--init_from=resume") == 0
    assert same(weights(out / "final"), weights(straight / "final"))


def test_a_second_signal_ends_at_once(data, tmp_path):
    args = (f"--data_dir={data}", f"--out_dir={tmp_path}/run", "--ckpt_every_tokens=1")
    (process,) = fork(*args, output=tmp_path / "output", hook=slow_writes, hook_args=(30,))
    began = time.monotonic()
    while "step  1/16" not in (tmp_path / "output").read_text() and time.monotonic() < began + 30:
        time.sleep(0.01)
    for _ in range(2):
        process.terminate()
        time.sleep(0.2)
    process.join(5)
    assert process.exitcode == -signal.SIGTERM


def test_ctrl_c_is_no_success(data, tmp_path, monkeypatch):
    original, calls = train.forward_backward, []

    def wrapped(*args):
        calls.append(os.kill(os.getpid(), signal.SIGINT) if not calls else 0)
        return original(*args)

    monkeypatch.setattr(train, "forward_backward", wrapped)
    assert run(f"--data_dir={data}", f"--out_dir={tmp_path}/run") == 130
    assert (tmp_path / "run/step_00000001/train_state.pt").exists()


def spoil_step(step, factor, monkeypatch):
    original, calls = train.forward_backward, []

    def wrapped(*args):
        calls.append(0)
        return original(*args) * (factor if len(calls) == step else 1)

    monkeypatch.setattr(train, "forward_backward", wrapped)


def test_a_loss_that_is_no_number_names_step_and_rows(straight, data, tmp_path, monkeypatch):
    spoil_step(7, math.nan, monkeypatch)
    message = error_of(f"--data_dir={data}", f"--out_dir={tmp_path}/run", "--ckpt_every_tokens=1024")
    assert message.startswith("train.py: step 7, rows ") and events(straight)[6]["rows_hash"] in message
    assert "--grad_clip=1.0" in message and len(events(tmp_path / "run")) == 6
    assert sorted(p.name for p in (tmp_path / "run").glob("step_*")) == ["step_00000004", "step_00000006"]


def test_weights_that_are_no_numbers_are_never_saved(data, tmp_path, monkeypatch):
    original = train.take_step

    def wrapped(model, *args):
        event = original(model, *args)
        if args[3].step == 5:
            model.head.norm.weight.data[0] = math.inf
        return event

    monkeypatch.setattr(train, "take_step", wrapped)
    args = [f"--data_dir={data}", f"--out_dir={tmp_path}/run", "--ckpt_every_tokens=1024"]
    error_of(*args)  # the next step notices, too
    args[2:] = ["--ckpt_every_tokens=1e9", "--phase1_tokens=3072", "--decay_tokens=0", "--eval_rows=0"]
    assert sorted(p.name for p in (tmp_path / "run").glob("*/")) == ["step_00000002", "step_00000004"]
    message = error_of(*args, "--overwrite=True")
    assert "checkpoint final was not written (the weights hold NaN or infinity)" in message


def test_loss_spikes_are_logged(data, tmp_path, monkeypatch, capsys):
    spoil_step(30, 3.0, monkeypatch)
    spoil_step(10, 3.0, monkeypatch)  # too early to be judged
    run(f"--data_dir={data}", f"--out_dir={tmp_path}/run", "--phase1_tokens=16384", "--decay_tokens=0")
    (spike,) = events(tmp_path / "run", "spike")
    step = events(tmp_path / "run")[29]
    assert spike["step"] == 30 and spike["loss"] == step["loss"] > 10
    assert train.hash_rows(spike["rows"]) == step["rows_hash"]
    assert "spike: loss" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------------
# Ablations: each one a setting


def test_shapes_of_the_decay(monkeypatch):
    for shape, middle in (("sqrt", 1 - math.sqrt(0.5)), ("linear", 0.5), ("cosine", 0.5)):
        monkeypatch.setattr(train, "decay_shape", shape)
        rates = [train.get_lr({"name": "decay", "tokens": 1000}, seen) / 2e-4 for seen in range(0, 1001, 50)]
        assert rates[0] == 1 and rates[10] == pytest.approx(0.1 + 0.9 * middle) and rates[-1] == pytest.approx(0.1)
        assert rates == sorted(rates, reverse=True)
    assert rates[5] == pytest.approx(0.1 + 0.9 * math.cos(math.pi / 8) ** 2)


def test_mask_rate_schedule_and_split(monkeypatch):
    phase = {"mask_prob": 0.3, "mask_prob_end": 0.1, "tokens": 1000}
    assert [train.get_mask_prob(phase, seen) for seen in (0, 250, 1000, 1100)] == pytest.approx([0.3, 0.25, 0.1, 0.1])
    assert train.get_mask_prob(phase | {"mask_prob_end": None}, 700) == 0.3
    tokens = np.random.default_rng(0).integers(5, 1000, 200_000)
    inputs, labels = train.mask_row(tokens, 0.3, [1, 2, 3], [0, 1, 2, 3, 4], 3, 1000, (1.0, 0.0, 0.0))
    assert (inputs[labels != IGNORE] == 3).all()
    inputs, labels = train.mask_row(tokens, 0.3, [1, 2, 3], [0, 1, 2, 3, 4], 3, 1000, (0.0, 0.5, 0.5))
    chosen = labels != IGNORE
    assert not (inputs == 3).any() and abs((inputs == tokens)[chosen].mean() - 0.5) < 0.01


def test_clm_on_a_share_of_the_positions_learns_the_tokens_that_mlm_masks(data, monkeypatch):
    monkeypatch.setattr(train, "block_size", 64)
    manifest, tokens = json.loads((data / "manifest.json").read_text()), np.fromfile(data / "train.bin", np.uint16)
    rows = [(3, 0), (1, 2)]
    batches = [train.make_batch(tokens, rows, goal, 0.3, 17, manifest) for goal in ("clm", "mlm")]
    clm, mlm = (batch["labels"].view(2, 64) for batch in batches)
    ordinary = ~torch.isin(clm, torch.tensor([0, 1, 2, 3, 4]))  # special tokens are targets of CLM alone
    assert torch.equal(clm[:, :-1][ordinary[:, :-1]], mlm[:, 1:][ordinary[:, :-1]])
    assert (clm[:, -1] == IGNORE).all() and 0.15 < (clm != IGNORE).float().mean() < 0.45


def test_the_batch_grows_by_eighths_and_tokens_are_counted_right(monkeypatch):
    for key, value in {"block_size": 10, "global_batch": 16, "batch_warmup_tokens": 1600}.items():
        monkeypatch.setattr(train, key, value)
    rows, seen = [], 0
    while seen < 5000:
        rows.append(train.step_rows("phase1", seen))
        seen += 10 * rows[-1]
    assert rows[0] == 2 and rows == sorted(rows) and set(rows) == set(range(2, 17, 2))
    assert all(16 * (s - 200) / 1600 < r <= 16 * (s + 200) / 1600 for r, s in
               zip(rows, np.cumsum([0, *rows]) * 10, strict=False) if s < 1400)  # fmt: skip
    assert train.count_steps("phase1", 5000) == (len(rows), seen)
    assert train.count_steps("phase1", 100) == (5, 100) and train.step_rows("decay", 0) == 16


ABLATED = ["--objective=mixed", "--mixed_clm_share=0.3", "--clm_target_share=0.5", "--mask_prob_end=0.1"]
ABLATED += ["--mask_split=(0.6,0.2,0.2)", "--batch_warmup_tokens=6000", "--decay_shape=cosine", "--global_batch=16"]
ABLATED += ["--phase1_tokens=10240", "--decay_tokens=3072"]


def test_ablations_are_exact_across_ranks_and_resumes(data, tmp_path, monkeypatch):
    args = (f"--data_dir={data}", *ABLATED)
    assert run(*args, f"--out_dir={tmp_path}/straight") == 0
    steps = events(tmp_path / "straight")
    assert steps[0]["tokens"] == 128 and steps[-1]["tokens"] >= 13312
    assert len(steps) == json.loads((tmp_path / "straight/plan.json").read_text())["steps"]
    evals = events(tmp_path / "straight", "eval")
    assert evals[0]["val_clm"] and evals[0]["val_mlm"]  # a mixed phase is held to both

    stop_after(len(steps) // 2, monkeypatch)
    assert run(*args, f"--out_dir={tmp_path}/stopped") == 0
    monkeypatch.undo()
    assert run(*args, f"--out_dir={tmp_path}/stopped", "--init_from=resume") == 0
    assert same(weights(tmp_path / "stopped/final"), weights(tmp_path / "straight/final"))
    assert [e["loss"] for e in events(tmp_path / "stopped")] == [e["loss"] for e in steps]

    run(*args, f"--out_dir={tmp_path}/one", "--dropout=0")
    codes, text = run_forked(
        *args, f"--out_dir={tmp_path}/two", "--dropout=0", "--micro_batch=2", ranks=2, output=tmp_path / "output"
    )
    assert codes == [0, 0], text
    close_to(tmp_path / "two", tmp_path / "one")


def test_ablations_leave_the_held_out_loss_alone_and_are_part_of_a_runs_identity(straight, data, tmp_path):
    run(f"--data_dir={data}", f"--out_dir={tmp_path}/run", *ABLATED)
    for key in ("val_mlm", "val_clm"):  # at step 0: the same weights
        assert events(tmp_path / "run", "eval")[0][key] == events(straight, "eval")[0][key]
    ablations = "mixed_clm_share=0.1 clm_target_share=0.1 mask_prob_end=0.1 decay_shape=linear mask_split=(1,0,0)"
    for setting in (*ablations.split(), "batch_warmup_tokens=1024"):
        message = error_of(f"--data_dir={data}", f"--out_dir={straight}", "--init_from=resume", f"--{setting}")
        assert f"{setting.split('=')[0]} was" in message


# ----------------------------------------------------------------------------------------------------------------------
# What a person sees


def test_the_page_at_the_start_and_an_estimate(data, tmp_path, capsys):
    run(f"--data_dir={data}", f"--out_dir={tmp_path}/run", "--freeze_layers=1")
    text = capsys.readouterr().out
    for line in (r"model   0\.0M parameters from scratch, vocabulary 320", rf"data    {data}: [\d,]+ tokens = \d+ rows",
                 r"machine 1 x cpu \(no GPU\), float32, attention: sdpa, torch \S+",
                 r"step    512 tokens = 1 ranks x 3 micro-batches x 3 rows x 64",
                 r"phase1  clm, 10 steps, 4 of warmup, \d+\.\d\d passes over the rows, frozen \(skip\): 1",
                 r"decay   mlm at 15%, 6 steps, 0 of warmup",
                 r"at this pace the 11 steps left take 0:00:0\d"):  # fmt: skip
        assert re.search(f"^{line}", text, re.M), line


def test_compact_prints_a_line_now_and_then_in_a_pipe_and_one_line_in_a_terminal(data, tmp_path, capsys, monkeypatch):
    args = (f"--data_dir={data}", "--compact=True")
    run(*args, f"--out_dir={tmp_path}/pipe")
    lines = [line for line in capsys.readouterr().out.splitlines() if re.search(r"step +\d+/16", line)]
    assert [int(re.search(r"step +(\d+)/", line)[1]) for line in lines] == [1, 10, 16]  # the first, and ends of phases
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    run(*args, f"--out_dir={tmp_path}/terminal")
    text = capsys.readouterr().out
    assert len(re.findall(r"\r\x1b\[K\w+ +\w+  step +\d+/16", text)) == 16
    assert not re.search(r"step +\d+/16[^\r]*\n", text)  # always over the last one, or what is said in between


def test_reading_overlaps_with_computing(data, tmp_path, monkeypatch):
    moments = []
    for name in ("load_step", "forward_backward"):
        original = getattr(train, name)

        def wrapped(*args, original=original, name=name):
            moments.append((time.perf_counter(), name))
            time.sleep(0.1)
            return original(*args)

        monkeypatch.setattr(train, name, wrapped)
    run(f"--data_dir={data}", f"--out_dir={tmp_path}/run", "--eval_rows=0", "--decay_tokens=0")
    steps = [moment for moment, name in moments if name == "forward_backward"]
    assert 0.1 < (steps[-1] - steps[0]) / (len(steps) - 1) < 0.16  # seconds a step, not 0.2


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's memory counters")
def test_reading_does_not_grow_memory(data, tmp_path, monkeypatch):
    """130 MB through a memory map: its pages are the system's cache (RssFile); the process's own (RssAnon) stay."""
    manifest = json.loads((data / "manifest.json").read_text())
    for key, value in {"block_size": 8192, "global_batch": 32, "micro_batch": 8}.items():
        monkeypatch.setattr(train, key, value)
    with open(tmp_path / "train.bin", "wb") as file:
        file.truncate(130_000_000)
    tokens = np.memmap(tmp_path / "train.bin", np.uint16, mode="r")
    phase = {"name": "phase1", "objective": "mlm", "clm_share": 0.0, "mask_prob": 0.3, "mask_prob_end": None}
    place, sizes = train.Place(), []
    while place.samples < len(tokens) // 8192:
        train.load_step(tokens, place, phase, CPU, manifest)
        place = place.after(32)
        sizes.append(int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) // 1000)
    assert max(sizes[len(sizes) // 4 :]) < sizes[len(sizes) // 4] + 20, sizes


def rank_1_breaks():
    original = train.forward_backward

    def wrapped(*args):
        if os.environ["RANK"] == "1" and args[4][1] >= 24:  # its fourth step
            raise ZeroDivisionError("this rank broke")
        return original(*args)

    train.forward_backward = wrapped


def test_a_rank_that_dies_ends_all_promptly_and_its_error_is_shown(data, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(
        "import sys, test_train, train\n"
        "from configurator import configure\n"
        "configure(vars(train))\n"
        "test_train.rank_1_breaks()\n"
        "sys.exit(train.record(train.main)())\n"
    )
    process = launch(f"--data_dir={data}", f"--out_dir={tmp_path}/run", "--log_every=1", ranks=2, script=script)
    began = None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "this rank broke" in line and not began:
            began = time.monotonic()
    assert process.wait() == 1
    assert time.monotonic() - began < 10  # torchrun's own tidying up
    root = "".join(lines).split("Root Cause")[1]
    assert "rank      : 1" in root and "ZeroDivisionError: this rank broke" in root


@pytest.mark.slow
def test_two_machines_compute_what_one_process_computes(data, sparse, tmp_path):
    """Two rendezvous groups on this machine, as on two: local ranks 0 and 1 on each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    args = [f"--data_dir={data}", f"--out_dir={tmp_path}/run", *SPARSE, "--micro_batch=2", "--check_ranks=1"]
    nodes = []
    for node in (0, 1):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={node}",
                   "--nproc_per_node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=1",
                   ROOT / "train.py", *TINY, *args]  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        nodes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    texts = [node.communicate()[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], texts
    assert json.loads((tmp_path / "run/plan.json").read_text())["world_size"] == 4
    close_to(tmp_path / "run", sparse)


# ----------------------------------------------------------------------------------------------------------------------
# A phase end is a release


def test_a_phase_end_has_a_model_card_and_loads_in_transformers_in_both_precisions(straight, data, tmp_path):
    import yaml
    from transformers import AutoModelForMaskedLM

    shutil.copytree(straight, tmp_path / "run")
    row = {"model": "run/final", "task": "organs", "seed": 42, "test": {"macro_f1": 0.61234}}
    (tmp_path / "run/results.jsonl").write_text(json.dumps(row) + '\n{"probe": "needle"}\n')
    args = (f"--data_dir={data}", f"--out_dir={tmp_path}/run", "--init_from=resume")
    assert run(*args) == 0  # finished: the card alone is written again
    for name in ("phase1", "final"):
        _, front, text = (tmp_path / "run" / name / "README.md").read_text().split("---\n", 2)
        front = yaml.safe_load(front)
        assert front["library_name"] == "transformers" and front["pipeline_tag"] == "fill-mask" and front["tags"]
        assert not front.keys() & {"license", "base_model"}  # from scratch
        assert "| phase1 | clm |  | 5,120 | 10 |" in text and "seed=17, data_seed=42" in text
        assert ("| decay | mlm | 0.1500 | 3,072 | 6 |" in text) == (name == "final")
        assert f"{events(straight, 'eval')[1]['val_mlm']:.4f}" in text and "sha256" in text and "float32" in text
    assert "| run/final | organs | 42 | 0.6123 |" in text
    ids = torch.randint(5, VOCAB, (2, 50))
    exact, half = (
        AutoModelForMaskedLM.from_pretrained(straight / "final", dtype=dtype).eval()(ids).logits.float()
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert 0 < (exact - half).abs().max() < 0.1
    plan, manifest = (json.loads(f.read_text()) for f in (straight / "plan.json", data / "manifest.json"))
    plan["init_from"] = "answerdotai/ModernBERT-base"
    manifest["sources"] = [{"name": "notes", "documents": 3, "train_tokens": 1000, "val_tokens": 10, "share": 1.0}]
    card = train.model_card("final", plan, manifest, [], [])
    assert "\nbase_model: answerdotai/ModernBERT-base\n" in card and "| notes | 1,000 | 1.0000 |" in card


def test_directories_that_are_not_the_runs_own_stand_in_its_way(data, tmp_path):
    (tmp_path / "run/final").mkdir(parents=True)
    message = error_of(f"--data_dir={data}", f"--out_dir={tmp_path}/run", "--overwrite=True")
    assert "final is not of train.py" in message and (tmp_path / "run/final").exists()
