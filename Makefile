# Shortcuts: every line below is a command to type. `make -n demo` prints a target's commands without running them.
#
#     make demo OUT=/tmp/demo       results elsewhere
#     make demo PYTHON=python3.12   the Python (3.11 or newer) from which .venv is made

PYTHON = python3
OUT    = out/demo
PY     = .venv/bin/python

.PHONY: help demo test lint bench clean

help:
	@echo "make demo    the whole recipe in small on a CPU, with a report at the end: $(OUT)/report.md"
	@echo "make test    the tests"
	@echo "make lint    the style checks"
	@echo "make bench   tokens/s and memory, side by side with transformers"
	@echo "make clean   removes the demo's results and the caches, and nothing else"

# One domain, two roads from one general encoder: `clm` takes the causal detour, `mlm` is its twin without it, and
# `mlm_seed2` is the twin under another seed, which shows how much difference means nothing.
TRAIN = $(PY) train.py config/demo.py --overwrite=True
FROM  = --init_from=$(OUT)/general/final --data_dir=$(OUT)/data/domain

demo: .venv/installed
	$(PY) prepare_data.py config/data_demo_general.py --out_dir=$(OUT)/data/general
	$(PY) prepare_data.py config/data_demo_domain.py --out_dir=$(OUT)/data/domain --tokenizer=$(OUT)/data/general/tokenizer
	$(TRAIN) --objective=mlm --data_dir=$(OUT)/data/general --out_dir=$(OUT)/general
	$(TRAIN) $(FROM) --objective=clm --out_dir=$(OUT)/clm
	$(TRAIN) $(FROM) --objective=mlm --out_dir=$(OUT)/mlm
	$(TRAIN) $(FROM) --objective=mlm --out_dir=$(OUT)/mlm_seed2 --seed=42
	$(PY) cka.py --model_a=$(OUT)/clm/final --model_b=$(OUT)/mlm/final \
	    --control_a=$(OUT)/mlm_seed2/final --control_b=$(OUT)/mlm/final \
	    --texts=$(OUT)/data/domain --out_dir=$(OUT)/cka
	$(PY) finetune.py config/demo_task.py --task=$(OUT)/data/domain/task_organ.jsonl --results=$(OUT)/results.jsonl \
	    --model=$(OUT)/general/final,$(OUT)/clm/final,$(OUT)/mlm/final,$(OUT)/mlm_seed2/final
	$(PY) needle.py --model=$(OUT)/general/final,$(OUT)/clm/final,$(OUT)/mlm/final --haystack=$(OUT)/data/general \
	    --language=en --lengths=128,256,512 --n=900 --out_dir=$(OUT)/needle
	$(PY) report.py --out_dir=$(OUT)

test: .venv/installed
	$(PY) -m pytest -q

lint: .venv/installed
	$(PY) -m ruff check .

bench: .venv/installed
	$(PY) bench.py --repeats=3

clean:
	rm -rf out/demo .pytest_cache .ruff_cache __pycache__ */__pycache__

# Training steps free and allocate the same large buffers again and again. By default glibc hands them back to the
# system each time, and every fresh page costs a fault: keep them, in huge pages. Results stay the same, steps get
# faster. To type a demo or bench command yourself at that speed, export these three variables first.
ifeq ($(shell uname -s),Linux)
demo bench: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
demo bench: export MALLOC_MMAP_THRESHOLD_ ?= 17179869184
demo bench: export MALLOC_TRIM_THRESHOLD_ ?= 17179869184
endif

# The environment, made again when requirements.txt changes. This file is touched last: after a failed or interrupted
# install it is missing or old, and the next make tries again.
.venv/installed: requirements.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null || { \
	    echo "make: PYTHON=$(PYTHON): expected Python 3.11 or newer; name one, as in: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PY) -m pip install -r requirements.txt
	touch $@
