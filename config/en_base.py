# English Base, 50B tokens: the CLM detour, or its MLM twin, from ModernBERT-base (paper §3.2, P-224).
#
#   torchrun --nproc_per_node=4 train.py config/en_base.py --objective=clm
#   torchrun --nproc_per_node=4 train.py config/en_base.py --objective=mlm
#
# 384 rows x 8,192 tokens = 3,145,728 tokens a step, 96 rows for each of 4 GPUs.
# Phase 1: 50B tokens = 15,895 steps, of which 32 warm up. Decay: 5B tokens = 1,590 steps.

out_dir = "out/en_base-{objective}"
data_dir = "data/en50b"
init_from = "answerdotai/ModernBERT-base"
phase1_tokens = 50e9
decay_tokens = 5e9
micro_batch = 8

# the checkpoint's shape (149.7M parameters), for --dry_run and for --init_from=scratch
vocab_size = 50368
