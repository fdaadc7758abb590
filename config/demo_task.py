# The demo's downstream task for finetune.py: which organ system does a definition speak of? Small texts, few epochs and
# a learning rate for a small encoder; everything else is the paper's protocol.

seeds = "42-44"
epochs = 4
batch_size = 16
learning_rate = 5e-4
pool = "mean"
max_train = 2000
max_eval = 1000
max_len = 256
