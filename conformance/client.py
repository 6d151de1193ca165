"""The runner's end of the protocol: one child process per implementation, restarted when it dies or overruns."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from statescan import __version__
from statescan.conformance.calls import Array, Call, Reply
from statescan.conformance.claims import check_claims
from statescan.conformance.transport import blanks, take_tensors, write_blank, write_inputs
from statescan.goldens.store import FormatError, check_schema, parse_json
from statescan.spec.contract import RULES_VERSION

Message = dict[str, Any]

HELLO_SECONDS = 120.0
RUN_SECONDS = 30.0
MAX_LINE = 1 << 20
QUICK_DEATHS = 3
QUICK_SECONDS = 5.0


class ProtocolError(RuntimeError):
    """The child said something that is no answer, or died too often."""


class Client:
    """Runs calls in a child process started from `command`; use it as a context manager."""

    def __init__(self, command: list[str], *, run_seconds: float = RUN_SECONDS) -> None:
        self.command, self.run_seconds = command, run_seconds
        self.hello: Message = {}
        self.capabilities: list[dict[str, Any]] = []
        self._deaths: list[float] = []
        self._next = 0
        self._buffer = b""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Client:
        self._scratch = tempfile.TemporaryDirectory(prefix="statescan-")
        self.folder = Path(self._scratch.name)
        self._log = (self.folder / "stderr.txt").open("w+b")
        try:
            self._start()
        except ProtocolError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProtocolError, TimeoutError, OSError):
                self._ask({"cmd": "bye"}, 5.0)
        self._kill()
        self._log.close()
        self._scratch.cleanup()

    def setup(self, mixer: Mapping[str, Any], vector: str = "") -> Reply:
        """Have the child make the mixer that the hook calls after this one are for."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            answer = self._ask({"cmd": "setup", "vector": vector, "mixer": dict(mixer)}, self.run_seconds)
        except TimeoutError:
            self._kill()
            return Reply("timeout", message=f"no answer within {self.run_seconds:g} s")
        except ProtocolError as error:
            return self._died(str(error))
        return reply_of(answer)

    def run(self, call: Call, *, vector: str = "", name: str = "a") -> Reply:
        """One call; a dead or late child is one reply, and a new child takes over."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        number = f"{self._next % 1000000:06d}"
        try:
            inputs = write_inputs(self.folder, f"{number}.in", tensors_of(call))
            outputs = write_blank(self.folder, f"{number}.out", call.results, call.tensors)
            made = blanks(self.folder, f"{number}.out")
        except OSError as error:  # the child has the folder in hand too
            self._kill()
            return Reply("protocol", message=f"the scratch folder: {error}")
        message = message_of(call, number, inputs, outputs, vector, name, self.run_seconds)
        try:
            answer = self._ask(message, self.run_seconds)
        except TimeoutError:
            self._kill()
            return Reply("timeout", message=f"no answer within {self.run_seconds:g} s")
        except ProtocolError as error:
            return self._died(str(error))
        try:
            written = take_tensors(self.folder, f"{number}.out", outputs, made)
        except FormatError as error:
            self._kill()
            return Reply("protocol", message=str(error))
        for suffix in ("in", "out"):
            with contextlib.suppress(OSError):
                (self.folder / f"{number}.{suffix}").unlink()
        return reply_of(answer, written)

    def _died(self, reason: str) -> Reply:
        code = self._process.poll() if self._process is not None else None
        crashed = code is not None
        self._kill()
        now = time.monotonic()
        self._deaths = [t for t in self._deaths if now - t < QUICK_SECONDS] + [now]
        if len(self._deaths) >= QUICK_DEATHS:
            raise ProtocolError(f"{QUICK_DEATHS} children ended within {QUICK_SECONDS:g} s; the last: {reason}")
        if not crashed:
            return Reply("protocol", message=reason)
        ended = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return Reply("error", error="Crash", message=f"the process ended with {ended}: {self._log_tail()}")

    def _start(self) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        try:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ProtocolError(f"{shlex.join(self.command)} cannot be started: {error.strerror}") from error
        self._buffer = b""
        try:
            self.hello = self._ask({
                "cmd": "hello", "protocol": "statescan/1", "suite": __version__, "rules": RULES_VERSION,
                "scratch": str(self.folder), "max_line": MAX_LINE,
            }, HELLO_SECONDS)  # fmt: skip
            if self.hello["ok"]:
                self.capabilities = self._ask({"cmd": "capabilities"}, HELLO_SECONDS)["capabilities"]
        except (TimeoutError, KeyError) as error:
            raise ProtocolError(f"no hello from {shlex.join(self.command)}: {error!r}; {self._log_tail()}") from error
        except ProtocolError as error:
            raise ProtocolError(f"{error}; {self._log_tail()}") from error

    def _ask(self, message: Message, seconds: float) -> Message:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        self._next += 1
        deadline = time.monotonic() + seconds
        self._send(json.dumps({"id": self._next, **message}, separators=(",", ":")).encode() + b"\n", deadline)
        return answer_in(self._line(deadline), self._next)

    def _send(self, line: bytes, deadline: float) -> None:
        """Hand a line over; a child that does not read it in time is late."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdin, selectors.EVENT_WRITE)
            while line:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                try:
                    line = line[os.write(process.stdin.fileno(), line) :]
                except BlockingIOError:
                    continue
                except OSError as error:
                    self._wait()
                    raise ProtocolError(f"the adapter no longer listens ({error})") from error

    def _wait(self) -> None:
        """Give a child that has closed its pipes a moment to end."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)

    def _line(self, deadline: float) -> bytes:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if len(self._buffer) > MAX_LINE:
                    raise ProtocolError(f"a line of more than {MAX_LINE} bytes")
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    self._wait()
                    raise ProtocolError("the adapter closed its output")
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def _log_tail(self) -> str:
        self._log.flush()
        self._log.seek(0, os.SEEK_END)
        size = self._log.tell()
        self._log.seek(max(0, size - 1500))
        return self._log.read().decode("utf-8", "replace").strip()[-600:]


def answer_in(line: bytes, number: int) -> Message:
    """The answer to message `number` in a line from outside; ProtocolError where it is none."""
    try:
        answer = parse_json(line, "reply")
        check_schema("message", answer, "reply")
        check_claims(answer.get("capabilities", []), "reply")
    except FormatError as error:
        raise ProtocolError(f"not an answer: {line[:200]!r} ({error})") from error
    if answer["id"] != number:
        raise ProtocolError(f"answer to message {answer['id']}, {number} was asked")
    return dict(answer)


def tensors_of(call: Call) -> dict[str, Array]:
    """What goes into the input file of a call: its tensors, and cotangents where gradients are asked for."""
    given = {} if call.grad is None else call.grad.cotangents
    return {**call.tensors, **{f"cotangent.{key}": array for key, array in given.items()}}


def message_of(
    call: Call, number: str, inputs: list[Message], outputs: list[Message], vector: str, name: str,
    seconds: float = RUN_SECONDS,
) -> Message:  # fmt: skip
    """The `run` message of a call whose tensors lie in files of this number."""
    grad = {} if call.grad is None else {"grad": {"of": list(call.grad.of), "cotangents": list(call.grad.cotangents)}}
    return {
        "cmd": "run", "vector": vector, "call": name, "op": call.op, "args": dict(call.args),
        "deadline_ms": int(seconds * 1e3), "return_inputs": True,
        "inputs": {"file": f"{number}.in", "tensors": inputs},
        "outputs": {"file": f"{number}.out", "tensors": outputs}, **grad,
        **({"installed": dict(call.installed)} if call.installed else {}),
        **({"far": list(call.far)} if call.far else {}),
    }  # fmt: skip


def reply_of(answer: Mapping[str, Any], outputs: Mapping[str, Array] | None = None) -> Reply:
    """What an answer says, with the tensors that came back."""
    status = "ok" if answer["ok"] else answer.get("status", "error")
    return Reply(status, outputs or {}, answer.get("value"), str(answer.get("error", "")),
                 str(answer.get("message", answer.get("need", ""))), float(answer.get("ms", 0.0)))  # fmt: skip


def python_command(target: str) -> list[str]:
    """The child for an adapter in a Python module."""
    return [sys.executable, "-m", "statescan.conformance.worker", target]
