"""
Speed and memory of training steps, side by side with transformers' ModernBERT.

    python bench.py                                              # tiny, on whatever this machine has
    python bench.py --shape=base --dtype=float32 --repeats=5
    python bench.py --shape=base --tokens=8192 --cases="['8192']" --memory=True
    python bench.py --variants="['ours mlm', 'ours clm', 'ours clm all-logits']" --cases="['4096']"

A step is a forward pass, the loss and a backward pass, without an optimizer. All variants live in one process and take
turns, step by step, so that whatever else the machine does meets them alike. Ours and transformers' MLM have the same
weights, data and targets, and the table shows their losses. On ragged batches only real tokens are counted.

A variant is "ours mlm", "ours clm", or "theirs mlm" / "theirs clm" with an attention of transformers (sdpa, eager,
flash_attention_2). MLM computes logits where there is a target, on both sides; with "all-logits" at the end everywhere,
which is transformers' default. "theirs clm" is ModernBertDecoder, which has the same shape but always all logits.
"ours mlm recompute" keeps only the inputs of the blocks (activation checkpointing). "loss mlm" and "loss clm" are the
vocabulary and the cross-entropy alone, next to "loss clm all-logits", PyTorch's own way.

Ours is compared with the best of transformers' variants, "recompute" with ours without it, the loss with all-logits.
Prints a table and writes it as JSON. Only the ratios mean something on another machine.
"""

import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from configurator import configure
from model import (
    IGNORE,
    ModernBERT,
    ModernBERTConfig,
    default_device,
    default_dtype,
    linear_cross_entropy,
    next_token_labels,
    peak_tflops_of,
    pick_backend,
)

# what is measured
shape = "tiny"  # tiny: 6 layers x 256 | base: 22 x 768 | large: 28 x 1024 (P-102, P-103)
tokens = 4096  # real tokens in a step
cases = ["512", "ragged", "4096"]  # a number: rows of that many tokens | ragged: lengths uniform in 64...512
variants = ["ours mlm", "theirs mlm sdpa", "theirs mlm eager", "ours clm", "theirs clm sdpa", "theirs clm eager"]
mask_prob = 0.30  # share of the tokens that are MLM targets (P-202)
backward = True  # False: forward pass and loss only, without gradients
vocab_size = 50368  # of ModernBERT; 32768 is ModernCamemBERT's
global_every = 3  # every n-th layer is global (P-105); 1000: what if all but the first were local
compile = False  # torch.compile for both sides, ours block by block

# how
device = "auto"  # auto | cpu | cuda | mps
dtype = "auto"  # auto: bfloat16 where the hardware multiplies it fast | float32 | bfloat16
repeats = 5  # timed steps of each variant
warmup = 1  # untimed steps of each variant before them
threads = 0  # of a CPU; 0 = what PyTorch chooses
memory = True  # also measure peak memory; on a CPU that takes a fresh process for each variant
peak_tflops = 0.0  # of the device in this dtype, for MFU; 0 = look it up by the GPU's name, bfloat16 only
seed = 0  # of weights, tokens and targets
out = "out/bench.json"  # where the results go
memory_of = ""  # set by the script itself in those processes: print the peak of a step of this variant, per case

SHAPES = {
    "tiny": dict(hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=384),
    "base": dict(hidden_size=768, num_hidden_layers=22, num_attention_heads=12, intermediate_size=1152),
    "large": dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=2624),
}
ALLOCATOR = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "PYTORCH_CUDA_ALLOC_CONF")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")


def fail(message):
    raise SystemExit(f"bench.py: {message}")


def check_settings():
    """Everything that can be wrong is found before the first long step."""
    if shape not in SHAPES:
        fail(f"--shape={shape}: expected one of {', '.join(SHAPES)}")
    if dtype not in ("auto", "float32", "bfloat16"):
        fail(f"--dtype={dtype}: expected auto, float32 or bfloat16")
    if device not in ("auto", "cpu", "cuda", "mps"):
        fail(f"--device={device}: expected auto, cpu, cuda or mps")
    if device == "cuda" and not torch.cuda.is_available():
        fail("--device=cuda: PyTorch sees no GPU here; use --device=cpu, or install a CUDA build of torch")
    for name, value, least in (("repeats", repeats, 1), ("warmup", warmup, 0), ("tokens", tokens, 64)):
        if value < least:
            fail(f"--{name}={value}: expected {least} or more")
    if not 0 < mask_prob <= 1:
        fail(f"--mask_prob={mask_prob}: expected a share above 0 and at most 1")
    for case in cases:
        if case != "ragged" and not (str(case).isdigit() and 0 < int(case) <= tokens and tokens % int(case) == 0):
            fail(f"--cases: {case!r}: expected 'ragged' or a row length that divides tokens={tokens}")
    for variant in variants:
        who, objective, *rest = variant.split() + [""] * (2 - len(variant.split()))
        if who == "theirs" and (rest or [""]).pop(0) not in ATTENTIONS:
            who = "theirs, without an attention"
        more = {"ours": ("all-logits", "recompute"), "theirs": ("all-logits",), "loss": ("all-logits",)}
        if who not in more or objective not in ("mlm", "clm") or len(rest) > 1 or not {*rest} <= {*more[who]}:
            fail(f"--variants: {variant!r}: expected 'ours mlm', 'theirs clm eager', 'theirs mlm sdpa all-logits', ...")


def make_config():
    return ModernBERTConfig(
        vocab_size=vocab_size, global_attn_every_n_layers=global_every, pad_token_id=0, **SHAPES[shape]
    )


def make_batch(case, where):
    """One batch in both forms: a flat stream with cu_seqlens for ours, padded rows for transformers. No row has
    padding when all are of one length, and transformers is then called without a mask, which is faster."""
    generator = torch.Generator().manual_seed(seed)
    if case == "ragged":
        lengths = []
        while sum(lengths) < tokens:
            length = int(torch.randint(64, 513, (1,), generator=generator))
            lengths.append(min(length, tokens - sum(lengths)))
    else:
        lengths = [int(case)] * (tokens // int(case))
    flat = torch.randint(1, vocab_size, (tokens,), generator=generator)
    masked = torch.rand(tokens, generator=generator) < mask_prob
    labels = torch.where(masked, torch.randint(1, vocab_size, (tokens,), generator=generator), IGNORE)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)

    def pad(x, value):
        return torch.nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True, padding_value=value).to(where)

    n_targets = {"mlm": int(masked.sum()), "clm": tokens - len(lengths)}
    width = SHAPES[shape]["hidden_size"]
    hidden = {k: torch.randn(n, width, generator=generator).to(where).requires_grad_() for k, n in n_targets.items()}
    return {
        "case": "ragged" if case == "ragged" else f"{len(lengths)} x {case}",
        "lengths": lengths,
        "n_targets": n_targets,
        "hidden": hidden,  # what the loss alone is measured on
        "flat": flat.to(where),
        "cu_seqlens": cu_seqlens.to(where),
        "mlm": labels.to(where),
        "clm": next_token_labels(flat, cu_seqlens).to(where),
        "rows": pad(flat, 0),
        "mask": None if len(set(lengths)) == 1 else pad(torch.ones_like(flat), 0),
        "row_labels": {"mlm": pad(labels, IGNORE), "clm": pad(flat, IGNORE)},  # theirs shift by themselves
    }


def make_model(who, objective, where):
    """The network that a variant runs on, in training mode. Ours serves both objectives; of transformers' the MLM has
    our weights."""
    torch.manual_seed(seed)
    config = make_config()
    ours = ModernBERT(config)
    if who != "theirs":
        net = ours
    else:
        import transformers  # only here: a process that measures our memory should not hold it

        settings = {k: v for k, v in config.to_dict().items() if k not in ("architectures", "model_type")}
        if objective == "mlm":
            net = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**settings))
            net.load_state_dict(ours.state_dict())
        else:
            settings.update(bos_token_id=0, eos_token_id=0, cls_token_id=0, sep_token_id=0)  # None is not allowed
            net = transformers.ModernBertDecoderForCausalLM(transformers.ModernBertDecoderConfig(**settings))
    net = net.to(where).train()
    if compile and who == "theirs":
        net.compile()
    elif compile:
        net.compile_blocks()
    return net


def run_step(variant, net, batch, amp_dtype):
    """One step -> the mean loss over the targets."""
    who, objective, *rest = variant.split()
    all_logits = "all-logits" in rest
    where = batch["flat"].device
    with torch.autocast(where.type, amp_dtype, enabled=amp_dtype != torch.float32), torch.set_grad_enabled(backward):
        if who == "theirs":
            net.set_attn_implementation(rest[0])
            net.sparse_prediction = not all_logits
            more = {"use_cache": False} if objective == "clm" else {}
            labels = batch["row_labels"][objective]
            loss = net(input_ids=batch["rows"], attention_mask=batch["mask"], labels=labels, **more).loss
        elif who == "loss":
            hidden, targets = batch["hidden"][objective], batch[objective][batch[objective] != IGNORE]
            weight, bias = net.decoder.weight, net.decoder.bias
            if all_logits:
                loss = F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)
            else:
                loss = linear_cross_entropy(hidden, weight, bias, targets) / len(targets)
        else:
            net.model.recompute = "recompute" in rest
            labels, n_targets = batch[objective], batch["n_targets"][objective]
            how = dict(is_causal=objective == "clm", cu_seqlens=batch["cu_seqlens"], max_seqlen=max(batch["lengths"]))
            if all_logits:
                logits = net(batch["flat"], **how).logits
                loss = F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum") / n_targets
            else:
                loss = net(batch["flat"], labels=labels, **how).loss_sum / n_targets
    if backward:
        loss.backward()
        net.zero_grad(set_to_none=True)
    return loss.detach()


def synchronize(where):
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    if where.type == "mps":
        torch.mps.synchronize()


def step_flops(variant, batch):
    """Useful operations of a step: those of the real tokens, and of the logits that have a target (A-21)."""
    with torch.device("meta"):
        net = ModernBERT(make_config())
    who, objective = variant.split()[:2]
    share = batch["n_targets"][objective] / tokens
    flops = sum(n * net.flops_per_token(n, objective == "clm", share) for n in batch["lengths"])
    if who == "loss":
        flops = 6 * batch["n_targets"][objective] * net.decoder.weight.numel()
    return flops if backward else flops / 3


def resident_bytes(key):
    """VmRSS (now) or VmHWM (the highest so far) of this process. Not ru_maxrss: that starts at the parent's size."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def print_own_peaks(where, amp_dtype):
    """In a process of its own: the bytes that a step takes on top of the weights, one line of JSON, per case."""
    net = make_model(*memory_of.split()[:2], where)
    peaks = []
    for case in cases:
        batch = make_batch(case, where)
        ctypes.CDLL(None).malloc_trim(0)  # what the case before left behind goes back to the system
        before = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the highest so far
        run_step(memory_of, net, batch, amp_dtype)
        peaks.append(resident_bytes("VmHWM") - before)
    print(json.dumps(peaks))


def cpu_peaks(variant):
    """Peak bytes of a step of `variant` on a CPU for every case, or the reason why not."""
    if not hasattr(ctypes.CDLL(None), "malloc_trim") or not Path("/proc/self/clear_refs").exists():
        return ["on a CPU only measured with Linux and glibc"] * len(cases)
    names = ("shape", "tokens", "cases", "mask_prob", "backward", "vocab_size", "global_every", "dtype", "seed")
    command = [sys.executable, str(Path(__file__).resolve()), "--device=cpu", f"--memory_of={variant}"]
    command += [f"--threads={torch.get_num_threads()}", *(f"--{name}={globals()[name]}" for name in names)]
    # every large buffer a mapping of its own, gone when freed: in a heap, the holes between buffers count as memory
    env = {key: value for key, value in os.environ.items() if key not in ALLOCATOR}
    env["MALLOC_MMAP_THRESHOLD_"] = "65536"
    run = subprocess.run(command, capture_output=True, text=True, env=env)
    if run.returncode:
        return [run.stderr.strip().split("\n")[-1] or f"exit status {run.returncode}"] * len(cases)
    return json.loads(run.stdout.splitlines()[-1])


def cuda_peak(variant, net, batch, amp_dtype, where):
    """Peak bytes of a step of `variant` on a GPU, on top of the weights that are there."""
    synchronize(where)
    torch.cuda.reset_peak_memory_stats(where)
    before = torch.cuda.memory_allocated(where)
    run_step(variant, net, batch, amp_dtype)
    synchronize(where)
    return torch.cuda.max_memory_allocated(where) - before


def measure(where, amp_dtype):
    """A row for every case and variant."""
    rows = [{"case": case, "variant": variant} for case in cases for variant in variants]
    bar = tqdm(total=len(rows) * (warmup + repeats + bool(memory)), file=sys.stderr, unit="step", leave=False)
    if memory and where.type == "cpu":  # first, while this process leaves the memory to them
        for variant in variants:
            for row, peak in zip([row for row in rows if row["variant"] == variant], cpu_peaks(variant), strict=True):
                row["peak_bytes"] = peak
                bar.update()
    nets = {}
    for variant in variants:
        who, objective = variant.split()[:2]
        key = f"{who} {objective}" if who == "theirs" else "ours"
        nets[variant] = nets[key] = nets.get(key) or make_model(who, objective, where)
    for case in cases:
        batch = make_batch(case, where)
        here = {row["variant"]: row for row in rows if row["case"] == case}
        for variant, row in here.items():
            row.update(name=batch["case"], sequences=len(batch["lengths"]), seconds=[])
            for _ in range(warmup):
                run_step(variant, nets[variant], batch, amp_dtype)
                bar.update()
            if memory and where.type == "cuda":
                row["peak_bytes"] = cuda_peak(variant, nets[variant], batch, amp_dtype, where)
                bar.update()
        for repeat in range(repeats):
            for i in range(len(variants)):  # each turn starts with another variant
                variant = variants[(i + repeat) % len(variants)]
                synchronize(where)
                start = time.perf_counter()
                loss = run_step(variant, nets[variant], batch, amp_dtype)
                synchronize(where)
                here[variant]["seconds"].append(time.perf_counter() - start)
                here[variant]["loss"] = loss.item()
                bar.update()
        for variant, row in here.items():
            row["flops"] = step_flops(variant, batch)
    bar.close()
    return rows


def add_ratios(rows, peak):
    """Speeds, and each of ours over the best of transformers in the same case and objective; a part of ours, over what
    it replaces."""
    for row in rows:
        seconds = statistics.median(row["seconds"])
        row["tokens_per_s"] = tokens / seconds
        row["tokens_per_s_min"], row["tokens_per_s_max"] = tokens / max(row["seconds"]), tokens / min(row["seconds"])
        row["tflops"] = row["flops"] / seconds / 1e12
        row["mfu"] = row["tflops"] / peak if peak else None
    for row in rows:
        who, objective, *rest = row["variant"].split()
        rival = f"theirs {objective}"
        if who != "ours" or rest == ["recompute"]:
            rival = {"ours": f"ours {objective}$", "loss": f"loss {objective} all-logits"}.get(who)
        same_case = [r for r in rows if r["case"] == row["case"] and r is not row]
        rivals = [r for r in same_case if rival and (r["variant"] + "$").startswith(rival)]
        if rivals:
            best = max(rivals, key=lambda r: r["tokens_per_s"])
            row["ratio"], row["compared_with"] = row["tokens_per_s"] / best["tokens_per_s"], best["variant"]
            if isinstance(row.get("peak_bytes"), int) and isinstance(best.get("peak_bytes"), int):
                row["memory_ratio"] = row["peak_bytes"] / max(1, best["peak_bytes"])


def table(rows):
    """Lined-up columns: tokens/s as median (min ... max), ours over the best of theirs, memory of a step."""
    head = "case, variant, tokens/s, (min ... max), ratio, peak MB, ratio, TFLOP/s, MFU, loss".split(", ")
    lines = [head]
    for row in rows:
        peak = row.get("peak_bytes")
        lines.append(
            [
                row["name"],
                row["variant"],
                f"{row['tokens_per_s']:,.0f}",
                f"({row['tokens_per_s_min']:,.0f} ... {row['tokens_per_s_max']:,.0f})",
                f"{row['ratio']:.2f}x" if "ratio" in row else "",
                f"{peak / 1e6:,.0f}" if isinstance(peak, int) else "-",
                f"{row['memory_ratio']:.2f}x" if "memory_ratio" in row else "",
                f"{row['tflops']:.3g}",
                f"{row['mfu']:.1%}" if row["mfu"] else "-",
                f"{row['loss']:.4f}",
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = []
    for i, line in enumerate(lines):
        if i == 0 or line[0] != lines[i - 1][0]:
            text.append("")
        cells = [f"{c:<{w}}" if j < 2 else f"{c:>{w}}" for j, (c, w) in enumerate(zip(line, widths, strict=True))]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text[1:])


def describe(where, amp_dtype, peak):
    """The circumstances, for the JSON and the lines above the table."""
    names = ("shape", "tokens", "cases", "variants", "mask_prob", "backward", "vocab_size", "global_every", "compile")
    if where.type == "cuda":
        name = torch.cuda.get_device_name(where)
    else:
        name = platform.processor() or platform.machine()
    return {
        "settings": {key: globals()[key] for key in (*names, "repeats", "warmup", "seed")},
        "device": f"{where.type} ({name})",
        "attention_backend": pick_backend(where, amp_dtype),
        "dtype": str(amp_dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "allocator": {key: os.environ[key] for key in ALLOCATOR if key in os.environ},
        "peak_tflops": peak,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main():
    check_settings()
    if threads:
        torch.set_num_threads(threads)
    where = default_device() if device == "auto" else torch.device(device)
    amp_dtype = default_dtype(where) if dtype == "auto" else getattr(torch, dtype)
    if memory_of:
        return print_own_peaks(where, amp_dtype)

    peak = peak_tflops or (peak_tflops_of(where)[0] if amp_dtype == torch.bfloat16 else None)
    about = describe(where, amp_dtype, peak)
    what = "forward and backward" if backward else "forward only"
    print(f"{shape}, {tokens:,} tokens a step, {what}; ", end="")
    print(f"{about['device']}, {about['dtype']}, {about['threads']} threads, torch {about['torch']}")
    print(f"attention backend: {about['attention_backend']}; allocator: {about['allocator'] or 'as the system has it'}")
    if where.type == "cpu" and sys.platform == "linux" and "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        print("glibc returns large buffers after each use here, which costs time and favours us: see `make bench`")

    rows = measure(where, amp_dtype)
    add_ratios(rows, peak)
    print(table(rows), flush=True)
    reasons = sorted({row["peak_bytes"] for row in rows if isinstance(row.get("peak_bytes"), str)})
    if reasons:
        print("peak memory: " + "; ".join(reasons))
    elif memory and where.type not in ("cpu", "cuda"):
        print(f"peak memory: not measured on {where.type}, which does not record it")
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", "utf-8")
    os.replace(part, path)
    print(f"written to {path}")


if __name__ == "__main__":
    configure(globals())
    main()
