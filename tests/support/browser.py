"""A headless chromium, driven over the pipe of its DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
    "--disable-extensions --disable-background-networking --hide-scrollbars"
)


class Browser:
    """A tab: opens pages, evaluates expressions, presses keys and the mouse, takes pictures."""

    def __init__(self, to: int, back: int) -> None:
        self.to, self.back = to, back
        self.rest, self.number, self.session = b"", 0, ""
        self.messages: list[str] = []  # of the console, errors of scripts and of the policy
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def read(self) -> dict[str, Any]:
        """Return the next message; record it if it is from the console."""
        while b"\0" not in self.rest:
            data = os.read(self.back, 1 << 16)
            assert data, "the browser has gone"
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(line)
        if message.get("method") in (
            "Runtime.consoleAPICalled",
            "Runtime.exceptionThrown",
            "Log.entryAdded",
            "Page.javascriptDialogOpening",
        ):
            self.messages.append(json.dumps(message["params"]))
        return message

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a file in a window of a size in CSS pixels, with the light or the dark theme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for_load()

    def wait_for_load(self) -> None:
        """Wait until the opened page has loaded."""
        while self.read().get("method") != "Page.loadEventFired":
            pass

    def __call__(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        """Press and release a key, such as Tab, ArrowRight or Enter."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowDown": 40}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": codes.get(key, 0)}
        text = "\r" if key == "Enter" else text
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def click(self, selector: str) -> None:
        """Scroll to an element and click its middle with the left button."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector: str) -> None:
        """Scroll to an element and move the mouse to its middle."""
        x, y = self.middle(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def middle(self, selector: str) -> tuple[float, float]:
        """Return the position of an element's middle in the window."""
        box = self(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', inline: 'center'});"
            "const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return box[0], box[1]

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """Write a picture of the window, or of the whole page."""
        result = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(result["data"]))

    def pdf(self, path: Path) -> None:
        """Print the page."""
        result = self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)
        path.write_bytes(base64.b64decode(result["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start chromium with its profile in a folder; end it on exit."""
    to_read, to = os.pipe()
    back, back_write = os.pipe()
    command = f"exec {CHROMIUM} {OPTIONS} --remote-debugging-pipe --user-data-dir='{profile}' "
    process = subprocess.Popen(
        ["bash", "-c", f"{command} 3<&{to_read} 4>&{back_write}"],
        pass_fds=(to_read, back_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(back_write)
    try:
        yield Browser(to, back)
    finally:
        process.terminate()
        process.wait(20)
        os.close(to)
        os.close(back)
