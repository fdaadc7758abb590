# The demo's general text: the documentation of Python packages that requirements.txt installs (no download).
#
#   python prepare_data.py config/data_demo_general.py
#
# About 12,600 docstrings, 4.9M tokens, in half a minute on two cores. torch and transformers would nearly double the
# text, but also the time: parsing their source takes longer than all the rest together.

sources = "docstrings:numpy,scipy,sklearn,pandas,matplotlib,networkx,datasets,huggingface_hub"
train_tokenizer = 8192
val_frac = 0.02
out_dir = "out/demo/data/general"
