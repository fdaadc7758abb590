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
directory with train_state.pt beside it, so every other script and AutoModelForMaskedLM load it as it is; phase1/ and
final/ also hold a model card, README.md.
"""

import hashlib
import json
import math
import os
import shutil
import signal
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP

from checkpoint import find_checkpoint, model_card
from configurator import configure
from model import (
    IGNORE,
    ModernBERT,
    ModernBERTConfig,
    default_device,
    default_dtype,
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
objective = "clm"  # phase 1: clm = the detour (P-201) | mlm = its twin (P-202) | mixed = both in every step
phase1_tokens = 10_000_000_000  # length of phase 1
decay_tokens = 1_000_000_000  # length of the decay, 10% of phase 1 in the paper
decay_objective = "mlm"  # P-201; clm is for the reverse experiment on a decoder
mask_prob = 0.30  # masked share in phase 1 when it is mlm, P-202
decay_mask_prob = 0.15  # masked share in the decay, P-201
mask_prob_end = None  # ablation: the share of phase 1 moves from mask_prob to this one, linearly in tokens
mask_split = (0.8, 0.1, 0.1)  # masked tokens that become [MASK], a random token, themselves; (1, 0, 0) = all [MASK]
mask_special = False  # True: also mask [CLS], [SEP] and the like, as ModernBERT's own packer does, P-204
clm_target_share = 1.0  # ablation: CLM learns from this share of the positions; 0.3 = the tokens its twin masks, X-34
mixed_clm_share = 0.5  # rows of a mixed step that are CLM; one loss over all targets: a CLM row has 1 / mask_prob more

# the batch: the optimizer sees global_batch rows a step, however many ranks there are and whatever fits in memory
block_size = 8192  # tokens in a row
global_batch = 384  # rows in a step; 384 x 8,192 = 3,145,728 tokens, P-209
batch_warmup_tokens = 0  # ablation: over these tokens of phase 1 a step grows from 1/8 of global_batch to all of it
micro_batch = 8  # rows in one forward pass of one rank; lower it when memory runs out
mask_documents = False  # True: attention stops at document boundaries; the paper's does not, P-213

# the optimizer
learning_rate = 2e-4  # peak, P-208
warmup_tokens = 100_000_000  # linear warmup at the start of phase 1, none in the decay, P-205
decay_shape = "sqrt"  # of the decay: sqrt = 1 - sqrt(t), P-206 | linear | cosine
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
compile = False  # torch.compile each block; worth it on a GPU
recompute = False  # activation checkpointing: much less memory, up to a third more time, the same numbers
peak_tflops = 0.0  # of one device, for MFU; 0 = look it up by the GPU's name

# evaluation, logs, checkpoints
eval_every_tokens = 200_000_000  # held-out loss; also at the start and the end of each phase
eval_rows = 64  # fixed rows of val.bin with fixed masks at 15%, so that curves of all runs compare; 0 = never
log_every = 1  # steps between printed lines; log.jsonl has every step
compact = False  # True: one short line that rewrites itself; where there is no terminal, a line a minute
check_ranks = 0  # compare the weights of all ranks every so many steps; 0 = never
ckpt_every_tokens = 500_000_000  # also at the end of each phase and on SIGTERM or Ctrl-C
keep_ckpts = 2  # how many step_* checkpoints to keep; 0 = all of them, for trajectories
tensorboard = False  # True: also write out_dir/tensorboard (pip install tensorboard)
wandb_project = ""  # also log to this Weights & Biases project (pip install wandb)

EVAL_SEED = 0  # masks of the held-out rows: one fixed value, so that seeds and runs can be compared
EVAL_MASK_PROB = 0.15  # ModernBERT's own evaluation rate
BERT_SPLIT = (0.8, 0.1, 0.1)  # of the held-out masks, whatever mask_split says

# Settings that change what is computed. A resumed run must have the same, or it would be another run.
IDENTITY = """objective phase1_tokens decay_tokens decay_objective mask_prob decay_mask_prob mask_prob_end mask_split
    mask_special clm_target_share mixed_clm_share block_size global_batch batch_warmup_tokens mask_documents
    learning_rate warmup_tokens decay_shape final_lr_fraction beta1 beta2 eps weight_decay grad_clip dropout
    freeze_layers freeze_phase freeze_mode seed data_seed""".split()


def fail(message):
    """One line on stderr and exit code 1; under torchrun one rank of each machine speaks."""
    raise SystemExit(f"train.py: {message}" if os.environ.get("LOCAL_RANK", "0") == "0" else 1)


def say(text):
    """Prints a line, over the one that rewrites itself where there is one."""
    print(("\r\x1b[K" if compact and sys.stdout.isatty() else "") + text, flush=True)


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

    def claim(self):
        """Every thread has a current GPU of its own, at first GPU 0, which belongs to another rank."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def pin(self, batch):
        """Into memory from which a copy to the GPU does not wait."""
        pins = self.device.type == "cuda"
        return {k: v.pin_memory() if pins and torch.is_tensor(v) else v for k, v in batch.items()}

    def load(self, batch):
        pinned = self.device.type == "cuda"
        return {k: v.to(self.device, non_blocking=pinned) if torch.is_tensor(v) else v for k, v in batch.items()}


def find_machine():
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))  # set by torchrun
    if device == "cuda" and not torch.cuda.is_available():
        fail("--device=cuda: PyTorch sees no GPU here; use --device=cpu, or install a CUDA build of torch")
    where = default_device() if device == "auto" else torch.device(device)
    if where.type == "cuda":
        if local_rank >= torch.cuda.device_count():  # said by that rank itself: rank 0 has its GPU
            raise SystemExit(f"train.py: --nproc_per_node: expected one rank a GPU, there is no GPU {local_rank} here")
        where = torch.device("cuda", local_rank)
    kind = default_dtype(where) if dtype == "auto" else getattr(torch, dtype)
    machine = Machine(rank, int(os.environ.get("WORLD_SIZE", 1)), where, kind)
    machine.claim()
    return machine


# ----------------------------------------------------------------------------------------------------------------------
# The plan: everything that can be known before the first step


def check_settings(world_size):
    def check(key, fine, expected):
        if not fine:
            fail(f"--{key}={globals()[key]}: expected {expected}")

    for key, choices in {
        "objective": ("clm", "mlm", "mixed"),
        "decay_objective": ("clm", "mlm", "mixed"),
        "decay_shape": ("sqrt", "linear", "cosine"),
        "freeze_phase": ("phase1", "decay", "both"),
        "freeze_mode": ("skip", "zero_grad"),
        "device": ("auto", "cpu", "cuda", "mps"),
        "dtype": ("auto", "bfloat16", "float32"),
        "attention": ("auto", "flash_attn", "varlen_attn", "sdpa"),
    }.items():
        check(key, globals()[key] in choices, "one of " + ", ".join(choices))
    for key in ("mask_prob", "decay_mask_prob", "mixed_clm_share"):
        check(key, 0 < globals()[key] < 1, "a share between 0 and 1, such as 0.3")
    check("clm_target_share", 0 < clm_target_share <= 1, "a share above 0, at most 1")
    fine = mask_prob_end is None or isinstance(mask_prob_end, float) and 0 < mask_prob_end < 1
    check("mask_prob_end", fine, "None, or a share between 0 and 1, such as 0.15")
    shares = len(mask_split) == 3 and all(isinstance(x, (int, float)) and x >= 0 for x in mask_split)
    check("mask_split", shares and abs(sum(mask_split) - 1) < 1e-9, "three shares that add up to 1, as in 0.8,0.1,0.1")
    for key in "global_batch micro_batch learning_rate log_every eval_every_tokens ckpt_every_tokens".split():
        check(key, globals()[key] > 0, "a number above 0")
    numbers = "phase1_tokens decay_tokens warmup_tokens batch_warmup_tokens weight_decay grad_clip eval_rows keep_ckpts"
    for key in (*numbers.split(), "seed", "data_seed", "check_ranks"):
        check(key, globals()[key] >= 0, "0 or more")
    check("dropout", 0 <= dropout < 1, "0 or more, and below 1")
    check("block_size", block_size >= 2, "2 or more tokens: a next token needs one before it")
    check("decay_tokens", phase1_tokens or decay_tokens, "tokens in at least one phase, and phase1_tokens is 0 too")
    fits = max(1, global_batch // world_size) * world_size
    what = f"a multiple of the {world_size} ranks, such as {fits}, so that a step is the same for any number of them"
    check("global_batch", global_batch % world_size == 0, what)
    grows = f"a multiple of {8 * world_size} with --batch_warmup_tokens: it grows by eighths, on {world_size} ranks"
    check("global_batch", not batch_warmup_tokens or global_batch % (8 * world_size) == 0, grows)


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


def step_rows(name, seen):
    """Rows of the step that begins after `seen` tokens of phase `name`: global_batch, but for a batch warmup."""
    if name == "decay" or seen >= batch_warmup_tokens:
        return global_batch
    return global_batch * (1 + int(8 * seen / batch_warmup_tokens)) // 8


def count_steps(name, tokens):
    """-> steps, and tokens at their end. A phase ends with the first step that reaches its budget (A-02)."""
    steps = seen = 0
    while seen < tokens and step_rows(name, seen) < global_batch:
        steps, seen = steps + 1, seen + step_rows(name, seen) * block_size
    rest = max(0, math.ceil((tokens - seen) / (global_batch * block_size)))
    return steps + rest, seen + rest * global_batch * block_size


def make_phases():
    """The timeline."""
    tokens_per_step = global_batch * block_size
    phases = []
    for name, goal, tokens, rate, rate_end in (
        ("phase1", objective, phase1_tokens, mask_prob, mask_prob_end),
        ("decay", decay_objective, decay_tokens, decay_mask_prob, None),
    ):
        steps, end = count_steps(name, tokens)
        phases.append(
            {
                "name": name,
                "objective": goal,
                "clm_share": {"clm": 1.0, "mlm": 0.0, "mixed": mixed_clm_share}[goal],  # of the rows of a step
                "mask_prob": None if goal == "clm" else rate,
                "mask_prob_end": None if goal == "clm" else rate_end,
                "tokens": tokens,
                "tokens_at_end": end,
                "steps": steps,
                "warmup_steps": math.ceil(warmup_tokens / tokens_per_step) if name == "phase1" else 0,
                "frozen": freeze_layers if freeze_phase in (name, "both") else "",
            }
        )
    return [phase for phase in phases if phase["steps"]]


def get_lr(phase, seen):
    """Learning rate of the step that begins after `seen` tokens of its phase. Phase 1 warms up and stays (P-205); the
    first step is not wasted at 0. The decay is peak * (f + (1 - f) * (1 - sqrt(t))) with t = seen / all, the affine
    reading of P-206: it starts at the peak and reaches f * peak at t = 1."""
    if phase["name"] == "phase1":
        warmup = phase["warmup_steps"] * global_batch * block_size
        return learning_rate * min(1.0, (seen + step_rows("phase1", seen) * block_size) / max(1, warmup))
    t = min(1.0, seen / phase["tokens"])
    fall = {"sqrt": math.sqrt(t), "linear": t, "cosine": (1 - math.cos(math.pi * t)) / 2}[decay_shape]
    return learning_rate * (final_lr_fraction + (1 - final_lr_fraction) * (1 - fall))


def get_mask_prob(phase, seen):
    """Masked share of the step that begins after `seen` tokens of its phase; None if the phase masks nothing."""
    start, end = phase["mask_prob"], phase["mask_prob_end"]
    return start if end is None else start + (end - start) * min(1.0, seen / phase["tokens"])


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
        middle, clm = get_mask_prob(phase, phase["tokens"] / 2) or 0, phase["clm_share"]
        phase["flops_per_token"] = clm * shape.flops_per_token(block_size, True, clm_target_share)
        phase["flops_per_token"] += (1 - clm) * shape.flops_per_token(block_size, False, middle)
        phase["flops"] = phase["flops_per_token"] * phase["tokens_at_end"]
        phase["lr_first_step"], phase["lr_at_end"] = get_lr(phase, 0), get_lr(phase, phase["tokens_at_end"])
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
        "device": machine.device.type,
        "hardware": torch.cuda.get_device_name(machine.device) if machine.device.type == "cuda" else "no GPU",
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
    block = 25 * c.hidden_size + 8 * c.intermediate_size
    per_token = (4 * c.hidden_size * c.num_hidden_layers + block) if recompute else c.num_hidden_layers * block
    per_token += 16 * c.hidden_size
    activations = min(micro_batch, global_batch // world_size) * block_size * per_token
    loss = 2**27 * 8 + c.vocab_size * c.hidden_size * 6
    return round((states + activations + loss) / 1e9, 2)


def describe(plan, manifest, n_rows):
    """The page at the start: model, data, machine, batch, phases."""
    shape, info = f"{plan['parameters'] / 1e6:.1f}M parameters from {plan['init_from']}", manifest["splits"]["train"]
    sources = ", ".join(f"{source['share']:.0%} {source['name']}" for source in manifest["sources"][:6])
    device = f"{plan['world_size']} x {plan['device']} ({plan['hardware']})"
    ranks = f"{plan['world_size']} ranks x {plan['grad_accum']} micro-batches x {plan['micro_batch']} rows"
    print(f"model   {shape}, vocabulary {plan['model']['vocab_size']:,}")
    print(f"data    {data_dir}: {info['tokens']:,} tokens = {n_rows:,} rows" + (f"; {sources}" if sources else ""))
    print(f"machine {device}, {plan['dtype']}, attention: {plan['attention']}, torch {plan['torch']}")
    print(f"step    {plan['tokens_per_step']:,} tokens = {ranks} x {block_size}")
    if batch_warmup_tokens:
        print(f"        fewer in the first {batch_warmup_tokens:,} tokens: the batch grows from an eighth to all of it")
    for phase in plan["phases"]:
        if phase["warmup_steps"] > phase["steps"]:
            print(f"note: --warmup_tokens={warmup_tokens} is longer than phase 1, which never reaches the peak")
        rates = [phase[key] for key in ("mask_prob", "mask_prob_end") if phase[key]]
        rate = " at " + " to ".join(f"{rate:.0%}" for rate in rates) if rates else ""
        frozen = f", frozen ({freeze_mode}): {phase['frozen']}" if phase["frozen"] else ""
        passes = phase["tokens_at_end"] / block_size / n_rows
        steps = f"{phase['steps']:,} steps, {phase['warmup_steps']} of warmup"
        print(f"{phase['name']:7} {phase['objective']}{rate}, {steps}, {passes:.2f} passes over the rows{frozen}")
    sys.stdout.flush()


# ----------------------------------------------------------------------------------------------------------------------
# Data: rows by number, masks by address


def load_data(folder):
    """manifest.json and the two memory-mapped token files of prepare_data.py."""
    path = Path(folder) / "manifest.json"
    if not path.is_file():
        fail(f"--data_dir={folder}: no manifest.json there; run prepare_data.py first, or point at its out_dir")
    try:
        manifest = json.loads(path.read_text("utf-8"))
        kind, tokens = np.dtype(manifest["dtype"]), {}
    except (ValueError, KeyError) as error:
        fail(f"--data_dir={folder}: manifest.json is damaged ({error}); run prepare_data.py again")
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


def mask_row(tokens, probability, address, special_ids, mask_id, vocab_size, split=BERT_SPLIT):
    """BERT's corruption of one row (T,): of the chosen positions 80% become [MASK], 10% a random ordinary token, 10%
    stay (P-204; `split`). -> inputs (T,), labels (T,) with IGNORE where nothing is predicted.

    Random numbers are addressed, not streamed: `address` (seed, row, pass) alone decides them, so they are the same
    for any number of ranks, any micro-batch, and after a resume."""
    rng = np.random.default_rng(address)
    draw, kind = rng.random(len(tokens)), rng.random(len(tokens))
    ordinary = ordinary_ids(vocab_size, tuple(special_ids))
    replacement = ordinary[rng.integers(0, len(ordinary), len(tokens))]
    chosen = draw < probability
    if not mask_special:
        chosen &= ~np.isin(tokens, special_ids)
    masked, replaced = split[0], split[0] + split[1]
    inputs = np.where(chosen & (kind < masked), mask_id, tokens)
    inputs = np.where(chosen & (kind >= masked) & (kind < replaced), replacement, inputs)
    return inputs, np.where(chosen, tokens, IGNORE)


def make_batch(data, rows, goal, rate, seed, manifest, split=BERT_SPLIT):
    """rows [(row, pass), ...] of `data` as one flat stream -> the arguments of the model's call. `rate` is the share of
    positions that are targets: masked for mlm, kept for clm."""
    names = manifest["tokenizer"]
    mask_args = names["special_ids"], names["mask_token_id"], names["vocab_size"]
    inputs, labels, starts = [], [], []
    for i, (row, pass_) in enumerate(rows):
        tokens = data[row * block_size : (row + 1) * block_size].astype(np.int64)
        starts.append(i * block_size)
        if mask_documents:  # a sequence begins after every end of document
            starts.extend(i * block_size + np.flatnonzero(tokens[:-1] == names["eos_token_id"]) + 1)
        if goal == "mlm":
            tokens, targets = mask_row(tokens, rate, [seed, row, pass_], *mask_args, split)
            labels.append(targets)
        inputs.append(tokens)
    cu_seqlens = torch.tensor([*starts, len(rows) * block_size], dtype=torch.int32)
    inputs = torch.from_numpy(np.concatenate(inputs))
    labels = torch.from_numpy(np.concatenate(labels)) if goal == "mlm" else next_token_labels(inputs, cu_seqlens)
    if goal == "clm" and rate < 1:  # the draws of mask_row, and position i predicts token i + 1
        draws = np.concatenate([np.random.default_rng([seed, *row]).random(block_size) for row in rows])
        labels[torch.from_numpy(np.roll(draws, -1) >= rate)] = IGNORE
    longest = int(cu_seqlens.diff().max())
    args = {"input_ids": inputs, "labels": labels, "cu_seqlens": cu_seqlens, "max_seqlen": longest}
    return {**args, "is_causal": goal == "clm"}


def load_step(data, place, phase, machine, manifest):
    """The optimizer step of this rank that begins at `place` -> its micro-batches, their number of targets, and the
    rows [(row, pass), ...] that all ranks together read."""
    count = step_rows(phase["name"], place.phase_tokens)
    rows = rows_of_samples(place.samples, count, len(data) // block_size, data_seed)
    n_clm = round(phase["clm_share"] * count)
    goals = ["clm"] * n_clm + ["mlm"] * (count - n_clm)
    if phase["objective"] == "mixed":  # which rows are which is addressed, too
        np.random.default_rng([seed, place.samples, 0, 1]).shuffle(goals)
    batches = []
    for goal, rate in (("clm", clm_target_share), ("mlm", get_mask_prob(phase, place.phase_tokens))):
        pairs = list(zip(rows, goals, strict=True))[machine.rank :: machine.world_size]
        mine = [row for row, its_goal in pairs if its_goal == goal]
        for i in range(0, len(mine), micro_batch):
            batch = make_batch(data, mine[i : i + micro_batch], goal, rate, seed, manifest, mask_split)
            batches.append(machine.pin(batch))
    return batches, sum(int((b["labels"] != IGNORE).sum()) for b in batches), rows


def hash_rows(rows):
    """Proves in the log that twins read the same."""
    return hashlib.blake2b(np.array(rows, dtype=np.int64).tobytes(), digest_size=8).hexdigest()


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
        rate = EVAL_MASK_PROB if goal == "mlm" else 1.0
        batch = make_batch(data, mine[i : i + micro_batch], goal, rate, EVAL_SEED, manifest)
        with machine.autocast():
            out = model(**machine.load(batch))
        loss_sum, n_targets = loss_sum + out.loss_sum.item(), n_targets + out.n_targets
    model.train(was_training)
    loss_sum, n_targets = machine.sum(loss_sum, n_targets)
    return loss_sum / max(1, n_targets)


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints


@dataclass(frozen=True)
class Place:
    """Where in the timeline a run stands."""

    phase: int = 0  # index into plan["phases"]
    phase_step: int = 0  # steps done in this phase
    phase_tokens: int = 0  # tokens seen in this phase: what the schedules count
    step: int = 0  # steps done in all: what the log counts
    tokens: int = 0  # tokens seen in all
    samples: int = 0  # rows read: where in the data

    def after(self, rows):
        """The place one step of `rows` rows later."""
        tokens = rows * block_size
        return Place(self.phase, self.phase_step + 1, self.phase_tokens + tokens, self.step + 1, self.tokens + tokens,
                     self.samples + rows)  # fmt: skip


def copy_out(model, optimizer):
    """The weights and moments of this moment in the CPU's memory, while training goes on -> a model without a device
    of its own to train on, and the moments by name, never by position."""
    with torch.device("meta"):
        copied = ModernBERT(model.config)
    weights = {k: v.to("cpu", copy=True) for k, v in model.state_dict().items() if k != "decoder.weight"}
    copied.load_state_dict(weights, strict=False, assign=True)
    copied.tie_weights()
    names = {p: n for n, p in model.named_parameters()}
    moments = {names[p]: {k: v.to("cpu", copy=True) for k, v in m.items()} for p, m in optimizer.state.items()}
    return copied, moments


def flush(path):
    """A file or directory to the disk itself, so that it outlives a loss of power."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def remove(folder):
    """Gone at once, so that nobody resumes from a half of it; then deleted."""
    gone = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(gone, ignore_errors=True)
    os.replace(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def write_checkpoint(name, copied, moments, place, plan, manifest, waited):
    """out_dir/name, whole or not at all: written beside it, flushed to disk, then renamed."""
    began, out = time.perf_counter(), Path(out_dir)
    target, part = out / name, out / f".{name}.part"
    if target.exists():  # from the same step of this run
        return
    for left in out.glob(".*.part"):  # by a kill
        shutil.rmtree(left, ignore_errors=True)
    try:
        if not all(torch.isfinite(weight).all() for weight in copied.parameters()):
            raise ValueError("the weights hold NaN or infinity")
        copied.save_pretrained(part)
        for file in (Path(data_dir) / "tokenizer").glob("*"):
            shutil.copy(file, part)
        if not name.startswith("step_"):
            (part / "README.md").write_text(model_card(name, plan, manifest, *card_rows()), "utf-8")
        state = {"place": asdict(place), "settings": plan["settings"], "data": plan["data"], "start": plan["init_from"]}
        torch.save({**state, "optimizer": moments}, part / "train_state.pt")
        for file in (*part.iterdir(), part):
            flush(file)
        os.replace(part, target)
        flush(out)
    except Exception as error:  # OSError, or the words that safetensors and torch have for a full disk
        shutil.rmtree(part, ignore_errors=True)
        fail(f"--out_dir={out_dir}: checkpoint {name} was not written ({error}), with {shutil.disk_usage(out).free:,} "
             "bytes free there; make room, then --init_from=resume goes on from the last one")
    rolling = sorted(out.glob("step_*"))
    for old in rolling[:-keep_ckpts] if keep_ckpts else []:
        remove(old)
    say(f"saved {target}: training waited {waited:.2f} s, written in {time.perf_counter() - began:.2f} s")


def card_rows():
    """For the model card: held-out losses from the log, and scores, where finetune.py wrote a results.jsonl here."""
    held_out = [event for event in read_log("log.jsonl") if event["kind"] == "eval"]
    return held_out, [row for row in read_log("results.jsonl") if "macro_f1" in row.get("test", ())]


def read_state(folder):
    """train_state.pt of a checkpoint, None if it has none. Plain numbers and tensors: nothing is unpickled."""
    try:
        return torch.load(Path(folder) / "train_state.pt", map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        return None
    except Exception as error:
        reason = str(error).split("\n")[0][:100]
        raise ValueError(f"train_state.pt is damaged: {reason}") from None


def newest_checkpoint():
    """The checkpoint of out_dir that has seen most steps. A damaged one stops everything: which other to go on from, at
    the price of its steps, is for a person to say."""
    steps, damaged = {}, []
    for folder in sorted(file.parent for file in Path(out_dir).glob("[!.]*/train_state.pt")):
        try:
            place = read_state(folder)["place"]
            with safe_open(folder / "model.safetensors", "pt"):  # is the file as long as its header says?
                json.loads((folder / "config.json").read_text("utf-8"))
            steps[folder] = place["step"], folder.name == "final"
        except Exception as error:
            damaged.append(f"{folder} is damaged ({' '.join(str(error).split())[:150]})")
    best = max(steps, key=steps.get, default=None)
    if damaged:
        way_out = f"resume again, from {best} at step {steps[best][0]}" if best else "start the run again"
        fail(f"--init_from=resume: {'; '.join(damaged)}; move it away and {way_out}")
    if not best:
        fail(f"--init_from=resume: --out_dir={out_dir} holds no checkpoint; start the run without init_from=resume")
    return best


def start_model(manifest, machine):
    """-> the model on its device, the folder it comes from and its train state (None from scratch)."""
    if init_from == "scratch":
        torch.manual_seed(seed)
        return ModernBERT(scratch_config(manifest["tokenizer"])).to(machine.device), None, None
    folder = newest_checkpoint() if init_from == "resume" else init_from
    model = load_model(folder, setting="init_from", attn_out_dropout=dropout).to(machine.device)
    folder = find_checkpoint(str(folder))  # a hub id -> where it was downloaded to
    files = Path(folder) / "tokenizer.json", Path(data_dir) / "tokenizer" / "tokenizer.json"
    ours = theirs = None
    try:
        state = read_state(folder)
        if all(file.is_file() for file in files):  # token ids mean nothing to a model of another vocabulary
            ours, theirs = (json.loads(file.read_text("utf-8"))["model"].get("vocab") for file in files)
    except (ValueError, KeyError) as error:
        fail(f"--init_from={folder}: {error}; expected a whole checkpoint, start from another one")
    if ours != theirs:
        fail(f"--data_dir={data_dir}: tokenized with another vocabulary than that of --init_from={folder}; prepare "
             f"the data again with --tokenizer={folder}")
    return model, folder, state


def check_tokenizer(names, phases):
    """Does the data's tokenizer have the tokens that the run needs?"""
    if names["mask_token_id"] is None and any(phase["objective"] != "clm" for phase in phases):
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
    if state["place"].keys() != asdict(Place()).keys():
        fail(f"--init_from={init_from}: train_state.pt of {folder} is from another version of train.py; use that one")
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
        place = replace(place, phase=0, phase_step=0, phase_tokens=0)
        same_rows = [state["settings"][key] == plan["settings"][key] for key in ("block_size", "data_seed")]
        if state["data"] != plan["data"] or not all(same_rows):
            place = replace(place, samples=0)
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


def read_log(name):
    """The objects of out_dir/name, a file of JSON lines. A crash may have cut lines short: they are left out."""
    path, found = Path(out_dir) / name, []
    for line in path.read_text("utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


class Log:
    """Appends every event to log.jsonl, feeds TensorBoard or wandb where asked for, and prints the steps."""

    def __init__(self, plan, step):
        path = Path(out_dir) / "log.jsonl"
        kept = [event for event in read_log(path.name) if event["step"] <= step]  # later steps are done again
        path.with_suffix(".part").write_text("".join(json.dumps(event) + "\n" for event in kept), "utf-8")
        os.replace(path.with_suffix(".part"), path)
        self.file = open(path, "a", encoding="utf-8", buffering=1)
        self.recent, self.taken, self.printed = deque(maxlen=100), 0, -math.inf  # losses; steps here; time of a line
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

    def step(self, event, rows, done, last_step, seconds_left):
        """One step: into the file, onto the screen, and a word if its loss is out of line."""
        self.write(kind="step", **event)
        if event["phase_step"] == 1:
            self.recent.clear()
        if is_spike(event["loss"], self.recent):
            self.write(kind="spike", **event, rows=rows)
            say(f"spike: loss {event['loss']:.4f} in step {event['step']}, {show_rows(rows)}")
        self.recent.append(event["loss"])
        self.taken += 1
        if self.taken == 5:
            say(f"at this pace the {last_step - event['step']:,} steps left take {clock(seconds_left)}")
        quiet = compact and not sys.stdout.isatty() and time.perf_counter() - self.printed < 60
        if done or (event["step"] % log_every == 0 and not quiet):
            print_step(event, last_step, seconds_left)
            self.printed = time.perf_counter()


def is_spike(loss, recent):
    """A loss above the median of up to 100 steps before it by 10 of their median absolute deviations (some 7 standard
    deviations, but blind to earlier spikes). The first 20 steps of a phase, or after a resume, are not judged."""
    if len(recent) < 20:
        return False
    return loss > np.median(recent) + 10 * np.median(np.abs(np.array(recent) - np.median(recent)))


def show_rows(rows):
    """For a message: the first rows of a step, and the hash by which the log knows them."""
    return f"rows {', '.join(str(row) for row, _ in rows[:4])}, ... of train.bin (hash {hash_rows(rows)})"


def clock(seconds):
    """7,384 -> '2:03:04'."""
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"


def print_step(event, last_step, seconds_left):
    line = (
        f"{event['phase_name']:6} {event['objective']}  step {event['step']:{len(str(last_step))}}/{last_step}  "
        f"loss {event['loss']:7.4f}  " + ("" if compact else f"grad {event['grad_norm']:6.3f}  lr {event['lr']:.2e}  ")
        + f"{event['tok_per_s'] / 1e3:7.1f}k tok/s  " + (f"mfu {event['mfu']:5.1%}  " if event["mfu"] else "")
        + f"left {clock(seconds_left)}"
    )
    if compact and sys.stdout.isatty():
        print("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1], end="", flush=True)
    else:
        print(line, flush=True)


def listen():
    """SIGTERM, Ctrl-C and SIGHUP ask a run to save and stop before its next step -> the list that collects them."""
    signals = []

    def on_signal(number, frame):
        signals.append(number)
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
        if os.environ.get("LOCAL_RANK", "0") == "0":
            os.write(2, b"stopping after this step; once more to stop now, without saving\n")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    return signals


def compare_ranks(model, machine, step):
    """Do all ranks hold the same weights, bit for bit? The sum of their bits, read as integers, tells."""
    mine = torch.stack([p.detach().view(torch.int32).sum(dtype=torch.int64) for p in model.parameters()]).sum()[None]
    sums = [torch.empty_like(mine) for _ in range(machine.world_size)]
    dist.all_gather(sums, mine)
    others = [rank for rank, their in enumerate(sums) if their != sums[0]]
    if others:
        fail(f"--check_ranks={check_ranks}: after step {step}, ranks {others} hold other weights than rank 0: expected "
             f"the same; look at the machines, then go on from the last checkpoint in {out_dir}")


def take_step(model, runner, optimizer, phase, place, batches, targets, rows, machine):
    """Backward, freeze, clip, update -> what the log says of it."""
    lr = get_lr(phase, place.phase_tokens)
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss_sum = forward_backward(runner, batches, targets, machine, (seed, place.samples, machine.rank))
    freeze(model, phase["frozen"])
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    loss, grad_norm = machine.sum(loss_sum)[0] / max(1, targets), norm.item()
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        fail(f"step {place.step + 1}, {show_rows(rows)}: loss {loss}, gradient norm {grad_norm}: expected finite "
             f"numbers; the last checkpoint in {out_dir} is good, start a new run from it with a lower "
             "--learning_rate, --grad_clip=1.0, --dtype=float32, or another --data_seed to meet other rows")
    if grad_clip:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), grad_clip, norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"loss": loss, "lr": lr, "grad_norm": grad_norm, "targets": targets}


def train(plan, manifest, tokens, model, folder, state, machine):
    """-> exit code: 0, also after SIGTERM with everything saved; 130 after Ctrl-C."""
    phases, master = plan["phases"], machine.rank == 0
    peak, gpu_name = (peak_tflops, "--peak_tflops") if peak_tflops else peak_tflops_of(machine.device)
    if peak and master:
        print(f"mfu is the share of {peak:g} TFLOP/s ({gpu_name}) on each device")
    optimizer = make_optimizer(model)
    place = restore(state, folder, plan, model, optimizer, machine.rank)
    if place.phase == len(phases):
        if master:
            (Path(folder) / "README.md").write_text(model_card("final", plan, manifest, *card_rows()), "utf-8")
            print(f"{folder}: this run is finished, nothing is left to do but its model card, which is up to date")
        return 0
    last_step = place.step + sum(p["steps"] for p in phases[place.phase :]) - place.phase_step
    last_token = place.tokens + sum(p["tokens_at_end"] for p in phases[place.phase :]) - place.phase_tokens

    model.backend = plan["attention"]
    model.model.recompute = recompute
    if compile:
        try:
            model.compile_blocks()
        except OSError as error:
            fail(f"--compile=True: {error}; install one, or leave compile off")
    gpu = [machine.device.index] if machine.device.type == "cuda" else None
    runner = DDP(model, device_ids=gpu) if machine.world_size > 1 else model
    log = Log(plan, place.step) if master else None
    # one thread reads and masks the next step while this one computes, another writes checkpoints
    loader, writer = ThreadPoolExecutor(1, initializer=machine.claim), ThreadPoolExecutor(1)
    writing = writer.submit(int)  # the checkpoint being written; the first is none
    signals = listen()

    def save(name):
        """Training waits for the copy alone, and for the checkpoint before where that is still being written."""
        nonlocal writing
        began = time.perf_counter()
        writing.result()  # raises what went wrong there
        if master:
            copies = copy_out(model, optimizer)
            waited = time.perf_counter() - began
            writing = writer.submit(write_checkpoint, name, *copies, place, plan, manifest, waited)

    def hold_out(phase):
        if eval_rows:
            maskable = manifest["tokenizer"]["mask_token_id"] is not None
            mlm = evaluate(model, tokens["val"], "mlm", manifest, machine) if maskable else None
            causal = phase["objective"] != "mlm"
            clm = evaluate(model, tokens["val"], "clm", manifest, machine) if causal else None
            if master:
                losses = {"mlm": mlm, "clm": clm}.items()
                say("held out: " + ", ".join(f"{name} loss {loss:.4f}" for name, loss in losses if loss is not None))
                where = {"phase_name": phase["name"], "step": place.step, "tokens": place.tokens}
                log.write(kind="eval", **where, val_mlm=mlm, val_clm=clm)

    if place.phase_step == 0 and init_from != "resume":
        hold_out(phases[0])
    model.train()
    pace = None  # seconds a token, smoothed
    while place.phase < len(phases):
        phase, ahead = phases[place.phase], None
        while place.phase_step < phase["steps"]:
            began = time.perf_counter()
            request = (phase, machine, manifest)
            batches, targets, rows = ahead.result() if ahead else load_step(tokens["train"], place, *request)
            following = place.after(len(rows))
            ahead = loader.submit(load_step, tokens["train"], following, *request)
            targets, stopping = machine.sum(targets, len(signals))  # all ranks stop before the same step
            if stopping:  # at once: torchrun kills its workers 30 s after it has passed a signal on
                save(f"step_{place.step:08d}")
                writing.result()
                loader.shutdown(cancel_futures=True)
                if master:
                    say(f"stopped by a signal after step {place.step}; go on with --init_from=resume")
                return 128 + signal.SIGINT if signal.SIGINT in signals else 0
            event = take_step(model, runner, optimizer, phase, place, batches, int(targets), rows, machine)
            before, place = place, following
            if check_ranks and machine.world_size > 1 and place.step % check_ranks == 0:
                compare_ranks(model, machine, place.step)
            if writing.done():
                writing.result()

            seconds, n_tokens = time.perf_counter() - began, place.tokens - before.tokens
            pace = 0.9 * pace + 0.1 * seconds / n_tokens if pace else seconds / n_tokens
            flops = n_tokens / seconds * phase["flops_per_token"] / machine.world_size
            event |= {"phase": place.phase + 1, "phase_name": phase["name"], "objective": phase["objective"],
                      "step": place.step, "phase_step": place.phase_step, "tokens": place.tokens,
                      "tok_per_s": n_tokens / seconds, "mfu": flops / (peak * 1e12) if peak else None,
                      "rows_hash": hash_rows(rows)}
            done = place.phase_step == phase["steps"]
            if master:
                log.step(event, rows, done, last_step, pace * (last_token - place.tokens))
            if done or crosses(eval_every_tokens, before.tokens, place.tokens):
                hold_out(phase)
            if not done and crosses(ckpt_every_tokens, before.tokens, place.tokens):
                save(f"step_{place.step:08d}")
        place = replace(place, phase=place.phase + 1, phase_step=0, phase_tokens=0)
        save("final" if place.phase == len(phases) else phase["name"])
    loader.shutdown(cancel_futures=True)
    writing.result()
    return 0


def crosses(every, before, after):
    """Did a step from `before` to `after` tokens reach or pass a multiple of `every`?"""
    return after // every > before // every


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
    ours = [folder for name in ("step_*", "phase1", "final") for folder in Path(out_dir).glob(name)]
    if strange := [folder for folder in ours if not (folder / "train_state.pt").exists()]:
        fail(f"--out_dir={out_dir}: {strange[0].name} is not of train.py and stands in its way; move it elsewhere")
    manifest, tokens = load_data(data_dir)
    model, folder, state = start_model(manifest, machine)
    if manifest["tokenizer"]["vocab_size"] > model.config.vocab_size:
        fail(f"--data_dir={data_dir}: its tokenizer has {manifest['tokenizer']['vocab_size']} tokens, the model only "
             f"{model.config.vocab_size}; prepare it with the model's own tokenizer, or set --vocab_size")
    plan = make_plan(model.config, machine)
    plan["data"] = {"train": manifest["splits"]["train"]["sha256"], "tokenizer": manifest["tokenizer"]}
    if not fresh:
        plan["init_from"] = state.get("start")
    check_tokenizer(manifest["tokenizer"], plan["phases"])
    if branches_off() and keep_optimizer and not (state and state["optimizer"]):
        fail(f"--init_from={init_from}: a decay (phase1_tokens=0) continues the optimizer of phase 1, and there is no "
             "train_state.pt; use a checkpoint of train.py, or start afresh with --keep_optimizer=False")
    if machine.world_size > 1:
        dist.barrier()  # all have read what they need before rank 0 tidies up
    try:
        if machine.rank == 0:
            if fresh:
                for old in old_run:
                    remove(old.parent) if old.name == "train_state.pt" else old.unlink()
                Path(out_dir).mkdir(parents=True, exist_ok=True)
                (Path(out_dir) / "plan.json").write_text(json.dumps(plan, indent=2) + "\n", "utf-8")
            describe(plan, manifest, len(tokens["train"]) // block_size)
        if machine.world_size > 1:
            dist.barrier()
        code = train(plan, manifest, tokens, model, folder, state, machine)
    except OSError as error:
        fail(f"--out_dir={out_dir}: {error}; make room there or choose another, then --init_from=resume")
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    configure(globals())
    sys.exit(record(main)())  # record: torchrun shows the error of the rank that failed first
