"""A page in Chromium without a window, asked through Chrome's DevTools protocol over two pipes. No package is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")


class Browser:
    """One page. Use it in a with statement.

    Args:
        profile: an empty folder.
        size: of the window in pixels.
    """

    def __init__(self, profile: Path, size: tuple[int, int] = (1280, 900)) -> None:
        assert CHROMIUM is not None
        reads, self._to = os.pipe()
        self._from, writes = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        command = [CHROMIUM, *flags, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}", "about:blank"]
        # Chromium reads from descriptor 3 and writes to 4.
        shell = ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "bash", *command]
        self._process = subprocess.Popen(shell, pass_fds=(reads, writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(reads)
        os.close(writes)
        self._rest, self._number, self._session = b"", 0, {}
        (page,) = [each for each in self._ask("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self._ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def open(self, url: str) -> None:
        self._ask("Page.navigate", url=url)

    def value(self, script: str) -> Any:
        """What an expression of JavaScript gives, as JSON has it; None if it raises, as on a page that is not there yet."""
        return self._ask("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def wait_for(self, script: str, seconds: float = 60.0) -> Any:
        """The value of an expression as soon as it is neither empty nor false."""
        end = time.monotonic() + seconds
        while not (value := self.value(script)):
            assert time.monotonic() < end, f"after {seconds:.0f} s still {value!r}: {script}"
            time.sleep(0.2)
        return value

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot")["data"]))

    def _ask(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                content = os.read(self._from, 2**20)
                assert content, "Chromium has ended"
                self._rest += content
            answer, _, self._rest = self._rest.partition(b"\0")
            if (found := json.loads(answer)).get("id") == self._number:
                assert "error" not in found, found
                return found["result"]
