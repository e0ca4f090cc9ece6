"""What a reader does on the page, in a browser that selenium drives."""

import json
import time
from collections.abc import Callable
from typing import Any

STEP = 0.02  # seconds between two looks
LIMIT = 60  # seconds that anything may take
WITHIN = ("data:", "about:", "chrome:", "chrome-untrusted:")  # the browser, and its own pages


class PageDriver:
    """A page in a browser."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.origin = ""
        self.gone_expected = False

    def open(self, url: str) -> None:
        self.complaints()  # of what was open before
        self.requests()
        self.gone_expected = False
        self.origin = url if url.startswith("file:") else url.partition("?")[0]
        self.driver.set_window_size(1200, 900)
        self.media()
        self.driver.get(url)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def one(self, selector: str) -> Any:
        """The first that is there, waited for."""
        self.until(lambda: bool(self.all(selector)), selector)
        return self.all(selector)[0]

    def text(self, selector: str) -> str:
        """What is read there, at once: a live page may replace what was found."""
        found: list[str | None] = []

        def there() -> bool:
            script = "return document.querySelector(arguments[0])?.innerText.trim()"
            found[:] = [self.js(script, selector)]
            return found[0] is not None

        self.until(there, selector)
        return str(found[0])

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, holds: Callable[[], bool], what: str = "") -> None:
        deadline = time.monotonic() + LIMIT
        while not holds():
            assert time.monotonic() < deadline, what
            time.sleep(STEP)

    def press(self, *keys: str) -> None:
        """On the keyboard, wherever that is."""
        from selenium.webdriver.common.action_chains import ActionChains

        chain = ActionChains(self.driver)
        for key in keys:
            chain.send_keys(key)
        chain.perform()

    def hover(self, element: Any, right: int = 0, down: int = 0) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        self.js("arguments[0].scrollIntoView({block: 'center'})", element)
        ActionChains(self.driver).move_to_element_with_offset(element, right, down).perform()

    def focus(self, selector: str) -> Any:
        element = self.one(selector)
        self.js("arguments[0].focus()", element)
        return element

    def focused(self) -> Any:
        return self.driver.switch_to.active_element

    def choose(self, selector: str, value: str) -> None:
        from selenium.webdriver.support.select import Select

        Select(self.one(selector)).select_by_value(value)

    def column(self, table: str, c: int) -> list[str]:
        """What is read in a column from top to bottom."""
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText.trim())"
        found = self.js(script, f'[aria-labelledby="table-{table}"] tbody td:nth-child({c + 1})')
        return [text.partition("\n")[0].partition(" (")[0] for text in found]

    def figure(self, title: str) -> Any:
        """The figure with a title, drawn."""
        found: list[Any] = []

        def drawn() -> bool:
            found[:] = [f for f in self.all("figure") if f.get_attribute("aria-label") == title]
            if found:
                self.js("arguments[0].scrollIntoView({block: 'center'})", found[0])
            return bool(found) and bool(found[0].find_elements("css selector", "svg"))

        self.until(drawn, title)
        return found[0]

    def media(self, **features: str) -> None:
        """A medium, or features of the reader's screen."""
        medium = features.pop("media", "")
        listed = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"media": medium, "features": listed}
        )

    def complaints(self) -> list[Any]:
        """What the page has written to the console, failures of scripts and loading included."""
        log = self.driver.get_log("browser")
        return [] if self.gone_expected else list(log)

    def requests(self) -> list[str]:
        """Every address that was asked for."""
        asked = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = message["params"]["request"]["url"]
                if not url.startswith(WITHIN):
                    asked.append(url)
        return asked
