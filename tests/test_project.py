"""What holds the project together: pins, configs that scripts accept, one import direction, a README that works."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from configurator import read_config, read_defaults

ROOT = Path(__file__).resolve().parent.parent
STAGES = ["prepare_data.py", "train.py", "finetune.py", "cka.py", "transplant.py", "needle.py"]
STAGES += ["report.py", "bench.py"]
SCRIPT_OF = {"data_": "prepare_data.py", "demo_task": "finetune.py"}  # every other config is for train.py


def test_requirements_are_exact_and_need_no_compiler():
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    lines = [line for line in lines if line]
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in lines), lines
    assert not any("flash" in line for line in lines)  # optional: it needs torch and nvcc to build
    assert "torch==2.13.0" in lines


@pytest.mark.parametrize("config", sorted(path.name for path in (ROOT / "config").glob("*.py")))
def test_configs_are_accepted_and_open_with_their_launch_line(config):
    script = next((name for start, name in SCRIPT_OF.items() if config.startswith(start)), "train.py")
    defaults, _ = read_defaults({"__file__": str(ROOT / script), **settings_of(script)})
    assert read_config(f"config/{config}", defaults)
    text = (ROOT / "config" / config).read_text()
    assert text.startswith("# ") and (f"config/{config}" in text or script in text.split("\n\n")[0])


def settings_of(script):
    """The settings of a script, without running it."""
    values = {}
    for node in ast.parse((ROOT / script).read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                values.setdefault(node.targets[0].id, eval(compile(ast.Expression(node.value), script, "eval"), {}))
            except Exception:
                continue
    return values


@pytest.mark.parametrize("script", STAGES)
def test_every_stage_explains_itself_from_any_directory(script, tmp_path):
    done = subprocess.run([sys.executable, ROOT / script, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr
    assert "Settings, changed with --key=value" in done.stdout and f"python {script}" in done.stdout
    assert not list(tmp_path.iterdir())


def test_imports_point_one_way():
    """Stages import model.py and configurator.py; nothing imports a stage."""
    stages = {Path(name).stem for name in STAGES}
    for path in ROOT.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            assert not stages & set(names), f"{path.name} imports {stages & set(names)}"


def test_the_readme_names_files_and_settings_that_exist():
    text = (ROOT / "README.md").read_text("utf-8")
    for path in re.findall(r"\b(?:config/\w+\.py|\w+\.py|requirements[\w-]*\.txt)\b", text):
        assert (ROOT / path).exists() or path == "config/x.py" or (ROOT / "config" / path).exists(), path
    for script, arguments in re.findall(r"(?:python|torchrun \S+) (\w+\.py)((?: +\S+)*)", text):
        known = read_defaults({"__file__": str(ROOT / script), **settings_of(script)})[0]
        for key in re.findall(r"--(\w+)=", arguments):
            assert key in known, f"{script} --{key}"


def test_model_imports_without_flash_attn_and_falls_back():
    code = "import sys; sys.modules['flash_attn'] = None; import torch, model; "
    code += "print(model.pick_backend(torch.device('cpu'), torch.bfloat16))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "sdpa", done.stderr
