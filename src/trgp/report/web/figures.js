// Charts with legends and values. Charts of single methods share a place, with a menu to switch.

const switchedOff = new Map(); // by the chart's name: names of series
const picked = new Map(); // by the place's key: the chart's name
const opened = new Set(); // names of charts whose values are shown as a table

/** Groups charts by the place that they share, in their order. */
function placesOf(charts) {
  const places = new Map();
  for (const chart of charts) {
    const shared = [chart.kind, chart.benchmark, chart.x_label, chart.y_label, "one method each"];
    const key = chart.method ? shared.join(" / ") : chart.name;
    if (!places.has(key)) places.set(key, []);
    places.get(key).push(chart);
  }
  return places;
}

/** Fills the place of one chart, or of several to switch between; hides it if none is selected. */
function showFigure(place, key, charts) {
  const among = charts.filter(isChosen);
  place.hidden = among.length === 0;
  place.chart = null;
  if (place.hidden) return place.replaceChildren();
  const chart = among.find((each) => each.name === picked.get(key)) ?? among[0];
  const again = () => keepingFocus(() => showFigure(place, key, charts));
  const heading = make("div", { class: "heading" }, make("h3", {}, chart.title));
  if (charts.length > 1) heading.append(switchBetween(key, among, chart, again));
  const drawing = make("div", { class: "drawing" });
  const parts = [heading, drawing, legend(chart, again), values(chart)];
  if (chart.note) parts.push(make("p", { class: "note" }, chart.note));
  place.setAttribute("aria-label", chart.title);
  place.replaceChildren(...parts);
  place.chart = chart;
  waiting.add(place);
  seen.unobserve(place); // observed anew, so that a figure in view is reported at once
  seen.observe(place);
}

function switchBetween(key, among, chart, again) {
  // The shortest names that distinguish the charts.
  const ways = [
    (each) => each.method,
    (each) => [each.method, each.preset].filter(Boolean).join(", "),
    (each) => each.title,
  ];
  const tells = (way) => new Set(among.map(way)).size === among.length;
  const says = ways.find(tells) ?? ways.at(-1);
  const choice = make("select", {
    "aria-label": "Method",
    "data-key": `switch of ${key}`,
    change: () => {
      picked.set(key, choice.value);
      again();
    },
  });
  choice.append(...among.map((each) => make("option", { value: each.name }, says(each))));
  choice.value = chart.name;
  return choice;
}

/** Returns the series to draw: those of selected methods that are not switched off. */
function shownSeries(chart) {
  const off = switchedOff.get(chart.name) ?? new Set();
  return (chart.series ?? []).filter((each) => !off.has(each.name) && isChosen({ method: each.method }));
}

const isHeat = (chart) => ["heat", "grid"].includes(chart.kind);

function legend(chart, again) {
  if (isHeat(chart)) return scale(chart);
  const among = (chart.series ?? []).filter((each) => isChosen({ method: each.method }));
  const off = switchedOff.get(chart.name) ?? new Set();
  const colours = coloured(chart);
  const chips = among.map((each) => {
    const click = () => {
      if (!off.delete(each.name)) off.add(each.name);
      switchedOff.set(chart.name, off);
      again();
    };
    const attributes = { type: "button", class: "chip", "aria-pressed": String(!off.has(each.name)) };
    const key = `${chart.name} / ${each.name}`;
    return make(
      "button",
      { ...attributes, "data-key": key, click },
      swatch(colours.get(each.name)),
      each.name,
    );
  });
  return make("div", { class: "legend", role: "group", "aria-label": "Series" }, ...chips);
}

/** Makes the colour scale. */
function scale(chart) {
  const [low, high] = d3.extent((chart.series ?? []).flatMap((each) => each.y ?? []));
  if (low === undefined || low === high) return make("div", { class: "legend" });
  const parts = [chart.z_label ?? "", digits(low), make("i"), digits(high)];
  return make("div", { class: "scale" }, ...parts.map((part) => make("span", {}, part)));
}

/** Makes a table of the chart's values when it is first opened. */
function values(chart) {
  const details = make("details", {
    toggle: () => {
      if (details.open) opened.add(chart.name);
      else opened.delete(chart.name);
      fill();
    },
  });
  const fill = () => {
    if (details.open && details.childElementCount === 1) details.append(valueTable(chart));
  };
  details.append(make("summary", { "data-key": `values of ${chart.name}` }, "Values as a table"));
  details.open = opened.has(chart.name);
  fill();
  return details;
}

function valueTable(chart) {
  const series = shownSeries(chart);
  const places = unique(series.flatMap((each) => each.x ?? []));
  const text = (each, x) => {
    const i = (each.x ?? []).indexOf(x);
    if (i < 0) return "";
    const given = chart.texts?.[chart.series.indexOf(each)]?.[i];
    const error = each.error?.[i] ?? null;
    return given ?? digits(each.y[i]) + (error === null ? "" : ` ± ${digits(error)}`);
  };
  const headings = [chart.x_label ?? "", ...series.map((each) => each.name)];
  const rows = places.map((x) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, named(x)),
      ...series.map((each) => make("td", { class: "number" }, text(each, x))),
    ),
  );
  return make(
    "div",
    { class: "scroll", tabindex: "0" },
    make(
      "table",
      { "aria-label": `Values of ${chart.title}` },
      make("thead", {}, make("tr", {}, ...headings.map((name) => make("th", { scope: "col" }, name)))),
      make("tbody", {}, ...rows),
    ),
  );
}

// A page may have hundreds of charts: each is drawn when it nears the window, or for printing.

const waiting = new Set();

function draw(place) {
  waiting.delete(place);
  const drawing = place.querySelector(".drawing");
  if (!place.chart || !drawing) return;
  const series = shownSeries(place.chart);
  const width = Math.max(320, Math.floor(drawing.clientWidth || 640));
  place.width = drawing.clientWidth;
  drawing.replaceChildren(
    series.length ? drawn(place.chart, series, width) : make("p", { class: "note" }, "Nothing is selected."),
  );
}

const seen = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting && waiting.has(target)) draw(target);
    }
  },
  { rootMargin: "400px" },
);

addEventListener("beforeprint", () => [...waiting].forEach(draw));

let resizing;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => {
    for (const place of document.querySelectorAll("figure")) {
      if (place.chart && place.querySelector(".drawing").clientWidth !== place.width) {
        waiting.add(place);
        seen.unobserve(place);
        seen.observe(place);
      }
    }
  }, 150);
});
