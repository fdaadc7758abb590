# English Large, 50B tokens: the CLM detour, or its MLM twin, from ModernBERT-large (paper §3.2, P-225).
#
#   torchrun --nproc_per_node=4 train.py config/en_large.py --objective=clm
#   torchrun --nproc_per_node=4 train.py config/en_large.py --objective=mlm
#
# 384 rows x 8,192 tokens = 3,145,728 tokens a step, 96 rows for each of 4 GPUs.
# Phase 1: 50B tokens = 15,895 steps, of which 32 warm up. Decay: 5B tokens = 1,590 steps.

out_dir = "out/en_large-{objective}"
data_dir = "data/en50b"
init_from = "answerdotai/ModernBERT-large"
phase1_tokens = 50e9
decay_tokens = 5e9
micro_batch = 4

# the checkpoint's shape (395.9M parameters), for --dry_run and for --init_from=scratch
vocab_size = 50368
hidden_size = 1024
num_hidden_layers = 28
num_attention_heads = 16
intermediate_size = 2624
