"""A real browser without a window, for the tests of the page; without one they are skipped."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from page_driver import PageDriver

from trgp.report.model import Report
from trgp.report.page import page


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageDriver]:
    """One a worker, with a profile of its own."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed")
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("profile")
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--window-size=1200,900",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options=options, service=Service(driver)) as started:
        yield PageDriver(started)


@pytest.fixture
def opened(browser: PageDriver, tmp_path: Path) -> Callable[[Report], PageDriver]:
    """Opens a report's page from the disk."""

    def open_page(report: Report) -> PageDriver:
        file = tmp_path / "report page.html"
        file.write_text(page(report), encoding="utf-8")
        browser.open(file.as_uri())
        return browser

    return open_page


@pytest.fixture(autouse=True)
def no_complaints(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test in the browser: the page has neither failed nor asked anybody else."""
    yield
    if "browser" in request.fixturenames:
        driver: PageDriver = request.getfixturevalue("browser")
        log, asked = driver.complaints(), driver.requests()
        elsewhere = [url for url in asked if not url.startswith(driver.origin)]
        driver.open("about:blank")
        assert (log, elsewhere) == ([], [])
