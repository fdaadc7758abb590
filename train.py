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
from dataclasses import asdict, dataclass
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
    find_checkpoint,
    flash_attn_varlen_func,
    load_model,
    next_token_labels,
    peak_tflops_of,
    pick_backend,
    varlen_attn,
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
phase1_tokens = 10_000_000_000  # length of phase 1
decay_tokens = 1_000_000_000  # length of the decay, 10% of phase 1 in the paper
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
warmup_tokens = 100_000_000  # linear warmup at the start of phase 1, none in the decay, P-205
final_lr_fraction = 0.1  # the decay ends at this share of the peak, P-206
beta1 = 0.9  # P-208
beta2 = 0.98  # P-208
eps = 1e-6  # P-208
weight_decay = 1e-5  # decoupled: a step shrinks weights by weight_decay * lr / peak, P-208
grad_clip = 0.0  # maximal gradient norm; 0 = off, P-211
dropout = 0.1  # on the attention output, P-105; 0 makes runs independent of the number of ranks to the last digits

# freezing (paper §3.3)
freeze_layers = ""  # e.g. 0-7 or 0-3,9,embeddings (with the tied decoder matrix); from 0, ends included
freeze_phase = "both"  # phase1 | decay | both
freeze_mode = "skip"  # skip = weights stay bit-identical | zero_grad = the paper's words, which do not keep them

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
eval_every_tokens = 200_000_000  # held-out loss; also at the start and the end of each phase
eval_rows = 64  # fixed rows of val.bin with fixed masks at 15%, so that curves of all runs compare; 0 = never
log_every = 1  # steps between printed lines; log.jsonl has every step
ckpt_every_tokens = 500_000_000  # also at the end of each phase and on SIGTERM or Ctrl-C
keep_ckpts = 2  # how many step_* checkpoints to keep; 0 = all of them, for trajectories
tensorboard = False  # True: also write out_dir/tensorboard (pip install tensorboard)
wandb_project = ""  # also log to this Weights & Biases project (pip install wandb)

EVAL_SEED = 0  # masks of the held-out rows: one fixed value, so that seeds and runs can be compared
EVAL_MASK_PROB = 0.15  # ModernBERT's own evaluation rate

# Settings that change what is computed. A resumed run must have the same, or it would be another run.
IDENTITY = """objective phase1_tokens decay_tokens decay_objective mask_prob decay_mask_prob mask_special block_size
    global_batch mask_documents learning_rate warmup_tokens final_lr_fraction beta1 beta2 eps weight_decay grad_clip
    dropout freeze_layers freeze_phase freeze_mode seed data_seed""".split()


def fail(message):
    """One line on stderr and exit code 1; under torchrun only rank 0 speaks."""
    raise SystemExit(f"train.py: {message}" if os.environ.get("RANK", "0") == "0" else 1)


@dataclass
class Machine:
    """What this process computes on. All ranks together make one step."""

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype  # of matrix products; weights, optimizer and losses are fp32

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def sum(self, *numbers):
        """Numbers of this rank -> their sums over all ranks, as floats."""
        if self.world_size == 1:
            return numbers
        kind = torch.float32 if self.device.type == "mps" else torch.float64
        sums = torch.tensor(numbers, dtype=kind, device=self.device)
        dist.all_reduce(sums)
        return sums.tolist()

    def load(self, batch):
        pin = self.device.type == "cuda"  # a copy from pinned memory does not wait
        return {
            k: (v.pin_memory() if pin else v).to(self.device, non_blocking=pin) if torch.is_tensor(v) else v
            for k, v in batch.items()
        }


def find_machine():
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))  # set by torchrun
    if device == "cuda" and not torch.cuda.is_available():
        fail("--device=cuda: PyTorch sees no GPU here; use --device=cpu, or install a CUDA build of torch")
    where = default_device() if device == "auto" else torch.device(device)
    if where.type == "cuda":
        if local_rank >= torch.cuda.device_count():  # said by that rank itself: rank 0 has its GPU
            raise SystemExit(f"train.py: --nproc_per_node: expected one rank a GPU, there is no GPU {local_rank} here")
        where = torch.device("cuda", local_rank)
        torch.cuda.set_device(where)
    kind = default_dtype(where) if dtype == "auto" else getattr(torch, dtype)
    return Machine(rank, int(os.environ.get("WORLD_SIZE", 1)), where, kind)


# ----------------------------------------------------------------------------------------------------------------------
# The plan: everything that can be known before the first step


def check_settings(world_size):
    def check(key, fine, expected):
        if not fine:
            fail(f"--{key}={globals()[key]}: expected {expected}")

    for key, choices in {
        "objective": ("clm", "mlm"),
        "decay_objective": ("clm", "mlm"),
        "freeze_phase": ("phase1", "decay", "both"),
        "freeze_mode": ("skip", "zero_grad"),
        "device": ("auto", "cpu", "cuda", "mps"),
        "dtype": ("auto", "bfloat16", "float32"),
        "attention": ("auto", "flash_attn", "varlen_attn", "sdpa"),
    }.items():
        check(key, globals()[key] in choices, "one of " + ", ".join(choices))
    for key in ("mask_prob", "decay_mask_prob"):
        check(key, 0 < globals()[key] < 1, "a share between 0 and 1, such as 0.3")
    for key in "global_batch micro_batch learning_rate log_every eval_every_tokens ckpt_every_tokens".split():
        check(key, globals()[key] > 0, "a number above 0")
    numbers = "phase1_tokens decay_tokens warmup_tokens weight_decay grad_clip eval_rows keep_ckpts seed data_seed"
    for key in numbers.split():
        check(key, globals()[key] >= 0, "0 or more")
    check("dropout", 0 <= dropout < 1, "0 or more, and below 1")
    check("block_size", block_size >= 2, "2 or more tokens: a next token needs one before it")
    check("decay_tokens", phase1_tokens or decay_tokens, "tokens in at least one phase, and phase1_tokens is 0 too")
    fits = max(1, global_batch // world_size) * world_size
    what = f"a multiple of the {world_size} ranks, such as {fits}, so that a step is the same for any number of them"
    check("global_batch", global_batch % world_size == 0, what)


def parse_layers(text, n_layers):
    """'0-2,9,embeddings' -> ['model.layers.0.', ..., 'model.embeddings.']: prefixes of parameter names."""
    prefixes = []
    for part in filter(None, (p.strip() for p in str(text).split(","))):
        first, _, last = part.partition("-")
        last = last or first
        if part == "embeddings":
            prefixes.append("model.embeddings.")
        elif first.isdigit() and last.isdigit() and int(first) <= int(last) < n_layers:
            prefixes += [f"model.layers.{i}." for i in range(int(first), int(last) + 1)]
        else:
            what = f"a layer of 0-{n_layers - 1}, a range such as 0-7, or embeddings"
            fail(f"--freeze_layers={text}: {part!r}: expected {what}")
    return prefixes


def make_phases():
    """The timeline. Steps are rounded up: a phase ends with the first step that reaches its budget (A-02)."""
    tokens_per_step = global_batch * block_size
    phases = []
    for name, goal, tokens, rate in (
        ("phase1", objective, phase1_tokens, mask_prob),
        ("decay", decay_objective, decay_tokens, decay_mask_prob),
    ):
        phases.append(
            {
                "name": name,
                "objective": goal,
                "mask_prob": rate if goal == "mlm" else None,
                "tokens": tokens,
                "steps": math.ceil(tokens / tokens_per_step),
                "warmup_steps": math.ceil(warmup_tokens / tokens_per_step) if name == "phase1" else 0,
                "frozen": freeze_layers if freeze_phase in (name, "both") else "",
            }
        )
    return [phase for phase in phases if phase["steps"]]


def get_lr(phase, step):
    """Learning rate of step `step` (from 0) of a phase. Phase 1 warms up and stays (P-205); the first step is not
    wasted at 0. The decay is peak * (f + (1 - f) * (1 - sqrt(t / T))) with t tokens seen of T, the affine reading of
    P-206: it starts at the peak and reaches f * peak at t = T."""
    if phase["name"] == "phase1":
        return learning_rate * min(1.0, (step + 1) / max(1, phase["warmup_steps"]))
    t = min(1.0, step * global_batch * block_size / phase["tokens"])
    return learning_rate * (final_lr_fraction + (1 - final_lr_fraction) * (1 - math.sqrt(t)))


def make_plan(config, machine):
    """The resolved run as plain data: printed by --dry_run, stored as plan.json."""
    phases = make_phases()
    parse_layers(freeze_layers, config.num_hidden_layers)
    kernels = {"flash_attn": flash_attn_varlen_func, "varlen_attn": varlen_attn}
    half = machine.device.type == "cuda" and machine.dtype == torch.bfloat16
    if attention in kernels and not (half and kernels[attention]):
        what = "a CUDA device, bfloat16 and that package, or --attention=auto, which takes what fits"
        fail(f"--attention={attention}: expected {what}")
    with torch.device("meta"):  # the shape alone, no memory
        shape = ModernBERT(config)
    parameters = sum(p.numel() for p in shape.parameters())
    for phase in phases:
        share = 1.0 if phase["objective"] == "clm" else phase["mask_prob"]
        phase["flops_per_token"] = shape.flops_per_token(block_size, phase["objective"] == "clm", share)
        phase["flops"] = phase["flops_per_token"] * phase["steps"] * global_batch * block_size
        phase["lr_first_step"], phase["lr_at_end"] = get_lr(phase, 0), get_lr(phase, phase["steps"])
    rows = global_batch // machine.world_size
    return {
        "init_from": init_from,
        "tokens_per_step": global_batch * block_size,
        "steps": sum(phase["steps"] for phase in phases),
        "phases": phases,
        "world_size": machine.world_size,
        "micro_batch": min(micro_batch, rows),
        "grad_accum": math.ceil(rows / micro_batch),
        "parameters": parameters,
        "parameters_without_embeddings": parameters - config.vocab_size * config.hidden_size,
        "flops": sum(phase["flops"] for phase in phases),
        "memory_gb_per_rank": memory_estimate(config, parameters, machine.world_size),
        "device": str(machine.device),
        "dtype": str(machine.dtype).removeprefix("torch."),
        "attention": pick_backend(machine.device, machine.dtype) if attention == "auto" else attention,
        "model": config.to_dict(),
        "settings": {key: globals()[key] for key in (*IDENTITY, "data_dir", "out_dir", "micro_batch")},
        "torch": torch.__version__,
    }


def memory_estimate(config, parameters, world_size):
    """GB that a rank needs with the CUDA kernels, roughly: weights, gradients and two moments in fp32, DDP's gradient
    buckets, the tensors that a block keeps for its backward pass under bf16, and the loss's chunk of logits."""
    c = config
    states = parameters * (16 + 4 * (world_size > 1))
    per_token = c.num_hidden_layers * (25 * c.hidden_size + 8 * c.intermediate_size) + 16 * c.hidden_size
    activations = min(micro_batch, global_batch // world_size) * block_size * per_token
    loss = 2**25 * 10 + c.vocab_size * c.hidden_size * 6
    return round((states + activations + loss) / 1e9, 2)


def describe(plan, n_rows):
    shape = f"{plan['parameters'] / 1e6:.1f}M parameters from {plan['init_from']}"
    print(f"{shape}, {plan['world_size']} x {plan['device']}, {plan['dtype']}, attention: {plan['attention']}")
    ranks = f"{plan['world_size']} ranks x {plan['grad_accum']} micro-batches x {plan['micro_batch']} rows"
    print(f"{plan['tokens_per_step']:,} tokens a step = {ranks} x {block_size}")
    for phase in plan["phases"]:
        if phase["warmup_steps"] > phase["steps"]:
            print(f"note: --warmup_tokens={warmup_tokens} is longer than phase 1, which never reaches the peak")
        rate = f" at {phase['mask_prob']:.0%}" if phase["mask_prob"] else ""
        frozen = f", frozen ({freeze_mode}): {phase['frozen']}" if phase["frozen"] else ""
        passes = phase["steps"] * global_batch / n_rows
        steps = f"{phase['steps']:,} steps, {phase['warmup_steps']} of warmup"
        print(f"{phase['name']}: {phase['objective']}{rate}, {steps}, {passes:.2f} passes over the rows{frozen}")


# ----------------------------------------------------------------------------------------------------------------------
# Data: rows by number, masks by address


def load_data(folder):
    """manifest.json and the two memory-mapped token files of prepare_data.py."""
    path = Path(folder) / "manifest.json"
    if not path.is_file():
        fail(f"--data_dir={folder}: no manifest.json there; run prepare_data.py first, or point at its out_dir")
    manifest = json.loads(path.read_text("utf-8"))
    kind, tokens = np.dtype(manifest["dtype"]), {}
    for split, info in manifest["splits"].items():
        file, size = Path(folder) / info["file"], info["tokens"] * kind.itemsize
        if not file.is_file() or file.stat().st_size != size:
            found = f"{file.stat().st_size} bytes" if file.is_file() else "nothing"
            fail(f"--data_dir={folder}: {file.name}: the manifest says {size} bytes, found {found}; prepare it again")
        tokens[split] = np.memmap(file, dtype=kind, mode="r") if size else np.empty(0, kind)
    for split, way_out in (("train", ""), ("val", ", or set --eval_rows=0")):
        if len(tokens[split]) < block_size and (split == "train" or eval_rows):
            what = f"{split}.bin of {folder} holds {len(tokens[split])} tokens, less than one row"
            fail(f"--block_size={block_size}: {what}; prepare more text, choose a smaller block_size{way_out}")
    return manifest, tokens


@lru_cache(maxsize=2)
def row_order(n_rows, data_seed, pass_):
    """The order of rows in pass `pass_` over the corpus: a permutation, each row comes once before any comes twice.
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
    """rows [(row, pass), ...] of `data` as one flat stream -> the arguments of the model's call."""
    names = manifest["tokenizer"]
    mask_args = names["special_ids"], names["mask_token_id"], names["vocab_size"]
    inputs, labels, starts = [], [], []
    for i, (row, pass_) in enumerate(rows):
        tokens = data[row * block_size : (row + 1) * block_size].astype(np.int64)
        starts.append(i * block_size)
        if mask_documents:  # a sequence begins after every end of document
            starts.extend(i * block_size + np.flatnonzero(tokens[:-1] == names["eos_token_id"]) + 1)
        if goal == "mlm":
            tokens, targets = mask_row(tokens, probability, [seed, row, pass_], *mask_args)
            labels.append(targets)
        inputs.append(tokens)
    cu_seqlens = torch.tensor([*starts, len(rows) * block_size], dtype=torch.int32)
    inputs = torch.from_numpy(np.concatenate(inputs))
    labels = torch.from_numpy(np.concatenate(labels)) if goal == "mlm" else next_token_labels(inputs, cu_seqlens)
    longest = int(cu_seqlens.diff().max())
    args = {"input_ids": inputs, "labels": labels, "cu_seqlens": cu_seqlens, "max_seqlen": longest}
    return {**args, "is_causal": goal == "clm"}


def load_step(data, first_sample, phase, machine, manifest):
    """One optimizer step of this rank: its micro-batches, their number of targets, and a hash of the rows that all
    ranks together read, which proves in the log that twins saw the same."""
    rows = rows_of_samples(first_sample, global_batch, len(data) // block_size, data_seed)
    digest = hashlib.blake2b(np.array(rows, dtype=np.int64).tobytes(), digest_size=8).hexdigest()
    mine = rows[machine.rank :: machine.world_size]
    batches = [
        make_batch(data, mine[i : i + micro_batch], phase["objective"], phase["mask_prob"], seed, manifest)
        for i in range(0, len(mine), micro_batch)
    ]
    return batches, sum(int((b["labels"] != IGNORE).sum()) for b in batches), digest


# ----------------------------------------------------------------------------------------------------------------------
# One step


def make_optimizer(model):
    """Decoupled AdamW with PyTorch's fused kernel. The paper's rule shrinks weights by weight_decay * lr / peak a
    step; torch shrinks by its own weight_decay * lr, so dividing by the peak makes them the same (P-208).
    All parameters are in the groups, frozen or not, so that the groups are the same in every phase."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": weight_decay / learning_rate},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},  # norms and biases
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), eps=eps, fused=True)


def forward_backward(model, batches, n_targets, machine, address=()):
    """Gradients of the mean loss over all targets of the step, over micro-batches and ranks (P-215). n_targets counts
    all of them. -> the sum of this rank's losses.

    DDP averages gradients over ranks, so the sum is multiplied back. All but the last micro-batch run under no_sync,
    forward and backward: DDP decides at forward time whether the backward pass communicates."""
    total = torch.zeros((), device=machine.device)
    for i, batch in enumerate(batches):
        if address:  # dropout, addressed like the masks
            digest = hashlib.blake2b(repr((*address, i)).encode(), digest_size=7).digest()
            torch.manual_seed(int.from_bytes(digest, "big"))
        waits = machine.world_size > 1 and i < len(batches) - 1
        with model.no_sync() if waits else nullcontext():
            with machine.autocast():
                loss_sum = model(**machine.load(batch)).loss_sum
            (loss_sum * (machine.world_size / max(1, n_targets))).backward()
        total += loss_sum.detach()
    return total.item()


def freeze(model, layers):
    """After backward, before clipping and the step (P-406). Without a gradient AdamW skips a parameter altogether.
    With a zero gradient, the paper's words, weight decay still shrinks it and kept momentum still moves it."""
    prefixes = tuple(parse_layers(layers, model.config.num_hidden_layers))
    for name, p in model.named_parameters() if prefixes else ():
        if name.startswith(prefixes):
            p.grad = None if freeze_mode == "skip" else torch.zeros_like(p)


@torch.no_grad()
def evaluate(model, data, goal, manifest, machine):
    """Mean loss over the fixed held-out rows: mlm at 15% with fixed masks, or clm. The same for any number of ranks."""
    n_rows = len(data) // block_size
    rows = np.unique(np.linspace(0, n_rows - 1, min(eval_rows, n_rows)).round().astype(int))
    mine = [(int(row), 0) for row in rows][machine.rank :: machine.world_size]
    loss_sum, n_targets, was_training = 0.0, 0, model.training
    model.eval()
    for i in range(0, len(mine), micro_batch):
        batch = make_batch(data, mine[i : i + micro_batch], goal, EVAL_MASK_PROB, EVAL_SEED, manifest)
        with machine.autocast():
            out = model(**machine.load(batch))
        loss_sum, n_targets = loss_sum + out.loss_sum.item(), n_targets + out.n_targets
    model.train(was_training)
    loss_sum, n_targets = machine.sum(loss_sum, n_targets)
    return loss_sum / max(1, n_targets)


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints


@dataclass
class Place:
    """Where in the timeline a run stands."""

    phase: int = 0  # index into plan["phases"]
    phase_step: int = 0  # steps done in this phase: what the schedule counts
    step: int = 0  # steps done in all: what the log counts
    samples: int = 0  # rows read: where in the data


def save_checkpoint(name, model, optimizer, place, plan):
    """out_dir/name, whole or not at all: written beside it, flushed to disk, then renamed."""
    target, part = Path(out_dir) / name, Path(out_dir) / f".{name}.part"
    shutil.rmtree(part, ignore_errors=True)
    names = {p: n for n, p in model.named_parameters()}  # by name, never by position
    moments = {names[p]: moments for p, moments in optimizer.state.items()}
    state = {"place": asdict(place), "settings": plan["settings"], "data": plan["data"]}
    try:
        model.save_pretrained(part)
        for file in (Path(data_dir) / "tokenizer").glob("*"):
            shutil.copy(file, part)
        torch.save({**state, "optimizer": moments}, part / "train_state.pt")
        for file in part.iterdir():
            with open(file, "rb") as f:
                os.fsync(f.fileno())
    except Exception as error:  # OSError, or the words that safetensors and torch have for a full disk
        shutil.rmtree(part, ignore_errors=True)
        fail(f"--out_dir={out_dir}: checkpoint {name} was not written ({error}); make room, then --init_from=resume")
    old = Path(out_dir) / f".{name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.replace(target, old)
    os.replace(part, target)
    shutil.rmtree(old, ignore_errors=True)
    rolling = sorted(Path(out_dir).glob("step_*"))
    for old in rolling[:-keep_ckpts] if keep_ckpts else []:
        shutil.rmtree(old, ignore_errors=True)
    print(f"saved {target}")


def read_state(folder):
    """train_state.pt of a checkpoint, None if it has none. Plain numbers and tensors: nothing is unpickled."""
    try:
        return torch.load(Path(folder) / "train_state.pt", map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        return None
    except Exception as error:
        reason = str(error).split("\n")[0][:100]
        fail(f"--init_from={folder}: train_state.pt is damaged ({reason}); move that directory away and resume, "
             "or start from another checkpoint")


def newest_checkpoint():
    """The checkpoint of out_dir that has seen most steps."""
    folders = [p.parent for p in Path(out_dir).glob("[!.]*/train_state.pt")]
    if not folders:
        fail(f"--init_from=resume: --out_dir={out_dir} holds no checkpoint; start the run without init_from=resume")
    return max(folders, key=lambda p: (read_state(p)["place"]["step"], p.name == "final"))


def start_model(manifest, machine):
    """-> the model on its device, the folder it comes from and its train state (None from scratch)."""
    if init_from == "scratch":
        torch.manual_seed(seed)
        return ModernBERT(scratch_config(manifest["tokenizer"])).to(machine.device), None, None
    folder = newest_checkpoint() if init_from == "resume" else init_from
    model = load_model(folder, setting="init_from", attn_out_dropout=dropout).to(machine.device)
    folder = find_checkpoint(str(folder))  # a hub id -> where it was downloaded to
    files = Path(folder) / "tokenizer.json", Path(data_dir) / "tokenizer" / "tokenizer.json"
    if all(file.is_file() for file in files):  # token ids mean nothing to a model of another vocabulary
        ours, theirs = (json.loads(file.read_text("utf-8"))["model"].get("vocab") for file in files)
        if ours != theirs:
            fail(f"--data_dir={data_dir}: tokenized with another vocabulary than that of --init_from={folder}; prepare "
                 f"the data again with --tokenizer={folder}")
    return model, folder, read_state(folder)


def check_tokenizer(names, phases):
    """Does the data's tokenizer have the tokens that the run needs?"""
    if names["mask_token_id"] is None and any(phase["objective"] == "mlm" for phase in phases):
        fail(f"--data_dir={data_dir}: its tokenizer has no mask token; expected --objective=clm with --decay_tokens=0")
    if mask_documents and names["eos_token_id"] is None:
        fail(f"--mask_documents=True: the tokenizer of {data_dir} has no token that ends a document")


def scratch_config(ids):
    ids = {key: ids.get(key) for key in ("cls_token_id", "sep_token_id", "pad_token_id", "mask_token_id")}
    shape = "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size local_attention"
    shape = {key: globals()[key] for key in (*shape.split(), "global_attn_every_n_layers")}
    longest = max(block_size, ModernBERTConfig.max_position_embeddings)
    try:
        return ModernBERTConfig(**shape, **ids, max_position_embeddings=longest, attn_out_dropout=dropout)
    except ValueError as error:
        fail(f"--{error}")


def branches_off():
    """Is this run a decay of its own, from a checkpoint of another run (Table 7)?"""
    return init_from not in ("resume", "scratch") and phase1_tokens == 0


def restore(state, folder, plan, model, optimizer, rank):
    """Where does this run begin? A fresh one: at the start. A resumed one: where it stopped. A decay that branches off
    (phase1_tokens=0): at the start of its own schedule, with the optimizer and the place in the data of the checkpoint
    (P-207, P-312). Fills the optimizer's moments. -> Place"""
    resume, branch = init_from == "resume", branches_off()
    if not state or not (resume or branch):
        return Place()
    changed = [
        f"{key} was {old}, is {plan['settings'][key]}"
        for key, old in state["settings"].items()
        if key in IDENTITY and old != plan["settings"][key]
    ]
    if state["data"] != plan["data"]:
        changed.append(f"the data in {data_dir} is other data")
    if resume and changed:
        fail(f"--init_from=resume: {folder} belongs to another run: {'; '.join(changed)}. Use that run's settings, or "
             f"start a new run from its weights with --init_from={folder} and another --out_dir")

    place = Place(**state["place"])
    if branch:
        place.phase = place.phase_step = 0
        same_rows = [state["settings"][key] == plan["settings"][key] for key in ("block_size", "data_seed")]
        if state["data"] != plan["data"] or not all(same_rows):
            place.samples = 0
            if rank == 0:
                print("note: other data, block_size or data_seed than the checkpoint's; reading from the start")
    if resume or keep_optimizer:
        moments = state["optimizer"]
        for name, p in model.named_parameters():
            if name in moments:
                optimizer.state[p] = {k: v.to(p.device) for k, v in moments[name].items()}
        fresh = [name for name, _ in model.named_parameters() if name not in moments]
        if fresh and rank == 0:  # frozen so far
            print(f"note: no optimizer state for {', '.join(fresh)}; they start with fresh moments")
    return place


# ----------------------------------------------------------------------------------------------------------------------
# The loop


class Log:
    """Appends every event to log.jsonl, and feeds TensorBoard or wandb where asked for."""

    def __init__(self, plan, step):
        path = Path(out_dir) / "log.jsonl"
        if path.exists():  # steps after the checkpoint are done again: forget their lines
            lines = path.read_text("utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            path.with_suffix(".part").write_text("".join(kept), "utf-8")
            os.replace(path.with_suffix(".part"), path)
        self.file = open(path, "a", encoding="utf-8", buffering=1)
        self.board = self.run = None
        try:
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(Path(out_dir) / "tensorboard", purge_step=step)
            if wandb_project:
                import wandb

                self.run = wandb.init(project=wandb_project, name=Path(out_dir).name, config=plan, resume="allow")
        except ImportError as error:
            key = "wandb_project" if tensorboard is False or self.board else "tensorboard"
            fail(f"--{key}={globals()[key]}: {error}; pip install {key.split('_')[0]}, or leave the setting out")

    def write(self, **event):
        self.file.write(json.dumps(event) + "\n")
        numbers = {f"{event['kind']}/{k}": v for k, v in event.items() if isinstance(v, float)}
        for key, value in numbers.items() if self.board else ():
            self.board.add_scalar(key, value, event["step"])
        if self.run:
            self.run.log(numbers, step=event["step"])


def print_step(event, last_step, seconds_left):
    minutes, seconds = divmod(int(seconds_left), 60)
    print(
        f"{event['phase_name']:6} {event['objective']}  step {event['step']:{len(str(last_step))}}/{last_step}  "
        f"loss {event['loss']:7.4f}  grad {event['grad_norm']:6.3f}  lr {event['lr']:.2e}  "
        f"{event['tok_per_s'] / 1e3:7.1f}k tok/s  " + (f"mfu {event['mfu']:5.1%}  " if event["mfu"] else "")
        + f"left {minutes // 60}:{minutes % 60:02}:{seconds:02}",
        flush=True,
    )


def train(plan, manifest, tokens, model, folder, state, machine):
    """-> exit code: 0, or 128 + the number of the signal that stopped the run."""
    phases, master = plan["phases"], machine.rank == 0
    peak, gpu_name = (peak_tflops, "--peak_tflops") if peak_tflops else peak_tflops_of(machine.device)
    if peak and master:
        print(f"mfu is the share of {peak:g} TFLOP/s ({gpu_name}) on each device")
    optimizer = make_optimizer(model)
    place = restore(state, folder, plan, model, optimizer, machine.rank)
    if place.phase == len(phases):
        if master:
            print(f"{folder}: this run is finished, nothing is left to do")
        return 0
    last_step = place.step + sum(p["steps"] for p in phases[place.phase :]) - place.phase_step

    model.backend = plan["attention"]
    if compile:
        torch._dynamo.config.recompile_limit = 64  # 3 kinds of block x causal or not x train or eval, beyond its 8
        for layer in model.model.layers:
            layer.compile()  # in place: no new module, no prefix in the names
    gpu = [machine.device.index] if machine.device.type == "cuda" else None
    runner = DDP(model, device_ids=gpu) if machine.world_size > 1 else model
    log = Log(plan, place.step) if master else None
    loader = ThreadPoolExecutor(max_workers=1)  # reads and masks the next step while this one computes
    signals = []  # those that asked us to stop

    def on_signal(number, frame):
        signals.append(number)
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
        if master:
            os.write(2, b"stopping after this step; once more to stop now, without saving\n")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)

    def save(name):
        if master:
            save_checkpoint(name, model, optimizer, place, plan)
        if machine.world_size > 1:
            dist.barrier()

    def hold_out(phase):
        if eval_rows:
            maskable = manifest["tokenizer"]["mask_token_id"] is not None
            mlm = evaluate(model, tokens["val"], "mlm", manifest, machine) if maskable else None
            causal = phase["objective"] == "clm"
            clm = evaluate(model, tokens["val"], "clm", manifest, machine) if causal else None
            if master:
                losses = {"mlm": mlm, "clm": clm}.items()
                print("held out: " + ", ".join(f"{name} loss {loss:.4f}" for name, loss in losses if loss is not None))
                seen = place.step * plan["tokens_per_step"]
                log.write(kind="eval", phase_name=phase["name"], step=place.step, tokens=seen, val_mlm=mlm, val_clm=clm)

    def take_step(phase, batches, targets):
        """-> what the log says of it"""
        lr = get_lr(phase, place.phase_step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss_sum = forward_backward(runner, batches, targets, machine, (seed, place.samples, machine.rank))
        freeze(model, phase["frozen"])
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        loss, grad_norm = machine.sum(loss_sum)[0] / max(1, targets), norm.item()
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            fail(f"step {place.step + 1}: loss {loss}, gradient norm {grad_norm}: expected finite numbers; the last "
                 f"checkpoint in {out_dir} is good, start from it with a lower --learning_rate or --grad_clip=1.0")
        if grad_clip:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), grad_clip, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"loss": loss, "lr": lr, "grad_norm": grad_norm, "targets": targets}

    if place.phase_step == 0 and init_from != "resume":
        hold_out(phases[0])
    model.train()
    pace = None  # seconds a step, smoothed
    while place.phase < len(phases):
        phase, ahead = phases[place.phase], None
        while place.phase_step < phase["steps"]:
            began = time.perf_counter()
            request = (phase, machine, manifest)
            batches, targets, rows = ahead.result() if ahead else load_step(tokens["train"], place.samples, *request)
            ahead = loader.submit(load_step, tokens["train"], place.samples + global_batch, *request)
            targets, stopping = machine.sum(targets, len(signals))  # all ranks stop before the same step
            if stopping:  # at once: torchrun kills its workers 30 s after it has passed a signal on
                save(f"step_{place.step:08d}")
                loader.shutdown(cancel_futures=True)
                if master:
                    print(f"stopped by a signal after step {place.step}; go on with --init_from=resume", flush=True)
                return 128 + (signals or [signal.SIGTERM])[0]
            event = take_step(phase, batches, int(targets))
            place.step += 1
            place.phase_step += 1
            place.samples += global_batch

            seconds, seen = time.perf_counter() - began, place.step * plan["tokens_per_step"]
            pace = seconds if pace is None else 0.9 * pace + 0.1 * seconds
            speed = plan["tokens_per_step"] / seconds
            flops = speed * phase["flops_per_token"] / machine.world_size
            event |= {"phase": place.phase + 1, "phase_name": phase["name"], "objective": phase["objective"],
                      "step": place.step, "phase_step": place.phase_step, "tokens": seen, "tok_per_s": speed,
                      "mfu": flops / (peak * 1e12) if peak else None, "rows_hash": rows}
            done = place.phase_step == phase["steps"]
            if master:
                log.write(kind="step", **event)
                if place.step % log_every == 0 or done:
                    print_step(event, last_step, pace * (last_step - place.step))
            if done or crosses(eval_every_tokens, seen, plan["tokens_per_step"]):
                hold_out(phase)
            if not done and crosses(ckpt_every_tokens, seen, plan["tokens_per_step"]):
                save(f"step_{place.step:08d}")
        place.phase, place.phase_step = place.phase + 1, 0
        save("final" if place.phase == len(phases) else phase["name"])
    loader.shutdown(cancel_futures=True)
    return 0


def crosses(every, seen, tokens_per_step):
    """Did the last step reach or pass a multiple of `every` tokens?"""
    return seen // every > (seen - tokens_per_step) // every


def main():
    global out_dir
    out_dir = out_dir.replace("{objective}", objective).replace("{seed}", str(seed))
    check_settings(int(os.environ.get("WORLD_SIZE", 1)))
    machine = find_machine()
    if dry_run:
        file = Path(init_from) / "config.json"
        try:  # a hub id's shape is in the settings: nothing is downloaded
            config = ModernBERTConfig.from_dict(json.loads(file.read_text("utf-8"))) if file.is_file() else None
        except ValueError as error:
            fail(f"--init_from={init_from}: config.json: {error}")
        plan = make_plan(config or scratch_config({}), machine)
        if machine.rank == 0:
            print(json.dumps(plan, indent=2))
        return 0
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if machine.device.type == "cuda" else "gloo")

    fresh = init_from != "resume"
    patterns = ("step_*/train_state.pt", "phase1/train_state.pt", "final/train_state.pt", "log.jsonl")
    old_run = [file for pattern in patterns for file in Path(out_dir).glob(pattern) if file.stat().st_size]
    if fresh and old_run and not overwrite:
        fail(f"--out_dir={out_dir}: already holds a run; continue it with --init_from=resume, choose another out_dir, "
             "or throw it away with --overwrite=True")
    if fresh and old_run and Path(out_dir).resolve() in Path(init_from).resolve().parents:
        fail(f"--init_from={init_from}: lies in the run that --overwrite=True would throw away; choose another out_dir")
    manifest, tokens = load_data(data_dir)
    model, folder, state = start_model(manifest, machine)
    if manifest["tokenizer"]["vocab_size"] > model.config.vocab_size:
        fail(f"--data_dir={data_dir}: its tokenizer has {manifest['tokenizer']['vocab_size']} tokens, the model only "
             f"{model.config.vocab_size}; prepare it with the model's own tokenizer, or set --vocab_size")
    plan = make_plan(model.config, machine) | {"data": manifest["splits"]["train"]["sha256"]}
    check_tokenizer(manifest["tokenizer"], plan["phases"])
    if branches_off() and keep_optimizer and not (state and state["optimizer"]):
        fail(f"--init_from={init_from}: a decay (phase1_tokens=0) continues the optimizer of phase 1, and there is no "
             "train_state.pt; use a checkpoint of train.py, or start afresh with --keep_optimizer=False")
    if machine.world_size > 1:
        dist.barrier()  # all have read what they need before rank 0 tidies up
    if machine.rank == 0:
        if fresh:
            for old in old_run:
                shutil.rmtree(old.parent) if old.name == "train_state.pt" else old.unlink()
            Path(out_dir).mkdir(parents=True, exist_ok=True)
            (Path(out_dir) / "plan.json").write_text(json.dumps(plan, indent=2) + "\n", "utf-8")
        describe(plan, len(tokens["train"]) // block_size)
    if machine.world_size > 1:
        dist.barrier()
    code = train(plan, manifest, tokens, model, folder, state, machine)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    configure(globals())
    sys.exit(main())
