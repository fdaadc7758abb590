"""
Settings of a stage script, overridden by config files and the command line.

    python train.py config/demo.py --seed=42 --max_lr=3e-4

A script keeps its settings as plain lower-case globals at the top of its file and ends with `configure(globals())`.

- A config file is a Python file of assignments, run in a namespace of its own: it may compute, import and define what
  it likes, but cannot read the script's values. A public name that is no setting is refused as a typo, unless it is an
  import, a function, a class or a module: let the names of helper values start with an underscore.
- A config file is looked up in the current directory, then in the directory of this file.
- The command line wins over config files wherever it stands. Among files, and for a key given twice, the last one wins.
- A value has the type of the script's default. An int is fine for a float, 1e4 for an int, a list for a tuple, a number
  for a list of one; inf is a float, nan never is. Text for a str setting is taken as it stands, but for quotes around
  it, and text for a list of names is cut at its commas.
- A setting whose default is None takes any literal, and as text what is no literal. No other setting can become None.
"""

import ast
import difflib
import os
import reprlib
import sys
import traceback
import types
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PLAIN = (type(None), bool, int, float, str, tuple, list, dict)


def configure(settings, argv=None):
    """Overrides `settings`, a script's globals(), in place and prints what was set. `argv` defaults to sys.argv[1:].

    --help prints the script's docstring and settings and exits with 0. Whatever is wrong ends the program with one line
    on stderr and exit code 1, before any setting has changed.
    """
    argv = sys.argv[1:] if argv is None else argv
    defaults, block = read_defaults(settings)
    if "-h" in argv or "--help" in argv:
        print((settings.get("__doc__") or "").strip(), "\nSettings, changed with --key=value:\n", *block, sep="\n")
        raise SystemExit(0)

    from_files, from_line = {}, {}  # key -> (value, where it was set)
    try:
        for arg in argv:
            if arg.startswith("-"):
                key, value = read_argument(arg, defaults)
                from_line[key] = (value, "command line")
            else:
                from_files |= {key: (value, arg) for key, value in read_config(arg, defaults).items()}
    except (ValueError, OSError) as problem:
        raise SystemExit(f"{Path(settings.get('__file__', sys.argv[0])).name}: {problem}") from None

    overrides = from_files | from_line  # the command line wins, in whatever order they came
    settings.update({key: value for key, (value, _) in overrides.items()})
    if overrides and os.environ.get("RANK", "0") == "0":  # one of torchrun's processes speaks for all
        key_width = max(len(key) for key in overrides)
        value_width = min(40, max(len(repr(value)) for value, _ in overrides.values()))
        for key, (value, where) in overrides.items():  # on stderr: a script's stdout may be JSON for another program
            print(f"  {key:{key_width}} = {value!r:{value_width}}   ({where})", file=sys.stderr)


def read_defaults(settings):
    """Returns ({key: default}, the lines that --help shows).

    A script's settings are the lower-case names to which it assigns a constant before its first def or class. A dict
    without __file__, for use in tests, has all its public plain values as settings.
    """
    if "__file__" not in settings:
        plain = {k: v for k, v in settings.items() if not k.startswith("_") and isinstance(v, PLAIN)}
        return plain, [f"{key} = {value!r}" for key, value in plain.items()]

    source = Path(settings["__file__"]).read_text(encoding="utf-8")
    top = takewhile(lambda node: not isinstance(node, (ast.FunctionDef, ast.ClassDef)), ast.parse(source).body)
    nodes = [node for node in top if is_setting(node)]
    lines = source.splitlines()
    first, last = (nodes[0].lineno - 1, nodes[-1].end_lineno) if nodes else (0, 0)
    while first > 0 and lines[first - 1].startswith("#"):  # a heading above the block belongs to it
        first -= 1
    return {node.targets[0].id: settings[node.targets[0].id] for node in nodes}, lines[first:last]


def is_setting(node):
    """True for `name = constant`. 8 * 1024 is a constant too; what is computed from other names is not."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not isinstance(node.targets[0], ast.Name):
        return False
    name = node.targets[0].id
    return name.islower() and name[0] != "_" and not any(isinstance(part, ast.Name) for part in ast.walk(node.value))


def read_argument(arg, defaults):
    """'--key=value' -> (key, value)."""
    key, equals, text = arg.removeprefix("--").partition("=")  # at the first "=": the value may contain more
    if not arg.startswith("--"):
        raise ValueError(f"{arg}: expected --key=value, --help or a config file")
    if key not in defaults:
        raise ValueError(f"{arg}: unknown setting, {nearest(key, defaults, '--')}")
    if not equals:
        example = "True" if isinstance(defaults[key], bool) else "VALUE, with no space around the ="
        raise ValueError(f"{arg}: expected a value, write --{key}={example}")
    return key, coerce(parse(text, defaults[key]), defaults[key], arg)


def read_config(arg, defaults):
    """Runs the config file `arg`, and returns {key: value} of the settings that it assigns."""
    path = next((folder / arg for folder in (Path.cwd(), ROOT) if (folder / arg).is_file()), None)
    if path is None or path.suffix != ".py":
        what = "not a .py file" if path else "a directory" if Path(arg).is_dir() else f"no such file here or in {ROOT}"
        raise ValueError(f"{arg}: {what}, expected a config file such as config/demo.py, or --key=value")

    source = path.read_bytes()
    try:
        tree = ast.parse(source, arg)
        code = compile(tree, arg, "exec")
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte, before Python 3.12
        line, what = getattr(error, "lineno", None) or 1, getattr(error, "msg", error)
        raise ValueError(f"{arg}:{line}: SyntaxError: {what}") from None
    namespace = {"__name__": "config", "__file__": str(path)}
    try:
        exec(code, namespace)
    except (Exception, SystemExit) as error:
        line = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == arg][-1]
        raise ValueError(f"{arg}:{line}: {type(error).__name__}: {' '.join(str(error).split())}") from None

    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    helpers = {alias.asname or alias.name for node in imports for alias in node.names}
    values = {}
    for key, value in namespace.items():
        where = f"{arg}: {key} = {reprlib.repr(value)}"
        if key in defaults:
            values[key] = coerce(value, defaults[key], where)
        elif not (key[0] == "_" or key in helpers or callable(value) or isinstance(value, types.ModuleType)):
            raise ValueError(f"{where}: unknown setting, {nearest(key, defaults)} (a helper's name starts with _)")
    return values


def parse(text, default):
    """Command-line text -> Python value of any type: the default only tells how to read the text."""
    if isinstance(default, str):
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        return text[1:-1] if quoted else None if text == "None" else text
    if isinstance(default, float) and text in ("inf", "-inf"):
        return float(text)
    if isinstance(default, bool):
        text = text.capitalize()  # true is True
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        names = isinstance(default, (tuple, list)) and default and isinstance(default[0], str)
        bare = text and not text.startswith(("[", "("))  # a,b for ['a', 'b'], which a shell wants in quotes
        return [name.strip() for name in text.split(",")] if names and bare else text


def coerce(value, default, where):
    """Returns `value` in the type of `default`, or raises a ValueError that opens with `where` if it does not fit."""
    kind = PLAIN if default is None else type(default)
    if kind is float and type(value) is int and abs(value) <= sys.float_info.max:
        value = float(value)
    elif kind is int and isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:  # exact up to there
        value = int(value)
    elif kind in (tuple, list) and isinstance(value, (tuple, list, int, float)):  # --lengths=512 is a list of one
        value = kind(value) if isinstance(value, (tuple, list)) else kind([value])
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)) or value != value:
        expected = "a literal" if default is None else kind.__name__
        raise ValueError(f"{where}: expected {expected}, such as the default {default!r}")
    return value


def nearest(key, defaults, dashes=""):
    """The end of an error line: the valid name that is most like `key`."""
    close = difflib.get_close_matches(key.lower(), defaults, n=1, cutoff=0.5)
    return f"did you mean {dashes}{close[0]}?" if close else "--help lists them all."
