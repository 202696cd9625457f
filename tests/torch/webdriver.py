"""A real browser, driven as W3C WebDriver has it, by plain HTTP: Chromium without a window, through chromedriver."""

import json
import shutil
import subprocess
import urllib.request
from types import TracebackType
from typing import Any

from kvemb.local_cluster.processes import free_ports
from tests.integration.counting_trainers import PATIENCE_S, wait_for

WHY_NOT = "" if shutil.which("chromedriver") else "no browser: chromedriver is not installed (apt-get install chromium-driver)"
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key that the standard gives references to elements


class Browser:
    """One page; a context manager."""

    def __init__(self) -> None:
        self._port = free_ports(1)[0]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._driver = subprocess.Popen(["chromedriver", f"--port={self._port}"], **quiet)  # type: ignore[call-overload]
        self._session = ""

    def __enter__(self) -> "Browser":
        try:
            wait_for(self._is_up)
            flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
            wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": {"args": flags}}}}
            self._session = f"/session/{self._ask('POST', '/session', wanted)['sessionId']}"
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self._session:
                self._ask("DELETE", self._session)
        finally:
            self._driver.terminate()
            self._driver.wait(PATIENCE_S)

    def open(self, url: str) -> None:
        self._ask("POST", f"{self._session}/url", {"url": url})

    def texts(self, selector: str) -> list[str]:
        """What stands in the elements that a CSS selector finds: in one call, since the page may draw others at any moment."""
        script = "return Array.from(document.querySelectorAll(arguments[0]), (one) => one.innerText.trim())"
        return list(self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": [selector]}))

    def click(self, selector: str) -> None:
        """Click the one element that a CSS selector finds, with the mouse, as a person would."""
        (one,) = self._find(selector)
        self._ask("POST", f"{self._session}/element/{one}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Put a text in place of what stands in a field, and end with Enter."""
        (one,) = self._find(selector)
        self._ask("POST", f"{self._session}/element/{one}/clear", {})
        self._ask("POST", f"{self._session}/element/{one}/value", {"text": f"{text}\ue007"})

    def _find(self, selector: str) -> list[str]:
        found = self._ask("POST", f"{self._session}/elements", {"using": "css selector", "value": selector})
        return [one[_ELEMENT] for one in found]

    def _is_up(self) -> bool:
        try:
            return bool(self._ask("GET", "/status")["ready"])
        except OSError:
            return False

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", method=method)
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return json.load(response)["value"]
