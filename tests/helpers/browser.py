"""Headless Chromium for tests of HTML pages: errors, requests, scripts.

with open_page(path, width=390, dark=True) as page:
    assert page.problems() == []
    page.click("#next")
    assert page.evaluate("document.title") == "..."

Chromium speaks the DevTools protocol over a pipe (NUL-terminated JSON), so the tests need no
WebDriver and no package. One browser serves all pages of a process. `make chromium` installs it.
"""

import atexit
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SECONDS = 300  # longest wait for an answer of a browser on a busy machine

# Texts that become a running script, or end the element around them, where they are not escaped.
HOSTILE = (
    "</script><script>window.hostile = 1</script>",
    "</style><script>window.hostile = 1</script>",
    "<img src=x onerror='window.hostile = 1'>",
    "\"><svg onload='window.hostile = 1'>",
    "' autofocus onfocus='window.hostile = 1' x='",
    "<!--<script>",
    "</title></textarea></pre><b class=hostile>bold</b>",
    "`${window.hostile = 1}`",
    "\u202e\x1b[2Jbackwards",
)

_BAD = ("error", "warning", "assert")  # kinds of messages
_FLAGS = (
    *("--headless", "--no-sandbox", "--no-first-run", "--hide-scrollbars"),
    *("--disable-gpu", "--disable-quic", "--disable-sync", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)


def chromium() -> str:
    """Return the program; skip the test, with the reason, where it is not installed."""
    found = os.environ.get("CHROMIUM") or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if found is None:
        pytest.skip("needs Chromium: `make chromium` installs Debian's package")
    return found


@contextmanager
def open_page(path: str | Path, *, width: int = 1280, dark: bool = False) -> Iterator["Page"]:
    """Open an HTML file, and yield it when it is loaded and its scripts have run."""
    page = Page(_browser(chromium()), Path(path).absolute(), width=width, dark=dark)
    try:
        yield page
    finally:
        page.close()


class Page:
    """An open page, with its errors and warnings, and the addresses that it asked for."""

    def __init__(self, browser: "_Chromium", path: Path, *, width: int, dark: bool):
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._browser = browser
        self._address = path.as_uri()
        self._loaded, self._shown = False, "about:blank"
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
        self._target = target
        self._session = attached["sessionId"]
        browser.listeners[self._session] = self._hear
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[theme])
        self._load("Page.navigate", url=self._address)

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)
        del self._browser.listeners[self._session]

    def reload(self) -> None:
        """Load the page again, at the address that it has now."""
        self._load("Page.reload")

    def _load(self, method: str, **parameters: Any) -> None:
        self._loaded = False
        self._call(method, **parameters)
        self._browser.listen_until(lambda: self._loaded)
        self.settle()

    def settle(self) -> None:
        """Wait for two frames, so that what was drawn or asked for has happened."""
        frames = "new Promise(f => requestAnimationFrame(() => requestAnimationFrame(() => f(0))))"
        self.evaluate(f"Promise.race([{frames}, new Promise(f => setTimeout(f, 300))])")

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression, of a promise after it is kept."""
        answer = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(_exception(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def text(self, selector: str = "body") -> str:
        """Return the visible text of an element."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def hover(self, selector: str) -> None:
        """Move the mouse over the middle of the first element that matches."""
        self._mouse("mouseMoved", selector)

    def click(self, selector: str) -> None:
        """Click on the middle of the first element that matches."""
        self._mouse("mouseMoved", selector)
        self._mouse("mousePressed", selector)
        self._mouse("mouseReleased", selector)

    def problems(self) -> list[str]:
        """Return all that no page may have: errors, requests, a scroll bar, text that acts."""
        self.settle()
        found = [f"error: {error}" for error in self.errors]
        found += [f"request: {address}" for address in self.requests]
        wide, window = self.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        if wide > window:
            found.append(f"the page is {wide} pixels wide in a window of {window}")
        if self.evaluate("window.hostile !== undefined || !!document.querySelector('.hostile')"):
            found.append("hostile text acts")
        return found

    def _mouse(self, kind: str, selector: str) -> None:
        x, y = self.evaluate(
            f"(e => {{ e.scrollIntoView({{block: 'center', inline: 'center'}}); "
            "const b = e.getBoundingClientRect(); "
            "return [b.x + b.width / 2, b.y + b.height / 2]; })"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)
        self.settle()

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def _hear(self, event: str, values: dict[str, Any]) -> None:
        if event == "Page.frameNavigated" and "parentId" not in values["frame"]:
            self._shown = values["frame"]["url"]
        elif event == "Page.loadEventFired":
            self._loaded = self._shown != "about:blank"  # whose event may come late
        elif event == "Runtime.exceptionThrown":
            self.errors.append(_exception(values["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and values["type"] in _BAD:
            said = [str(a.get("value", a.get("description"))) for a in values["args"]]
            self.errors.append(f"console.{values['type']}: {' '.join(said)}")
        elif event == "Log.entryAdded" and values["entry"]["level"] in _BAD:
            self.errors.append(values["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            address = values["request"]["url"].partition("#")[0]
            if address not in (self._address, "about:blank") and not address.startswith("data:"):
                self.requests.append(address)


def _exception(details: dict[str, Any]) -> str:
    return details.get("exception", {}).get("description") or details["text"]


class _Chromium:
    """A running browser, and the two ends of its pipe."""

    def __init__(self, program: str):
        self.listeners: dict[str, Any] = {}
        self._last = 0
        self._unread = b""
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        ends = (to_browser, from_browser)
        profile = f"--user-data-dir={self._folder.name}"
        # Chromium reads commands from file 3 and writes answers to file 4.
        start = 'exec {r}<&"$0" {w}<&"$1"; exec 3<&"$r" 4<&"$w"; exec "${@:2}"'
        self._process = subprocess.Popen(
            ["bash", "-c", start, *map(str, ends), program, *_FLAGS, profile],
            pass_fds=ends,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for end in ends:
            os.close(end)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Return the answer to a command of the DevTools protocol."""
        self._last += 1
        number = self._last
        answers = []
        message = {"id": number, "method": method, "params": parameters}
        message |= {"sessionId": session} if session else {}
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        self.listen_until(lambda: bool(answers), number, answers)
        if "error" in answers[0]:
            raise RuntimeError(f"{method}: {answers[0]['error']['message']}")
        return answers[0]["result"]

    def listen_until(self, done, number: int = 0, answers: list | None = None) -> None:
        """Pass events to the pages, and the answer with this number to `answers`, until `done`."""
        deadline = time.monotonic() + SECONDS
        while not done():
            for message in self._messages():
                if message.get("id") == number and answers is not None:
                    answers.append(message)
                elif "method" in message and (hear := self.listeners.get(message.get("sessionId"))):
                    hear(message["method"], message["params"])
            if time.monotonic() > deadline:
                raise RuntimeError(f"Chromium does not answer within {SECONDS} s")

    def _messages(self) -> Iterator[dict[str, Any]]:
        if not select.select([self._read], [], [], 1)[0]:
            return
        data = os.read(self._read, 1 << 20)
        if not data:
            raise RuntimeError(f"Chromium ended with status {self._process.wait()}")
        *whole, self._unread = (self._unread + data).split(b"\0")
        yield from map(json.loads, whole)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


@cache
def _browser(program: str) -> _Chromium:
    browser = _Chromium(program)
    atexit.register(browser.close)
    return browser
