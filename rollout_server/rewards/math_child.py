"""The child process of `math_checker`: it reads JSON lines {gold, response, timeout_s} and writes `true` or `false`.

A check that runs too long ends the process by SIGALRM's default action, which also interrupts big-integer arithmetic
inside C. The file is run by its path and imports nothing of this project.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys

from math_verify import parse, verify

_MEMORY_BYTES = 4 * 2**30


def main() -> None:
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process by closing stdin
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
        try:
            gold = parse(f"\\boxed{{{request['gold']}}}", parsing_timeout=None)
            response = parse(request["response"], parsing_timeout=None)
            is_equal = bool(verify(gold, response, timeout_seconds=None))
        except (ArithmeticError, MemoryError, RecursionError, TypeError, ValueError):
            is_equal = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(is_equal), flush=True)


if __name__ == "__main__":
    main()
