"""A browser without a window, driven by selenium; tests are skipped where there is none."""

import base64
import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest
from matplotlib.image import imread
from numpy.typing import NDArray

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_GET = (
    "pip install '.[browser]', and a Chromium with its driver (Debian: apt install chromium-driver)"
)
_SECONDS = 120
#: Width and height in which software draws a page in less than a second.
WINDOW = 900, 360
#: Waits for the page, and returns what went wrong.
_READY = """
const done = arguments[arguments.length - 1];
window.dustmap.ready.then(() => done(""), (error) => done(String(error)));
"""
#: Changes the state, and waits until it is drawn in full.
_CHANGE = """
const done = arguments[arguments.length - 1];
window.dustmap.change(arguments[0]).then(() => { window.dustmap.draw(); done(""); });
"""


@final
@dataclass(frozen=True)
class Browser:
    """One window, at `WINDOW` pixels unless resized."""

    driver: Any

    def open(self, page: Path, fragment: str = "") -> None:
        """Load a page anew, and wait for it."""
        self.driver.get("about:blank")
        self.driver.get(f"{page.as_uri()}#{fragment}")
        self.wait()

    def wait(self) -> None:
        """Wait until the page has read all of the map."""
        assert self.driver.execute_async_script(_READY) == ""

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def change(self, **part: Any) -> None:
        """Change the state of the page, and draw it."""
        self.driver.execute_async_script(_CHANGE, part)

    def ask(self, script: str, *arguments: Any) -> Any:
        """Return what a script returns."""
        return self.driver.execute_script(f"return {script}", *arguments)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.driver.find_element("css selector", "body").send_keys(key)

    def click(self, element: Any, across: int, down: int) -> None:
        """Click so many pixels from the middle of an element."""
        from selenium.webdriver import ActionChains

        actions = ActionChains(self.driver)
        actions.move_to_element_with_offset(element, across, down).click().perform()

    def picture(self, canvas: str = "volume") -> NDArray[np.float64]:
        """Return red, green, blue and alpha (height, width, 4), 0 to 1, of a canvas as it is."""
        return _decoded(self.ask(f"document.getElementById('{canvas}').toDataURL('image/png')"))

    def screen(self) -> NDArray[np.float64]:
        """Return the same of the whole window."""
        return _decoded(self.driver.get_screenshot_as_base64())

    def requests(self) -> list[str]:
        """Return the addresses that were asked for since the last time."""
        entries = [json.loads(entry["message"]) for entry in self.driver.get_log("performance")]
        sent = [entry["message"] for entry in entries]
        return [
            message["params"]["request"]["url"]
            for message in sent
            if message["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """Return what the console says since the last time."""
        return [str(entry["message"]) for entry in self.driver.get_log("browser")]


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Start a browser with a profile of its own in a folder."""
    pytest.importorskip("selenium", reason=f"no selenium: {_GET}")
    from selenium import webdriver

    found = [path for name in BROWSERS if (path := shutil.which(name))]
    driver_at = shutil.which("chromedriver")
    if not found or driver_at is None:
        pytest.skip(f"no Chromium or no chromedriver: {_GET}")
    options = webdriver.ChromeOptions()
    options.binary_location = found[0]
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_at))
    try:
        driver.set_script_timeout(_SECONDS)
        browser = Browser(driver)
        browser.resize(*WINDOW)
        yield browser
    finally:
        driver.quit()


def _decoded(png: str) -> NDArray[np.float64]:
    data = base64.b64decode(png.removeprefix("data:image/png;base64,"))
    return np.asarray(imread(io.BytesIO(data), format="png"), np.float64)
