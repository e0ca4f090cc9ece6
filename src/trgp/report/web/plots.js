// A chart as an SVG drawing. Its colours are the page's own, so that it follows the theme by itself.

const LETTER = 6.6; // the width of a letter along an axis, in pixels
const LONGEST = 26; // characters kept of a long name along an axis
const BANDS = 4; // most series whose deviations can be distinguished

/** Draws a chart with some of its series, at this width. */
function drawn(chart, series, width) {
  const kinds = { bars, stacked, lines, points, heat, grid: heat };
  const options = kinds[chart.kind](chart, series, width);
  return Plot.plot({
    width,
    marginLeft: 48,
    ariaLabel: chart.title,
    className: "plot",
    style: { fontSize: "12px", fontFamily: "inherit" },
    ...options,
    color: { type: "identity" },
  });
}

/** Returns each series' colour: its method's, or one by position if methods repeat. */
function coloured(chart) {
  const all = chart.series ?? [];
  const methods = all.map((each) => each.method).filter(Boolean);
  const tell = methods.length === all.length && new Set(methods).size === all.length;
  return new Map(all.map((each, i) => [each.name, tell ? colourIndex(each.method) : i]));
}

/** Returns every point of some series, with its text. */
function pointsOf(chart, series) {
  const colours = coloured(chart);
  return series.flatMap((each) =>
    (each.x ?? []).map((x, i) => {
      const y = each.y?.[i] ?? null;
      const error = each.error?.[i] ?? null;
      const value = `${digits(y)}${error === null ? "" : ` ± ${digits(error)}`}`;
      const place = chart.x_label ? `${chart.x_label}: ${named(x)}` : named(x);
      const says = `${each.name}\n${place}\n${chart.y_label || "value"}: ${value}`;
      return { series: each.name, i, x, y, error, says, fill: colour(colours.get(each.name)) };
    }),
  );
}

const named = (x) => (typeof x === "number" ? digits(x) : x);

/** Makes the tooltip. */
function tip(data, channels, pointer = Plot.pointer) {
  const look = { stroke: "var(--line)", textPadding: 8, maxRadius: 60, lineWidth: 40 };
  return Plot.tip(data, pointer({ ...channels, ...look, title: "says" }));
}

/** Draws one standard deviation up and down. */
function errors(data, channels) {
  const known = data.filter((d) => d.y !== null && d.error !== null && d.error !== undefined);
  const ends = { y1: (d) => d.y - d.error, y2: (d) => d.y + d.error };
  return Plot.ruleX(known, { stroke: "var(--text)", strokeWidth: 1.2, ...channels, ...ends });
}

/** Makes an axis of names, turned if they would touch each other. */
function names(label, domain, width) {
  const longest = Math.min(LONGEST, Math.max(1, ...domain.map((name) => String(name).length)));
  const turned = longest * LETTER * domain.length > width - 80;
  const below = turned ? Math.ceil(longest * LETTER * 0.64) + 44 : 44;
  const axis = { domain, label: label || null, labelAnchor: "center", tickFormat: cut };
  if (turned) axis.tickRotate = -40;
  return { axis, below };
}

const cut = (name) => {
  const letters = [...String(name)];
  return letters.length > LONGEST ? `${letters.slice(0, LONGEST - 1).join("")}…` : letters.join("");
};

const upright = (chart) => ({
  label: chart.y_label || null,
  labelArrow: "none",
  grid: true,
  nice: true,
  tickSpacing: 45,
});

function bars(chart, series, width) {
  const data = pointsOf(chart, series);
  const places = unique(data.map((d) => d.x));
  const alone = new Set(data.map((d) => d.x)).size === data.length;
  const { axis, below } = names(chart.x_label, places, width);
  const where = alone ? { x: "x" } : { fx: "x", x: "series" };
  const known = data.filter((d) => d.y !== null);
  return {
    marginBottom: below,
    y: upright(chart),
    ...(alone
      ? { x: axis }
      : { fx: { ...axis, padding: 0.15 }, x: { axis: null, domain: series.map((s) => s.name) } }),
    marks: [
      Plot.barY(known, { ...where, y: "y", fill: "fill" }),
      errors(known, where),
      Plot.ruleY([0], { stroke: "var(--text)" }),
      tip(known, { ...where, y: "y" }, Plot.pointerX),
    ],
  };
}

function stacked(chart, series, width) {
  const data = pointsOf(chart, series).filter((d) => d.y !== null);
  const { axis, below } = names(chart.x_label, unique(data.map((d) => d.x)), width);
  const stack = { x: "x", y: "y", z: "series", order: series.map((s) => s.name) };
  return {
    marginBottom: below,
    x: axis,
    y: upright(chart),
    marks: [
      Plot.barY(data, Plot.stackY({ ...stack, fill: "fill" })),
      Plot.ruleY([0], { stroke: "var(--text)" }),
      tip(data, Plot.stackY(stack)),
    ],
  };
}

function lines(chart, series, width) {
  const data = pointsOf(chart, series);
  const { axis, below } = across(chart, data, width);
  const colours = coloured(chart);
  const marks = series.flatMap((each) => {
    const own = data.filter((d) => d.series === each.name);
    const index = colours.get(each.name);
    const stroke = colour(index);
    const band = { x: "x", y1: (d) => d.y - d.error, y2: (d) => d.y + d.error };
    const drawing = [
      Plot.line(own, { x: "x", y: "y", stroke, strokeWidth: 1.8, strokeDasharray: dashes(index) }),
    ];
    if (series.length <= BANDS && own.some((d) => d.error)) {
      const known = own.filter((d) => d.y !== null && d.error !== null);
      drawing.unshift(Plot.areaY(known, { ...band, fill: stroke, fillOpacity: 0.12 }));
    }
    if (own.length <= 30) drawing.push(Plot.dot(own, { x: "x", y: "y", fill: stroke, r: 2.5 }));
    return drawing;
  });
  const known = data.filter((d) => d.y !== null);
  return {
    marginTop: chart.boundaries ? 36 : 24,
    marginBottom: below,
    x: axis,
    y: upright(chart),
    marks: [...boundaries(chart, width), ...marks, tip(known, { x: "x", y: "y" })],
  };
}

/** Returns the dash pattern, which distinguishes series with the same colour. */
const dashes = (index) => [null, "5 3", "2 2"][Math.floor(index / COLOURS) % 3];

/** Makes an x axis of numbers, or of names in their order. */
function across(chart, data, width) {
  const places = unique(data.map((d) => d.x));
  if (!places.every((x) => typeof x === "number")) return names(chart.x_label, places, width);
  const whole = places.every(Number.isInteger);
  const few = whole && places.length <= 20;
  const ticks = few ? { ticks: places } : {};
  const format = { tickFormat: whole ? "d" : undefined };
  const axis = { label: chart.x_label || null, labelAnchor: "center", labelArrow: "none" };
  return { axis: { ...axis, ...ticks, ...format }, below: 44 };
}

/** Draws the boundaries, with as many names as fit. */
function boundaries(chart, width) {
  const all = chart.boundaries ?? [];
  if (!all.length) return [];
  const longest = Math.max(...all.map(([, name]) => name.length));
  const every = Math.ceil((all.length * (longest + 1) * LETTER) / (width - 60));
  const some = all.filter((_, i) => i % every === 0);
  const rule = { x: (d) => d[0], stroke: "var(--faint)", strokeDasharray: "2 3", strokeOpacity: 0.7 };
  const text = { x: (d) => d[0], text: (d) => d[1], frameAnchor: "top", dy: -14, fill: "var(--faint)" };
  return [Plot.ruleX(all, rule), Plot.text(some, { ...text, textAnchor: "end" })];
}

function points(chart, series, width) {
  const data = pointsOf(chart, series).filter((d) => d.y !== null);
  const { axis, below } = across(chart, data, width);
  const marks = [
    errors(data, { x: "x", stroke: "fill" }),
    Plot.dot(data, { x: "x", y: "y", fill: "fill", stroke: "var(--surface)", r: 5 }),
  ];
  if (data.length <= 16) {
    const text = { x: "x", y: "y", text: (d) => cut(d.series), dx: 8, textAnchor: "start" };
    const halo = { stroke: "var(--surface)", strokeWidth: 3 };
    marks.push(Plot.text(data, { ...text, ...halo, fill: "var(--text)" }));
  }
  return {
    marginBottom: below,
    marginRight: 70,
    x: { ...axis, nice: true },
    y: upright(chart),
    marks: [...marks, tip(data, { x: "x", y: "y" })],
  };
}

/** Draws rows of cells, with numbers or texts in them if they fit. */
function heat(chart, series, width) {
  const all = pointsOf(chart, series);
  const rows = series.map((each) => each.name);
  const columns = unique(all.map((d) => d.x));
  const texts = new Map((chart.series ?? []).map((each, i) => [each.name, chart.texts?.[i] ?? []]));
  const numbers = chart.series.flatMap((s) => s.y ?? []).filter((y) => y !== null);
  const [low, high] = d3.extent(numbers);
  const decimals = numbers.every(Number.isInteger) ? 0 : 2;
  for (const d of all) {
    d.text = texts.get(d.series)[d.i] ?? d.y?.toFixed(decimals) ?? "";
    const where = [[chart.y_label, d.series], [chart.x_label, named(d.x)]];
    const value = chart.z_label && d.y !== null ? `${chart.z_label}: ${digits(d.y)}` : "";
    const content = chart.kind === "grid" ? [d.text || "–", value] : [value || d.text || "–"];
    const said = [...where.map((pair) => pair.filter(Boolean).join(" ")), ...content];
    d.says = said.filter(Boolean).join("\n");
    d.share = d.y === null || high === low ? (d.text ? 0.25 : null) : (d.y - low) / (high - low);
  }
  const longest = Math.min(LONGEST, Math.max(1, ...rows.map((row) => row.length)));
  const left = Math.ceil(longest * LETTER) + 34;
  const { axis, below } = names(chart.x_label, columns, width - left);
  const room = (width - left - 20) / Math.max(1, columns.length);
  const widest = Math.max(1, ...all.map((d) => d.text.length));
  const known = all.filter((d) => d.share !== null);
  const at = { x: "x", y: "series" };
  const marks = [Plot.cell(known, { ...at, fill: (d) => shade(d.share), inset: 0.5 })];
  const fill = (d) => (d.share > 0.5 ? "var(--on-heat-high)" : "var(--on-heat-low)");
  const look = { ...at, fill, fontSize: 11 };
  if (widest * LETTER + 4 <= room) marks.push(Plot.text(known, { ...look, text: "text" }));
  else if (chart.kind === "heat" && 3 * LETTER <= room) {
    marks.push(Plot.text(known, { ...look, text: (d) => d.y?.toFixed(0) ?? "" }));
  }
  const tall = Math.max(16, Math.min(30, 420 / Math.max(1, rows.length)));
  return {
    height: rows.length * tall + below + 14,
    marginLeft: left,
    marginBottom: below + 6,
    marginTop: 8,
    padding: 0,
    x: { ...axis, type: "band" },
    y: { domain: rows, label: chart.y_label || null, tickFormat: cut, type: "band" },
    marks: [...marks, tip(known, at)],
  };
}

const shade = (share) =>
  `color-mix(in oklab, var(--heat-high) ${(100 * share).toFixed(1)}%, var(--heat-low))`;
