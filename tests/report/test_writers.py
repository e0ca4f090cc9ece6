"""Tables as Markdown, CSV, LaTeX and HTML: nothing lost, and nothing that a name could do."""

import csv
import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from some_found import a_configuration, some_found

from trgp.report.build import build
from trgp.report.csv import table_csv
from trgp.report.folder import CONTENTS, check, write
from trgp.report.html import table_html
from trgp.report.latex import escaped, table_latex
from trgp.report.markdown import table_markdown
from trgp.report.model import Cell, Chart, Report, Row, Table
from trgp.results.store import Found


def a_table(text: str = "a_b", **more: str) -> Table:
    rows = (
        Row((Cell(text), Cell("94.91 ± 0.53", 94.9123, "best", ("trgp run x",), "a note")), "one"),
        Row((Cell(""), Cell("-0.80", -0.8, "near")), "two"),
        Row((Cell("x"), Cell("–")), "two"),
    )
    return Table("main", more.get("title", "Title"), ("method", "ACC %"), rows, "A note, 5 %.")


# ---- Markdown -------------------------------------------------------------------------------


def test_markdown() -> None:
    assert table_markdown(a_table()) == (
        "## Title\n\n"
        "| method | ACC % |\n"
        "| --- | ---: |\n"
        "| a\\_b | **94.91 ± 0.53** |\n"
        "|  | *-0.80* |\n"
        "| x | – |\n\n"
        "Bold: best. Italics: near.\n\n"
        "A note, 5 %.\n"
    )


@settings(max_examples=100)
@given(st.text(st.characters(), max_size=20))
def test_no_text_is_more_than_a_cell_of_markdown(text: str) -> None:
    line = table_markdown(a_table(text)).splitlines()[4]
    bare = re.sub(r"\\[\\`*_\[\]<>|]", "", line).replace("**94.91 ± 0.53**", "")
    assert bare.count("|") == 3
    assert not set(bare) & set("`*[]<>\\")
    line.encode()


# ---- CSV ------------------------------------------------------------------------------------


def test_csv_comes_back_as_it_was() -> None:
    odd = 'a,"b"\n<script>, ;'
    header, *rows = csv.reader(io.StringIO(table_csv(a_table(odd))))
    assert header == ["method", "ACC %", "ACC % (number)", "ACC % (mark)", "commands"]
    assert rows == [
        [odd, "94.91 ± 0.53", "94.9123", "best", "trgp run x"],
        ["", "-0.80", "-0.8", "near", ""],
        ["x", "–", "", "", ""],
    ]


@pytest.mark.parametrize("first", "=+-@")
def test_no_text_of_a_csv_is_a_formula(first: str) -> None:
    """Numbers stay as they are, whatever their sign."""
    text = f"{first}HYPERLINK(1)"
    made = a_table(text)
    cells = (Cell(text, commands=(text,)), Cell("-0.80", -0.8))
    made = replace(made, rows=(*made.rows, replace(made.rows[0], cells=cells)))
    _, first_row, *_, last = csv.reader(io.StringIO(table_csv(made)))
    assert first_row[0] == last[0] == last[-1] == f"'{text}"
    assert last[1:3] == ["-0.80", "-0.8"]


def test_csv_has_every_table() -> None:
    for table in build(some_found()).tables:
        header, *rows = csv.reader(io.StringIO(table_csv(table)))
        assert [name for name in header if name in table.columns] == list(table.columns)
        assert len(rows) == len(table.rows)
        assert {len(row) for row in rows} == {len(header)}


# ---- LaTeX ----------------------------------------------------------------------------------


def test_latex() -> None:
    text = table_latex(a_table("100% & $5_a {x} #1 ~ ^ \\"))
    assert "\\usepackage{adjustbox, booktabs}" in text
    for rule in ("\\toprule", "\\bottomrule", "\\begin{tabular}{lr}"):
        assert text.count(rule) == 1
    assert text.count("\\midrule") == 2  # one below the header, one between benchmarks
    cell = "100\\% \\& \\$5\\_a \\{x\\} \\#1 \\textasciitilde{} \\textasciicircum{}"
    assert f"{cell} \\textbackslash{{}} & \\textbf{{94.91 $\\pm$ 0.53}} \\\\" in text
    assert "\\underline{$-$0.80}" in text
    assert "x & -- \\\\" in text
    assert "A note, 5 \\%." in text


@given(st.text(st.characters(max_codepoint=127, min_codepoint=32), max_size=20))
def test_nothing_in_latex_is_special_by_accident(text: str) -> None:
    left = re.sub(r"\\(text[a-z]+|char34)\{\}|\\[&%$#_{}]", "", escaped(text))
    assert not set(left) & set('&%$#_{}~^\\<>|"`')


def test_long_headings_are_broken_and_lines_begin_with_no_argument() -> None:
    names = ("method", "in copies of the network")
    rows = (Row((Cell("[1cm]"), Cell("1", 1.0))), Row((Cell("*"), Cell("–"))))
    text = table_latex(Table("main", "Title", names, rows))
    assert "method & \\shortstack[r]{in copies \\\\ of the \\\\ network} \\\\\n" in text
    assert "\n{}[1cm] & 1 \\\\\n{}* & -- \\\\\n" in text


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_makes_a_document_of_every_table(tmp_path: Path) -> None:
    """In which nothing is wider or longer than a page."""
    odd = a_configuration("[x]\"`'~^\\<>|{}$%&#_", benchmark="*odd", preset="paper")
    tables = build(some_found()).tables + build(Found([odd, odd], [])).tables
    body = "\n".join(f"{table_latex(table)}\\clearpage" for table in tables)
    packages = "\\usepackage{adjustbox, booktabs}"
    document = f"\\documentclass{{article}}{packages}\\begin{{document}}{body}\\end{{document}}"
    (tmp_path / "all.tex").write_text(document)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    said = made.stdout.decode(errors="replace")
    assert made.returncode == 0, said
    assert "Overfull" not in said
    assert "Float too large" not in said


# ---- HTML -----------------------------------------------------------------------------------


class Read(HTMLParser):
    """The tags, the attributes and the texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", '" onload="x', "&lt;", "'><img>"])
def test_names_are_text_in_html(name: str) -> None:
    found = Found([a_configuration(name, benchmark=name, preset=name, command=name)], [])
    for table in build(found).tables:
        read = Read(table_html(table))
        tags = {"table", "caption", "thead", "tbody", "tfoot", "tr", "th", "td", "strong", "em"}
        assert set(read.tags) <= tags
        names = {"id", "scope", "colspan", "title"} | {
            f"data-{key}" for key in ("benchmark", "method", "preset", "value")
        }
        assert {key for key, _ in read.attributes} <= names
        if table.name == "memory":
            assert name in read.texts
            assert ("data-method", name) in read.attributes


def test_html_holds_what_the_page_needs() -> None:
    read = Read(table_html(a_table()))
    assert ("data-value", "94.9123") in read.attributes
    assert ("title", "a note | trgp run x") in read.attributes
    assert read.tags.count("strong") == read.tags.count("em") == 1


# ---- the folder -----------------------------------------------------------------------------


def a_report(*names: str) -> Report:
    charts = tuple(Chart(name, name, "lines", "x", "y", ()) for name in names)
    return Report("Title", (), (a_table(),), charts)


def draw(charts: Sequence[Chart]) -> Iterator[dict[str, bytes]]:
    for chart in charts:
        yield {"svg": chart.name.encode(), "png": b"png"}


def written(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


TABLES = {f"tables/main.{end}" for end in ("md", "csv", "tex", "html")} | {"index.html", CONTENTS}


def test_a_folder_is_written_and_renewed(tmp_path: Path) -> None:
    """What is no longer made goes, and what somebody else put there stays."""
    out = tmp_path / "a" / "report"
    assert len(list(write(a_report("a", "b"), "page", out, draw))) == 2
    figures = {f"figures/{name}.{end}" for name in ("a", "b") for end in ("svg", "png")}
    assert written(out) == TABLES | figures
    (out / "figures" / "mine.svg").write_text("mine")
    (out / "notes.txt").write_text("mine")
    list(write(a_report("b", "c"), "another page", out, draw))
    figures = {f"figures/{name}.{end}" for name in ("b", "c") for end in ("svg", "png")}
    assert written(out) == TABLES | figures | {"figures/mine.svg", "notes.txt"}
    assert (out / "index.html").read_text() == "another page"
    list(write(a_report("c"), "page", out, None))
    assert written(out) == TABLES | {"figures/mine.svg", "notes.txt"}


def test_a_report_that_was_stopped_can_be_renewed(tmp_path: Path) -> None:
    def fails(charts: Sequence[Chart]) -> Iterator[dict[str, bytes]]:
        yield from draw(charts[:1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(write(a_report("a", "b"), "page", tmp_path / "out", fails))
    assert (tmp_path / "out" / "figures" / "a.svg").exists()
    list(write(a_report("b"), "page", tmp_path / "out", draw))
    assert not (tmp_path / "out" / "figures" / "a.svg").exists()


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("mine")
    with pytest.raises(FileExistsError, match="holds files but no report"):
        check(tmp_path)
    with pytest.raises(FileExistsError, match="is a file"):
        check(tmp_path / "index.html")
    assert written(tmp_path) == {"index.html"}
    (tmp_path / "empty").mkdir()
    check(tmp_path / "empty")
    check(tmp_path / "new")


def test_a_list_of_contents_reaches_nothing_outside(tmp_path: Path) -> None:
    out = tmp_path / "out"
    list(write(a_report(), "page", out, draw))
    outside = tmp_path / "mine.txt"
    outside.write_text("mine")
    hostile = ["../mine.txt", str(outside), "tables/../../mine.txt", 5]
    for content in ({"trgp report": hostile}, {"trgp report": 1}, [], {}):
        (out / CONTENTS).write_text(json.dumps(content))
        list(write(a_report(), "page", out, draw))
        assert outside.exists()
