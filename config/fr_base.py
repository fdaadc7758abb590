# French Base: the CLM detour, or its MLM twin, from ModernCamemBERT (paper §3.2, P-221).
#
#   torchrun --nproc_per_node=4 train.py config/fr_base.py --objective=clm
#   torchrun --nproc_per_node=4 train.py config/fr_base.py --objective=mlm
#
# 384 rows x 8,192 tokens = 3,145,728 tokens a step, 96 rows for each of 4 GPUs.
# Phase 1: 10B tokens = 3,179 steps, of which 32 warm up. Decay: 1B tokens = 318 steps.

out_dir = "out/fr_base-{objective}"
data_dir = "data/fr10b"
init_from = "almanach/moderncamembert-base"
phase1_tokens = 10e9
decay_tokens = 1e9
micro_batch = 8

# the checkpoint's shape (136.1M parameters), for --dry_run and for --init_from=scratch
vocab_size = 32768
