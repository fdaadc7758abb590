# The demo: a small ModernBERT that a CPU trains in minutes. `make demo` runs it four times:
#
#   python train.py config/demo.py --data_dir=out/demo/data/general --objective=mlm --out_dir=out/demo/general
#       the "existing encoder", from random weights
#   python train.py config/demo.py --init_from=out/demo/general/final --objective=clm      the detour
#   python train.py config/demo.py --init_from=out/demo/general/final --objective=mlm      its twin
#   ... and the twin once more with --seed=42, to see how much difference means nothing
#
# 4 rows x 256 tokens = 1,024 tokens a step: a small model on little text needs many steps more than large ones.
# Phase 1: 1M tokens = 977 steps, of which 40 warm up. Decay: 100,000 tokens = 98 steps.
# Shape: 6 layers of width 128, 1.4M parameters. Its local layers see 32 tokens to each side, or a short row would
# hardly differ from their window.

out_dir = "out/demo/{objective}"
data_dir = "out/demo/data/domain"
phase1_tokens = 1_000_000
decay_tokens = 100_000
warmup_tokens = 40_960
block_size = 256
global_batch = 4
micro_batch = 4
learning_rate = 2e-3

vocab_size = 4096
hidden_size = 128
num_hidden_layers = 6
num_attention_heads = 2
intermediate_size = 192
local_attention = 64

eval_every_tokens = 100_000
eval_rows = 128
ckpt_every_tokens = 1_000_000
keep_ckpts = 1
log_every = 20
