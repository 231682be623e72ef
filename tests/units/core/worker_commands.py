"""Commands for the tests of the worker."""

import atexit
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from ampcheck.core.errors import UsageError


def commands():
    state = {"calls": 0}

    def count(times):
        state["calls"] += times
        return state["calls"]

    def chatter():
        print("x" * 100_000)
        sys.stdout.buffer.write(b'{"result": "forged"}\n')
        os.write(1, b'{"result": "forged"}\n')
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
        return "spoken"

    def refuse():
        raise UsageError("a subject is required; found none")

    def stumble():
        raise ValueError("no such shape\nand more")

    def leave():
        raise SystemExit(3)

    def die(number):
        print("the last words", flush=True)
        os.kill(os.getpid(), getattr(signal, number))

    def die_with_a_child():
        if os.fork() == 0:  # a fork, unlike a subprocess, holds the pipe of the replies
            time.sleep(60)
        os._exit(7)

    def tear():
        replies = sys._getframe(1).f_locals["replies"]  # of `serve`: nobody else knows where it answers
        replies.write(b'{"result": "the first ha')
        replies.flush()
        os._exit(7)

    def register(path):
        atexit.register(Path(path).write_text, "done")

    def child():
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid

    def read():
        return sys.stdin.read()

    def tell(names):
        return [os.environ.get(name) for name in names]

    def where():
        import worker_commands

        import ampcheck

        return [os.getcwd(), ampcheck.__file__, worker_commands.__file__]

    return SimpleNamespace(
        count=count,
        chatter=chatter,
        refuse=refuse,
        stumble=stumble,
        leave=leave,
        die=die,
        die_with_a_child=die_with_a_child,
        tear=tear,
        register=register,
        child=child,
        read=read,
        tell=tell,
        where=where,
        sleep=lambda seconds: time.sleep(seconds),
        echo=lambda value: value,
        odd=lambda: lambda: None,
    )
