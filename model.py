"""
ModernBERT from scratch, with a switch that makes it causal.

Read it top to bottom: configuration, rotary embedding, attention, the blocks, the loss, the model. How the hub spells
its files is in checkpoint.py. Three ideas carry this one:

1. Inside the model there is no batch and no padding. `tokens` is one flat stream (total,) and `cu_seqlens`
   (n_sequences + 1,) says where each sequence starts: [0, 5, 12] is a sequence of 5 tokens, then one of 7.
   A padded (B, T) batch is accepted at the edge, unpadded, run, and padded back.
2. One attention rule. Token i sees token j if and only if both are in the same sequence, |i - j| <= window // 2 on
   local layers, and j <= i when `is_causal`. Backends (flash-attn, PyTorch's varlen_attn, plain matrix products) are
   ways to compute this rule, never other rules.
3. `is_causal` is an argument of the call. The weights, the head and the file are the same for both directions,
   which is all that the detour needs (paper §3.1, P-107).

    model = ModernBERT.from_pretrained("answerdotai/ModernBERT-base")     # or a directory
    out = model(input_ids, attention_mask)                                # (B, T) -> out.logits (B, T, vocab)
    out = model(input_ids, attention_mask, is_causal=True)                # the same weights, left to right
    model.save_pretrained("my-model")                                     # AutoModelForMaskedLM can read it

The architecture is that of Warner et al. (2025), "Smarter, Better, Faster, Longer"; P-105 lists its constants.
"""

import inspect
import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint

from checkpoint import find_checkpoint, fit_weights, hub_config, read_config, read_weights

try:  # optional, CUDA only: the fastest kernels (requirements-gpu.txt)
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None
try:  # the same idea, shipped with recent PyTorch, CUDA only
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

IGNORE = -100  # label of a position that carries no target, the value PyTorch and Hugging Face use


# ----------------------------------------------------------------------------------------------------------------------
# Configuration


@dataclass
class ModernBERTConfig:
    """The shape of the model, under the names of the hub's config.json. Defaults: ModernBERT-base (P-102, P-105)."""

    vocab_size: int = 50368
    hidden_size: int = 768
    num_hidden_layers: int = 22
    num_attention_heads: int = 12
    intermediate_size: int = 1152  # of the gated MLP: Wi makes 2 x this
    max_position_embeddings: int = 8192
    local_attention: int = 128  # window of local layers: 64 tokens to each side
    global_attn_every_n_layers: int = 3  # layers 0, 3, 6, ... see everything, the others their window
    global_rope_theta: float = 160000.0
    local_rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    cls_token_id: int | None = None
    sep_token_id: int | None = None
    pad_token_id: int | None = None
    mask_token_id: int | None = None
    attn_out_dropout: float = 0.0  # 0.1 in pretraining (P-105); a setting of the run, so config.json does not keep it

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float) if field.type is float else field.type):
                raise ValueError(f"{field.name}={value!r}: expected {field.type}")
        for name in ("num_attention_heads", "num_hidden_layers", "global_attn_every_n_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected 1 or more")
        if self.hidden_size % self.num_attention_heads or (self.hidden_size // self.num_attention_heads) % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} with num_attention_heads={self.num_attention_heads}: "
                "expected heads of one even size; choose a hidden_size that is a multiple of 2 * heads"
            )
        if self.local_attention < 2:
            raise ValueError(f"local_attention={self.local_attention}: expected 2 or more tokens")

    def is_global(self, layer):
        return layer % self.global_attn_every_n_layers == 0

    @classmethod
    def from_dict(cls, hf):
        """Read a hub config.json, as transformers 4 or 5 wrote it."""
        return cls(**read_config(hf, cls.__dataclass_fields__))

    def to_dict(self):
        """The hub's config.json, for transformers 4 and 5."""
        return hub_config(asdict(self))


# ----------------------------------------------------------------------------------------------------------------------
# Attention


@dataclass
class Stream:
    """What every layer must know about the flat stream; computed once per forward pass."""

    cu_seqlens: torch.Tensor  # (n_sequences + 1,) int32, first 0, last total
    max_seqlen: int
    is_causal: bool
    backend: str  # flash_attn | varlen_attn | sdpa
    rope: dict  # theta -> (cos, sin), each (total, 1, 1, head_dim / 2), fp32
    local_mask: torch.Tensor | None  # what local layers must not see, added to their scores


def rope_angles(cu_seqlens, total, head_dim, theta):
    """cos and sin of position x frequency, (total, 1, 1, head_dim / 2), always fp32: at position 8,191 a bf16 angle
    would be off by up to 16 radians. Positions restart at 0 in every sequence."""
    index = torch.arange(total, device=cu_seqlens.device)
    position = index - cu_seqlens[sequence_ids(cu_seqlens, total)]
    inv_freq = theta ** (-torch.arange(0, head_dim, 2, device=cu_seqlens.device, dtype=torch.float32) / head_dim)
    angle = position.float()[:, None, None, None] * inv_freq
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotary embedding of x (total, n, heads, head_dim). Dimension d is paired with d + head_dim / 2. The products are
    fp32 (bf16 x fp32 promotes), only the result is cast back."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


def sequence_ids(cu_seqlens, total):
    """(total,) the number of the sequence that each token is in."""
    index = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), index, right=True)


def pick_backend(device, dtype):
    """The fastest way to compute the attention rule on this device. The CUDA kernels need half precision and an
    Ampere GPU or newer; everything else goes through scaled_dot_product_attention and plain matrix products."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        if torch.cuda.get_device_capability(device) >= (8, 0):
            if flash_attn_varlen_func is not None:
                return "flash_attn"
            if varlen_attn is not None:
                return "varlen_attn"
    return "sdpa"


def attention(q, k, v, stream, window):
    """The attention rule (see the top of the file). q, k, v: (total, heads, head_dim) -> (total, heads, head_dim).
    `window`: None on global layers, else the full window: 128 means 64 tokens to each side, 129 keys with the token
    itself, 65 when causal. Every backend counts it like this."""
    if stream.backend == "flash_attn":
        return flash_attn_attention(q, k, v, stream, window)
    if stream.backend == "varlen_attn" and (window is None or _VARLEN_WINDOW):
        return varlen_attention(q, k, v, stream, window)
    if window is None:
        return global_attention(q, k, v, stream)
    return local_attention(q, k, v, stream, window)


def flash_attn_attention(q, k, v, stream, window):
    side = (-1, -1) if window is None else (window // 2, window // 2)  # inclusive; causal=True cuts the right side
    cu, n = stream.cu_seqlens, stream.max_seqlen
    return flash_attn_varlen_func(q, k, v, cu, cu, n, n, causal=stream.is_causal, window_size=side)


_VARLEN_KEYS = inspect.signature(varlen_attn).parameters if varlen_attn is not None else {}
_VARLEN_WINDOW = "window_size" in _VARLEN_KEYS  # torch 2.10 and 2.11 say is_causal=, later ones window_size=(-1, 0)


def varlen_attention(q, k, v, stream, window):
    left = -1 if window is None else window // 2
    how = {"window_size": (left, 0 if stream.is_causal else left)} if _VARLEN_WINDOW else {}
    if "is_causal" in _VARLEN_KEYS:
        how["is_causal"] = stream.is_causal
    cu, n = stream.cu_seqlens, stream.max_seqlen
    return varlen_attn(q, k, v, cu, cu, n, n, **how)


def global_attention(q, k, v, stream):
    """Every token sees its whole sequence. Sequences of one length are one batched call, ragged ones a call each:
    padding them together would cost more than twice as much."""
    total, heads, head_dim = q.shape
    lengths = [n for n in stream.cu_seqlens.diff().tolist() if n > 0] or [0]
    if len(set(lengths)) == 1:
        q, k, v = (x.view(len(lengths), lengths[0], heads, head_dim).transpose(1, 2) for x in (q, k, v))
        return full_attention(q, k, v, stream.is_causal).transpose(1, 2).reshape(total, heads, head_dim)
    parts = zip(*(x.transpose(0, 1)[None].split(lengths, dim=2) for x in (q, k, v)), strict=True)
    outs = [full_attention(*part, stream.is_causal) for part in parts]
    return torch.cat(outs, dim=2)[0].transpose(0, 1)


def full_attention(q, k, v, is_causal):
    """q, k, v (n, heads, T, head_dim), no padding -> the same shape."""
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:  # fast where the fused kernel is not: 1.4 times at 4,096
        return MatmulAttention.apply(q, k, v, is_causal)
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


class MatmulAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(head_dim)) v in plain matrix products, some queries at a time. As in FlashAttention, the
    probabilities (T x T) are not kept for the backward pass, which computes them again, unless they are few."""

    QUERIES, KEEP = 256, 512  # queries at a time; rows up to this length keep their probabilities

    @staticmethod
    def probs(q, k, i, is_causal):
        """Queries i, i + 1, ... -> what they make of the keys that any of them may see."""
        scores = q[:, :, i : i + MatmulAttention.QUERIES] @ k.transpose(2, 3)
        if is_causal:  # the last keys are the queries themselves
            n = scores.shape[2]
            later = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
            scores[..., i:].masked_fill_(later, -math.inf)
        return scores.softmax(dim=-1).to(k.dtype)

    @staticmethod
    def forward(ctx, q, k, v, is_causal):
        q, k, v = (q * q.shape[3] ** -0.5).contiguous(), k.contiguous(), v.contiguous()
        length, out, kept = q.shape[2], torch.empty_like(q), []
        for i in range(0, length, MatmulAttention.QUERIES):
            end = min(i + MatmulAttention.QUERIES, length) if is_causal else length
            p = MatmulAttention.probs(q, k[:, :, :end], i, is_causal)
            out[:, :, i : i + p.shape[2]] = p @ v[:, :, :end]
            if length <= MatmulAttention.KEEP:
                kept.append(p)
        ctx.is_causal = is_causal
        ctx.save_for_backward(q, k, v, *kept)
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, *kept = ctx.saved_tensors
        length, d_out = q.shape[2], d_out.contiguous()
        dq = torch.empty_like(q)
        dk, dv = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
        for i in range(0, length, MatmulAttention.QUERIES):
            end = min(i + MatmulAttention.QUERIES, length) if ctx.is_causal else length
            p = kept.pop(0) if kept else MatmulAttention.probs(q, k[:, :, :end], i, ctx.is_causal)
            rows = slice(i, i + p.shape[2])
            dp = d_out[:, :, rows] @ v[:, :, :end].transpose(2, 3)
            ds = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype)  # p (dp - sum of p dp), in fp32 inside
            dq[:, :, rows] = ds @ k[:, :, :end]
            dk[:, :, :end] += ds.transpose(2, 3) @ q[:, :, rows]
            dv[:, :, :end] += p.transpose(2, 3) @ d_out[:, :, rows]
        return dq * q.shape[3] ** -0.5, dk.to(k.dtype), dv.to(v.dtype), None


def local_attention(q, k, v, stream, window):
    """Every token sees window // 2 tokens to each side, in time and memory linear in `total`.

    The stream is cut into blocks of 2 * side queries. All keys that a block can see lie in the block itself and `side`
    tokens before and after it, so a block is one small (queries x keys) matrix product. Blocks ignore where sequences
    begin; the mask of the stream does not."""
    mask = stream.local_mask
    total, heads, head_dim = q.shape
    n_blocks, block, n_keys = mask.shape
    side, tail = window // 2, n_blocks * block - total

    def keys_of_blocks(x):  # (total, heads, head_dim) -> (heads, n_blocks, n_keys, head_dim)
        x = F.pad(x.transpose(0, 1), (0, 0, side, tail + side)).view(heads, n_blocks + 1, block, head_dim)
        return torch.cat((x[:, :-1], x[:, 1:, : n_keys - block]), dim=2)

    q = F.pad((q * head_dim**-0.5).transpose(0, 1), (0, 0, 0, tail)).view(heads, n_blocks, block, head_dim)
    scores = q @ keys_of_blocks(k).transpose(2, 3)
    probs = scores.add_(mask).softmax(dim=-1)
    out = probs.to(v.dtype) @ keys_of_blocks(v)
    return out.view(heads, -1, head_dim)[:, :total].transpose(0, 1)


def local_block_mask(cu_seqlens, total, window, is_causal, dtype):
    """(n_blocks, block, n_keys) to add to scores: -inf where a query must not see a key (too far, in another sequence,
    or later when causal), else 0. Query r of block b is token b * block + r, key c is token b * block + c - side."""
    side = window // 2
    block, n_keys = 2 * side, (3 * side if is_causal else 4 * side)
    n_blocks = -(-total // block)
    device = cu_seqlens.device
    # tokens that do not exist form a sequence of their own (-1), so that no query is left without any key (NaN)
    padding = (side, n_blocks * block - total + side)
    ids = F.pad(sequence_ids(cu_seqlens, total), padding, value=-1).view(n_blocks + 1, block)
    ids = torch.cat((ids[:-1], ids[1:]), dim=1)  # (n_blocks, 2 * block): a block and its two sides
    distance = side + torch.arange(block, device=device)[:, None] - torch.arange(n_keys, device=device)
    far = distance.abs() > side
    if is_causal:
        far |= distance < 0
    hidden = far | (ids[:, side : side + block, None] != ids[:, None, :n_keys])
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)


# ----------------------------------------------------------------------------------------------------------------------
# The blocks


class Attention(nn.Module):
    """Multi-head attention. Layers 0, 3, 6, ... are global; the layers between see a window, which costs 129 keys a
    token instead of all T, and passes on what the global ones gather. The two kinds turn their rotary embedding at
    different speeds: its slowest dimension takes about 2 pi theta tokens for a turn, so theta is 10,000 in a window of
    129 tokens and 160,000 where 8,192 positions must be told apart."""

    def __init__(self, config, layer):
        super().__init__()
        self.heads = config.num_attention_heads
        self.window = None if config.is_global(layer) else config.local_attention
        self.theta = config.local_rope_theta if self.window else config.global_rope_theta
        self.dropout = config.attn_out_dropout
        self.Wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.Wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x, stream):
        total, width = x.shape
        qkv = self.Wqkv(x).view(total, 3, self.heads, width // self.heads)
        q, k = rotate(qkv[:, :2], *stream.rope[self.theta]).unbind(1)
        x = attention(q, k, qkv[:, 2], stream, self.window)
        # on the attention output, not on the probabilities: what ModernBERT was trained with (P-105)
        return F.dropout(self.Wo(x.reshape(total, width)), self.dropout, self.training)


class GeGLU(torch.autograd.Function):
    """(total, 2 I) -> (total, I): the GELU of the first half, entry by entry, says how much of the second passes. It is
    what autograd makes of the same lines, but keeps its input alone and computes the GELU again in backward."""

    @staticmethod
    def forward(ctx, both):
        ctx.save_for_backward(both)
        x, gate = both.chunk(2, dim=-1)
        return F.gelu(x).mul_(gate)

    @staticmethod
    def backward(ctx, d_out):
        x, gate = ctx.saved_tensors[0].chunk(2, dim=-1)
        return torch.cat((torch.ops.aten.gelu_backward(d_out * gate, x), d_out * F.gelu(x)), dim=-1)


class MLP(nn.Module):
    """A plain MLP makes one vector of intermediate_size between its two matrices; here there is a second, its gate."""

    def __init__(self, config):
        super().__init__()
        self.Wi = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.Wo = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.Wo(GeGLU.apply(self.Wi(x)))


def layer_norm(config):
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=False)


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        # the embeddings are already normalised, so the first block does not do it again
        self.attn_norm = nn.Identity() if layer == 0 else layer_norm(config)
        self.attn = Attention(config, layer)
        self.mlp_norm = layer_norm(config)
        self.mlp = MLP(config)

    def forward(self, x, stream):
        x = x + self.attn(self.attn_norm(x), stream)
        return x + self.mlp(self.mlp_norm(x))


class Embeddings(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = layer_norm(config)

    def forward(self, tokens):
        return self.norm(self.tok_embeddings(tokens))


class Encoder(nn.Module):
    """Embeddings, blocks, final norm: everything below the prediction head."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList([Block(config, i) for i in range(config.num_hidden_layers)])
        self.final_norm = layer_norm(config)
        self.recompute = False  # activation checkpointing: much less memory in training, up to a third more time

    def forward(self, tokens, stream, output_hidden_states=False):
        """tokens (total,) -> the final norm's output (total, C), and if asked for, the raw states after the embeddings
        and each block: kept without need, they are most of the memory of inference."""
        x = self.embeddings(tokens)
        states = [x]
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():  # keep the input of a block, run it again in backward
                x = checkpoint(layer, x, stream, use_reentrant=False)
            else:
                x = layer(x, stream)
            states = [*states, x] if output_hidden_states else None
        return self.final_norm(x), states


class Head(nn.Module):
    """Dense, GELU, norm: between the encoder and the vocabulary, for MLM and CLM alike (P-107)."""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.norm = layer_norm(config)

    def forward(self, x):
        return self.norm(F.gelu(self.dense(x)))


# ----------------------------------------------------------------------------------------------------------------------
# The loss


def next_token_labels(tokens, cu_seqlens):
    """CLM labels (total,): the next token, and IGNORE for the last token of each sequence, which has none (P-203)."""
    labels = torch.full_like(tokens, IGNORE)
    labels[:-1] = tokens[1:]
    labels[cu_seqlens[1:].long() - 1] = IGNORE
    return labels


class LinearCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies of `hidden @ weight.T + bias` without ever holding all logits: at 8,192 tokens and 50,368
    words they alone would take 1.65 GB. Positions go through in chunks, and since the gradient of a chunk follows from
    the same logits as its loss, both are computed while they exist. backward only scales by the incoming gradient."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, dtype, with_grad):
        w, b = weight.to(dtype), bias.to(dtype)
        loss = torch.zeros((), device=hidden.device)
        d_hidden = torch.empty_like(hidden) if with_grad else None
        d_weight = torch.zeros_like(weight) if with_grad else None
        d_bias = torch.zeros_like(bias) if with_grad else None
        n_words, on_cpu = weight.shape[0], weight.device.type == "cpu"
        chunk = max(128, (2**24 if on_cpu else 2**27) // n_words)  # positions: small ones do not keep a GPU busy
        part = 8192 if on_cpu else n_words  # words: adding bf16 to fp32 takes an fp32 copy on a CPU
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            h, target = hidden[rows].to(dtype), targets[rows, None]
            logits = F.linear(h, w, b)
            probs = F.softmax(logits, dim=-1, dtype=torch.float32)
            # log of the sum of exponentials = the largest logit - the log of its probability, which is never tiny
            log_sum = logits.amax(1, keepdim=True).float() - probs.amax(1, keepdim=True).log()
            loss += (log_sum - logits.gather(1, target).float()).sum()
            if with_grad:  # d loss / d logits = softmax - one_hot
                probs.scatter_add_(1, target, probs.new_full((1, 1), -1.0).expand_as(target))
                d_bias += probs.sum(0)
                d_logits = probs.to(dtype)
                del logits, probs  # before the next large tensor
                d_hidden[rows] = (d_logits @ w).to(hidden.dtype)
                for d_words, d in zip(d_weight.split(part), d_logits.split(part, dim=1), strict=True):
                    d_words += d.T @ h
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        # in place: d_weight has the size of the vocabulary. A second backward pass is refused by PyTorch itself
        return d_hidden.mul_(d_loss), d_weight.mul_(d_loss), d_bias.mul_(d_loss), None, None, None


def linear_cross_entropy(hidden, weight, bias, targets):
    """hidden (n, C), weight (V, C), bias (V,), targets (n,) -> scalar fp32: the SUM over targets. Whoever calls divides
    by the number of targets of the whole step, over micro-batches and ranks (P-215): a mean of means would be wrong."""
    dtype = compute_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):  # the function casts by itself, once
        return LinearCrossEntropy.apply(hidden, weight, bias, targets, dtype, torch.is_grad_enabled())


# ----------------------------------------------------------------------------------------------------------------------
# The model


@dataclass
class Output:
    """What a call returns. (B, T, ...) for a padded call with pads exactly 0, (total, ...) for a flat one."""

    logits: torch.Tensor | None = None  # (..., vocab)
    last_hidden_state: torch.Tensor | None = None  # (..., C) after the final norm, before the prediction head
    hidden_states: tuple | None = None  # n_layers + 1 of (..., C): embeddings, then the raw output of each block
    loss_sum: torch.Tensor | None = None  # scalar: the sum (not the mean) of the losses of all targets
    n_targets: int | None = None


class ModernBERT(nn.Module):
    """The masked language model, and, with is_causal=True, the same weights as a causal language model."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.backend = "auto"  # or flash_attn | varlen_attn | sdpa
        self.model = Encoder(config)
        self.head = Head(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.tie_weights()
        if self.decoder.weight.device.type != "meta":
            self.init_weights()

    def tie_weights(self):
        self.decoder.weight = self.model.embeddings.tok_embeddings.weight

    def init_weights(self):
        """Megatron's rule, cut at two standard deviations: what writes into the residual stream starts smaller."""
        sigma = self.config.initializer_range
        for name, parameter in self.named_parameters():
            if name.endswith(("norm.weight",)):
                nn.init.ones_(parameter)
            elif parameter.ndim == 1:
                nn.init.zeros_(parameter)
            else:
                std = sigma / math.sqrt(2 * self.config.num_hidden_layers) if name.endswith("Wo.weight") else sigma
                nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)

    def forward(
        self,
        input_ids,
        attention_mask=None,
        is_causal=False,
        labels=None,
        cu_seqlens=None,
        max_seqlen=None,
        output_hidden_states=False,
        output_logits=True,
    ):
        """input_ids (B, T) with an optional attention_mask (B, T), 1 = token, 0 = padding on either side; or a flat
        stream (total,) with cu_seqlens (n + 1,), by default one sequence. max_seqlen spares CUDA a synchronisation.

        With labels (same shape as input_ids, IGNORE = no target) the answer holds loss_sum and n_targets, and only
        the positions with a target pass through the head; without labels it holds logits, unless output_logits=False.
        labels are compared with the output at their own position: CLM passes next_token_labels."""
        shape = input_ids.shape
        where = None  # flat index of each real token in a padded batch
        if (input_ids.ndim == 2 and cu_seqlens is not None) or (input_ids.ndim == 1 and attention_mask is not None):
            raise ValueError("expected (B, T) with attention_mask, or (total,) with cu_seqlens, not a mix of the two")
        if input_ids.ndim == 2:
            where, cu_seqlens = unpad(attention_mask, shape, input_ids.device)
            input_ids = input_ids.flatten()[where]
            labels = None if labels is None else labels.flatten()[where]
        elif cu_seqlens is None:
            cu_seqlens = torch.tensor([0, len(input_ids)], dtype=torch.int32, device=input_ids.device)
        stream = self.make_stream(cu_seqlens, max_seqlen, len(input_ids), is_causal)
        x, states = self.model(input_ids, stream, output_hidden_states)

        def back(flat):  # to the caller's shape
            return flat if where is None else repad(flat, where, shape)

        out = Output(hidden_states=tuple(map(back, states)) if output_hidden_states else None)
        if labels is not None:
            chosen = (labels != IGNORE).nonzero().squeeze(1)
            out.n_targets = len(chosen)
            out.loss_sum = linear_cross_entropy(
                self.head(x[chosen]), self.decoder.weight, self.decoder.bias, labels[chosen]
            )
            return out
        out.last_hidden_state = back(x)
        if output_logits:
            out.logits = back(self.decoder(self.head(x)))
        return out

    def make_stream(self, cu_seqlens, max_seqlen, total, is_causal):
        config, device = self.config, cu_seqlens.device
        dtype = compute_dtype(self.decoder.weight)
        backend = pick_backend(device, dtype) if self.backend == "auto" else self.backend
        if max_seqlen is None:  # the caller lets us look at the values
            if cu_seqlens[0] != 0 or cu_seqlens[-1] != total:
                raise ValueError(f"cu_seqlens={cu_seqlens.tolist()}: expected 0 first and {total} (all tokens) last")
            max_seqlen = int(cu_seqlens.diff().max())
        head_dim = config.hidden_size // config.num_attention_heads
        rope = {
            theta: rope_angles(cu_seqlens, total, head_dim, theta)
            for theta in {config.global_rope_theta, config.local_rope_theta}
        }
        local_mask = None
        if backend == "sdpa" or (backend == "varlen_attn" and not _VARLEN_WINDOW):
            local_mask = local_block_mask(cu_seqlens, total, config.local_attention, is_causal, dtype)
        return Stream(cu_seqlens, max_seqlen, is_causal, backend, rope, local_mask)

    def compile_blocks(self):
        """torch.compile every block in place: no new module, no prefix in the names of the weights. Blocks of one kind
        share their code, and after two different shapes it is made for any number of sequences and tokens. Raises
        OSError where there is no C++ compiler."""
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except RuntimeError as error:
            raise OSError(f"torch.compile needs a C++ compiler: {error}") from None
        torch._dynamo.config.recompile_limit = 64  # kinds of block x directions x training or not, more than its 8
        for layer in self.model.layers:
            layer.compile()

    def resize_vocab(self, vocab_size):
        """Grow or cut the vocabulary in place. New rows start at the mean of the old ones, new biases at 0."""
        old, bias = self.decoder.weight.data, self.decoder.bias.data
        kept = min(vocab_size, len(old))
        rows = old.mean(0, keepdim=True).repeat(vocab_size, 1)
        rows[:kept] = old[:kept]
        self.model.embeddings.tok_embeddings = nn.Embedding(vocab_size, old.shape[1], _weight=rows)
        self.decoder.bias = nn.Parameter(F.pad(bias[:kept], (0, vocab_size - kept)))
        self.decoder.out_features = self.config.vocab_size = vocab_size
        self.tie_weights()

    @classmethod
    def from_pretrained(cls, name, **overrides):
        """Load a directory or hub id in the hub's format. `overrides` change the config (attn_out_dropout=0.1).
        Raises ValueError or OSError with one line that says what is wrong."""
        folder = find_checkpoint(str(name))
        try:
            config = ModernBERTConfig.from_dict(json.loads((folder / "config.json").read_text("utf-8")))
        except ValueError as error:  # JSON that cannot be decoded is one, too
            raise ValueError(f"{folder / 'config.json'}: {error}") from None
        with torch.device("meta"):  # no time lost on random weights that the file replaces
            model = cls(replace(config, **overrides))
        shapes = {k: v.shape for k, v in model.state_dict().items() if k != "decoder.weight"}  # that one is tied
        try:
            weights = fit_weights(read_weights(folder), shapes)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
        model.load_state_dict(weights, strict=False, assign=True)
        model.tie_weights()
        return model.eval()

    def save_pretrained(self, directory):
        """Write config.json and model.safetensors, which transformers (4 and 5) and from_pretrained read."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {k: v.detach().contiguous() for k, v in self.state_dict().items() if k != "decoder.weight"}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config.to_dict(), indent=2) + "\n", "utf-8")

    def flops_per_token(self, length, is_causal, target_fraction):
        """Forward and backward FLOPs per token of sequences of `length` tokens, of which `target_fraction` pass
        through the vocabulary (CLM 1, MLM its mask rate). 6 per weight, 12 C per visible key (A-21)."""
        c = self.config
        layers = sum(p.numel() for p in self.model.layers.parameters() if p.ndim == 2)
        side = c.local_attention // 2
        seen_global = (length + 1) / 2 if is_causal else length
        seen_local = min(length, side + 1 if is_causal else 2 * side + 1)
        n_global = sum(c.is_global(i) for i in range(c.num_hidden_layers))
        keys = n_global * seen_global + (c.num_hidden_layers - n_global) * seen_local
        head = c.hidden_size * (c.hidden_size + c.vocab_size)
        return 6 * layers + 12 * c.hidden_size * keys + 6 * target_fraction * head


def unpad(attention_mask, shape, device):
    """(B, T) mask -> flat indices of the real tokens, and cu_seqlens (B + 1,). No mask: every token is real."""
    if attention_mask is None:
        attention_mask = torch.ones(shape, dtype=torch.bool, device=device)
    if attention_mask.shape != shape:
        found = tuple(attention_mask.shape)
        raise ValueError(f"attention_mask {found}: expected the shape of input_ids, {tuple(shape)}")
    mask = attention_mask.bool()
    edges = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]  # how many runs of tokens a row has
    if (edges > 1).any():
        raise ValueError("attention_mask: expected padding at the ends of a row only, found a hole inside one")
    cu_seqlens = F.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    return mask.flatten().nonzero().squeeze(1), cu_seqlens


def repad(x, where, shape):
    """Flat (total, ...) back to (B, T, ...), zeros where there was padding."""
    out = x.new_zeros(shape[0] * shape[1], *x.shape[1:])
    return out.index_copy(0, where, x).view(*shape, *x.shape[1:])


# ----------------------------------------------------------------------------------------------------------------------
# Devices


def load_model(name, setting="model", **overrides):
    """from_pretrained for scripts: what is wrong becomes one line and a non-zero exit."""
    try:
        return ModernBERT.from_pretrained(str(name), **overrides)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--{setting}={error}") from None


def default_device():
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def default_dtype(device):
    """bf16 where the hardware multiplies it fast, else fp32. A CPU with AVX512_BF16 or AMX counts: there bf16 matrix
    products are several times faster than fp32 ones."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    if device.type == "cpu":
        tests = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        if any(getattr(torch.cpu, test, lambda: False)() for test in tests):
            return torch.bfloat16
    return torch.float32


# Dense bf16 TFLOP/s from the makers' data sheets, for model FLOPs utilisation. A name is looked for in this order.
PEAK_TFLOPS = {"H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "B200": 2250, "L40S": 362, "L4": 121}


def peak_tflops_of(device):
    """(TFLOP/s, name of the GPU), or (None, "") on a CPU and an unknown GPU: there is no utilisation to tell."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else ""
    return next(((peak, name) for key, peak in PEAK_TFLOPS.items() if key in name), (None, ""))


def compute_dtype(tensor):
    """The dtype that matrix products on `tensor` run in: autocast's where it is on, else the tensor's own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype
