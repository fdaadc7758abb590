# The demo: a small ModernBERT that a CPU trains in minutes. `make demo` runs it four times:
#
#   python train.py config/demo.py --data_dir=out/demo/data/general --objective=mlm --phase1_tokens=3e6 --out_dir=...
#       the "existing encoder", from random weights
#   python train.py config/demo.py --init_from=out/demo/general/final --objective=clm      the detour
#   python train.py config/demo.py --init_from=out/demo/general/final --objective=mlm      its twin
#   ... and the twin once more with --seed=42, to see how much difference means nothing
#
# 8 rows x 512 tokens = 4,096 tokens a step. Phase 1: 1.5M tokens = 367 steps, of which 10 warm up (about one pass over
# the domain text). Decay: 150,000 tokens = 37 steps. Shape: 6 layers of width 192, 4M parameters.

out_dir = "out/demo/{objective}"
data_dir = "out/demo/data/domain"
phase1_tokens = 1_500_000
decay_tokens = 150_000
warmup_tokens = 40_960
block_size = 512
global_batch = 8
micro_batch = 8
learning_rate = 1e-3

vocab_size = 8192
hidden_size = 192
num_hidden_layers = 6
num_attention_heads = 3
intermediate_size = 288

eval_every_tokens = 150_000
eval_rows = 64
ckpt_every_tokens = 1_000_000
keep_ckpts = 1
log_every = 10
