"""Chromium without a window, driven as its developer tools do: keys, computed styles, what it says and asks for."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

CHROMIUM = shutil.which("chromium")
EXPECTED = "GRPO_MP_TEST_BROWSER" in os.environ  # CI installs it
NEEDS_CHROMIUM = pytest.mark.skipif(not CHROMIUM and not EXPECTED, reason="no chromium: `apt-get install chromium`")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars")
FLAGS += ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr")
LIMIT_S = 180.0
# Virtual key codes and texts, which the default action of a key hangs on.
KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), " ": (32, " "), "ArrowDown": (40, ""), "ArrowRight": (39, "")}
SHIFT = 8


class Browser:
    """One page. `messages`: what its console got; `requests`: addresses that it asked for."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 900) -> None:
        """Start it, with a folder for its profile."""
        assert CHROMIUM, "CI installs chromium"
        self.messages, self.requests = list[str](), list[str]()
        self._runner, self._number = asyncio.Runner(), 0
        self._session: aiohttp.ClientSession | None = None
        command = [CHROMIUM, *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        with (profile.parent / f"{profile.name}.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            self._runner.run(self._connect(profile / "DevToolsActivePort"))
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
            self.resize(width, height)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it with all of its processes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._session:
            self._runner.run(self._session.close())
        self._runner.close()

    def call(self, method: str, **params: Any) -> Any:
        """Return the result of a command of the protocol."""
        return self._runner.run(self._call(method, params))

    def open(self, address: str) -> None:
        """Show a page, wholly loaded."""
        self.call("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of JavaScript as JSON has it. Fails where it throws."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Return once JavaScript is true."""
        wait_until(lambda: self.evaluate(expression), expression)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press a key and let it go, as from a keyboard."""
        code, text = KEYS[key]
        common = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def resize(self, width: int, height: int) -> None:
        """Give the page so many pixels; a width below 500 is that of a phone."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str) -> None:
        """Say which colours the reader prefers: light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def _connect(self, port_file: Path) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert time.monotonic() < deadline, "chromium does not start"
            await asyncio.sleep(0.05)
        port = port_file.read_text().split("\n")[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json") as reply:
            (target, *_) = [one for one in await reply.json() if one["type"] == "page"]
        self._socket = await self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)

    async def _call(self, method: str, params: dict[str, Any]) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = json.loads(await self._socket.receive_str(timeout=LIMIT_S))
            if message.get("id") == self._number:
                assert "error" not in message, (method, message)
                return message["result"]
            self._take(message.get("method"), message.get("params", {}))

    def _take(self, event: str | None, params: dict[str, Any]) -> None:
        if event == "Runtime.consoleAPICalled":
            self.messages.append(f"{params['type']}: {params['args']}")
        elif event == "Runtime.exceptionThrown":
            self.messages.append(str(params["exceptionDetails"]))
        elif event == "Log.entryAdded":
            self.messages.append(params["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


def wait_until(holds: Callable[[], object], what: object = "") -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
