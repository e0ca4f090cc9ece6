// The whole page: its data, the selection and the theme.

let report = null;
const held = new WeakMap(); // by section: the places in it, by key, each with what it shows

/** Returns the place of a key in a section, made on first use and filled by `show`. */
function placeOf(section, key, create, show = () => {}) {
  if (!held.has(section)) held.set(section, new Map());
  const places = held.get(section);
  if (!places.has(key)) {
    places.set(key, create());
    section.append(places.get(key));
  }
  show(places.get(key));
  return places.get(key);
}

/** Keeps only the places with these keys in a section, in this order. */
function keepPlaces(section, keys) {
  const places = held.get(section) ?? new Map();
  for (const [key, place] of places) {
    if (!keys.includes(key)) {
      place.remove();
      places.delete(key);
    }
  }
  keys.forEach((key, i) => {
    const place = places.get(key);
    const after = i ? places.get(keys[i - 1]) : null;
    if (after && after.nextElementSibling !== place) after.after(place);
  });
}

function showReport(next) {
  report = { summary: [], tables: [], charts: [], problems: [], commands: [], ...next };
  byId("title").textContent = report.title;
  document.title = report.title;
  byId("summary").replaceChildren(
    ...report.summary.map((sentence) => make("p", {}, sentence)),
    ...report.problems.map((problem) => make("p", { class: "problem" }, problem)),
  );
  const series = report.charts.flatMap((chart) => chart.series ?? []);
  // Before methods that only tables name, so that drawn methods get the most distinct colours.
  unique(series.map((each) => each.method).filter(Boolean)).sort().forEach(colourIndex);
  const rows = report.tables.flatMap((table) => table.rows ?? []);
  showChoices([...rows, ...report.charts, ...series], showChosen);
  showChosen();
}

function showChosen() {
  const section = byId("tables");
  for (const table of report.tables) {
    const create = () => make("div", { class: "table" });
    placeOf(section, table.name, create, (place) => showIfNew(place, table, () => showTable(place, table)));
  }
  keepPlaces(section, report.tables.map((table) => table.name));
  showFigures(document.querySelector("#figures > .figures"), report.charts);
  for (const part of ["tables", "figures"]) {
    const empty = !report[part === "tables" ? "tables" : "charts"].length;
    byId(part).hidden = empty;
    document.querySelector(`[data-part="${part}"]`).hidden = empty;
  }
  if (live.latest) showProgress(live.latest);
}

function showFigures(section, charts) {
  for (const chart of charts) for (const each of chart.series ?? []) each.x ??= chart.x ?? [];
  const places = placesOf(charts);
  for (const [key, members] of places) {
    const create = () => make("figure");
    placeOf(section, key, create, (place) =>
      showIfNew(place, members, () => showFigure(place, key, members)),
    );
  }
  keepPlaces(section, [...places.keys()]);
}

/** Skips content that would look the same, so that nothing jumps while it is read. */
function showIfNew(place, content, show) {
  const text = JSON.stringify([content, chosen.benchmark, chosen.preset, [...chosen.without].sort()]);
  if (place.shows === text) return;
  place.shows = text;
  show();
}

byId("choices").addEventListener("submit", (event) => event.preventDefault());
byId("theme").addEventListener("change", ({ target }) => {
  if (target.value) document.documentElement.dataset.theme = target.value;
  else delete document.documentElement.dataset.theme;
});

/** Reads the data sent with the page, which is compressed if large. */
async function sent({ type, textContent }) {
  if (type === "application/json") return JSON.parse(textContent);
  const bytes = Uint8Array.from(atob(textContent), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(unpacked).json();
}

sent(byId("data")).then((first) => {
  showReport(first);
  if (document.documentElement.dataset.mode === "live") follow();
});
