"""
What a frozen encoder makes of texts: they are read, run through it once, and the vectors are kept.

cka.py compares such vectors between encoders, needle.py and transplant.py train small probes on them.
"""

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from checkpoint import load_tokenizer


def read_texts(path, setting):
    """The texts of a .txt file (one a line), a .jsonl file ("text" field) or a prepared data directory (its validation
    split, decoded); blank ones are left out. Anything else is one line that names the setting, and a non-zero exit."""
    path = Path(path)
    if path.is_dir():
        tokenizer = load_tokenizer(path / "tokenizer", setting)
        return tokenizer.batch_decode(read_documents(path, setting), skip_special_tokens=True)
    if path.suffix not in (".txt", ".jsonl") or not path.is_file():
        raise SystemExit(f"--{setting}={path}: expected a .txt or .jsonl file, or a directory of prepare_data.py")
    lines = path.read_text(encoding="utf-8").split("\n")
    if path.suffix == ".jsonl":
        for number, line in enumerate(lines):
            try:
                lines[number] = str(json.loads(line)["text"]) if line.strip() else ""
            except (ValueError, KeyError, TypeError):
                where = f"--{setting}={path}: line {number + 1}"
                raise SystemExit(f'{where}: expected a JSON object with a "text" field') from None
    return [line.strip() for line in lines if line.strip()]


def read_documents(data_dir, setting):
    """The validation documents of a prepared data directory as lists of ids, [CLS] and [SEP] included.

    They are held out by construction: prepare_data.py splits by document before anything else.
    """
    data_dir = Path(data_dir)
    try:
        manifest = json.loads((data_dir / "manifest.json").read_text(encoding="utf-8"))
        split, eos = manifest["splits"]["val"], manifest["tokenizer"]["eos_token_id"]
        ids = np.fromfile(data_dir / split["file"], dtype=manifest["dtype"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"--{setting}={data_dir}: expected a directory of prepare_data.py ({error!r})") from None
    documents = np.split(ids, np.flatnonzero(ids == eos) + 1)  # cut after every eos; what follows the last one is empty
    return [document.tolist() for document in documents if len(document) > 2]


def encode(texts, tokenizer, max_len):
    """Texts -> [CLS] text [SEP] as lists of ids, cut to max_len with both kept."""
    bodies = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [[tokenizer.cls_token_id, *body[: max_len - 2], tokenizer.sep_token_id] for body in bodies]


def flat_batch(documents, device):
    """Lists of ids -> one stream (total,) and cu_seqlens (n + 1,): ragged texts side by side, no padding."""
    lengths = torch.tensor([0] + [len(ids) for ids in documents])
    ids = torch.tensor([token for ids in documents for token in ids])
    return ids.to(device), lengths.cumsum(0).to(device, torch.int32)


def batches_of(documents, batch_tokens):
    """Indices, longest document first (what does not fit into memory fails at once), at most batch_tokens a batch."""
    batches, total = [[]], 0
    for i in sorted(range(len(documents)), key=lambda i: -len(documents[i])):
        if batches[-1] and total + len(documents[i]) > batch_tokens:
            batches.append([])
            total = 0
        batches[-1].append(i)
        total += len(documents[i])
    return batches if documents else []


def block_bounds(n_layers):
    """{name: (first, last)} of the low, mid and late blocks: the paper's 0-7, 8-14, 15-21 of 22, scaled to n_layers."""
    low, mid = round(n_layers * 8 / 22), round(n_layers * 15 / 22)
    blocks = {"low": (0, low - 1), "mid": (low, mid - 1), "late": (mid, n_layers - 1)}
    return {name: (first, last) for name, (first, last) in blocks.items() if first <= last}


def weights_hash(model):
    """The start of the sha256 over the names and bytes of all weights."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def autocast(device, dtype):
    """For a forward pass in bfloat16; in float32, nothing."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


@torch.no_grad()
def compute(model, documents, reduce, what, name="model", device="cpu", dtype=torch.float32, states=False,
            batch_tokens=16384, cache=None):  # fmt: skip
    """What `reduce` keeps of every document (list of ids) -> array (n, ...).

    reduce(output, sizes) gets the model's output for some documents as one flat stream, without padding, and how many
    tokens each has; it returns one entry a document. `what` names it in the cache: a directory, in which results lie
    under a hash of config, weights, documents, `what` and dtype, so that they are computed once. states:
    output.hidden_states is needed too. With several processes (torchrun), each takes its share and all get the whole.
    """
    device = torch.device(device)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    network = [asdict(model.config), weights_hash(model)]  # other windows or thetas make other vectors of equal weights
    key = json.dumps([network, what, str(dtype), [list(map(int, ids)) for ids in documents]])
    file = Path(cache) / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.npy" if cache else None
    found = np.load(file) if file and rank == 0 and file.exists() else None
    if ranks > 1:  # rank 0 alone looks: were a file there for some ranks only, those would not join in computing it
        dist.broadcast_object_list(box := [found])
        found = box[0]
    if found is not None:
        return found
    model = model.to(device).eval()
    batches = batches_of(documents, batch_tokens)[rank::ranks]
    total = sum(len(documents[i]) for rows in batches for i in rows)
    bar = tqdm(total=total, desc=f"features of {name}", unit="token", unit_scale=True, disable=rank > 0)
    for rows in batches:
        ids, cu_seqlens = flat_batch([documents[i] for i in rows], device)
        sizes = [len(documents[i]) for i in rows]
        with autocast(device, dtype):
            out = model(
                ids, cu_seqlens=cu_seqlens, max_seqlen=max(sizes), output_hidden_states=states, output_logits=False
            )
        values = reduce(out, sizes)
        if found is None:
            found = np.zeros((len(documents), *values.shape[1:]), values.dtype)
        found[rows] = values
        bar.update(sum(sizes))
    bar.close()
    if ranks > 1:
        found = gather(found)
    if file and rank == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(part := file.with_suffix(".part.npy"), found)
        os.replace(part, file)
    return found


def gather(found):
    """Every rank has its documents' rows and zeros elsewhere (or, with fewer batches than ranks, nothing at all)."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, found)
    return sum(part for part in parts if part is not None)
