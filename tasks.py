"""
Labelled texts for finetune.py and transplant.py: a jsonl file with one example a line,

    {"text": "...", "label": "...", "split": "train" | "val" | "test"}

prepare_data.py writes such a file for the demo; your own works the same way.
"""

import json
from pathlib import Path


def read_task(path):
    """jsonl -> {"train": [(text, label), ...], "val": ..., "test": ...}, labels as strings; val may be empty. What is
    wrong becomes one line and a non-zero exit."""
    splits = {"train": [], "val": [], "test": []}
    if not Path(path).is_file():
        raise SystemExit(f'--task={path}: expected a jsonl file with "text", "label" and "split" in each row')
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row["text"], str) or not isinstance(row["label"], (str, int, float)):
                raise TypeError
            splits[row["split"]].append((row["text"], str(row["label"])))
        except (ValueError, KeyError, TypeError):
            where = f"--task={path}: line {number}"
            raise SystemExit(f'{where}: expected {{"text": ..., "label": ..., "split": train|val|test}}') from None
    for split in ("train", "test"):
        if not splits[split]:
            raise SystemExit(f"--task={path}: no rows with split={split}")
    return splits
