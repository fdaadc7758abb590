"""Settings from config files and the command line: what wins, what is refused, and with which words (C1, C3, C5)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configurator import configure

ROOT = Path(__file__).resolve().parent.parent

STAGE = '''
"""Trains a small thing.

    python stage.py config/demo.py
"""

import json
import math

from configurator import configure

# What to read
data_dir = "data/fr"  # from prepare_data.py
block_size = 8 * 1024  # tokens per row
# How to train
learning_rate = 2e-4  # peak (P-202)
compile = False  # faster steps, slower start
freeze_layers = None  # "0-7" keeps the lower third as it is
betas = (
    0.9,  # of the mean
    0.98,  # of the square
)
_scratch = 1
LIMIT = 2
half = block_size // 2


def main():
    print(json.dumps([data_dir, block_size, learning_rate, compile, freeze_layers, betas]))


late = 3

if __name__ == "__main__":
    configure(globals())
    main()
'''
DEFAULTS = '["data/fr", 8192, 0.0002, false, null, [0.9, 0.98]]\n'


@pytest.fixture
def stage(tmp_path):
    """Runs the script above as a person would, from tmp_path: stage(*args) -> (exit code, stdout, stderr)."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "stage.py").write_text(STAGE)

    def run(*args, **environment):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        command = [sys.executable, str(folder / "stage.py"), *args]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes a config file and stands in its directory: config(text) -> its name."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="that.py"):
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return write


def configured(*args, **settings):
    """The settings after configure()."""
    configure(settings, list(args))
    return settings


def refused(*args, **settings):
    """The one line with which configure() ends the program; it must leave the settings as they were."""
    before = dict(settings)
    with pytest.raises(SystemExit) as stop:
        configure(settings, list(args))
    assert settings == before
    message = stop.value.code
    assert isinstance(message, str) and "\n" not in message  # a message as the code: printed to stderr, exit code 1
    return message


# ----------------------------------------------------------------------------------------------------------------------
# Values on the command line


@pytest.mark.parametrize(
    "default, text, value",
    [
        (0.1, "3e-4", 3e-4),
        (0.1, "1", 1.0),
        (0.1, "-2", -2.0),
        (0.1, "1_000", 1000.0),
        (0.1, "inf", float("inf")),
        (0.1, "-inf", -float("inf")),
        (3, "7", 7),
        (3, "-1", -1),
        (3, "1e4", 10_000),
        (3, "1e9", 1_000_000_000),
        (3, "2.0", 2),
        (3, "10_000", 10_000),
        (False, "True", True),
        (False, "true", True),
        (True, "False", False),
        (True, "false", False),
        ("a", "b", "b"),
        ("a", "", ""),
        ("a", "1e4", "1e4"),
        ("a", "True", "True"),
        ("a", "x=1, y=2", "x=1, y=2"),
        ("a", "(0, 1)", "(0, 1)"),
        ("a", "'quoted'", "quoted"),
        ("a", '"None"', "None"),
        ("a", "it's", "it's"),
        ("a", r"'C:\new'", r"C:\new"),
        ((1, 2), "(3, 4)", (3, 4)),
        ((1, 2), "3,4", (3, 4)),
        ((1, 2), "3", (3,)),
        ((0.1, 0.2), "1e-3", (0.001,)),
        (("a", "b"), "c", ("c",)),
        (("a", "b"), "c, d", ("c", "d")),
        (["a", "b"], "['c,d']", ["c,d"]),
        ((1, 2), "[3, 4]", (3, 4)),
        ([1, 2], "(3, 4)", [3, 4]),
        ([], "[]", []),
        ({"a": 1}, "{'b': 2}", {"b": 2}),
        (None, "None", None),
        (None, "3", 3),
        (None, "1e4", 1e4),
        (None, "True", True),
        (None, "(0, 1)", (0, 1)),
        (None, "0-1", "0-1"),
        (None, "out/demo/final", "out/demo/final"),
        (None, "'3'", "3"),
        (None, "a=b", "a=b"),
        (None, "", ""),
    ],
)
def test_command_line_value(default, text, value):
    got = configured(f"--x={text}", x=default)["x"]
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    "default, text, expected",
    [
        (0.1, "fast", "float"),
        (0.1, "", "float"),
        (0.1, "True", "float"),
        (0.1, "None", "float"),
        (0.1, "nan", "float"),
        (0.1, "1" + 400 * "0", "float"),  # an int beyond the range of floats
        (3, "1.5", "int"),
        (3, "1e400", "int"),
        (3, "1e17", "int"),  # beyond 2**53 a float no longer holds every integer
        (3, "True", "int"),
        (3, "None", "int"),
        (3, "3 4", "int"),
        (False, "1", "bool"),
        (False, "yes", "bool"),
        (False, "None", "bool"),
        ("a", "None", "str"),
        ((1, 2), "(3, 4", "tuple"),
        ((1, 2), "", "tuple"),
        (("a", "b"), "", "tuple"),
        (("a", "b"), "('c', d", "tuple"),
        ({"a": 1}, "{1, 2}", "dict"),
        ({"a": 1}, "{[]: 1}", "dict"),
    ],
)
def test_command_line_value_of_another_type(default, text, expected):
    message = refused(f"--x={text}", x=default)
    assert f"--x={text}: expected {expected}, such as the default {default!r}" in message


def test_none_default_can_be_set_and_reset(config):  # C1
    assert configured("--freeze_layers=0-1", freeze_layers=None)["freeze_layers"] == "0-1"
    that = config("freeze_layers = 'all'")
    assert configured(that, freeze_layers=None)["freeze_layers"] == "all"
    assert configured(that, "--freeze_layers=None", freeze_layers=None)["freeze_layers"] is None


def test_last_of_a_repeated_key_wins():
    assert configured("--x=1", "--y=5", "--x=2", x=0, y=0) == {"x": 2, "y": 5}


@pytest.mark.parametrize(
    "arg, words",
    [
        ("--learning_rat=1e-9", "did you mean --learning_rate?"),
        ("--learning-rate=1e-9", "did you mean --learning_rate?"),
        ("--LEARNING_RATE=1e-9", "did you mean --learning_rate?"),
        ("--qqq=1", "--qqq=1: unknown setting, --help lists them all"),
        ("--__name__=1", "unknown setting"),
        ("--=1", "unknown setting"),
        ("--", "unknown setting"),
        ("--compile", "write --compile=True"),
        ("--learning_rate", "write --learning_rate=VALUE"),
        ("--compil", "did you mean --compile?"),
        ("-v", "expected --key=value"),
        ("learning_rate=1", "or --key=value"),
    ],
)
def test_bad_argument(arg, words):
    message = refused(arg, learning_rate=2e-4, compile=False)
    assert words in message and arg in message


def test_a_space_for_the_equals_sign_is_named_as_such():
    assert "no space around the =" in refused("--seed", "42", seed=17)


# ----------------------------------------------------------------------------------------------------------------------
# Config files


def test_config_sets_values_and_ignores_helpers(config):
    that = config(
        "import math\nimport os.path as p\nfrom math import pi, tau as turn\n_tmp = 3\n"
        "def warm(n):\n    unknown = n\n    return unknown\nclass Base:\n    pass\ntwice = lambda n: 2 * n\n"
        "seed = warm(_tmp) + math.floor(pi) + twice(1e3)\nlearning_rate = 1\n"
    )
    settings = configured(that, seed=0, learning_rate=0.1, other="kept")
    assert settings == {"seed": 2006, "learning_rate": 1.0, "other": "kept"}
    assert type(settings["seed"]) is int and type(settings["learning_rate"]) is float


def test_an_imported_name_that_is_a_setting_is_set(config):
    config("seed = 5", "_base_for_this_test.py")
    that = config("import sys\nsys.path.insert(0, '.')\nfrom _base_for_this_test import seed\ndel sys.path[0]\n")
    assert configured(that, seed=0) == {"seed": 5}


@pytest.mark.parametrize("args", [("that.py", "--x=3"), ("--x=3", "that.py")])
def test_command_line_wins_in_any_order(config, args):
    config("x = 2\ny = 2\n")
    assert configured(*args, x=1, y=1, z=1) == {"x": 3, "y": 2, "z": 1}


def test_later_config_wins(config):
    config("x = 1\ny = 1\n", "one.py")
    config("x = 2\n", "two.py")
    assert configured("one.py", "two.py", x=0, y=0) == {"x": 2, "y": 1}
    assert configured("two.py", "one.py", x=0, y=0) == {"x": 1, "y": 1}


def test_config_does_not_see_the_script(config):
    assert "that.py:1: NameError" in refused(config("x = x + 1"), x=1)


@pytest.mark.parametrize(
    "text, words",
    [
        ("learning_rat = 1e-9", "that.py: learning_rat = 1e-09: unknown setting, did you mean learning_rate?"),  # C3
        ("LEARNING_RATE = 1e-9", "did you mean learning_rate?"),
        ("qqq = {'a': 1}", "unknown setting, --help lists them all"),
        ("from pathlib import Path\ndata_dirr = Path('x')", "did you mean data_dir?"),
        ("from pathlib import Path\ndata_dir = Path('x')", "expected str, such as the default 'data/fr'"),
        ("learning_rate = 'fast'", "that.py: learning_rate = 'fast': expected float, such as the default 0.0002"),
        ("learning_rate = float('nan')", "expected float"),
        ("learning_rate = None", "expected float"),
        ("seed = 1.5", "expected int"),
        ("seed = True", "expected int"),
        ("freeze_layers = {1, 2}", "expected a literal"),
        ("def seed(): pass", "expected int"),
        ("x = 3\nlearning_rate = (1,\n", "that.py:2: SyntaxError: "),
        ("\n\nreturn 3", "that.py:3: SyntaxError: "),
        (b"seed = '\xff'", "that.py:1: SyntaxError: "),
        (b"seed = 1\0", "that.py:1: SyntaxError: "),
        ("seed = 1\n\nlearning_rate = 1 / 0", "that.py:3: ZeroDivisionError: division by zero"),
        ("def f():\n    raise KeyError('two\\nlines')\nseed = f()", "that.py:2: KeyError: 'two\\nlines'"),
        ("raise ValueError('two\\nlines')", "that.py:1: ValueError: two lines"),
        ("import not_a_module_at_all", "that.py:1: ModuleNotFoundError: No module named"),
        ("exit()", "that.py:1: SystemExit"),
    ],
)
def test_bad_config(config, text, words):
    defaults = {"learning_rate": 2e-4, "data_dir": "data/fr", "seed": 17, "freeze_layers": None}
    assert words in refused(config(text), **defaults)


def test_a_wrong_value_in_a_config_is_refused_even_if_overridden(config):
    assert "expected int" in refused(config("seed = 'x'"), "--seed=3", seed=17)


def test_not_a_config_file(config, tmp_path):
    config("{'x': 1}", "that.json")  # runs as Python, and would set nothing
    (tmp_path / "folder.py").mkdir()
    for arg in ("config/nope.py", "nope", "folder.py", "", "that.json", "x" * 5000):
        assert arg in refused(arg, x=1)


def test_config_is_found_here_then_in_the_repository(config, tmp_path, monkeypatch):
    (tmp_path / "root").mkdir()
    monkeypatch.setattr("configurator.ROOT", tmp_path / "root")
    config("x = 1", "root/that.py")
    assert configured("that.py", x=0) == {"x": 1}
    config("x = 2", "that.py")
    assert configured("that.py", x=0) == {"x": 2}
    assert configured(str(tmp_path / "root" / "that.py"), x=0) == {"x": 1}


# ----------------------------------------------------------------------------------------------------------------------
# What is printed


def test_prints_only_overrides_aligned(config, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    configured(config("learning_rate = 1e-3"), "--seed=3", "--name=a b", learning_rate=0.1, seed=1, name="n", kept=5)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "  learning_rate = 0.001   (that.py)",
        "  seed          = 3       (command line)",
        "  name          = 'a b'   (command line)",
    ]
    configured(kept=5)
    monkeypatch.setenv("RANK", "1")
    configured("--kept=6", kept=5)
    assert capsys.readouterr() == ("", "")


# ----------------------------------------------------------------------------------------------------------------------
# A script of its own, as a person runs it


def test_script_runs_from_elsewhere(stage, config):
    config("learning_rate = 1\n")
    assert stage() == (0, DEFAULTS, "")
    code, out, err = stage("--freeze_layers=0-1", "that.py", "--betas=0.9,0.95", "--block_size=1e4", RANK="0")
    assert (code, out) == (0, '["data/fr", 10000, 1.0, false, "0-1", [0.9, 0.95]]\n')
    assert "  freeze_layers = '0-1'         (command line)\n" in err and "(that.py)\n" in err


@pytest.mark.parametrize("flags", [["--help"], ["-h"], ["--block_size=3", "--help"]])
def test_help(stage, flags):  # C5
    code, out, err = stage(*flags)
    assert (code, err) == (0, "")
    block = STAGE[STAGE.index("# What to read") : STAGE.index("_scratch")]
    assert out.startswith("Trains a small thing.\n\n    python stage.py config/demo.py\n") and out.endswith(block)


@pytest.mark.parametrize(
    "arg, words",
    [
        ("--compile", "write --compile=True"),
        ("config/nope.py", "no such file"),
        ("scripts", "a directory"),
        ("--learning_rate=fast", "expected float"),
        ("--late=4", "unknown setting"),
        ("--_scratch=2", "unknown setting"),
        ("--LIMIT=3", "unknown setting"),
        ("--half=3", "unknown setting"),
        ("--json=3", "unknown setting"),
    ],
)
def test_script_error_is_one_line(stage, arg, words):  # C5
    code, out, err = stage(arg)
    assert code != 0 and out == ""
    assert err.startswith(f"stage.py: {arg}: ") and words in err and err.count("\n") == 1


def test_help_of_a_script_without_settings(tmp_path, capsys):
    script = tmp_path / "bare.py"
    script.write_text("import os\n")
    with pytest.raises(SystemExit) as stop:
        configure({"__file__": str(script), "__doc__": None}, ["--help"])
    assert stop.value.code == 0 and "Traceback" not in capsys.readouterr().err
