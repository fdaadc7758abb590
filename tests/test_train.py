"""The training loop against closed forms, an independent optimizer, one process against two, and a straight run against
an interrupted one. Everything is fp32 on the CPU with a model of a few thousand weights."""

import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import train
from configurator import configure
from model import IGNORE, ModernBERT, ModernBERTConfig, next_token_labels

ROOT = Path(__file__).resolve().parent.parent
DEFAULTS = {k: v for k, v in vars(train).items() if k.islower() and isinstance(v, (str, int, float, bool))}
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
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
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
    rates = [train.get_lr(phase, i) for i in range(40)]
    assert rates[0] == pytest.approx(2e-4 / 32) and rates[30] < 2e-4
    assert rates[31] == rates[39] == 2e-4
    assert train.get_lr({"name": "phase1", "warmup_steps": 0}, 0) == 2e-4


def test_decay_follows_the_affine_root(monkeypatch):
    monkeypatch.setattr(train, "global_batch", 1)
    monkeypatch.setattr(train, "block_size", 10)
    phase = {"name": "decay", "tokens": 1000.0}
    table = {0: 2.000e-4, 10: 1.431e-4, 25: 1.100e-4, 50: 7.272e-5, 75: 4.412e-5, 100: 2.000e-5}  # P-206
    for step, lr in table.items():
        assert train.get_lr(phase, step) == pytest.approx(lr, rel=5e-4)
    assert train.get_lr(phase, 101) == pytest.approx(2e-5)  # the last step may overshoot the budget, never the floor


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
    batch = train.make_batch(tokens, [(3, 0), (1, 0)], "clm", None, 17, manifest)
    expected = np.r_[tokens[192:256], tokens[64:128]].astype(int)
    assert batch["input_ids"].tolist() == expected.tolist() and batch["is_causal"]
    assert batch["cu_seqlens"].tolist() == [0, 64, 128] and batch["max_seqlen"] == 64
    assert batch["labels"].tolist() == [*expected[1:64], IGNORE, *expected[65:], IGNORE]  # T - 1 targets a row, P-203
    monkeypatch.setattr(train, "mask_documents", True)
    batch = train.make_batch(tokens, [(3, 0), (1, 0)], "clm", None, 17, manifest)
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
    assert process.wait() == 128 + signal.SIGTERM and "go on with --init_from=resume" in rest
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
    assert run(f"--data_dir={data}", f"--out_dir={out}", "--dropout=0") == 128 + signal.SIGTERM
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
    import shutil

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
    import shutil

    shutil.copytree(straight, tmp_path / "run")
    shutil.copytree(straight / "final", tmp_path / "run" / "best")
    args = (f"--data_dir={data}", f"--out_dir={tmp_path}/run", "--overwrite=True", "--phase1_tokens=512")
    args += ("--decay_tokens=0",)
    assert "lies in the run" in error_of(*args, f"--init_from={tmp_path}/run/phase1")
    assert run(*args) == 0
    assert (tmp_path / "run/best/model.safetensors").exists() and not (tmp_path / "run/phase1").exists()


def test_a_tokenizer_without_a_mask_can_do_clm_alone(data, tmp_path):
    import shutil

    shutil.copytree(data, tmp_path / "data")
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["tokenizer"]["mask_token_id"] = None
    (tmp_path / "data/manifest.json").write_text(json.dumps(manifest))
    args = (f"--data_dir={tmp_path}/data", f"--out_dir={tmp_path}/out", "--phase1_tokens=1024")
    assert "no mask token" in error_of(*args)
    assert run(*args, "--decay_tokens=0") == 0
    assert [e["val_mlm"] for e in events(tmp_path / "out", "eval")] == [None, None]
