"""A headless Chromium, where there is one."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
SIZE = "--window-size=1280,900"
WORDS = ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--lang=en", SIZE)


@contextmanager
def start_browser() -> Iterator[object]:
    """Yield the browser, as a driver of selenium."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for word in [*WORDS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]:  # root has no sandbox
        options.add_argument(word)
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()
