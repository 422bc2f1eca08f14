"""Programs of this checkout, run as a user runs them: the command line, and processes of their own, one or two."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from typer import Typer
from typer.testing import CliRunner, Result

from ctxext.cli.app import app
from ctxext.cli.options import StrictCommand

ROOT = Path(__file__).parents[1]
# What accelerate's configuration file would say.
LAUNCH = [
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
]

# ctxext, killed in the middle of the line of its journal whose number is the first argument.
KILLED = """
import json, os, signal, sys
from ctxext.measuring.journal import Journal
append, count, last = Journal.append, 0, int(sys.argv[1])
def dying(self, entry):
    global count
    count += 1
    if count == last:
        with open(self.path, "a") as file:
            file.write(json.dumps(entry)[:30])
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, entry)
Journal.append = dying
from ctxext.cli.app import app
app(sys.argv[2:])
"""


def script(main: Callable[..., None], *arguments: object, code: int | None = None) -> Result:
    """``python SCRIPT ARGUMENTS`` in this process, of the script whose function is ``main``; see ``command``."""
    alone = Typer()
    alone.command(cls=StrictCommand)(main)
    return command(*arguments, code=code, of=alone)


def command(*arguments: object, code: int | None = None, of: Typer = app) -> Result:
    """``ctxext ARGUMENTS`` in this process, which ends with ``code`` if one is given; a traceback fails the test."""
    result = CliRunner().invoke(of, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert code in (None, result.exit_code), result.output
    return result


def ran(
    arguments: Sequence[str], place: Path, typed: str = "", code: int | None = None
) -> subprocess.CompletedProcess[str]:
    """What ``python ARGUMENTS`` said in the folder ``place``, with ``typed`` as its input and ``code`` as its end."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    words = [sys.executable, *arguments]
    done = subprocess.run(
        words, input=typed, env=environment, cwd=place, capture_output=True, text=True, timeout=300, check=False
    )
    assert code in (None, done.returncode), done.stderr[-2000:]
    return done


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def killed_at(line: int, arguments: Sequence[str], place: Path) -> None:
    """Run ``ctxext ARGUMENTS`` until its journal has half of a line."""
    done = ran(["-c", KILLED, str(line), *arguments], place)
    assert done.returncode == -signal.SIGKILL, done.stderr


def launched(arguments: Sequence[str], place: Path) -> str:
    """Return the standard output of ``ctxext ARGUMENTS``, run by ``accelerate launch`` on two processes."""
    done = ran([*LAUNCH, "-m", "ctxext", *arguments], place)
    assert done.returncode == 0, done.stderr
    return done.stdout
