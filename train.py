"""
Continued pretraining with a causal detour: one loop, two phases (paper §3.2).

    phase 1   causal mask, next-token prediction (--objective=clm), or its twin: masked tokens at 30% (--objective=mlm)
    decay     bidirectional mask, masked tokens at 15%, a tenth of the tokens, learning rate from peak to a tenth of it

    python train.py config/fr_base.py --objective=clm --dry_run=True            # print the plan, touch nothing
    python train.py config/demo.py --objective=clm                              # one process, CPU or GPU
    torchrun --nproc_per_node=4 train.py config/fr_base.py --objective=clm      # four GPUs, the same computation
    ... --init_from=resume                                                      # go on after a stop or a crash
    ... --init_from=out/fr_base-clm/phase1 --phase1_tokens=0 --decay_tokens=5e9 --out_dir=...   # branch another decay

Reads a data directory of prepare_data.py. Writes to out_dir: plan.json (what will be done), log.jsonl (what happened),
and checkpoints: step_*/ (the last few), phase1/ (before the decay), final/. A checkpoint is a Hugging Face model
directory with train_state.pt beside it, so every other script and AutoModelForMaskedLM load it as it is.
"""

import hashlib
import json
import math
import os
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from configurator import configure
from model import (
    IGNORE,
    ModernBERT,
    ModernBERTConfig,
    default_device,
    default_dtype,
    load_model,
    next_token_labels,
    pick_backend,
)

# the run
out_dir = "out/{objective}"  # plan, log and checkpoints go here; {objective} and {seed} stand for their values
data_dir = "data/fr10b"  # written by prepare_data.py
init_from = "scratch"  # scratch | resume | a checkpoint directory | a hub id such as answerdotai/ModernBERT-base
keep_optimizer = True  # a decay that branches off (phase1_tokens=0) continues the optimizer state, P-207
overwrite = False  # True: throw away the run that out_dir already holds
dry_run = False  # True: print the resolved plan as JSON and exit

# the timeline, in tokens
objective = "clm"  # phase 1: clm = the detour (P-201) | mlm = its twin (P-202)
phase1_tokens = 10e9  # length of phase 1
decay_tokens = 1e9  # length of the decay, 10% of phase 1 in the paper
decay_objective = "mlm"  # P-201; clm is for the reverse experiment on a decoder
mask_prob = 0.30  # masked share in phase 1 when it is mlm, P-202
decay_mask_prob = 0.15  # masked share in the decay, P-201
mask_special = False  # True: also mask [CLS], [SEP] and the like, as ModernBERT's own packer does, P-204

# the batch: the optimizer sees global_batch rows a step, however many ranks there are and whatever fits in memory
block_size = 8192  # tokens in a row
global_batch = 384  # rows in a step; 384 x 8,192 = 3,145,728 tokens, P-209
micro_batch = 8  # rows in one forward pass of one rank; lower it when memory runs out
mask_documents = False  # True: attention stops at document boundaries; the paper's does not, P-213

# the optimizer
learning_rate = 2e-4  # peak, P-208
warmup_tokens = 1e8  # linear warmup at the start of phase 1, none in the decay, P-205
final_lr_fraction = 0.1  # the decay ends at this share of the peak, P-206
beta1 = 0.9  # P-208
beta2 = 0.98  # P-208
eps = 1e-6  # P-208
weight_decay = 1e-5  # decoupled: a step shrinks weights by weight_decay * lr / peak, P-208
grad_clip = 0.0  # maximal gradient norm; 0 = off, P-211
dropout = 0.1  # on the attention output, P-105; 0 makes runs independent of the number of ranks to the last digits

# freezing (paper §3.3)
freeze_layers = ""  # e.g. 0-7 or 0-3,9,embeddings; counts from 0, ends included
freeze_phase = "both"  # phase1 | decay | both
freeze_mode = "skip"  # skip = bit-identical weights | zero_grad = the paper's words, which weight decay and momentum undo

# seeds
seed = 17  # masks, dropout, random weights, P-214
data_seed = 42  # order of rows; twins share it, P-214

# the model, when it starts from scratch (a checkpoint brings its own shape); names as in config.json
vocab_size = 50368
hidden_size = 768
num_hidden_layers = 22
num_attention_heads = 12
intermediate_size = 1152
local_attention = 128
global_attn_every_n_layers = 3

# the machine
device = "auto"  # auto | cpu | cuda | mps
dtype = "auto"  # auto | bfloat16 | float32: of the matrix products; weights and optimizer stay fp32
attention = "auto"  # auto | flash_attn | varlen_attn | sdpa
compile = False  # torch.compile each block
peak_tflops = 0.0  # of one device, for MFU; 0 = look it up by the GPU's name

# evaluation, logs, checkpoints
eval_every_tokens = 2e8  # held-out loss; also at the start and the end of each phase
eval_rows = 64  # fixed rows of val.bin with fixed masks at 15%, so that curves of all runs compare; 0 = never
log_every = 1  # steps between printed lines; log.jsonl has every step
ckpt_every_tokens = 5e8  # also at the end of each phase and on SIGTERM or Ctrl-C
keep_ckpts = 2  # how many step_* checkpoints to keep; 0 = all of them, for trajectories
tensorboard = False  # True: also write out_dir/tensorboard (pip install tensorboard)
wandb_project = ""  # also log to this Weights & Biases project (pip install wandb)

EVAL_SEED = 0  # masks of the held-out rows: one fixed value, so that seeds and runs can be compared
EVAL_MASK_PROB = 0.15  # ModernBERT's own evaluation rate

# Settings that change what is computed. A resumed run must have the same, or it would be another run.
IDENTITY = """objective phase1_tokens decay_tokens decay_objective mask_prob decay_mask_prob mask_special block_size
    global_batch mask_documents learning_rate warmup_tokens final_lr_fraction beta1 beta2 eps weight_decay grad_clip
    dropout freeze_layers freeze_phase freeze_mode seed data_seed""".split()

# Dense bf16 TFLOP/s from the makers' data sheets, for MFU.
PEAK_TFLOPS = {"H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "B200": 2250, "L40S": 362, "L4": 121, "4090": 165}


def fail(message):
    """One line on stderr and exit code 1; under torchrun only rank 0 speaks."""
    raise SystemExit(f"train.py: {message}" if os.environ.get("RANK", "0") == "0" else 1)


# ----------------------------------------------------------------------------------------------------------------------
# The plan: everything that can be known before the first step


def make_phases():
    """The timeline. Steps are rounded up: a phase ends with the first step that reaches its budget (A-02)."""
    tokens_per_step = global_batch * block_size
    phases = []
    for name, goal, budget, rate in (
        ("phase1", objective, phase1_tokens, mask_prob),
        ("decay", decay_objective, decay_tokens, decay_mask_prob),
    ):
        steps = math.ceil(budget / tokens_per_step)
        warmup = math.ceil(warmup_tokens / tokens_per_step) if name == "phase1" else 0
        if steps:
            frozen = freeze_layers if freeze_phase in (name, "both") else ""
            phases.append(
                {
                    "name": name,
                    "objective": goal,
                    "mask_prob": rate if goal == "mlm" else None,
                    "tokens": budget,
                    "steps": steps,
                    "warmup_steps": warmup,
                    "frozen": frozen,
                }
            )
    return phases


def get_lr(phase, step):
    """Learning rate of step `step` (from 0) of a phase. Phase 1 warms up and stays (P-205); the first step is not
    wasted at 0. The decay is peak * (f + (1 - f) * (1 - sqrt(t / T))) with t tokens seen of T, the affine reading of
    P-206: it starts at the peak and reaches f * peak at t = T."""
    if phase["name"] == "phase1":
        return learning_rate * min(1.0, (step + 1) / max(1, phase["warmup_steps"]))
    t = min(1.0, step * global_batch * block_size / phase["tokens"])
    return learning_rate * (final_lr_fraction + (1 - final_lr_fraction) * (1 - math.sqrt(t)))


def check_settings(world_size):
    choices = {
        "objective": ("clm", "mlm"),
        "decay_objective": ("clm", "mlm"),
        "freeze_phase": ("phase1", "decay", "both"),
        "freeze_mode": ("skip", "zero_grad"),
        "device": ("auto", "cpu", "cuda", "mps"),
        "dtype": ("auto", "bfloat16", "float32"),
        "attention": ("auto", "flash_attn", "varlen_attn", "sdpa"),
    }
    for key, allowed in choices.items():
        if globals()[key] not in allowed:
            fail(f"--{key}={globals()[key]}: expected one of {', '.join(allowed)}")
    for key in ("mask_prob", "decay_mask_prob"):
        if not 0 < globals()[key] < 1:
            fail(f"--{key}={globals()[key]}: expected a share between 0 and 1, such as 0.3")
    for key in ("block_size", "global_batch", "micro_batch", "learning_rate", "log_every"):
        if not globals()[key] > 0:
            fail(f"--{key}={globals()[key]}: expected a number above 0")
    for key in ("phase1_tokens", "decay_tokens", "warmup_tokens", "weight_decay", "grad_clip", "eval_rows", "keep_ckpts"):
        if not globals()[key] >= 0:
            fail(f"--{key}={globals()[key]}: expected 0 or more")
    for key in ("eval_every_tokens", "ckpt_every_tokens"):
        if not globals()[key] > 0:
            fail(f"--{key}={globals()[key]}: expected a number of tokens above 0, such as 5e8")
    if not 0 <= dropout < 1:
        fail(f"--dropout={dropout}: expected 0 or more, and below 1")
    if block_size < 2:
        fail(f"--block_size={block_size}: expected 2 or more tokens, the next token needs one before it")
    if phase1_tokens == decay_tokens == 0:
        fail("--phase1_tokens=0 --decay_tokens=0: expected tokens in at least one phase")
    if global_batch % world_size:
        fail(
            f"--global_batch={global_batch}: expected a multiple of the {world_size} ranks, so that the step is the same "
            f"for any number of them; choose {global_batch // world_size * world_size or world_size} or other ranks"
        )


def parse_layers(text, n_layers):
    """'0-2,9,embeddings' -> ['model.layers.0.', ..., 'model.embeddings.']: prefixes of parameter names."""
    prefixes = []
    for part in filter(None, (p.strip() for p in str(text).split(","))):
        if part == "embeddings":
            prefixes.append("model.embeddings.")
            continue
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit() and int(first) <= int(last or first) < n_layers):
            fail(f"--freeze_layers={text}: {part!r} is not a layer of 0-{n_layers - 1}, a range such as 0-7, or embeddings")
        prefixes += [f"model.layers.{i}." for i in range(int(first), int(last or first) + 1)]
    return prefixes


def choose_device(local_rank=0):
    if device == "cuda" and not torch.cuda.is_available():
        fail("--device=cuda: PyTorch sees no GPU here; use --device=cpu, or install a CUDA build of torch")
    if device == "auto":
        return default_device()
    return torch.device(device, local_rank) if device == "cuda" else torch.device(device)


def gpu_peak_tflops(where):
    if peak_tflops:
        return peak_tflops
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else ""
    return next((peak for key, peak in PEAK_TFLOPS.items() if key in name), None)


def make_plan(config, where, world_size):
    """The resolved run as plain data: printed by --dry_run, stored as plan.json."""
    phases = make_phases()
    parse_layers(freeze_layers, config.num_hidden_layers)
    amp = default_dtype(where) if dtype == "auto" else getattr(torch, dtype)
    with torch.device("meta"):
        shape = ModernBERT(config)
    parameters = sum(p.numel() for p in shape.parameters())
    for phase in phases:
        share = 1.0 if phase["objective"] == "clm" else phase["mask_prob"]
        phase["flops_per_token"] = shape.flops_per_token(block_size, phase["objective"] == "clm", share)
        phase["flops"] = phase["flops_per_token"] * phase["steps"] * global_batch * block_size
        phase["lr_first_step"], phase["lr_at_end"] = get_lr(phase, 0), get_lr(phase, phase["steps"])
    rows_per_rank = global_batch // world_size
    return {
        "init_from": init_from,
        "tokens_per_step": global_batch * block_size,
        "steps": sum(phase["steps"] for phase in phases),
        "phases": phases,
        "world_size": world_size,
        "micro_batch": min(micro_batch, rows_per_rank),
        "grad_accum": math.ceil(rows_per_rank / micro_batch),
        "parameters": parameters,
        "parameters_without_embeddings": parameters - config.vocab_size * config.hidden_size,
        "flops": sum(phase["flops"] for phase in phases),
        "memory_gb_per_rank": memory_estimate(config, parameters, world_size),
        "device": str(where),
        "dtype": str(amp).removeprefix("torch."),
        "attention": pick_backend(where, amp) if attention == "auto" else attention,
        "model": config.to_dict(),
        "settings": {key: globals()[key] for key in (*IDENTITY, "data_dir", "out_dir", "micro_batch")},
        "torch": torch.__version__,
    }


def memory_estimate(config, parameters, world_size):
    """GB a rank needs with the CUDA kernels, to about 20%: weights, gradients and two moments in fp32 (and DDP's
    gradient buckets), the tensors that a block keeps for its backward pass in bf16, the loss's chunk of logits."""
    c = config
    states = parameters * (16 + 4 * (world_size > 1))
    per_token = c.num_hidden_layers * (25 * c.hidden_size + 8 * c.intermediate_size) + 16 * c.hidden_size
    activations = min(micro_batch, global_batch // world_size) * block_size * per_token
    loss = 2**25 * 10 + c.vocab_size * c.hidden_size * 6
    return round((states + activations + loss) / 1e9, 2)


# ----------------------------------------------------------------------------------------------------------------------
# Data: rows by number, masks by address


def load_data(folder):
    """manifest.json and the two memory-mapped token files of prepare_data.py."""
    path = Path(folder) / "manifest.json"
    if not path.is_file():
        fail(f"--data_dir={folder}: no manifest.json there; run prepare_data.py first, or point at its out_dir")
    manifest = json.loads(path.read_text("utf-8"))
    tokens = {}
    for split, info in manifest["splits"].items():
        file, item = Path(folder) / info["file"], np.dtype(manifest["dtype"]).itemsize
        if not file.is_file() or file.stat().st_size != info["tokens"] * item:
            size = file.stat().st_size if file.is_file() else "no"
            fail(f"--data_dir={folder}: {file.name} has {size} bytes, the manifest says {info['tokens'] * item}")
        tokens[split] = np.memmap(file, dtype=manifest["dtype"], mode="r") if info["tokens"] else np.empty(0)
    for split, needed in (("train", True), ("val", eval_rows > 0)):
        if needed and len(tokens[split]) < block_size:
            fail(
                f"--block_size={block_size}: {split}.bin of {folder} holds {len(tokens[split])} tokens, less than one row; "
                "prepare more text, or choose a smaller block_size" + (" or --eval_rows=0" if split == "val" else "")
            )
    return manifest, tokens


@lru_cache(maxsize=2)
def row_order(n_rows, data_seed, pass_):
    """The order of rows in pass `pass_` over the corpus: a permutation, so each row comes once before any comes twice.
    It depends on data_seed alone: twins read the same rows in the same order (P-214)."""
    return np.random.default_rng([data_seed, pass_]).permutation(n_rows)


def rows_of_samples(first, count, n_rows, data_seed):
    """Samples first .. first + count - 1 of the endless stream -> [(row, pass), ...]."""
    samples = range(first, first + count)
    return [(int(row_order(n_rows, data_seed, i // n_rows)[i % n_rows]), i // n_rows) for i in samples]


@lru_cache(maxsize=1)
def ordinary_ids(vocab_size, special_ids):
    return np.setdiff1d(np.arange(vocab_size), special_ids)


def mask_row(tokens, probability, address, special_ids, mask_id, vocab_size):
    """BERT's corruption of one row (T,): of the chosen positions 80% become [MASK], 10% a random ordinary token, 10%
    stay (P-204). -> inputs (T,), labels (T,) with IGNORE where nothing is predicted.

    Random numbers are addressed, not streamed: `address` (seed, row, pass) alone decides them, so they are the same
    for any number of ranks, any micro-batch, and after a resume."""
    rng = np.random.default_rng(address)
    draw, kind = rng.random(len(tokens)), rng.random(len(tokens))
    ordinary = ordinary_ids(vocab_size, tuple(special_ids))
    replacement = ordinary[rng.integers(0, len(ordinary), len(tokens))]
    chosen = draw < probability
    if not mask_special:
        chosen &= ~np.isin(tokens, special_ids)
    inputs = np.where(chosen & (kind < 0.8), mask_id, tokens)
    inputs = np.where(chosen & (kind >= 0.8) & (kind < 0.9), replacement, inputs)
    return inputs, np.where(chosen, tokens, IGNORE)


def make_batch(data, rows, goal, probability, seed, manifest):
    """rows [(row, pass), ...] of `data` as one flat stream -> dict of tensors: the arguments of the model's call."""
    names = manifest["tokenizer"]
    inputs, labels, starts = [], [], []
    for i, (row, pass_) in enumerate(rows):
        tokens = data[row * block_size : (row + 1) * block_size].astype(np.int64)
        starts.append(i * block_size)
        if mask_documents:  # a sequence begins after every end of document
            ends = np.flatnonzero(tokens[:-1] == names["eos_token_id"]) + 1
            starts.extend(i * block_size + ends)
        if goal == "mlm":
            tokens, targets = mask_row(
                tokens, probability, [seed, row, pass_], names["special_ids"], names["mask_token_id"], names["vocab_size"]
            )
            labels.append(targets)
        inputs.append(tokens)
    cu_seqlens = torch.tensor([*starts, len(rows) * block_size], dtype=torch.int32)
    inputs = torch.from_numpy(np.concatenate(inputs))
    labels = torch.from_numpy(np.concatenate(labels)) if goal == "mlm" else next_token_labels(inputs, cu_seqlens)
    return {
        "input_ids": inputs,
        "labels": labels,
        "cu_seqlens": cu_seqlens,
        "max_seqlen": int(cu_seqlens.diff().max()),
        "is_causal": goal == "clm",
    }


def load_step(data, first_sample, phase, rank, world_size, manifest):
    """One optimizer step of this rank: its micro-batches, their number of targets, and a hash of the rows that all
    ranks together read, which proves in the log that twins saw the same."""
    rows = rows_of_samples(first_sample, global_batch, len(data) // block_size, data_seed)
    digest = hashlib.blake2b(np.array(rows, dtype=np.int64).tobytes(), digest_size=8).hexdigest()
    mine = rows[rank::world_size]
    batches = [
        make_batch(data, mine[i : i + micro_batch], phase["objective"], phase["mask_prob"], seed, manifest)
        for i in range(0, len(mine), micro_batch)
    ]
    return batches, sum(int((b["labels"] != IGNORE).sum()) for b in batches), digest


def to_device(batch, where):
    move = {"device": where, "non_blocking": True}
    return {k: (v.pin_memory() if where.type == "cuda" else v).to(**move) if torch.is_tensor(v) else v for k, v in batch.items()}


# ----------------------------------------------------------------------------------------------------------------------
# One step


def forward_backward(model, batches, n_targets, where, amp_dtype, world_size=1, address=()):
    """Gradients of the mean loss over all targets of the step, over micro-batches and ranks (P-215). n_targets counts
    all of them. -> the sum of this rank's losses, a scalar tensor.

    DDP averages gradients over ranks, so the sum is multiplied back. All but the last micro-batch run under no_sync,
    forward and backward: DDP decides at forward time whether the backward pass communicates."""
    total = torch.zeros((), device=where)
    for i, batch in enumerate(batches):
        last = i == len(batches) - 1
        if address:  # dropout, addressed like the masks
            torch.manual_seed(int.from_bytes(hashlib.blake2b(repr((*address, i)).encode(), digest_size=7).digest(), "big"))
        with nullcontext() if last or world_size == 1 else model.no_sync():
            with torch.autocast(where.type, amp_dtype, enabled=amp_dtype != torch.float32):
                loss_sum = model(**to_device(batch, where)).loss_sum
            (loss_sum * (world_size / max(1, n_targets))).backward()
        total += loss_sum.detach()
    return total


def frozen_parameters(model, layers):
    prefixes = tuple(parse_layers(layers, model.config.num_hidden_layers))
    return [p for name, p in model.named_parameters() if prefixes and name.startswith(prefixes)]


def freeze(parameters, mode):
    """After backward, before clipping and the step. Without a gradient AdamW skips a parameter altogether. With a zero
    gradient, the paper's words, weight decay still shrinks it and kept momentum still moves it (spec §4)."""
    for p in parameters:
        p.grad = None if mode == "skip" or p.grad is None else p.grad.zero_()


def make_optimizer(model):
    """Decoupled AdamW with PyTorch's fused kernel. The paper's rule shrinks weights by weight_decay * lr / peak a
    step; torch shrinks by its own weight_decay * lr, so dividing by the peak makes them the same (P-208).
    All parameters are in the groups, frozen or not, so that the groups are the same in every phase."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": weight_decay / learning_rate},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},  # norms and biases
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), eps=eps, fused=True)


@torch.no_grad()
def evaluate(model, data, goal, manifest, where, amp_dtype, rank=0, world_size=1):
    """Mean loss over the fixed held-out rows: mlm at 15% with fixed masks, or clm. The same for any number of ranks."""
    n_rows = len(data) // block_size
    rows = np.unique(np.linspace(0, n_rows - 1, min(eval_rows, n_rows)).round().astype(int))
    mine = [(int(row), 0) for row in rows][rank::world_size]
    sums = torch.zeros(2, dtype=torch.float32 if where.type == "mps" else torch.float64, device=where)
    was_training = model.training
    model.eval()
    for i in range(0, len(mine), micro_batch):
        batch = make_batch(data, mine[i : i + micro_batch], goal, EVAL_MASK_PROB, EVAL_SEED, manifest)
        with torch.autocast(where.type, amp_dtype, enabled=amp_dtype != torch.float32):
            out = model(**to_device(batch, where))
        sums += torch.stack((out.loss_sum.to(sums), torch.tensor(out.n_targets).to(sums)))
    model.train(was_training)
    if world_size > 1:
        dist.all_reduce(sums)
    return (sums[0] / sums[1].clamp(min=1)).item()


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints


def save_checkpoint(name, model, optimizer, state):
    """out_dir/name, whole or not at all: written beside it, flushed to disk, then renamed."""
    target, part = Path(out_dir) / name, Path(out_dir) / f".{name}.part"
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    for file in (Path(data_dir) / "tokenizer").glob("*"):
        shutil.copy(file, part)
    names = {p: n for n, p in model.named_parameters()}  # by name, never by position
    moments = {names[p]: s for p, s in optimizer.state.items()}
    torch.save({**state, "optimizer": moments}, part / "train_state.pt")
    for file in part.iterdir():
        with open(file, "rb") as f:
            os.fsync(f.fileno())
    if target.exists():
        shutil.rmtree(target)
    os.replace(part, target)
    rolling = sorted(Path(out_dir).glob("step_*"))
    for old in rolling[:-keep_ckpts] if keep_ckpts else []:
        shutil.rmtree(old)


def read_state(folder):
    """train_state.pt of a checkpoint: plain numbers and tensors, nothing is unpickled."""
    try:
        return torch.load(Path(folder) / "train_state.pt", map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        return None
    except Exception as error:
        reason = str(error).split("\n")[0][:100]
        fail(f"--init_from={folder}: train_state.pt is damaged ({reason}); start from another checkpoint")


def newest_checkpoint():
    """The checkpoint of out_dir that has seen most steps."""
    folders = [p.parent for p in Path(out_dir).glob("*/train_state.pt") if not p.parent.name.startswith(".")]
    if not folders:
        fail(f"--init_from=resume: --out_dir={out_dir} holds no checkpoint; start the run without init_from=resume")
    return max(folders, key=lambda p: (read_state(p)["step"], p.name == "final"))


def load_optimizer(optimizer, model, moments, where):
    """Moments by parameter name. A parameter without any (it was frozen so far) starts fresh; they are listed."""
    fresh = []
    for name, p in model.named_parameters():
        if name in moments:
            optimizer.state[p] = {k: v.to(where) for k, v in moments[name].items()}
        else:
            fresh.append(name)
    return fresh


def check_identity(state, plan, folder):
    """A resumed run must be the run that was stopped."""
    changed = [
        f"{key} was {state['settings'][key]}, is {plan['settings'][key]}"
        for key in IDENTITY
        if state["settings"][key] != plan["settings"][key]
    ]
    if state["data"] != plan["data"]:
        changed.append(f"the data in {data_dir} is not the data of that run")
    if changed:
        fail(
            f"--init_from=resume: {folder} belongs to another run: {'; '.join(changed)}. Use the settings of that run, or "
            f"start a new one from its weights with --init_from={folder} and another --out_dir"
        )


def check_tokenizer(folder, data_folder):
    """Token ids mean nothing to a checkpoint that was trained with another vocabulary."""
    files = Path(folder) / "tokenizer.json", Path(data_folder) / "tokenizer" / "tokenizer.json"
    if all(file.is_file() for file in files):
        ours, theirs = (json.loads(file.read_text("utf-8"))["model"].get("vocab") for file in files)
        if ours != theirs:
            fail(
                f"--data_dir={data_folder}: tokenized with another vocabulary than --init_from={folder}; prepare the data "
                f"again with --tokenizer={folder}"
            )


def start_model(manifest, where):
    """-> model on the device, folder of the checkpoint it comes from (None from scratch), its train state or None."""
    if init_from == "scratch":
        torch.manual_seed(seed)
        config = scratch_config(manifest)
        return ModernBERT(config).to(where), None, None
    folder = newest_checkpoint() if init_from == "resume" else init_from
    model = load_model(folder, setting="init_from", attn_out_dropout=dropout).to(where)
    check_tokenizer(folder, data_dir)
    return model, folder, read_state(folder)


def scratch_config(manifest=None):
    names = manifest["tokenizer"] if manifest else {}
    ids = {key: names.get(key) for key in ("cls_token_id", "sep_token_id", "pad_token_id", "mask_token_id")}
    shape = "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size local_attention"
    shape = {key: globals()[key] for key in [*shape.split(), "global_attn_every_n_layers"]}
    try:
        longest = max(block_size, ModernBERTConfig.max_position_embeddings)
        return ModernBERTConfig(**shape, **ids, max_position_embeddings=longest, attn_out_dropout=dropout)
    except ValueError as error:
        fail(f"--{error}")


# ----------------------------------------------------------------------------------------------------------------------
# The loop


class Log:
    """Prints a line a step, appends every event to log.jsonl, and feeds TensorBoard or wandb where asked for."""

    def __init__(self, plan, resumed_step):
        path = Path(out_dir) / "log.jsonl"
        if path.exists():  # steps after the checkpoint are done again: forget their lines
            lines = path.read_text("utf-8").splitlines(keepends=True) if resumed_step else []
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= resumed_step]
            part = path.with_suffix(".part")
            part.write_text("".join(kept), "utf-8")
            os.replace(part, path)
        self.file = open(path, "a", encoding="utf-8", buffering=1)
        self.board = self.run = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                fail("--tensorboard=True: the package is missing; pip install tensorboard, or leave the setting out")
            self.board = SummaryWriter(Path(out_dir) / "tensorboard", purge_step=resumed_step)
        if wandb_project:
            try:
                import wandb
            except ImportError:
                fail(f"--wandb_project={wandb_project}: the package is missing; pip install wandb, or leave the setting out")
            self.run = wandb.init(project=wandb_project, name=Path(out_dir).name, config=plan, resume="allow")

    def write(self, **event):
        self.file.write(json.dumps(event) + "\n")
        numbers = {f"{event['kind']}/{k}": v for k, v in event.items() if isinstance(v, float)}
        for key, value in numbers.items() if self.board else ():
            self.board.add_scalar(key, value, event["step"])
        if self.run:
            self.run.log(numbers, step=event["step"])


def clock(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def crosses(every, before, after):
    return int(after // every) > int(before // every)


def train(plan, manifest, tokens, model, folder, state, where, rank, world_size):
    amp_dtype, phases = getattr(torch, plan["dtype"]), plan["phases"]
    master = rank == 0
    model.backend = plan["attention"]
    optimizer = make_optimizer(model)

    # Where in the timeline do we stand? A fresh run: at 0. A resumed one: where it stopped. A decay that branches off:
    # at 0 of its own schedule, with the optimizer and the place in the data of the checkpoint (P-207, P-312).
    phase_index = phase_step = step = samples = 0
    branch = init_from != "resume" and phase1_tokens == 0 and init_from != "scratch"
    if init_from == "resume":
        check_identity(state, plan, folder)
        phase_index, phase_step = state["phase_index"], state["phase_step"]
        if phase_index == len(phases) and master:
            print(f"{folder}: this run is finished, nothing is left to do")
    if branch and keep_optimizer and (state is None or not state["optimizer"]):
        fail(
            f"--init_from={init_from} --phase1_tokens=0: a decay continues the optimizer of phase 1, and this checkpoint has "
            "no train_state.pt; use a checkpoint of train.py, or --keep_optimizer=False to start a fresh optimizer"
        )
    if init_from == "resume" or (branch and state is not None):
        step = state["step"]
        same_rows = state["data"] == plan["data"] and state["settings"]["block_size"] == block_size
        if same_rows and state["settings"]["data_seed"] == data_seed:
            samples = state["samples"]
        elif master:
            print("note: the checkpoint read other rows (data, block_size or data_seed differ); starting at row 0 of these")
        if init_from == "resume" or keep_optimizer:
            fresh = load_optimizer(optimizer, model, state["optimizer"], where)
            if fresh and master:
                print(f"note: no optimizer state for {', '.join(fresh)}; they start with fresh moments")
    del state

    if compile:
        for layer in model.model.layers:
            layer.compile()  # in place: no new module, no prefix in the names
    runner = model
    if world_size > 1:
        runner = DDP(model, device_ids=[where.index] if where.type == "cuda" else None)
    peak = gpu_peak_tflops(where)

    def snapshot(name):
        if master:
            place = {"phase_index": phase_index, "phase_step": phase_step, "step": step, "samples": samples}
            save_checkpoint(name, model, optimizer, {**place, "settings": plan["settings"], "data": plan["data"]})
            print(f"saved {Path(out_dir) / name}")
        if world_size > 1:
            dist.barrier()

    def held_out(phase):
        if not eval_rows:
            return
        args = (manifest, where, amp_dtype, rank, world_size)
        mlm = evaluate(model, tokens["val"], "mlm", *args)
        clm = evaluate(model, tokens["val"], "clm", *args) if phase["objective"] == "clm" else None
        if master:
            print(f"held out: mlm loss {mlm:.4f}" + (f", clm loss {clm:.4f}" if clm is not None else ""))
            log.write(kind="eval", phase_name=phase["name"], step=step, tokens=step * plan["tokens_per_step"],
                      val_mlm=mlm, val_clm=clm)  # fmt: skip

    log = Log(plan, step) if master else None
    stop = {}  # the signal that asked us to stop, if any
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stop.setdefault("signal", number))
    last_step = step + sum(p["steps"] for p in phases[phase_index:]) - phase_step
    width = len(str(last_step))
    loader = ThreadPoolExecutor(max_workers=1)  # reads and masks the next step while this one computes
    seconds_per_step = None
    if step == 0 or branch:
        held_out(phases[0])
    model.train()

    while phase_index < len(phases):
        phase = phases[phase_index]
        frozen = frozen_parameters(model, phase["frozen"])
        pending = None
        while phase_step < phase["steps"]:
            began = time.perf_counter()
            request = (tokens["train"], samples, phase, rank, world_size, manifest)
            batches, n_targets, rows_hash = pending.result() if pending else load_step(*request)
            pending = loader.submit(load_step, request[0], samples + global_batch, *request[2:])
            n_targets = int(all_reduce_sum(torch.tensor([float(n_targets)], dtype=torch.float64), where, world_size)[0])

            lr = get_lr(phase, phase_step)
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss_sum = forward_backward(runner, batches, n_targets, where, amp_dtype, world_size, (seed, samples, rank))
            freeze(frozen, freeze_mode)
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            grad_norm = torch.nn.utils.get_total_norm(grads)
            if grad_clip:
                torch.nn.utils.clip_grads_with_norm_(model.parameters(), grad_clip, grad_norm)
            sums = torch.tensor([loss_sum.item(), float(bool(stop))], dtype=torch.float64)
            loss, stopping = all_reduce_sum(sums, where, world_size).tolist()
            loss /= max(1, n_targets)
            if not math.isfinite(loss) or not math.isfinite(grad_norm.item()):
                fail(
                    f"step {step + 1}: loss {loss}, gradient norm {grad_norm.item()}: expected finite numbers. The weights "
                    f"of the last checkpoint in {out_dir} are good; lower --learning_rate or set --grad_clip=1.0"
                )
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

            step, phase_step, samples = step + 1, phase_step + 1, samples + global_batch
            seconds = time.perf_counter() - began
            seconds_per_step = seconds if seconds_per_step is None else 0.9 * seconds_per_step + 0.1 * seconds
            speed, seen = plan["tokens_per_step"] / seconds, step * plan["tokens_per_step"]
            mfu = speed * phase["flops_per_token"] / (peak * 1e12 * world_size) if peak else None
            if master:
                log.write(
                    kind="step", phase=phase_index + 1, phase_name=phase["name"], objective=phase["objective"], step=step,
                    phase_step=phase_step, tokens=seen, loss=loss, lr=lr, grad_norm=grad_norm.item(), tok_per_s=speed,
                    mfu=mfu, targets=n_targets, rows_hash=rows_hash,
                )  # fmt: skip
                if step % log_every == 0 or phase_step == phase["steps"]:
                    print(
                        f"{phase['name']:6} {phase['objective']}  step {step:{width}}/{last_step}  loss {loss:7.4f}  "
                        f"grad {grad_norm.item():6.3f}  lr {lr:.2e}  {speed / 1e3:7.1f}k tok/s  "
                        + (f"mfu {mfu:5.1%}  " if mfu else "")
                        + f"left {clock(seconds_per_step * (last_step - step))}",
                        flush=True,
                    )
            done = phase_step == phase["steps"]
            if done or crosses(eval_every_tokens, seen - plan["tokens_per_step"], seen):
                held_out(phase)
            if stopping:
                snapshot(f"step_{step:08d}")
                if master:
                    print(f"stopped by a signal after step {step}; go on with --init_from=resume", file=sys.stderr)
                loader.shutdown(cancel_futures=True)
                return 128 + stop.get("signal", signal.SIGTERM)
            if not done and crosses(ckpt_every_tokens, seen - plan["tokens_per_step"], seen):
                snapshot(f"step_{step:08d}")
        phase_index, phase_step = phase_index + 1, 0
        snapshot("final" if phase_index == len(phases) else phase["name"])
    loader.shutdown(cancel_futures=True)
    return 0


def all_reduce_sum(numbers, where, world_size):
    """Sum a small CPU tensor of numbers over all ranks."""
    if world_size == 1:
        return numbers
    numbers = numbers.to(where)
    dist.all_reduce(numbers)
    return numbers.cpu()


def main():
    global out_dir
    out_dir = out_dir.format(objective=objective, seed=seed)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    check_settings(world_size)
    where = choose_device(int(os.environ.get("LOCAL_RANK", 0)))
    if dry_run:
        folder = Path(init_from)
        local = (folder / "config.json").is_file()
        config = ModernBERTConfig.from_dict(json.loads((folder / "config.json").read_text())) if local else scratch_config()
        print(json.dumps(make_plan(config, where, world_size), indent=2))
        return 0
    if where.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        where = torch.device("cuda", torch.cuda.current_device())
        torch.backends.cuda.matmul.allow_tf32 = True
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if where.type == "cuda" else "gloo")

    holds_run = any(Path(out_dir).glob("*/train_state.pt")) or (Path(out_dir) / "log.jsonl").exists()
    if init_from != "resume" and holds_run and not overwrite:
        fail(
            f"--out_dir={out_dir}: already holds a run; continue it with --init_from=resume, choose another out_dir, or "
            "throw it away with --overwrite=True"
        )
    manifest, tokens = load_data(data_dir)
    model, folder, state = start_model(manifest, where)
    if manifest["tokenizer"]["vocab_size"] > model.config.vocab_size:
        fail(
            f"--data_dir={data_dir}: its tokenizer has {manifest['tokenizer']['vocab_size']} tokens, the model only "
            f"{model.config.vocab_size}; prepare the data with the model's own tokenizer, or set --vocab_size"
        )
    plan = make_plan(model.config, where, world_size)
    plan["data"] = manifest["splits"]["train"]["sha256"]
    if rank == 0:
        if init_from != "resume" and holds_run:
            for old in Path(out_dir).glob("*/train_state.pt"):
                shutil.rmtree(old.parent)
            (Path(out_dir) / "log.jsonl").unlink(missing_ok=True)
        Path(out_dir).mkdir(parents=True, exist_ok=True)
        if init_from != "resume":
            (Path(out_dir) / "plan.json").write_text(json.dumps(plan, indent=2) + "\n", "utf-8")
        describe(plan, len(tokens["train"]) // block_size)
    if world_size > 1:
        dist.barrier()
    code = train(plan, manifest, tokens, model, folder, state, where, rank, world_size)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def describe(plan, n_rows):
    print(
        f"{plan['parameters'] / 1e6:.1f}M parameters from {plan['init_from']}, {plan['world_size']} x {plan['device']}, "
        f"{plan['dtype']}, attention: {plan['attention']}"
    )
    print(
        f"{plan['tokens_per_step']:,} tokens a step = {plan['world_size']} ranks x {plan['grad_accum']} micro-batches x "
        f"{plan['micro_batch']} rows x {block_size}"
    )
    for phase in plan["phases"]:
        rate = f" at {phase['mask_prob']:.0%}" if phase["mask_prob"] else ""
        frozen = f", layers {phase['frozen']} frozen ({freeze_mode})" if phase["frozen"] else ""
        print(
            f"{phase['name']}: {phase['objective']}{rate}, {phase['steps']:,} steps, {phase['warmup_steps']} of warmup, "
            f"{phase['steps'] * global_batch / n_rows:.2f} passes over the rows{frozen}"
        )


if __name__ == "__main__":
    configure(globals())
    sys.exit(main())
