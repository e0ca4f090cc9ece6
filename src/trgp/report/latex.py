"""Write tables as LaTeX with booktabs: best in bold, near underlined."""

import re
import textwrap

from .model import Cell, Table

MARKS = {"": "{}", "best": "\\textbf{{{}}}", "near": "\\underline{{{}}}"}
SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\char34{}",  # exists in every font encoding
    "`": r"\textasciigrave{}",
    "±": r"$\pm$",
    "–": "--",
    "…": r"\ldots{}",
    **{character: "\\" + character for character in "&%$#_{}"},
}
_SPECIAL = re.compile("[" + re.escape("".join(SPECIAL)) + "]")
FIT = "max width=\\linewidth, max totalheight=0.8\\textheight, keepaspectratio"

NARROW = 9  # characters of a heading per line


def table_latex(table: Table) -> str:
    """Return a floating table with a caption, at most a page, rules between benchmarks."""
    numbers = table.numeric
    lines = [
        "% needs \\usepackage{adjustbox, booktabs}",
        "\\begin{table}",
        "\\centering",
        f"\\caption{{{escaped(table.title)}}}",
        f"\\label{{tab:{table.name}}}",
        f"\\begin{{adjustbox}}{{{FIT}}}",
        f"\\begin{{tabular}}{{{''.join('r' if number else 'l' for number in numbers)}}}",
        "\\toprule",
        _line([_heading(*each) for each in zip(table.columns, numbers, strict=True)]),
        "\\midrule",
    ]
    for before, row in zip((None, *table.rows), table.rows, strict=False):
        if before is not None and before.benchmark != row.benchmark:
            lines.append("\\midrule")
        lines.append(_line([_written(cell) for cell in row.cells]))
    lines += ["\\bottomrule", "\\end{tabular}", "\\end{adjustbox}"]
    if table.note:
        lines += ["", "\\smallskip", f"{{\\footnotesize\\raggedright {escaped(table.note)}\\par}}"]
    return "\n".join([*lines, "\\end{table}", ""])


def escaped(text: str) -> str:
    """Escape a text so that LaTeX prints it verbatim."""
    return _SPECIAL.sub(lambda found: SPECIAL[found[0]], text)


def _heading(name: str, number: bool) -> str:
    """Break a long heading into lines, because the width decides the scale of the table."""
    lines = [escaped(line) for line in textwrap.wrap(name, NARROW)]
    if len(lines) <= 1:
        return escaped(name)
    side, stacked = "r" if number else "l", r" \\ ".join(lines)
    return f"\\shortstack[{side}]{{{stacked}}}"


def _written(cell: Cell) -> str:
    # A number gets a minus sign, not a hyphen.
    text = re.sub(r"^-(?=\d)", "$-$", escaped(cell.text))
    return MARKS[cell.mark].format(text)


def _line(cells: list[str]) -> str:
    line = " & ".join(cells) + r" \\"
    # After `\\`, these characters would start its argument.
    return f"{{}}{line}" if line.startswith(("[", "*")) else line
