"""What the page is made of, as the package ships it."""

from importlib.resources import files

from trgp.report.page import LIBRARIES, SCRIPTS

REPORT = files("trgp.report")


def test_no_script_ends_early() -> None:
    scripts = [REPORT / "vendor" / name for name in LIBRARIES]
    scripts += [REPORT / "web" / f"{name}.js" for name in SCRIPTS]
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        assert "</script" not in text.lower()
        assert "<!--" not in text


def test_data_never_become_markup() -> None:
    for name in SCRIPTS:
        text = (REPORT / "web" / f"{name}.js").read_text(encoding="utf-8")
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in text


def test_every_script_is_part_of_the_page() -> None:
    there = {file.name for file in (REPORT / "web").iterdir() if file.name.endswith(".js")}
    assert there == {f"{name}.js" for name in SCRIPTS}


def test_the_code_of_others_is_named() -> None:
    said = (REPORT / "vendor" / "README.md").read_text(encoding="utf-8")
    for name in LIBRARIES:
        assert f"`{name}`" in said
        first = (REPORT / "vendor" / name).read_text(encoding="utf-8").partition("\n")[0]
        (version,) = [word.removeprefix("v") for word in first.split() if word.startswith("v")]
        assert f"| {version} |" in said
