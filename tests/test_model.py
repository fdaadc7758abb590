"""
Tests of model.py: the same function as transformers' ModernBERT, one attention rule in every backend, no leak.

The references are independent of the code under test: transformers' own ModernBertForMaskedLM, one attention written
with an explicit mask (`reference_attention`), closed forms in float64, and numbers worked out by hand. The kernels that
need CUDA run where there is a GPU; everywhere else a twin with their documented signature stands in for them, so the
way model.py calls them is tested too.
"""

import copy
import inspect
import json
import math
import os
import random
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForMaskedLM,
    ModernBertForMaskedLM,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
)
from transformers import ModernBertConfig as TheirConfig

import model as M
from model import IGNORE, ModernBERT, ModernBERTConfig

ROOT = Path(M.__file__).parent
TINY = dict(
    vocab_size=97,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=44,
    local_attention=8,
    global_rope_theta=1234.0,
    local_rope_theta=77.0,
    pad_token_id=0,
    cls_token_id=1,
    sep_token_id=2,
    mask_token_id=3,
)
FR, EN = 32768, 50368  # vocabularies of ModernCamemBERT and ModernBERT
SHAPES = {
    "base": dict(hidden_size=768, num_hidden_layers=22, num_attention_heads=12, intermediate_size=1152),
    "large": dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=2624),
}


# ----------------------------------------------------------------------------------------------------------------------
# Helpers


def shake(module, seed=0):
    """Weights far from any initialisation, so that a norm, a bias or a mask that is ignored changes the result."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if name.endswith("norm.weight"):
                p.copy_(1 + 0.3 * noise)
            elif p.ndim == 1:
                p.copy_(noise)
            else:
                p.copy_(noise * p.shape[-1] ** -0.5)
    return module.eval()


def tiny(seed=0, **changes):
    return shake(ModernBERT(ModernBERTConfig(**{**TINY, **changes})), seed)


def batch(lengths, side, vocab_size, seed=0):
    """Random ids (B, T), with the mask of padding on one side ("left", "right"); "none" wants equal lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, vocab_size, (len(lengths), max(lengths)), generator=generator)
    column = torch.arange(max(lengths))
    length = torch.tensor(lengths)[:, None]
    mask = (column >= max(lengths) - length) if side == "left" else (column < length)
    labels = torch.where((torch.rand(ids.shape, generator=generator) < 0.3) & mask, ids, IGNORE)
    return ids * mask, mask.long(), labels


def offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def flat_ids(lengths, vocab_size=97, seed=0):
    return torch.randint(4, vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(seed))


def relative_error(a, b):
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-12)).item()


# ----------------------------------------------------------------------------------------------------------------------
# The same function as transformers, in both directions


def assert_same_model(ours, theirs, ids, mask, labels):
    real = mask.bool()
    their_out = theirs(input_ids=ids, attention_mask=mask, labels=labels, output_hidden_states=True)
    our_out = ours(ids, mask, output_hidden_states=True)
    assert (our_out.logits - their_out.logits)[real].abs().max() < 1e-4
    # transformers replaces the last raw state by the normalised one
    pairs = [*zip(our_out.hidden_states[:-1], their_out.hidden_states[:-1], strict=True)]
    pairs.append((our_out.last_hidden_state, their_out.hidden_states[-1]))
    for mine, other in pairs:
        assert (mine - other)[real].abs().max() < 1e-4
    loss = ours(ids, mask, labels=labels)
    assert loss.n_targets == (labels != IGNORE).sum()
    mean = loss.loss_sum / loss.n_targets
    assert abs(mean.item() - their_out.loss.item()) < 1e-5 * max(1, their_out.loss.item())
    ours.zero_grad()
    theirs.zero_grad()
    mean.backward()
    their_out.loss.backward()
    their_grads = {name: p.grad for name, p in theirs.named_parameters()}
    assert their_grads.keys() == dict(ours.named_parameters()).keys()
    for name, p in ours.named_parameters():
        assert relative_error(p.grad, their_grads[name]) < 1e-4, name


def random_shape(seed):
    draw = random.Random(seed)
    heads, head_dim = draw.choice([1, 2, 3, 4]), draw.choice([4, 8, 16, 22])
    return dict(
        vocab_size=draw.choice([61, 128, 503]),
        hidden_size=heads * head_dim,
        num_hidden_layers=draw.randint(1, 6),
        num_attention_heads=heads,
        intermediate_size=draw.choice([16, 33, 80]),
        local_attention=draw.choice([2, 7, 16, 128]),
        global_attn_every_n_layers=draw.randint(1, 4),
        global_rope_theta=draw.choice([500.0, 160000.0]),
        local_rope_theta=draw.choice([50.0, 10000.0]),
        norm_eps=draw.choice([1e-5, 1e-2]),
        pad_token_id=0,
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right", "none"])
@pytest.mark.parametrize("seed", range(4))
def test_parity_with_transformers_on_random_shapes(seed, side, attention, tmp_path):
    draw = random.Random(f"{seed}-{side}")
    lengths = [draw.randint(1, 300) for _ in range(draw.randint(1, 4))]
    if side == "none":
        lengths = lengths[:1] * 2
    shape = random_shape(100 * seed + len(side))
    ids, mask, labels = batch(lengths, side, shape["vocab_size"], seed)
    # their checkpoint into ours
    theirs = shake(ModernBertForMaskedLM(TheirConfig(**shape)), seed)
    theirs.save_pretrained(tmp_path / "theirs")
    theirs.set_attn_implementation(attention)
    assert_same_model(ModernBERT.from_pretrained(tmp_path / "theirs"), theirs, ids, mask, labels)
    # ours into theirs
    ours = tiny(seed + 1, **shape)
    ours.save_pretrained(tmp_path / "ours")
    theirs = ModernBertForMaskedLM.from_pretrained(tmp_path / "ours", attn_implementation=attention)
    assert_same_model(ours, theirs, ids, mask, labels)


def parity_at_full_width(shape, lengths, folder, **changes):
    """Weights as they are initialised, at the widths and vocabularies of the real models."""
    torch.manual_seed(0)
    ours = ModernBERT(ModernBERTConfig(**{**shape, "pad_token_id": 0, **changes})).eval()
    ours.save_pretrained(folder)
    theirs = ModernBertForMaskedLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    assert_same_model(ours, theirs, *batch(lengths, "right", ours.config.vocab_size))


@pytest.mark.parametrize("shape, vocab_size", [("base", FR), ("base", EN), ("large", FR)])
def test_parity_with_transformers_at_full_width(shape, vocab_size, tmp_path):
    parity_at_full_width(SHAPES[shape], [70, 9], tmp_path, vocab_size=vocab_size, num_hidden_layers=2)


@pytest.mark.slow
@pytest.mark.parametrize("shape, vocab_size", [("base", EN), ("large", FR)])
def test_parity_with_transformers_at_full_size(shape, vocab_size, tmp_path):
    parity_at_full_width(SHAPES[shape], [300, 65, 1], tmp_path, vocab_size=vocab_size)


@pytest.mark.parametrize("lengths", [[1, 5], [129], [8192]])
def test_parity_with_transformers_up_to_8192_tokens(lengths, tmp_path):
    shape = dict(hidden_size=64, num_attention_heads=1, intermediate_size=64, num_hidden_layers=2)
    parity_at_full_width(shape, lengths, tmp_path, vocab_size=97)


def their_causal_masks(total, window):
    """The rule as additive masks for transformers, which takes explicit ones: that makes it a causal reference too."""
    rule = {"full_attention": None, "sliding_attention": window}
    hidden = {kind: ~visible_by_rule(offsets([total]), w, True) for kind, w in rule.items()}
    return {kind: torch.zeros(1, 1, total, total).masked_fill(h, -torch.inf) for kind, h in hidden.items()}


@pytest.mark.parametrize("total", [1, 7, 64, 150])
def test_the_causal_model_is_transformers_with_causal_masks(total, tmp_path):
    """Logits and CLM gradients of is_causal=True: the same weights and head, another mask, labels moved by one."""
    ours = tiny()
    ours.save_pretrained(tmp_path)
    theirs = ModernBertForMaskedLM.from_pretrained(tmp_path, attn_implementation="eager")
    ids = flat_ids([total])
    logits = theirs(input_ids=ids[None], attention_mask=their_causal_masks(total, 8)).logits[0]
    assert (ours(ids, is_causal=True).logits - logits).abs().max() < 1e-4
    labels = M.next_token_labels(ids, offsets([total]))
    out = ours(ids, is_causal=True, labels=labels)
    loss = F.cross_entropy(logits[:-1], ids[1:], reduction="sum")
    assert out.n_targets == total - 1
    assert abs(out.loss_sum.item() - loss.item()) < 1e-4 * max(1, loss.item())
    if total > 1:
        out.loss_sum.backward()
        loss.backward()
        their_grads = {name: p.grad for name, p in theirs.named_parameters()}
        for name, p in ours.named_parameters():
            assert relative_error(p.grad, their_grads[name]) < 1e-4, name


# ----------------------------------------------------------------------------------------------------------------------
# Attention: one rule, several backends


def visible_by_rule(cu_seqlens, window, is_causal):
    """(total, total) bool: may query i see key j? The rule of the paper's two masks, pair by pair in plain Python."""
    cu = cu_seqlens.tolist()
    sequence = [s for s in range(len(cu) - 1) for _ in range(cu[s], cu[s + 1])]
    visible = torch.zeros(cu[-1], cu[-1], dtype=torch.bool)
    for i in range(cu[-1]):
        for j in range(cu[-1]):
            near = window is None or abs(i - j) <= window // 2
            visible[i, j] = sequence[i] == sequence[j] and near and (j <= i or not is_causal)
    return visible


def reference_attention(q, k, v, visible):
    """softmax(q k / sqrt(d)) v over the visible pairs, in float64. q, k, v (total, heads, head_dim)."""
    scores = torch.einsum("ihd,jhd->hij", q.double(), k.double()) / math.sqrt(q.shape[-1])
    probs = scores.masked_fill(~visible.to(q.device), -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", probs, v.double())


def twin_kernel(q, k, v, cu_q, cu_k, max_q, max_k, left, right):
    """What the CUDA kernels promise: per sequence, keys from i - left to i + right inclusive, -1 = no bound."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and torch.equal(cu_q, cu_k)
    assert isinstance(max_q, int) and max_q == max_k == int(cu_q.diff().max())
    assert q.shape == k.shape == v.shape and q.shape[0] == cu_q[-1]
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    outs = []
    for start, end in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if left >= 0:
            hidden |= distance > left
        if right >= 0:
            hidden |= -distance > right
        scores = torch.einsum("ihd,jhd->hij", q[start:end], k[start:end]) / math.sqrt(q.shape[-1])
        outs.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v[start:end]))
    return torch.cat(outs)


def flash_twin(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """flash-attn 2: window_size=(left, right) inclusive, and causal=True puts right to 0 whatever it says."""
    assert dropout_p == 0 and softmax_scale is None
    left, right = window_size[0], 0 if causal else window_size[1]
    return twin_kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, left, right)


def varlen_window_twin(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    """torch.nn.attention.varlen.varlen_attn of torch 2.12 and later: (-1, 0) is causal, (w, 0) causal and local."""
    assert scale is None
    return twin_kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *window_size)


def varlen_causal_twin(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None, scale=None
):
    """The same function in torch 2.10 and 2.11: is_causal, and no window."""
    assert scale is None
    return twin_kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, -1, 0 if is_causal else -1)


def put_in_place(monkeypatch, name):
    """Let model.py find a twin where it looks for a kernel -> (backend's name, device, dtype, tolerance)."""
    if name.startswith("varlen_attn") and "twin" in name:
        twin = varlen_causal_twin if "2.11" in name else varlen_window_twin
        monkeypatch.setattr(M, "varlen_attn", twin)
        monkeypatch.setattr(M, "_VARLEN_KEYS", inspect.signature(twin).parameters)
        monkeypatch.setattr(M, "_VARLEN_WINDOW", "window_size" in M._VARLEN_KEYS)
    if name == "flash_attn twin":
        monkeypatch.setattr(M, "flash_attn_varlen_func", flash_twin)
    if name.endswith("in bf16"):
        return name.split()[0], torch.device("cpu"), torch.bfloat16, 3e-2
    if "cuda" not in name:
        return name.split()[0], torch.device("cpu"), torch.float32, 1e-5
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    if name.startswith("flash_attn") and M.flash_attn_varlen_func is None:
        pytest.skip("needs the flash-attn package")
    if name.startswith("varlen_attn") and M.varlen_attn is None:
        pytest.skip("needs a PyTorch with torch.nn.attention.varlen")
    dtype, tolerance = (torch.float32, 1e-4) if name.startswith("sdpa") else (torch.bfloat16, 2e-2)
    return name.split()[0], torch.device("cuda"), dtype, tolerance


CPU_BACKENDS = ["sdpa", "flash_attn twin", "varlen_attn twin", "varlen_attn twin of torch 2.11"]
BACKENDS = [*CPU_BACKENDS, "sdpa in bf16", "sdpa on cuda", "flash_attn on cuda", "varlen_attn on cuda"]

WINDOW = 16  # local attention works in blocks of this many queries
LENGTHS = {
    "one token": [1],
    "one sequence": [37],
    "several": [3, 29, 1, 40, 16],
    "of one length": [21, 21, 21],
    "shorter than the window": [2, 5, 1, 7],
    "half a window and one": [8, 9],
    "one short of a block": [15],
    "a block": [16],
    "one past a block": [17],
    "cut at the blocks": [16, 32, 16],
    "cut one past the blocks": [17, 16, 16],
    "two blocks and one": [33],
    "none first": [0, 5, 19],
    "none last and between": [5, 0, 0, 19, 0],
    "only one is not empty": [0, 18, 0],
}


def make_stream(backend, cu_seqlens, window, is_causal):
    net = ModernBERT(ModernBERTConfig(**{**TINY, "local_attention": window or WINDOW}))
    net.backend = backend
    return net.make_stream(cu_seqlens, None, int(cu_seqlens[-1]), is_causal)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("is_causal", [False, True], ids=["both ways", "causal"])
@pytest.mark.parametrize("window", [None, WINDOW], ids=["global", "local"])
@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_computes_the_rule(name, window, is_causal, lengths, monkeypatch):
    backend, device, dtype, tolerance = put_in_place(monkeypatch, name)
    cu_seqlens = offsets(lengths)
    visible = visible_by_rule(cu_seqlens, window, is_causal)
    torch.manual_seed(0)
    scale = 2 if dtype == torch.float32 else 1
    q, k, v, g = (scale * torch.randn(4, sum(lengths), 3, 8)).to(device, dtype).unbind()
    mine = [x.clone().requires_grad_() for x in (q, k, v)]
    theirs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = M.attention(*mine, make_stream(backend, cu_seqlens.to(device), window, is_causal), window)
    expected = reference_attention(*theirs, visible)
    assert out.shape == q.shape and out.dtype == dtype
    assert (out.double() - expected).abs().max() < tolerance * expected.abs().max()
    grads = torch.autograd.grad(out, mine, g)
    for grad, reference in zip(grads, torch.autograd.grad(expected, theirs, g.double()), strict=True):
        scale = reference.abs().max().clamp(min=1)
        assert (grad.double() - reference.double()).abs().max() < tolerance * scale


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [1023, 1024, 1025])
def test_global_attention_over_long_rows(length, is_causal, dtype, tolerance):
    """Lengths around the one at which the CPU changes its way of computing in bf16; two rows, as a batch and ragged."""
    q, k, v = torch.randn(3, 2 * length + 3, 1, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    i, j = torch.arange(length)[:, None], torch.arange(length)
    visible = (j <= i) | (not is_causal)
    expected = reference_attention(q[:length], k[:length], v[:length], visible)
    for lengths in ([length], [length, length], [length, 3]):
        part = [x[: sum(lengths)] for x in (q, k, v)]
        out = M.attention(*part, make_stream("sdpa", offsets(lengths), None, is_causal), None)[:length]
        assert (out.double() - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("length", [1, 2, 255, 256, 257, 511, 512, 513, 800])
@pytest.mark.parametrize("is_causal", [False, True])
def test_matmul_attention_is_attention(length, is_causal):
    """What CPUs do in bf16, here in fp32: outputs and gradients at the edges of its groups of queries, from views that
    are not contiguous, whether or not it keeps the probabilities."""
    base = torch.randn(length, 2, 3, 2, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    d_out = torch.randn(2, 3, length, 8, generator=torch.Generator().manual_seed(1))
    q, k, v = (x.permute(1, 2, 0, 3) for x in (base[:, :, :, 0], base[:, :, :, 1], base[:, :, :, 0] * 0.5))
    out = M.MatmulAttention.apply(q, k, v, is_causal)
    later = torch.ones(length, length, dtype=torch.bool).triu(1) & is_causal
    scores = (q @ k.transpose(2, 3)).double() / math.sqrt(8)
    expected = scores.masked_fill(later, -torch.inf).softmax(-1) @ v.double()
    assert (out - expected).abs().max() < 1e-5
    (grad,) = torch.autograd.grad(out, base, d_out, retain_graph=True)
    (again,) = torch.autograd.grad(out, base, d_out, retain_graph=True)
    (reference,) = torch.autograd.grad(expected, base, d_out.double())
    assert torch.equal(grad, again) and relative_error(grad, reference) < 1e-5


@pytest.mark.parametrize("window", [2, 3, 7, 10, 128])
@pytest.mark.parametrize("is_causal", [False, True])
def test_windows_of_any_size(window, is_causal):
    """An odd window is used as the even one below it, as transformers does; one that nothing reaches hides nothing."""
    lengths = [40, 1, 23]
    q, k, v = torch.randn(3, sum(lengths), 2, 8, generator=torch.Generator().manual_seed(0))
    out = M.attention(q, k, v, make_stream("sdpa", offsets(lengths), window, is_causal), window)
    expected = reference_attention(q, k, v, visible_by_rule(offsets(lengths), window, is_causal))
    assert (out - expected).abs().max() < 1e-5


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 128])
def test_attention_over_8192_tokens(window, is_causal):
    """Some queries of a long sequence (and of a short one packed behind it), each against all keys."""
    lengths = [8192, 100]
    q, k, v = torch.randn(3, sum(lengths), 1, 8, generator=torch.Generator().manual_seed(0)).requires_grad_().unbind()
    out = M.attention(q, k, v, make_stream("sdpa", offsets(lengths), window, is_causal), window)
    some = torch.tensor([0, 1, 63, 64, 65, 127, 128, 129, 4095, 4096, 8000, 8191, 8192, 8291])
    i, j = some[:, None], torch.arange(sum(lengths))
    visible = (i < 8192) == (j < 8192)
    visible &= ((i - j).abs() <= 64) | (window is None)
    visible &= (j <= i) | (not is_causal)
    scores = (q[some, 0].double() @ k[:, 0].double().T / math.sqrt(8)).masked_fill(~visible, -torch.inf)
    expected = (scores.softmax(-1) @ v[:, 0].double()).float()
    assert (out[some, 0] - expected).abs().max() < 1e-5
    g = torch.randn(len(some), 8, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out[some, 0], (q, k, v), g, retain_graph=True)
    for grad, reference in zip(grads, torch.autograd.grad(expected, (q, k, v), g), strict=True):
        assert (grad - reference).abs().max() < 1e-5


@pytest.mark.parametrize("name", CPU_BACKENDS)
def test_a_local_layer_sees_129_keys_or_65_when_causal(name, monkeypatch):
    """With the unit matrix as values the output of attention is its probabilities: what is seen is not zero."""
    backend = put_in_place(monkeypatch, name)[0]
    total = 300
    q, k = torch.randn(2, total, 1, total, generator=torch.Generator().manual_seed(0))
    v = torch.eye(total)[:, None]
    i, j = torch.arange(total)[:, None], torch.arange(total)
    for is_causal, n_keys, first, last in ((False, 129, 86, 214), (True, 65, 86, 150)):
        seen = M.attention(q, k, v, make_stream(backend, offsets([total]), 128, is_causal), 128)[:, 0] > 0
        assert seen[150].sum() == n_keys
        assert seen[150].nonzero().flatten().tolist() == list(range(first, last + 1))
        assert torch.equal(seen, ((i - j).abs() <= 64) & ((j <= i) | (not is_causal)))


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_local_block_is_moved_by_its_window_only(is_causal):
    """Window 8: what happens at j reaches i if and only if |i - j| <= 4 (and j <= i), through a whole block."""
    net = tiny()
    block = net.model.layers[1]
    assert block.attn.window == 8
    stream = net.make_stream(offsets([32]), None, 32, is_causal)
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    before = block(x, stream)
    for j in range(32):
        moved = x.clone()
        moved[j] += torch.randn(32, generator=torch.Generator().manual_seed(j))
        reached = (block(moved, stream) - before).abs().amax(1) > 1e-6
        assert reached.tolist() == [abs(i - j) <= 4 and (j <= i or not is_causal) for i in range(32)]


def test_layers_alternate_as_the_config_says():
    config = ModernBERTConfig(num_hidden_layers=22)
    assert [i for i in range(22) if config.is_global(i)] == [0, 3, 6, 9, 12, 15, 18, 21]
    kinds = [(layer.attn.window, layer.attn.theta) for layer in tiny(num_hidden_layers=5).model.layers]
    local, full = (8, 77.0), (None, 1234.0)
    assert kinds == [full, local, local, full, local]


# ----------------------------------------------------------------------------------------------------------------------
# No leak


@pytest.mark.parametrize("name", CPU_BACKENDS)
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("side", ["flat", "left", "right"])
def test_causal_sees_nothing_of_the_future(side, train, name, monkeypatch):
    """M2: tokens after t are changed; every state of every layer, and the logits, stay what they were up to t."""
    net = tiny().train(train)
    net.backend = put_in_place(monkeypatch, name)[0]
    total = 200
    for t in (0, 8, 97, 198):
        ids = flat_ids([total])
        changed = ids.clone()
        changed[t + 1 :] = (changed[t + 1 :] - 4 + 50) % 93 + 4
        outs = []
        for tokens in (ids, changed):
            if side == "flat":
                out = net(tokens, is_causal=True, output_hidden_states=True)
                outs.append(torch.cat([*out.hidden_states, out.logits], dim=-1))
            else:
                pad = torch.zeros(11, dtype=torch.long)
                row = torch.cat((pad, tokens) if side == "left" else (tokens, pad))[None]
                out = net(row, (row > 0).long(), is_causal=True, output_hidden_states=True)
                outs.append(torch.cat([*out.hidden_states, out.logits], dim=-1)[row > 0])
        difference = (outs[0] - outs[1]).abs()
        assert difference[: t + 1].max() < 1e-6
        assert (difference[t + 1 :].amax(0).view(-1) > 1e-3).float().mean() > 0.95  # and it does change what follows
    both_ways = [net(tokens).logits for tokens in (ids, changed)]
    assert (both_ways[0] - both_ways[1])[:t].abs().max() > 1e-3


@pytest.mark.parametrize("side", ["flat", "right"])
def test_causal_in_bf16_sees_nothing_of_the_future(side):
    """Under autocast the CPU computes short rows another way: the same demand."""
    net, ids = tiny().train(), flat_ids([200])
    for t in (0, 64, 150):
        changed = torch.cat((ids[: t + 1], flat_ids([199 - t], seed=1)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if side == "flat":
                a, b = (net(x, is_causal=True).logits for x in (ids, changed))
            else:
                mask = torch.tensor([[1] * 200, [1] * 30 + [0] * 170])
                a, b = (net(torch.stack((x, ids)), mask, is_causal=True).logits[0] for x in (ids, changed))
        assert (a - b)[: t + 1].abs().max() < 1e-6 and (a - b)[t + 1 :].abs().max() > 1e-2


@pytest.mark.parametrize("name", CPU_BACKENDS)
@pytest.mark.parametrize("layer", [0, 1], ids=["global", "local"])
def test_no_layer_type_leaks(layer, name, monkeypatch):
    """The same per block, by gradients: an output at t has no derivative by any input after t, but one by itself."""
    net = tiny()
    net.backend = put_in_place(monkeypatch, name)[0]
    stream = net.make_stream(offsets([40]), None, 40, True)
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = net.model.layers[layer](x, stream)
    for t in (0, 7, 8, 9, 20, 38):
        (grad,) = torch.autograd.grad(out[t].sum(), x, retain_graph=True)
        assert (grad[t + 1 :] == 0).all() and (grad[t] != 0).any()
        reach = 0 if layer == 0 else max(0, t - 4)
        assert (grad[reach : t + 1].abs().amax(1) > 0).all() and (grad[:reach] == 0).all()


@pytest.mark.parametrize("name", CPU_BACKENDS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_do_not_see_each_other(is_causal, name, monkeypatch):
    net = tiny()
    net.backend = put_in_place(monkeypatch, name)[0]
    lengths = [5, 17, 0, 1, 30]
    ids, cu = flat_ids(lengths), offsets(lengths)
    packed = net(ids, cu_seqlens=cu, is_causal=is_causal).logits
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        if end > start:
            alone = net(ids[start:end], is_causal=is_causal).logits
            assert (packed[start:end] - alone).abs().max() < 1e-4
    changed = ids.clone()
    changed[5:22] = flat_ids([17], seed=9)
    difference = (net(changed, cu_seqlens=cu, is_causal=is_causal).logits - packed).abs().amax(1)
    assert difference[:5].max() < 1e-6 and difference[22:].max() < 1e-6 and difference[5:22].min() > 1e-4


# ----------------------------------------------------------------------------------------------------------------------
# The edge of the model: padding, shapes, what a call returns


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_flat_and_padded_are_the_same(side, is_causal):
    net, lengths = tiny(), [3, 50, 1, 17]
    ids, mask, labels = batch(lengths, side, 97)
    real = mask.bool()
    padded = net(ids, mask, is_causal=is_causal, output_hidden_states=True)
    flat = net(ids[real], cu_seqlens=offsets(lengths), is_causal=is_causal, output_hidden_states=True)
    assert torch.equal(padded.logits[real], flat.logits)
    assert torch.equal(padded.last_hidden_state[real], flat.last_hidden_state)
    for a, b in zip(padded.hidden_states, flat.hidden_states, strict=True):
        assert torch.equal(a[real], b)
    loss = net(ids, mask, is_causal=is_causal, labels=labels)
    flat_loss = net(ids[real], cu_seqlens=offsets(lengths), is_causal=is_causal, labels=labels[real], max_seqlen=50)
    assert loss.n_targets == flat_loss.n_targets and torch.equal(loss.loss_sum, flat_loss.loss_sum)


def test_labels_on_padding_are_no_targets():
    ids, mask, labels = batch([3, 9], "right", 97)
    everywhere = torch.where(mask.bool(), labels, 5)
    a, b = (tiny()(ids, mask, labels=x) for x in (labels, everywhere))
    assert a.n_targets == b.n_targets and torch.equal(a.loss_sum, b.loss_sum)


@pytest.mark.parametrize("side", ["left", "right"])
def test_hidden_states_come_back_padded(side):
    """M6: n_layers + 1 tensors of (B, T, C), embeddings first, raw block outputs, pads exactly 0."""
    net = tiny()
    ids, mask, _ = batch([3, 21, 8], side, 97)
    out = net(ids, mask, output_hidden_states=True)
    assert len(out.hidden_states) == 5
    for state in (*out.hidden_states, out.last_hidden_state):
        assert state.shape == (3, 21, 32)
        assert (state[mask == 0] == 0).all() and (state[mask == 1].abs().amax(-1) > 0).all()
    assert out.logits.shape == (3, 21, 97) and (out.logits[mask == 0] == 0).all()
    real = mask.bool()
    assert torch.equal(out.hidden_states[0][real], net.model.embeddings(ids[real]))
    assert torch.equal(net.model.final_norm(out.hidden_states[-1])[real], out.last_hidden_state[real])
    assert torch.equal(net.decoder(net.head(out.last_hidden_state))[real], out.logits[real])


def test_what_is_not_asked_for_is_not_returned():
    out = tiny()(flat_ids([9]), output_logits=False)
    assert out.logits is None and out.hidden_states is None and out.loss_sum is None
    assert out.last_hidden_state.shape == (9, 32)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16 autocast"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [[3, 256], [1, 128], [5, 129]])
def test_pads_never_become_nan(lengths, is_causal, dtype):
    """M4: lengths at which other kernels have turned fully padded rows into NaN."""
    net = tiny().train()
    ids, mask, labels = batch(lengths, "right", 97)
    labels[0, 0] = 5
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
        out = net(ids, mask, is_causal=is_causal)
        loss = net(ids, mask, is_causal=is_causal, labels=labels)
        loss.loss_sum.backward()
    assert torch.isfinite(out.logits).all() and (out.logits[mask == 0] == 0).all()
    assert torch.isfinite(loss.loss_sum)
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())
    net.zero_grad()
    out.logits.float().square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())


def test_a_row_of_nothing_but_padding():
    ids, mask, _ = batch([4, 7], "right", 97)
    mask[0] = 0
    out = tiny()(ids, mask)
    assert (out.logits[0] == 0).all() and torch.isfinite(out.logits).all()


def test_a_batch_of_nothing_but_padding():
    ids, mask, labels = batch([4, 7], "right", 97)
    out = tiny()(ids, torch.zeros_like(mask), output_hidden_states=True)
    assert out.logits.shape == (2, 7, 97) and (out.logits == 0).all()
    loss = tiny()(ids, torch.zeros_like(mask), labels=labels)
    assert loss.n_targets == 0 and loss.loss_sum == 0


def test_states_that_nobody_asked_for_are_not_kept():
    """Without a gradient each state can go as soon as the next one is there."""
    alive, peak = set(), 0

    def watch(block, args, out):
        nonlocal peak
        alive.add(id(out.untyped_storage()))
        weakref.finalize(out, alive.discard, id(out.untyped_storage()))
        peak = max(peak, len(alive))

    net = tiny(num_hidden_layers=12)
    for block in net.model.layers:
        block.register_forward_hook(watch)
    with torch.no_grad():
        net(flat_ids([30]))
    assert peak <= 2


def test_wrong_inputs_are_refused():
    net, ids = tiny(), torch.full((2, 6), 5)
    with pytest.raises(ValueError, match="attention_mask.*hole"):
        net(ids, torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0]]))
    with pytest.raises(ValueError, match="attention_mask"):
        net(ids, torch.ones(2, 5))
    with pytest.raises(ValueError, match="cu_seqlens"):
        net(ids, cu_seqlens=offsets([6, 6]))
    with pytest.raises(ValueError, match="attention_mask"):
        net(ids.flatten(), torch.ones(12))
    for cu_seqlens in ([0, 6], [0, 6, 13], [1, 12]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            net(ids.flatten(), cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32))


# ----------------------------------------------------------------------------------------------------------------------
# Rotary embedding


@pytest.mark.parametrize("theta", [160000.0, 10000.0])
def test_rope_is_exact_to_8191_even_in_bf16(theta):
    net = tiny(global_rope_theta=theta, hidden_size=256).to(torch.bfloat16)
    cos, sin = net.make_stream(offsets([8192]), None, 8192, False).rope[theta]
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (8192, 1, 1, 32)
    frequency = theta ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    angle = torch.arange(8192, dtype=torch.float64)[:, None] * frequency
    # an fp32 angle of 8,191 radians is known to 5e-4, and the frequencies to 1e-7
    assert (cos[:, 0, 0] - angle.cos()).abs().max() < 2e-3
    assert (sin[:, 0, 0] - angle.sin()).abs().max() < 2e-3
    assert (cos[:512, 0, 0] - angle[:512].cos()).abs().max() < 1e-4


def test_rope_restarts_in_every_sequence():
    lengths = [3, 0, 5, 1]
    cos, _ = M.rope_angles(offsets(lengths), 9, 8, 100.0)
    position = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 0])
    assert torch.allclose(cos[:, 0, 0, 1], (position * 100.0**-0.25).cos())


def test_rotate_turns_pairs_half_a_head_apart():
    """Pair (d, d + half) is one complex number, turned by position x frequency."""
    x = torch.randn(6, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    cos, sin = M.rope_angles(offsets([6]), 6, 8, 50.0)
    turned = torch.complex(*x.chunk(2, -1)) * torch.complex(cos, sin)
    assert torch.allclose(M.rotate(x, cos, sin), torch.cat((turned.real, turned.imag), -1), atol=1e-6)
    assert M.rotate(x.bfloat16(), cos, sin).dtype == torch.bfloat16


def test_bf16_is_as_close_to_fp32_as_transformers(tmp_path):
    net = tiny(hidden_size=64, num_hidden_layers=6)
    net.save_pretrained(tmp_path)
    theirs = ModernBertForMaskedLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    ids = flat_ids([2, 100])
    exact = net(ids).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        error = (net(ids).logits - exact).square().mean().sqrt()
        their_error = (theirs(input_ids=ids[None]).logits[0] - exact).square().mean().sqrt()
    assert error < 1.25 * their_error


# ----------------------------------------------------------------------------------------------------------------------
# Activation checkpointing, torch.compile


@pytest.mark.parametrize("is_causal", [False, True], ids=["both ways", "causal"])
def test_recomputing_activations_changes_no_bit(is_causal):
    """The same loss and gradients with less kept, under dropout and autocast too."""
    net = tiny(attn_out_dropout=0.2).train()
    ids = flat_ids([40, 3])
    kept, results = [], []
    for net.model.recompute in (False, True):
        torch.manual_seed(1)
        net.zero_grad()
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, s=sizes: s.append(x.numel()) or x, lambda x: x):
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(ids, labels=ids, cu_seqlens=offsets([40, 3]), is_causal=is_causal).loss_sum
        loss.backward()
        kept.append(sum(sizes))
        results.append([loss.detach(), *(p.grad.clone() for p in net.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert kept[1] < kept[0] / 2
    with torch.no_grad():
        assert net(ids).logits.shape == (43, 97)


@torch.library.custom_op("detour_tests::varlen", mutates_args=())
def opaque_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, longest: int, left: int, right: int
) -> torch.Tensor:
    return twin_kernel(q, k, v, cu, cu, longest, longest, left, right)


opaque_kernel.register_fake(lambda q, k, v, cu, longest, left, right: torch.empty_like(q))


@pytest.mark.parametrize("is_causal", [False, True], ids=["both ways", "causal"])
def test_compiled_blocks_are_not_compiled_again_for_every_batch(is_causal, monkeypatch):
    """As on a GPU, where the kernel is one opaque operation: after the second shape, other numbers of tokens and
    sequences run the code that is there. No C compiler is needed to see it."""
    from torch._dynamo.testing import CompileCounter

    def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
        return opaque_kernel(query, key, value, cu_seq_q, max_q, *window_size)

    monkeypatch.setattr(M, "varlen_attn", kernel)
    monkeypatch.setattr(M, "_VARLEN_KEYS", inspect.signature(kernel).parameters)
    monkeypatch.setattr(M, "_VARLEN_WINDOW", True)
    torch._dynamo.reset()
    counter = CompileCounter()
    compile_block = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block: compile_block(block, backend=counter))
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "not called")
    net = tiny().eval()
    net.backend = "varlen_attn"
    plain = copy.deepcopy(net)
    net.compile_blocks()
    counts = []
    for lengths in ([9, 5], [20, 3, 8], [7, 7, 7, 30], [64], [2, 1, 40, 5, 11], [13, 50]):
        ids = flat_ids(lengths)
        out = net(ids, cu_seqlens=offsets(lengths), is_causal=is_causal).logits
        assert torch.allclose(out, plain(ids, cu_seqlens=offsets(lengths), is_causal=is_causal).logits, atol=1e-5)
        counts.append(counter.frame_count)
    assert counts[0] > 0 and counts[-1] == counts[3], counts
    assert not any("_orig_mod" in name for name in net.state_dict())


def test_without_a_compiler_only_compiling_is_refused(monkeypatch):
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "/nowhere/g++"))  # read from CXX at import
    net = tiny()
    with pytest.raises(OSError, match="torch.compile needs a C.. compiler") as error:
        net.compile_blocks()
    assert "\n" not in str(error.value) and net(flat_ids([5])).logits.shape == (5, 97)


# ----------------------------------------------------------------------------------------------------------------------
# Losses


def test_next_token_labels_by_hand():
    tokens = torch.tensor([11, 12, 13, 21, 31, 32])
    labels = M.next_token_labels(tokens, torch.tensor([0, 3, 4, 6], dtype=torch.int32))
    assert labels.tolist() == [12, 13, IGNORE, IGNORE, 32, IGNORE]
    labels = M.next_token_labels(tokens, torch.tensor([0, 0, 3, 3, 6, 6], dtype=torch.int32))
    assert labels.tolist() == [12, 13, IGNORE, 31, 32, IGNORE]
    assert tokens.tolist() == [11, 12, 13, 21, 31, 32]


def loss_inputs(n, vocab_size, width=6):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, width, generator=generator).requires_grad_()
    weight = torch.randn(vocab_size, width, generator=generator).requires_grad_()
    bias = torch.randn(vocab_size, generator=generator).requires_grad_()
    targets = torch.randint(0, vocab_size, (n,), generator=generator)
    return (hidden, weight, bias), targets


CHUNK = 128  # the smallest chunk, which a vocabulary of 2**18 gets


@pytest.mark.parametrize("n", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_linear_cross_entropy_at_its_chunk_borders(n):
    inputs, targets = loss_inputs(n, 2**18, width=3)
    loss = M.linear_cross_entropy(*inputs, targets)
    expected = F.cross_entropy(F.linear(*inputs), targets, reduction="sum")
    assert loss.dtype == torch.float32 and abs(loss.item() / expected.item() - 1) < 1e-6
    grads = torch.autograd.grad(loss * 0.5, inputs)  # the incoming gradient is not 1
    for grad, reference in zip(grads, torch.autograd.grad(expected * 0.5, inputs), strict=True):
        assert relative_error(grad, reference) < 1e-5
    with torch.no_grad():
        assert torch.equal(M.linear_cross_entropy(*inputs, targets), loss)


def test_linear_cross_entropy_matches_its_numerical_derivative():
    inputs, targets = loss_inputs(7, 11)
    inputs = [x.detach().double().requires_grad_() for x in inputs]
    assert torch.allclose(
        M.linear_cross_entropy(*inputs, targets).double(),
        F.cross_entropy(F.linear(*inputs), targets, reduction="sum"),
        rtol=1e-6,
    )


def test_linear_cross_entropy_gives_its_gradient_once():
    """backward scales the kept gradient in place; a second one would scale it twice, so it is an error."""
    inputs, targets = loss_inputs(9, 50)
    loss = M.linear_cross_entropy(*inputs, targets)
    (0.5 * loss).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="in-?place"):
        (0.5 * loss).backward()


def test_linear_cross_entropy_of_large_logits():
    (hidden, weight, bias), targets = loss_inputs(9, 50)
    inputs = [(1e4 * hidden).detach().requires_grad_(), weight, bias]
    loss = M.linear_cross_entropy(*inputs, targets)
    expected = F.cross_entropy(F.linear(*inputs), targets, reduction="sum")
    assert relative_error(loss, expected) < 1e-6
    for grad, ref in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True):
        assert torch.isfinite(grad).all() and relative_error(grad, ref) < 1e-5


def test_linear_cross_entropy_without_targets():
    """T2: a micro-batch in which nothing is masked costs 0.0 and moves nothing; it is not NaN."""
    inputs, targets = loss_inputs(0, 50)
    loss = M.linear_cross_entropy(*inputs, targets)
    assert loss.item() == 0.0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, inputs))
    net = tiny().train()
    ids = flat_ids([9])
    out = net(ids, labels=torch.full_like(ids, IGNORE))
    out.loss_sum.backward()
    assert out.n_targets == 0 and out.loss_sum.item() == 0.0
    assert all(p.grad is not None and (p.grad == 0).all() for p in net.parameters())


def test_linear_cross_entropy_of_frozen_weights():
    """A frozen decoder gets no gradient, and what lies below it still does."""
    (hidden, weight, bias), targets = loss_inputs(9, 50)
    expected = torch.autograd.grad(M.linear_cross_entropy(hidden, weight, bias, targets), hidden)[0]
    loss = M.linear_cross_entropy(hidden, weight.detach(), bias.detach(), targets)
    loss.backward()
    assert torch.equal(hidden.grad, expected) and weight.grad is None


def test_linear_cross_entropy_in_bf16():
    inputs, targets = loss_inputs(700, 500, width=64)
    with torch.no_grad():
        inputs[1].mul_(0.1)
    expected = M.linear_cross_entropy(*inputs, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = M.linear_cross_entropy(*inputs, targets)
    assert loss.dtype == torch.float32 and abs(loss.item() / expected.item() - 1) < 1e-3
    for grad, ref in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True):
        assert grad.dtype == torch.float32 and ((grad - ref).norm() / ref.norm()) < 1e-2


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize("grad", [True, False])
def test_the_logits_never_exist_as_a_whole(grad):
    inputs, targets = loss_inputs(3 * CHUNK, 2**18, width=2)
    with LargestTensor() as largest, torch.set_grad_enabled(grad):
        loss = M.linear_cross_entropy(*inputs, targets)
        if grad:
            loss.backward()
    assert largest.numel <= CHUNK * 2**18  # a third of n x vocab


def test_mlm_projects_its_targets_only():
    net = tiny(vocab_size=5000)
    ids = flat_ids([300])
    labels = torch.where(torch.arange(300) % 10 == 0, ids, IGNORE)
    with LargestTensor() as largest:
        net(ids, labels=labels).loss_sum.backward()
    assert largest.numel <= 5000 * 32  # the embedding matrix, and nothing of 300 x 5,000


# ----------------------------------------------------------------------------------------------------------------------
# Dropout, initialisation, size


def test_dropout_falls_on_the_attention_output_only():
    """P-105: after Wo, so that an output is either 0 or 1 / (1 - p) times what it was; and only in training."""
    net = tiny(attn_out_dropout=0.25)
    block = net.model.layers[1]
    x = torch.randn(400, 32, generator=torch.Generator().manual_seed(0))
    stream = net.make_stream(offsets([400]), None, 400, False)
    quiet = block.attn(x, stream)
    block.train()
    torch.manual_seed(0)
    noisy = block.attn(x, stream)
    kept = noisy != 0
    assert torch.allclose(noisy[kept], quiet[kept] / 0.75, atol=1e-5)
    assert abs(kept.float().mean().item() - 0.75) < 0.02
    assert torch.equal(block.mlp(x), block.eval().mlp(x))


def test_dropout_is_called_once_a_layer_and_only_in_training(monkeypatch):
    calls = []
    dropout = F.dropout

    def counting(x, p=0.5, training=True, inplace=False):
        calls.append((p, training))
        return dropout(x, p, training, inplace)

    monkeypatch.setattr(F, "dropout", counting)
    net, ids = tiny(attn_out_dropout=0.1), flat_ids([20])
    assert torch.equal(net(ids).logits, tiny()(ids).logits)
    assert all(p == 0 or not training for p, training in calls)
    calls.clear()
    a, b = net.train()(ids).logits, net(ids).logits
    assert calls == [(0.1, True)] * 2 * 4 and not torch.equal(a, b)
    assert torch.equal(tiny().train()(ids).logits, tiny()(ids).logits)  # no other randomness when p = 0


def test_initial_weights_are_megatrons():
    """modernbert.md: normal with sigma 0.02 cut at two sigma, whose deviation is 0.8796 sigma; /sqrt(2 n) into the
    residual stream; norms 1; bias 0."""
    torch.manual_seed(0)
    net = ModernBERT(ModernBERTConfig(vocab_size=3000, hidden_size=256, num_hidden_layers=3, num_attention_heads=4))
    for name, p in net.named_parameters():
        if name.endswith("norm.weight"):
            assert (p == 1).all(), name
        elif name == "decoder.bias":
            assert (p == 0).all()
        else:
            sigma = 0.02 / math.sqrt(2 * 3) if name.endswith("Wo.weight") else 0.02
            assert p.std().item() == pytest.approx(0.8796 * sigma, rel=0.02), name
            assert abs(p.mean().item()) < 0.05 * sigma and p.abs().max() <= 2 * sigma * 1.0001, name


def unallocated(vocab_size, shape):
    with torch.device("meta"):
        return ModernBERT(ModernBERTConfig(vocab_size=vocab_size, **SHAPES[shape]))


@pytest.mark.parametrize(
    "vocab_size, shape, total, encoder",
    [
        (FR, "base", 136_120_832, 135_497_472),
        (EN, "base", 149_655_232, 149_014_272),
        (FR, "large", 377_841_664, 376_759_296),
        (EN, "large", 395_881_664, 394_781_696),
    ],
)
def test_parameter_counts(vocab_size, shape, total, encoder):
    net = unallocated(vocab_size, shape)
    assert sum(p.numel() for p in net.parameters()) == total
    assert sum(p.numel() for p in net.model.parameters()) == encoder


@pytest.mark.parametrize(
    "vocab_size, shape, layers, attention, head",
    [  # A-21, millions per token: attention (CLM, MLM), head (CLM, MLM 30%, MLM 15%)
        (FR, "base", 662, (310, 621), (155, 46, 23)),
        (EN, "base", 662, (310, 621), (236, 71, 35)),
        (FR, "large", 2059, (518, 1035), (208, 62, 31)),
        (EN, "large", 2059, (518, 1035), (316, 95, 47)),
    ],
)
def test_flops_per_token(vocab_size, shape, layers, attention, head):
    net = unallocated(vocab_size, shape)
    clm = net.flops_per_token(8192, True, 1.0)
    mlm = [net.flops_per_token(8192, False, rate) for rate in (0.30, 0.15)]
    assert clm / 1e6 == pytest.approx(layers + attention[0] + head[0], abs=1.5)
    assert mlm[0] / 1e6 == pytest.approx(layers + attention[1] + head[1], abs=1.5)
    assert mlm[1] / 1e6 == pytest.approx(layers + attention[1] + head[2], abs=1.5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_flops_count_the_visible_pairs(is_causal):
    """12 C per pair; the ends of a sequence, where a window is cut, are not worth counting. Window 8, 200 tokens."""
    net = tiny()
    pairs = 2 * visible_by_rule(offsets([200]), None, is_causal).sum()
    pairs += 2 * visible_by_rule(offsets([200]), 8, is_causal).sum()
    weights = sum(p.numel() for p in net.model.layers.parameters() if p.ndim == 2)
    attention = net.flops_per_token(200, is_causal, 0.0) - 6 * weights
    assert attention == pytest.approx(12 * 32 * pairs.item() / 200, rel=0.01)
    assert net.flops_per_token(5, False, 0.0) - 6 * weights == 12 * 32 * 4 * 5  # shorter than the window


# ----------------------------------------------------------------------------------------------------------------------
# Tied weights, resizing


def assert_tied(net):
    assert net.decoder.weight is net.model.embeddings.tok_embeddings.weight
    assert [n for n, _ in net.named_parameters() if "decoder.weight" in n] == []


def test_tied_weights_stay_tied(tmp_path):
    net = tiny()
    assert_tied(net)
    assert_tied(copy.deepcopy(net))
    net.save_pretrained(tmp_path)
    net = ModernBERT.from_pretrained(tmp_path)
    assert_tied(net)
    ids = flat_ids([20])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(ids, labels=ids).loss_sum.backward()
    optimizer.step()
    assert_tied(net)
    net.resize_vocab(120)
    assert_tied(net)
    net.save_pretrained(tmp_path)
    assert "decoder.weight" not in load_file(tmp_path / "model.safetensors")
    assert_tied(ModernBERT.from_pretrained(tmp_path))
    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert theirs.decoder.weight is theirs.model.embeddings.tok_embeddings.weight
    assert_tied(net.to(torch.bfloat16))


def test_a_file_that_repeats_the_tied_weight_loads(tmp_path):
    net = tiny()
    net.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["decoder.weight"] = weights["model.embeddings.tok_embeddings.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    again = ModernBERT.from_pretrained(tmp_path)
    assert_tied(again)
    assert torch.equal(again(flat_ids([9])).logits, net(flat_ids([9])).logits)


def test_resize_vocab(tmp_path):
    net, ids = tiny(), flat_ids([30])
    before = net(ids).logits
    mean = net.decoder.weight.mean(0)
    net.resize_vocab(130)
    after = net(ids).logits
    assert net.config.vocab_size == 130 and after.shape == (30, 130)
    assert torch.allclose(after[:, :97], before, atol=1e-5)
    assert torch.allclose(net.decoder.weight[97:], mean.expand(33, -1))
    assert (net.decoder.bias[97:] == 0).all() and (net.decoder.bias[:97] != 0).any()
    net(torch.tensor([129, 5]), labels=torch.tensor([128, IGNORE])).loss_sum.backward()
    assert net.decoder.weight.grad.shape == (130, 32) and net.decoder.bias.grad.shape == (130,)
    net.save_pretrained(tmp_path)
    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert (theirs(input_ids=ids[None]).logits[0] - after).abs().max() < 1e-4
    net.resize_vocab(97)
    assert torch.allclose(net(ids).logits, before, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints


def test_round_trip_is_bit_identical(tmp_path):
    net = tiny()
    net.save_pretrained(tmp_path / "a")
    again = ModernBERT.from_pretrained(str(tmp_path / "a"))
    assert again.config == net.config and not again.training
    assert again.state_dict().keys() == net.state_dict().keys()
    assert all(torch.equal(v, net.state_dict()[k]) for k, v in again.state_dict().items())
    assert torch.equal(again(flat_ids([33])).logits, net(flat_ids([33])).logits)
    again.save_pretrained(tmp_path / "b")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_transformers_reads_what_we_save_and_back(tmp_path):
    """M10: through save, AutoModelForMaskedLM, its save, and ours again, the logits are the same."""
    net = tiny()
    ids, mask, _ = batch([1, 64, 200], "right", 97)
    net.save_pretrained(tmp_path / "ours")
    theirs, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(theirs) is ModernBertForMaskedLM
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    real = mask.bool()
    assert (theirs(input_ids=ids, attention_mask=mask).logits - net(ids, mask).logits)[real].abs().max() < 1e-4
    theirs.save_pretrained(tmp_path / "theirs")
    assert torch.equal(ModernBERT.from_pretrained(tmp_path / "theirs")(ids, mask).logits, net(ids, mask).logits)


V4 = dict(global_rope_theta=1234.0, local_rope_theta=77.0, global_attn_every_n_layers=2)
V5 = dict(
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 1234.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
    },
    layer_types=["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
)


def rewrite_config(folder, drop=(), **changes):
    config = json.loads((folder / "config.json").read_text())
    config = {k: v for k, v in config.items() if k not in drop}
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_both_spellings_of_the_config_are_one_model(tmp_path):
    """M8: transformers 4 says global_rope_theta, transformers 5 rope_parameters; we read each and write both."""
    net = tiny(global_attn_every_n_layers=2)
    net.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {k: saved[k] for k in V4} == V4 and {k: saved[k] for k in V5} == V5
    ids = flat_ids([50])
    logits = net(ids).logits
    for spelling in (V4, V5, {**V4, **V5}):
        rewrite_config(tmp_path, drop=[*V4, *V5], **spelling)
        ours = ModernBERT.from_pretrained(tmp_path)
        assert torch.equal(ours(ids).logits, logits)
        kinds = [(layer.attn.theta, layer.attn.window) for layer in ours.model.layers]
        assert kinds == [(1234.0, None), (77.0, 8), (1234.0, None), (77.0, 8)]
        theirs = AutoModelForMaskedLM.from_pretrained(tmp_path)
        assert (theirs(input_ids=ids[None]).logits[0] - logits).abs().max() < 1e-4


def test_what_a_transformers_4_config_means_when_it_is_silent(tmp_path):
    net = tiny()
    net.save_pretrained(tmp_path)
    rewrite_config(tmp_path, drop=[*V4, *V5])
    config = ModernBERT.from_pretrained(tmp_path).config
    assert (config.global_rope_theta, config.local_rope_theta) == (160000.0, 10000.0)
    assert config.global_attn_every_n_layers == 3
    # and null for the local one: as the global one
    rewrite_config(tmp_path, global_rope_theta=1234.0, local_rope_theta=None)
    assert ModernBERT.from_pretrained(tmp_path).config.local_rope_theta == 1234.0


def test_weights_in_several_files(tmp_path):
    net = tiny()
    net.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(weights)
    halves = {"part-1.safetensors": names[:5], "part-2.safetensors": names[5:]}
    for file, part in halves.items():
        save_file({k: weights[k] for k in part}, tmp_path / file)
    index = {"weight_map": {k: file for file, part in halves.items() for k in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(ModernBERT.from_pretrained(tmp_path)(flat_ids([9])).logits, net(flat_ids([9])).logits)
    (tmp_path / "part-2.safetensors").unlink()
    with pytest.raises(SystemExit, match="part-2.safetensors"):
        M.load_model(tmp_path)


def test_half_precision_weights_load_as_fp32(tmp_path):
    tiny().to(torch.bfloat16).save_pretrained(tmp_path)
    again = ModernBERT.from_pretrained(tmp_path)
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    assert torch.equal(again.decoder.weight, tiny().decoder.weight.bfloat16().float())


@pytest.mark.parametrize("kind", [ModernBertForSequenceClassification, ModernBertForTokenClassification])
def test_fine_tuned_checkpoints_give_their_encoder_and_head(kind, tmp_path):
    """classifier(head(x)) is their answer: nothing but the classifier, which read_weights has, is left behind."""
    shape = {k: v for k, v in TINY.items() if not k.endswith("theta")}
    theirs = shake(kind(TheirConfig(**shape, num_labels=3, classifier_pooling="mean"))).eval()
    theirs.save_pretrained(tmp_path)
    ours = ModernBERT.from_pretrained(tmp_path)
    assert (ours.decoder.bias == 0).all()
    assert_tied(ours)
    weights = M.read_weights(tmp_path)
    ids, mask, _ = batch([9, 23, 4], "right", 97)
    x = ours(ids, mask, output_logits=False).last_hidden_state
    if kind is ModernBertForSequenceClassification:
        x = (x * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
    logits = F.linear(ours.head(x), weights["classifier.weight"], weights["classifier.bias"])
    real = mask.bool() if logits.ndim == 3 else slice(None)
    assert (logits - theirs(input_ids=ids, attention_mask=mask).logits)[real].abs().max() < 1e-4
    (tmp_path / "model.safetensors").rename(tmp_path / "whole")
    save_file({k: v for k, v in weights.items() if k != "head.norm.weight"}, tmp_path / "model.safetensors")
    assert "missing head.norm.weight" in one_line(tmp_path)


def test_overrides_change_the_config_and_typos_do_not_pass(tmp_path):
    tiny().save_pretrained(tmp_path)
    net = ModernBERT.from_pretrained(tmp_path, attn_out_dropout=0.1)
    assert net.config.attn_out_dropout == 0.1 and net.model.layers[2].attn.dropout == 0.1
    assert "attn_out_dropout" not in net.config.to_dict()
    with pytest.raises((TypeError, ValueError), match="attn_dropout"):
        ModernBERT.from_pretrained(tmp_path, attn_dropout=0.1)


def one_line(folder):
    """load_model's answer to a bad checkpoint: one line, and the exit status of an error."""
    with pytest.raises(SystemExit) as stop:
        M.load_model(folder)
    message = str(stop.value)
    assert "\n" not in message and "--model=" in message and str(folder) in message
    return message


def test_weights_that_do_not_fit_are_all_listed(tmp_path):
    """M13: nothing is left at random values, nothing is dropped, and one error names everything at once."""
    tiny().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.2.mlp.Wi.weight"]
    weights["head.dense.wieght"] = weights.pop("head.dense.weight")
    weights["decoder.bias"] = torch.zeros(96)
    weights["model.layers.1.attn.Wo.weight"][3, 3] = torch.nan
    weights["model.final_norm.weight"][0] = torch.inf
    save_file(weights, tmp_path / "model.safetensors")
    message = one_line(tmp_path)
    assert "missing model.layers.2.mlp.Wi.weight" in message and "missing head.dense.weight" in message
    assert "unexpected head.dense.wieght" in message
    assert "decoder.bias is (96,), expected (97,)" in message
    assert "model.layers.1.attn.Wo.weight holds NaN" in message and "model.final_norm.weight holds NaN" in message
    with pytest.raises(ValueError, match="wieght"):
        ModernBERT.from_pretrained(tmp_path)


def test_damaged_and_missing_files(tmp_path):
    tiny().save_pretrained(tmp_path)
    file, whole = tmp_path / "model.safetensors", (tmp_path / "model.safetensors").read_bytes()
    for damage in (b"", whole[:5], whole[: len(whole) // 2], b"\xff" * 100, b"PK\x03\x04" + whole):
        file.write_bytes(damage)
        assert "model.safetensors" in one_line(tmp_path)
    file.unlink()
    assert "model.safetensors" in one_line(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    assert "safetensors" in one_line(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "config.json" in one_line(tmp_path)


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff\xfe", b"", b'"a"'])
def test_a_config_that_is_no_config(text, tmp_path):
    tiny().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes(text)
    assert "config.json" in one_line(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        dict(model_type="bert"),
        dict(model_type=None),
        dict(hidden_activation="gelu_pytorch_tanh"),
        dict(classifier_activation="relu"),
        dict(attention_bias=True),
        dict(mlp_bias=True),
        dict(norm_bias=True),
        dict(decoder_bias=False),
        dict(classifier_bias=True),
        dict(tie_word_embeddings=False),
        dict(layer_types=["full_attention", "full_attention", "sliding_attention", "full_attention"]),
        dict(layer_types=["sliding_attention"] * 4),
        dict(layer_types=["full_attention"]),
        dict(rope_parameters={"full_attention": {"rope_type": "yarn", "rope_theta": 1234.0}}),
        dict(rope_parameters={"rope_type": "default", "rope_theta": 1234.0}),
        dict(global_rope_theta=5.0),
        dict(num_attention_heads=5),
        dict(num_attention_heads=0),
        dict(num_attention_heads=32),
        dict(global_attn_every_n_layers=0, layer_types=None),
        dict(local_attention=1),
        dict(hidden_size="32"),
        dict(hidden_size=32.0),
        dict(num_hidden_layers=None),
        dict(norm_eps="small"),
    ],
    ids=str,
)
def test_configs_that_we_would_misread_are_refused(change, tmp_path):
    tiny().save_pretrained(tmp_path)
    rewrite_config(tmp_path, **change)
    name = next(iter(change))
    assert name in one_line(tmp_path)


def test_a_missing_directory(tmp_path):
    assert "no such" in one_line(tmp_path / "nothing")
    for name in (str(tmp_path / "nothing"), tmp_path / "nothing", "./nothing", "nothing", "a/b/c"):
        with pytest.raises(OSError, match="no such"):
            ModernBERT.from_pretrained(name)


# ----------------------------------------------------------------------------------------------------------------------
# Backends and machines


def test_without_flash_attn_and_without_a_network(tmp_path):
    """I1: a fresh interpreter that has no flash-attn imports the model and says sdpa; an unknown hub id without a
    network is one line and a failure."""
    program = (
        "import sys; sys.modules['flash_attn'] = None\n"
        "import torch, model\n"
        "print('attention backend:', model.pick_backend(torch.device('cpu'), torch.bfloat16))\n"
        "model.load_model('no-such-owner/no-such-model')\n"
    )
    offline = dict(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path), PYTHONPATH=str(ROOT))
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, **offline}, capture_output=True, text=True
    )
    assert run.stdout == "attention backend: sdpa\n"
    assert run.returncode != 0 and "Traceback" not in run.stderr
    lines = run.stderr.strip().split("\n")
    assert len(lines) == 1 and lines[0].startswith("--model=no-such-owner/no-such-model: ")


def test_the_network_may_fail_in_any_way(monkeypatch):
    import huggingface_hub

    def broken(*args, **kwargs):
        raise ConnectionError("name not known\nand a second line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    assert "name not known" in one_line("owner/name")


def test_pick_backend(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(M, "flash_attn_varlen_func", flash_twin)
    monkeypatch.setattr(M, "varlen_attn", varlen_window_twin)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert M.pick_backend(cpu, torch.bfloat16) == "sdpa"
    assert M.pick_backend(cuda, torch.bfloat16) == M.pick_backend(cuda, torch.float16) == "flash_attn"
    assert M.pick_backend(cuda, torch.float32) == "sdpa"
    monkeypatch.setattr(M, "flash_attn_varlen_func", None)
    assert M.pick_backend(cuda, torch.bfloat16) == "varlen_attn"
    monkeypatch.setattr(M, "varlen_attn", None)
    assert M.pick_backend(cuda, torch.bfloat16) == "sdpa"
    monkeypatch.setattr(M, "varlen_attn", varlen_window_twin)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert M.pick_backend(cuda, torch.bfloat16) == "sdpa"


@pytest.mark.parametrize("name", CPU_BACKENDS[1:])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_whole_model_is_the_same_in_every_backend(is_causal, name, monkeypatch):
    net, lengths = tiny(), [3, 50, 1, 17]
    ids, cu = flat_ids(lengths), offsets(lengths)
    assert net.make_stream(cu, None, 71, is_causal).backend == "sdpa"
    expected = net(ids, cu_seqlens=cu, is_causal=is_causal, labels=ids)
    grads = torch.autograd.grad(expected.loss_sum, list(net.parameters()))
    net.backend = put_in_place(monkeypatch, name)[0]
    out = net(ids, cu_seqlens=cu, is_causal=is_causal, labels=ids)
    assert abs(out.loss_sum.item() / expected.loss_sum.item() - 1) < 1e-5
    for grad, reference in zip(torch.autograd.grad(out.loss_sum, list(net.parameters())), grads, strict=True):
        assert relative_error(grad, reference) < 1e-4


def test_compute_dtype_follows_autocast():
    x = torch.zeros(2)
    assert M.compute_dtype(x) == torch.float32 and M.compute_dtype(x.bfloat16()) == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert M.compute_dtype(x) == torch.bfloat16
    assert M.default_dtype("cpu") in (torch.float32, torch.bfloat16)
