"""Processes of Python that need not import torch and Lightning: forks of a server that has.

    process = fork_server.Popen([sys.executable, "-m", "lit_llm", "fit", …], cwd=folder, stdout=subprocess.PIPE, text=True)
    done = fork_server.run([sys.executable, "script.py"], env=environment, capture_output=True, text=True)

Both are used as those of `subprocess`, with commands `python SCRIPT`, `python -m MODULE` and `python -c SOURCE`. The import
takes four to eight seconds of a processor, a fork less than a tenth. The server never trains, so a fork has the state of an
interpreter after its imports: its own environment, working directory, sys.path, files, signals, random numbers. It differs in
what happened before: there are modules that a script does not import, strings hash as in all other forks, the libraries have
read their environment (`READ_AT_IMPORT`). A test of a start, of an import or of these variables uses `subprocess`.

Each pytest worker has a server of its own. It starts with the first process and ends with the worker.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib.util
import io
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

READ_AT_IMPORT = ("PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONWARNINGS", "MALLOC_MMAP_THRESHOLD_", "CUDA_VISIBLE_DEVICES")
"""Variables that a fork sees too late."""


class Popen:
    """A forked process, with what tests use of `subprocess.Popen`.

    Args:
        command: sys.executable and its arguments.
        process_group: 0 makes the process the leader of a group; another number is the leader of the group it joins.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        text: bool = False,
        start_new_session: bool = False,
        process_group: int | None = None,
    ) -> None:
        self.args = [os.fspath(word) for word in command]
        assert self.args[0] == sys.executable and self.args[1:], self.args
        environment = dict(os.environ if env is None else env)
        late = [name for name in READ_AT_IMPORT if environment.get(name) != _environment.get(name)]
        assert not late, f"{late} have no effect after the imports: use subprocess"
        self.returncode: int | None = None
        with contextlib.ExitStack() as closed:  # what only the process needs

            def opened(given: Any, own: int) -> tuple[int, IO[Any] | None]:
                """The descriptor for the process, and our end of a pipe."""
                if given == subprocess.PIPE:
                    theirs, ours = os.pipe() if own == 0 else os.pipe()[::-1]
                    closed.callback(os.close, theirs)
                    return theirs, open(ours, ("w" if own == 0 else "r") + ("" if text else "b"))
                if given == subprocess.DEVNULL:
                    theirs = os.open(os.devnull, os.O_RDWR)
                    closed.callback(os.close, theirs)
                    return theirs, None
                return own if given is None else given if isinstance(given, int) else given.fileno(), None

            first, self.stdin = opened(stdin, 0)
            second, self.stdout = opened(stdout, 1)
            third, self.stderr = (second, None) if stderr == subprocess.STDOUT else opened(stderr, 2)
            order = {
                "words": self.args[1:],
                "environment": environment,
                "folder": os.fspath(cwd or os.getcwd()),
                "session": start_new_session,
                "group": process_group,
            }
            self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                fds = [theirs.fileno(), first, second, third]
                socket.send_fds(_server(), [json.dumps(order).encode()], fds)
        self.pid = int(self._heard())

    def _heard(self) -> bytes:
        said = self._line.recv(100)
        assert said, "the fork server is gone"
        return said

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._line, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._heard())
            with self._line:  # until the server has reaped it: then the pid is free, as after `subprocess`'s wait
                self._line.shutdown(socket.SHUT_WR)
                self._line.recv(1)
        return self.returncode

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        """Standard output and error, read to their ends."""
        end = None if timeout is None else time.monotonic() + timeout
        texts: list[Any] = [None, None]

        def read(number: int, stream: IO[Any]) -> None:
            texts[number] = stream.read()
            stream.close()

        streams = [(number, stream) for number, stream in enumerate((self.stdout, self.stderr)) if stream is not None]
        readers = [threading.Thread(target=read, args=each, daemon=True) for each in streams]
        for reader in readers:
            reader.start()
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError), self.stdin:
                if input:
                    self.stdin.write(input)
        for reader in readers:
            reader.join(None if end is None else max(0.0, end - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        return texts[0], texts[1]

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Popen:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    process = Popen(command, **options)
    try:
        out, err = process.communicate(input, timeout)
    except BaseException:
        process.kill()
        raise
    done = subprocess.CompletedProcess(process.args, process.wait(), out, err)
    if check:
        done.check_returncode()
    return done


_control: socket.socket | None = None
_process: subprocess.Popen[bytes] | None = None
_environment = dict(os.environ)  # before any test has changed it


def _server() -> socket.socket:
    global _control, _process
    if _control is None:
        _control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            environment = _environment | {"OMP_NUM_THREADS": "1"}
            _process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return _control


def stop() -> None:
    """End the server and all processes that it started."""
    global _control
    if _control is not None and _process is not None:
        _control.close()
        _control = None
        _process.wait()


def plan_a_run() -> None:
    """Import and fill what only a beginning run does, which is half of the processor time of a short run in a fork.

    Nothing is computed: a plan calls the model on the meta device.
    """
    import s3fs  # noqa: F401  # Lightning does, where it is installed
    import torch.utils.tensorboard  # noqa: F401
    from process_state import restored_process_state

    import lit_llm.hf.read
    import lit_llm.training.fit  # noqa: F401
    from lit_llm.__main__ import main

    with restored_process_state(), contextlib.redirect_stdout(io.StringIO()):
        assert main(["plan", "--config", "quickstart"]) == 0


# -- the server ---------------------------------------------------------------------------------------------------------


def serve(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each order. Returns the order and its files, in the forks; the server itself ends here."""
    importlib.import_module("lit_llm.training.bounded_exit")  # first, as in a process of its own: its exit handler is the last
    import sample_ledger  # noqa: F401  # what a run imports before it does anything

    from lit_llm.config.resolve import resolved

    resolved([])  # fills the parser's caches, which halves the remaining start time
    plan_a_run()
    gc.collect()
    gc.freeze()  # so that a collection in a fork does not copy every page
    running: dict[int, tuple[int, socket.socket]] = {}  # pid: its pidfd, and the line to whoever waits for it
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data is None:
                message, files, _, _ = socket.recv_fds(control, 2**20, 4)
                if not message:
                    for pid in running:
                        _kill(pid)
                    os._exit(0)
                line = socket.socket(fileno=files.pop(0))
                pid = os.fork()
                if pid == 0:
                    order = json.loads(message)
                    if order["session"]:
                        os.setsid()
                    if order["group"] is not None:
                        os.setpgid(0, order["group"])
                    with line:
                        line.send(str(os.getpid()).encode())
                    selector.close()
                    control.close()
                    for descriptor, other in running.values():
                        os.close(descriptor)
                        other.close()
                    return order, files
                for file in files:
                    os.close(file)
                running[pid] = os.pidfd_open(pid), line
                selector.register(running[pid][0], selectors.EVENT_READ, pid)
                continue
            pid = key.data
            descriptor, line = running[pid]
            selector.unregister(key.fileobj)
            if key.fileobj == descriptor:  # it has ended, and stays a zombie until it is waited for
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                assert ended is not None
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody will
                    line.send(str(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status).encode())
                selector.register(line, selectors.EVENT_READ, pid)
            else:
                os.waitpid(pid, 0)
                os.close(descriptor)
                line.close()
                del running[pid]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)


def become(order: dict[str, Any], files: list[int], libraries: list[str]) -> tuple[types.CodeType, dict[str, Any]]:
    """In the fork: do what an interpreter does before it executes the first line. Returns the code, and `__main__`'s globals.

    Args:
        libraries: the end of sys.path.
    """
    for file, target in zip(files, (0, 1, 2), strict=True):
        os.dup2(file, target)
        os.close(file)
    faulthandler.enable()  # which file descriptor 2 is has changed
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    import numpy
    import torch
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    for seed in (random.seed, numpy.random.seed, torch.seed):  # as at an import: without it, all ranks would draw the same
        seed()
    tempfile.tempdir = None  # an import has asked for it, and TMPDIR may differ
    # Was read from the environment at import, in this order.
    ranks = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ]
    rank_zero_only.rank = int(next(iter(ranks), 0))

    kind, *arguments = order["words"]
    folder = "" if kind == "-c" else os.getcwd() if kind == "-m" else str(Path(kind).resolve().parent)
    sys.path[:] = [folder, *python_path(), *libraries]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    if kind == "-c":
        sys.argv = ["-c", *arguments[1:]]
        code = compile(arguments[0], "<string>", "exec")
    elif kind == "-m":
        name = arguments[0]
        if (spec := importlib.util.find_spec(name)) is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        assert spec is not None and spec.origin is not None, name
        main.__spec__, main.__package__, main.__file__ = spec, spec.parent, spec.origin
        sys.argv = [spec.origin, *arguments[1:]]
        code = compile(Path(spec.origin).read_bytes(), spec.origin, "exec")
    else:
        main.__file__ = kind
        sys.argv = [kind, *arguments]
        code = compile(Path(kind).read_bytes(), kind, "exec")
    return code, vars(main)


def python_path() -> list[str]:
    return [os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]


def main() -> None:
    status = 1

    def end() -> None:
        """The last exit handler leaves out the destruction of every module, half a second of a processor."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if status < 0:  # as the interpreter does after Ctrl-C
            signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        os._exit(status)

    atexit.register(end)
    server_only = {sys.path[0], *python_path()}
    order, files = serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        code, names = become(order, files, [each for each in sys.path if each not in server_only])
        exec(code, names)
        status = 0
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        raise
    except KeyboardInterrupt:
        status = -signal.SIGINT
        raise


if __name__ == "__main__":
    main()
