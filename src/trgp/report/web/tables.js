// Tables that sort by a click on a heading and show the selected rows.

const SHORT = 30; // characters of a name that is never broken
const sorted = new Map(); // by the table's name: { column, sign }
const whole = new Set(); // names of tables that show missing runs too

/** Fills a table's place on the page; the element stays the same. */
function showTable(place, table) {
  const order = sorted.get(table.name);
  const numbers = table.columns.map((_, c) => isNumeric(table.rows ?? [], c));
  const headings = table.columns.map((column, c) => heading(place, table, column, c, numbers[c], order));
  const chosenRows = (table.rows ?? []).filter(isChosen);
  const ran = chosenRows.filter((row) => !row.not_run);
  const mixed = ran.length > 0 && ran.length < chosenRows.length;
  const rows = inOrder(mixed && !whole.has(table.name) ? ran : chosenRows, order);
  const body = rows.map((row) =>
    make("tr", {}, ...row.cells.map((cell, c) => entry(table, row, cell, c, numbers[c]))),
  );
  const count = table.rows?.length ?? 0;
  const shown = rows.length === count ? "" : `${rows.length} of ${count} rows are shown.`;
  place.replaceChildren(
    make(
      "div",
      { class: "heading" },
      make("h3", { id: `table-${table.name}` }, table.title),
      mixed ? notRun(place, table, chosenRows.length - ran.length) : null,
    ),
    make(
      "div",
      { class: "scroll" },
      make(
        "table",
        { "aria-labelledby": `table-${table.name}` },
        make("thead", {}, make("tr", {}, ...headings)),
        make("tbody", {}, ...body),
      ),
    ),
    make("p", { class: "note", role: "status" }, shown),
    make("p", { class: "note", hidden: !table.note }, table.note ?? ""),
  );
}

/** Makes the switch that shows the paper's cells that were not run. */
function notRun(place, table, count) {
  const box = make("input", {
    type: "checkbox",
    "data-key": `${table.name}, what is not run`,
    change: () => {
      if (box.checked) whole.add(table.name);
      else whole.delete(table.name);
      keepingFocus(() => showTable(place, table));
    },
  });
  box.checked = whole.has(table.name);
  return make("label", { class: "not-run" }, box, ` Show what is not run (${count})`);
}

/** Returns whether a column has numbers, or only dashes in place of numbers. */
function isNumeric(rows, c) {
  const cells = rows.map((row) => row.cells[c] ?? {});
  const dash = (cell) => ["", "–"].includes(cell.text ?? "");
  return cells.some((cell) => cell.value !== undefined) || cells.every(dash);
}

function heading(place, table, column, c, numeric, order) {
  const here = order?.column === c;
  const sort = !here ? "none" : order.sign > 0 ? "ascending" : "descending";
  const first = numeric ? -1 : 1; // the best number first, names from A on
  const click = () => {
    if (!here) sorted.set(table.name, { column: c, sign: first });
    else if (order.sign === first) sorted.set(table.name, { column: c, sign: -first });
    else sorted.delete(table.name);
    keepingFocus(() => showTable(place, table));
  };
  const button = make("button", { type: "button", click, "data-key": `${table.name} by ${c}` }, column);
  return make("th", { scope: "col", "aria-sort": sort, class: numeric ? "number" : null }, button);
}

/** Sorts rows by one column, empty cells last; without an order they stay as they are. */
function inOrder(rows, order) {
  if (!order) return rows;
  const key = (row) => row.cells[order.column]?.value ?? (row.cells[order.column]?.text || null);
  const compare = (a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === null || y === null) return (x === null) - (y === null);
    if (typeof x === "number" && typeof y === "number") return order.sign * (x - y);
    if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
    return order.sign * x.localeCompare(y, "en", { numeric: true });
  };
  return [...rows].sort(compare);
}

function entry(table, row, cell, c, numeric) {
  const text = cell.text ?? "";
  const parts = [text];
  if (cell.commands || cell.note) {
    const what = [row.method, row.benchmark && `on ${row.benchmark}`, row.preset && `(${row.preset})`];
    const title = `${table.columns[c]} ${text}: ${what.filter(Boolean).join(" ")}`.replace(/: $/, "");
    const click = () => showCommand(title, cell);
    const names = row.cells.filter((each) => each.value === undefined).map((each) => each.text);
    const key = [table.name, row.benchmark, row.method, row.preset, ...names, c].join(" / ");
    parts[0] = make("button", { type: "button", title: cell.note, "data-key": key, click }, text);
  }
  if (cell.mark === "best") parts.push(make("span", { class: "unseen" }, " (best)"));
  if (cell.mark === "near") parts.push(make("span", { class: "unseen" }, " (near the best)"));
  const kinds = [cell.mark, numeric ? "number" : text.length <= SHORT && "short"];
  return make("td", { class: kinds.filter(Boolean).join(" ") || null }, ...parts);
}
