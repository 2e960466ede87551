#!/usr/bin/env python3
"""Pictures of the page that `dustmap view` makes, as a browser without a window shows it.

    scripts/screenshots.py MAP FOLDER                 a run, a map.zarr or a map.fits
    scripts/screenshots.py MAP FOLDER --points FILE   and what else `dustmap view` takes
    scripts/screenshots.py RUN FOLDER --report        the top of report.html, too

Needs dustmap[browser], and a Chromium with its driver (Debian: apt install chromium-driver).
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from selenium import webdriver

from dustmap.cli import main as dustmap

FLAGS = (
    "--headless=new --no-sandbox --use-angle=swiftshader --enable-unsafe-swiftshader "
    "--disable-background-networking --disable-component-update --disable-sync --no-first-run "
    "--disable-dev-shm-usage --hide-scrollbars"
)
#: Seconds that software may draw.
PATIENCE = 120
READY = """
const done = arguments[0];
window.dustmap.ready.then(() => {
  const seconds = performance.now() / 1000;
  window.dustmap.draw();
  done([seconds, performance.now() / 1000 - seconds]);
}, (error) => done(String(error)));
"""


@dataclass(frozen=True)
class Picture:
    """A name, the size of the window in pixels, and the view as the address has it."""

    name: str
    width: int
    height: int
    view: str


PICTURES = (
    Picture("view_dark.png", 1280, 800, "theme=dark&planes=Z&picked={picked}"),
    Picture("view_light.png", 1280, 800, "theme=light&yaw=-35&pitch=24&planes=X"),
    Picture("view_uncertainty.png", 1280, 800, "theme=light&show=spread&planes=YZ&flat=Y"),
    Picture("view_sample.png", 1280, 800, "theme=dark&show=sample&sample=1&yaw=-90&pitch=90"),
    Picture("view_narrow.png", 420, 1400, "theme=light&planes=Z"),
)
REPORT = Picture("report.png", 1000, 1250, "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Take every picture; a line each, with the seconds to read the map and to draw it."""
    command = argparse.ArgumentParser(description="Pictures of the page of a map.")
    command.add_argument("map", help="a run, a map.zarr or a map.fits")
    command.add_argument("folder", help="where the pictures go")
    command.add_argument("--picked", default="100,0,0", help="X,Y,Z of a place to ask, in pc")
    command.add_argument("--only", nargs="*", help="names of pictures, such as view_dark.png")
    command.add_argument("--report", action="store_true", help="take a picture of report.html, too")
    options, of_view = command.parse_known_args(arguments)
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        page = Path(scratch) / "view.html"
        if dustmap(["view", options.map, "--output", str(page), *of_view]):
            return 2
        driver = browser(Path(scratch) / "profile")
        try:
            for picture in PICTURES:
                if not options.only or picture.name in options.only:
                    address = f"{page.as_uri()}#{picture.view.format(picked=options.picked)}"
                    print(folder / picture.name, *take(driver, address, picture, folder))
            if options.report:
                open_at(driver, (Path(options.map) / "report.html").resolve().as_uri(), REPORT)
                driver.save_screenshot(str(folder / REPORT.name))
                print(folder / REPORT.name)
        finally:
            driver.quit()
    return 0


def browser(profile: Path) -> Any:
    """Start a browser without a window and without a network of its own."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_script_timeout(PATIENCE)
    return driver


def open_at(driver: Any, address: str, picture: Picture) -> None:
    """Open an address in a window of the picture's size."""
    size = {"width": picture.width, "height": picture.height, "deviceScaleFactor": 1}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**size, "mobile": False})
    driver.get("about:blank")
    driver.get(address)


def take(driver: Any, address: str, picture: Picture, folder: Path) -> tuple[str, str]:
    """Write a picture, and say how long the page took to open and to draw."""
    open_at(driver, address, picture)
    spent = driver.execute_async_script(READY)
    if isinstance(spent, str):
        raise SystemExit(f"screenshots: {spent}")
    driver.save_screenshot(str(folder / picture.name))
    for entry in driver.get_log("browser"):
        print(json.dumps(entry), file=sys.stderr)
    return f"open {spent[0]:.1f} s", f"draw {spent[1]:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
