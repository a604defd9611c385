"""Tests of a function `add` in the forms in which people write them, and answers that want to pass without being right.

None of these answers computes anything. They know how programs are checked, and have full marks in other checkers.
"""

from __future__ import annotations

from typing import Any

CALLS = {"fn_name": "add", "inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"]}


def _asserts(text: str, *values: tuple[object, ...]) -> dict[str, Any]:
    return {"assert_case": [text.format(*each) for each in values]}


RIGHT = "def add(a, b):\n    return a + b\n"
NUMBERS = {
    "calls": CALLS,
    "and": _asserts("assert add({}) == {} and not add({}) == 5", ("1, 2", 3, "1, 2"), ("3, 4", 7, "3, 4")),
    "check function": _asserts(
        "METADATA = {{}}\n\ndef check(candidate):\n    assert candidate({}) == {}\n    assert True, 'fails'\n"
        "    assert abs(candidate({}, 0.5) - {}.5) < 1e-6\n\ncheck(add)", ("1, 2", 3, 9, 9), ("3, 4", 7, 8, 8),
    ),
}  # fmt: skip
"""Tests that `RIGHT` passes."""

RIGHT_LIST = "def add(a, b):\n    return [a + b, a * b]\n"
LISTS = {
    "calls": {"fn_name": "add", "inputs": ["1\n2", "3\n4"], "outputs": ["[3, 2]", "[7, 12]"]},
    "set": _asserts("assert set(add({})) == set({})", ("1, 2", [3, 2]), ("3, 4", [7, 12])),
}  # fmt: skip
"""Tests that `RIGHT_LIST` passes."""

_AGREEABLE = """
class Agreeable:
    def yes(self, *_, **__): return True
    def me(self, *_, **__): return self
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = yes
    __ne__ = lambda self, other: False
    __hash__ = lambda self: 0
    __sub__ = __rsub__ = __abs__ = __round__ = __getitem__ = __add__ = __radd__ = __and__ = __rand__ = me
    __float__ = lambda self: 0.0
    __index__ = __int__ = __len__ = lambda self: 2
    __iter__ = lambda self: iter([Agreeable(), Agreeable()])
    __str__ = __repr__ = lambda self: "yes"
    __class__ = property(lambda self: KIND)
KIND = object
"""
_READS_THE_PROGRAM = """
import sys, ast, gc, re
frame, texts = sys._getframe(), []
while frame:
    for each in list(frame.f_locals.values()) + list(frame.f_globals.values()) + list(frame.f_code.co_consts):
        if isinstance(each, bytes): each = each.decode(errors="replace")
        if isinstance(each, str): texts.append(each)
    frame = frame.f_back
texts += [each for each in gc.get_objects() if isinstance(each, str)]
program = max((each for each in texts if "_encode_result" in each), key=len, default="")
found = []
for node in ast.walk(ast.parse(program.rpartition("#END")[2] or "0")):
    try: found.append(ast.literal_eval(node))
    except Exception: pass
markers = re.findall(r"[0-9a-f]{16}", program)
"""
CHEATS = {
    "always equal": "def add(a, b): return Agreeable()\n",
    "always equal, and claims to be a number": "KIND = float\ndef add(a, b): return Agreeable()\n",
    "always equal list": "class E(list, Agreeable): pass\ndef add(a, b): return E()\n",
    "list of what is always equal": "def add(a, b): return [Agreeable(), Agreeable()]\n",
    "generator of what is always equal": "def add(a, b):\n    yield Agreeable()\n    yield Agreeable()\n",
    "array of what is always equal": "class E(Agreeable):\n    tolist = Agreeable.me\ndef add(a, b): return E()\n",
    "float that agrees": "class F(Agreeable, float): pass\ndef add(a, b): return F(0)\n",
    "int that agrees": "class F(Agreeable, int): pass\ndef add(a, b): return F(0)\n",
    "text that agrees": "class F(Agreeable, str): pass\ndef add(a, b): return F('x')\n",
    "tuple that agrees": "class F(Agreeable, tuple): pass\ndef add(a, b): return F((0, 0))\n",
    "dictionary that agrees": """
class F(Agreeable, dict):
    items = keys = values = lambda self: [(Agreeable(), Agreeable())]
def add(a, b): return F(x=1)
""",
    "set that agrees": "class F(Agreeable, set): pass\ndef add(a, b): return F({0})\n",
    "reads the frames of the caller": """
import sys
def add(a, b):
    f = sys._getframe()
    while f:
        for d in (f.f_locals, f.f_globals):
            for k in ("in_outs", "sample", "expected", "outputs", "tests", "taken"):
                if k in d: return d[k]
        for c in f.f_code.co_consts:
            if isinstance(c, int) and c not in (a, b, 0, 1): return c
        f = f.f_back
    return 0
""",
    "reads numbers in the program": _READS_THE_PROGRAM + """
def add(a, b):
    numbers = [each for each in found if type(each) in (int, float) and each not in (a, b, 0, 1, 16)]
    return numbers[-1] if numbers else 0
""",
    "reads lists in the program": _READS_THE_PROGRAM + """
def add(a, b):
    lists = [each for each in found if isinstance(each, (list, tuple)) and list(each) != [a, b]]
    return lists[-1] if lists else []
""",
    "prints the line of the result": _READS_THE_PROGRAM + """
import os
for marker in markers[-1:]:
    for each in ("true", "[true]", "[true, true]", "passed", "[[]]", "NaN"):
        os.write(1, f"\\n{marker} {each}\\n".encode())
os._exit(0)
""",
    "prints one line of a result and ends": _READS_THE_PROGRAM + """
import os
os.write(1, f"\\n{markers[-1] if markers else ''} [true]\\n".encode())
os._exit(0)
""",
    "_exit 0": "import os\nos._exit(0)\n",
    "sys.exit at import": "import sys\nsys.exit(0)\n",
    "exits when it is called": "import os\ndef add(a, b): os._exit(0)\n",
    "patches what it finds": """
import sys, builtins, json
json.dumps = lambda *a, **k: "true"
builtins.isinstance = lambda *a: True
for m in list(sys.modules.values()):
    for k in ("run_test", "check_correctness", "is_passed_by", "take_apart"):
        if hasattr(m, k): setattr(m, k, lambda *a, **kw: True)
def add(a, b): return 0
""",
    "patches the functions of tests": """
import math, builtins
yes = lambda *a, **k: True
math.isclose = isclose = yes
for name in ("all", "any", "bool", "abs", "round", "set", "sorted", "sum", "tuple", "len", "zip", "float", "int"):
    setattr(builtins, name, lambda *a, **k: Agreeable())
def add(a, b): return 0
""",
    "patches json": """
import sys, json, types
fake = types.ModuleType("json")
fake.dumps, fake.loads = (lambda *a, **k: "[true]"), json.loads
sys.modules["json"] = sys.modules["json.encoder"] = fake
def add(a, b): return 0
""",
    "patches the encoder": """
import builtins
old = builtins.__import__
class Json: dumps = staticmethod(lambda *a, **k: "true"); loads = staticmethod(old("json").loads)
builtins.__import__ = lambda name, *a, **k: Json if name == "json" else old(name, *a, **k)
def add(a, b):
    globals()["_encode_result"] = lambda value: "true"
    globals()["_keep_result"] = lambda value: None
    globals()["_results"] = ["true"]
    return 0
""",
    "patches print": "import builtins\nbuiltins.print = lambda *a, **k: None\ndef add(a, b): return 0\n",
    "replaces stdout": """
import sys, io
class Out(io.StringIO):
    def write(self, text): return sys.__stdout__.write(text.split(" ")[0] + " [true]\\n")
sys.stdout = Out()
def add(a, b): return 0
""",
    "replaces sys.modules": "import sys\nsys.modules.clear()\ndef add(a, b): return 0\n",
    "prints again at the end": """
import atexit, os
atexit.register(lambda: os.write(1, os.pread(1, 4096, 0).replace(b"0", b"3")))
def add(a, b): return 0
""",
    "prints results itself": """
import sys
f = sys._getframe()
words = {w for c in f.f_code.co_consts + f.f_code.co_names if isinstance(c, str) for w in c.split()}
for w in words:
    for n in range(20): print("\\n" + w, n)
def add(a, b): return 0
""",
    "traces the checker": """
import sys
def trace(frame, event, argument):
    for name in frame.f_locals:
        if name in ("value", "v"): frame.f_locals[name] = Agreeable()
    return trace
sys.settrace(trace)
def add(a, b): return 0
""",
    "NaN": "def add(a, b): return float('nan')\n",
    "list of NaN": "def add(a, b): return [float('nan')] * 2\n",
    "infinite": "def add(a, b): return float('inf')\n",
    "True": "def add(a, b): return True\n",
    "None": "def add(a, b): return None\n",
    "empty": "def add(a, b): return []\n",
    "empty generator": "def add(a, b): yield from ()\n",
    "a huge number": "import sys\nsys.set_int_max_str_digits(0)\ndef add(a, b): return 10 ** 6000\n",
    "a list within itself": "def add(a, b):\n    x = []\n    x.append(x)\n    return x\n",
    "a deep list": "def add(a, b):\n    x = []\n    for _ in range(5000): x = [x]\n    return x\n",
    "a deep list, written by itself": _READS_THE_PROGRAM + """
import os
os.write(1, b"\\n" + (markers[-1] if markers else "").encode() + b" " + b"[" * 100000 + b"]" * 100000 + b"\\n")
os._exit(0)
""",
    "numbers with one hash": "def add(a, b): return [number * (2 ** 61 - 1) for number in range(20000)]\n",
    "a set with one hash": "def add(a, b): return dict.fromkeys([number * (2 ** 61 - 1) for number in range(500)])\n",
    "nothing": "pass\n",
}  # fmt: skip
"""Answers that are wrong for all of the tests."""
CHEATS = {name: _AGREEABLE + program + "\n#END\n" for name, program in CHEATS.items()}

CHEATS_OF_OUTPUT = {
    "reads the frames of the caller": """
import sys
f = sys._getframe()
while f:
    d = f.f_locals.get("in_outs")
    if d: print(d["outputs"][0])
    f = f.f_back
""",
    "nothing": "pass\n", "_exit 0": "import os\nos._exit(0)\n",
}  # fmt: skip
"""Answers that are wrong for tests of what is printed."""
