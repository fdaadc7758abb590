# The demo's general text: the documentation of Python packages that requirements.txt installs (no download).
#
#   python prepare_data.py config/data_demo_general.py
#
# Some 8,000 docstrings, 11 MB: more than the demo's small encoder reads.

sources = "docstrings:numpy,scipy,sklearn,matplotlib"
train_tokenizer = 4096
val_frac = 0.02
out_dir = "out/demo/data/general"
