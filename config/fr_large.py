# French Large: the CLM detour, or its MLM twin, from ModernCamemBERT-large (paper §3.2, P-222).
#
#   torchrun --nproc_per_node=4 train.py config/fr_large.py --objective=clm
#   torchrun --nproc_per_node=4 train.py config/fr_large.py --objective=mlm
#
# 384 rows x 8,192 tokens = 3,145,728 tokens a step, 96 rows for each of 4 GPUs.
# Phase 1: 25B tokens = 7,948 steps, of which 32 warm up. Decay: 2.5B tokens = 795 steps.
# The corpus has 10B tokens, so the run reads it 2.75 times.

out_dir = "out/fr_large-{objective}"
data_dir = "data/fr10b"
init_from = "almanach/moderncamembert-large"
phase1_tokens = 25e9
decay_tokens = 2.5e9
micro_batch = 4

# the checkpoint's shape (377.8M parameters), for --dry_run and for --init_from=scratch
vocab_size = 32768
hidden_size = 1024
num_hidden_layers = 28
num_attention_heads = 16
intermediate_size = 2624
