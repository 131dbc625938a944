"""The reference in a child process: one child serves many specs, a time limit ends it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess

SERVER = """
import json, sys
import aisimulate._runtime as runtime
run = getattr(runtime, sys.argv[1])
for line in sys.stdin:
    try:
        answer = run(line)
    except BaseException as error:
        answer = json.dumps({"error": str(error)})
    sys.stdout.write(answer.replace("\\n", " ") + "\\n")
    sys.stdout.flush()
"""


class Reference:
    """Asks the reference, installed for `python`, one payload at a time."""

    def __init__(
        self, python: str, limit_s: float = 3.0, function: str = "run_replay_json"
    ) -> None:
        self.python = python
        self.limit_s = limit_s
        self.function = function
        self._child: subprocess.Popen | None = None
        self._pending = b""

    def ask(self, payload: dict) -> dict:
        """The report, or `{"error": text}`; a spin is the error "time limit"."""
        if self._child is None:
            self._start()
        try:
            self._child.stdin.write(json.dumps(payload).encode() + b"\n")
            self._child.stdin.flush()
            line = self._read_line()
        except BrokenPipeError:
            line = b""
        if line is None:
            self.close()
            return {"error": "time limit"}
        if not line:
            self.close()
            return {"error": "the reference's process ended"}
        return json.loads(line)

    def _start(self) -> None:
        self._child = subprocess.Popen(
            [self.python, "-c", SERVER, self.function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._pending = b""

    def _read_line(self) -> bytes | None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(self.limit_s):
                    return None
                data = os.read(self._child.stdout.fileno(), 1 << 16)
                if not data:
                    return b""
                self._pending += data
        line, self._pending = self._pending.split(b"\n", 1)
        return line

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
            self._child = None
