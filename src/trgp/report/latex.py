"""Tables in LaTeX, for the package booktabs: the best in bold, what is near it underlined."""

import re

from .model import Cell, Table

MARKS = {"": "{}", "best": "\\textbf{{{}}}", "near": "\\underline{{{}}}"}
SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "±": r"$\pm$",
    "–": "--",
    "…": r"\ldots{}",
    **{character: "\\" + character for character in "&%$#_{}"},
}
_SPECIAL = re.compile("[" + re.escape("".join(SPECIAL)) + "]")


def table_latex(table: Table) -> str:
    """A floating table with its title as caption; a rule between benchmarks."""
    numbers = [
        any(row.cells[i].value is not None for row in table.rows) for i in range(len(table.columns))
    ]
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "\\centering",
        f"\\caption{{{escaped(table.title)}}}",
        f"\\label{{tab:{table.name}}}",
        f"\\begin{{tabular}}{{{''.join('r' if number else 'l' for number in numbers)}}}",
        "\\toprule",
        _line([escaped(name) for name in table.columns]),
        "\\midrule",
    ]
    for before, row in zip((None, *table.rows), table.rows, strict=False):
        if before is not None and before.benchmark != row.benchmark:
            lines.append("\\midrule")
        lines.append(_line([_written(cell) for cell in row.cells]))
    lines += ["\\bottomrule", "\\end{tabular}"]
    if table.note:
        lines += ["", "\\smallskip", f"\\footnotesize {escaped(table.note)}"]
    return "\n".join([*lines, "\\end{table}", ""])


def escaped(text: str) -> str:
    """A text that LaTeX prints as it is."""
    return _SPECIAL.sub(lambda found: SPECIAL[found[0]], text)


def _written(cell: Cell) -> str:
    # A minus, not a hyphen, before a number.
    text = re.sub(r"^-(?=\d)", "$-$", escaped(cell.text))
    return MARKS[cell.mark].format(text)


def _line(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"
