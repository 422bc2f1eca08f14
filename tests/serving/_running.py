"""A server of this checkout on a port that was free: in this process, or in another that ends as a user ends it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from ctxext.serving.load import Served
from ctxext.serving.server import application
from tests._programs import ROOT

if TYPE_CHECKING:
    import openai

KEY = "a key"


@dataclass
class Reached:
    """A server that runs, by its port and the name of its model."""

    port: int
    name: str

    @property
    def client(self) -> openai.OpenAI:
        """A client that holds the key, and does not ask twice."""
        import openai

        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=300)


@dataclass
class Running(Reached):
    """A server in another process, and the file of all that it wrote."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text("utf-8")

    @property
    def memory(self) -> int:
        """Bytes that its process holds."""
        status = Path(f"/proc/{self.process.pid}/status").read_text("utf-8")
        return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]

    def until(self, said: str) -> None:
        """Wait until it has written something."""
        deadline = time.monotonic() + 60
        while said not in self.said:
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)


@contextlib.contextmanager
def answering(served: Served, **more: Any) -> Iterator[Reached]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application(served, **more), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield Reached(listening.getsockname()[1], served.name)
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def running(
    checkpoint: Path, *flags: str, program: tuple[str, ...] = ("-m", "ctxext"), status: int = 0
) -> Iterator[Running]:
    """Start a server with these flags, wait until it answers, and end it by Ctrl-C at the end, with this status."""
    log = checkpoint.parent / f"{checkpoint.name}-{time.monotonic_ns()}.log"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as out:
        words = [sys.executable, *program, "serve", str(checkpoint), *flags]
        process = subprocess.Popen(words, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while "startup complete" not in log.read_text("utf-8"):
            assert process.poll() is None, log.read_text("utf-8")
            assert time.monotonic() < deadline, log.read_text("utf-8")
            time.sleep(0.1)
        port = int(re.search(r"http://(?:127\.0\.0\.1|localhost):(\d+)", log.read_text("utf-8"))[1])  # type: ignore[index]
        yield Running(port, str(checkpoint), process, log)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == status, log.read_text("utf-8")
        assert "Traceback" not in log.read_text("utf-8"), log.read_text("utf-8")
    finally:
        process.kill()
        process.wait()
