// The reader's selection: one benchmark or all, one preset or all, and any methods.

const chosen = { benchmark: "", preset: "", without: new Set() };

/** Returns whether a row, a figure or a run is selected; items without names always are. */
function isChosen({ benchmark = "", method = "", preset = "" }) {
  return (
    (!chosen.benchmark || !benchmark || benchmark === chosen.benchmark) &&
    (!chosen.preset || !preset || preset === chosen.preset) &&
    !chosen.without.has(method)
  );
}

/** Shows the controls for the benchmarks, presets and methods at hand; methods without a run are left out. */
function showChoices(items, changed) {
  const named = (field) => unique(items.map((item) => item[field]).filter(Boolean)).sort();
  const parts = ["benchmark", "preset"].map((field) => select(field, named(field), changed));
  const methods = unique(items.filter((item) => !item.not_run).map((item) => item.method)).filter(Boolean).sort();
  methods.forEach(colourIndex);
  const all = make(
    "button",
    {
      type: "button",
      class: "chip",
      "data-key": "all methods",
      click: () => {
        const none = methods.every((method) => !chosen.without.has(method));
        chosen.without = new Set(none ? methods : []);
        for (const box of byId("choices").querySelectorAll("input")) box.checked = !none;
        changed();
      },
    },
    "all or none",
  );
  const boxes = methods.map((method) => checkbox(method, changed));
  parts.push(make("fieldset", {}, make("legend", {}, "Methods"), ...boxes, all));
  const bar = byId("choices");
  bar.replaceChildren(...parts);
  // The bar stays in view, so the target of a link must not scroll under it.
  document.documentElement.style.scrollPaddingTop = `${bar.offsetHeight + 16}px`;
}

function select(field, names, changed) {
  // A name may vanish from the data of a live page; then it must hide nothing.
  if (!names.includes(chosen[field])) chosen[field] = "";
  const choice = make("select", {
    name: field,
    "data-key": `choice of ${field}`,
    change: () => {
      chosen[field] = choice.value;
      changed();
    },
  });
  choice.append(make("option", { value: "" }, "all"), ...names.map((n) => make("option", { value: n }, n)));
  choice.value = chosen[field];
  return make("label", {}, `${field[0].toUpperCase()}${field.slice(1)} `, choice);
}

function checkbox(method, changed) {
  const box = make("input", {
    type: "checkbox",
    value: method,
    "data-key": `choice of ${method}`,
    change: () => {
      if (box.checked) chosen.without.delete(method);
      else chosen.without.add(method);
      changed();
    },
  });
  box.checked = !chosen.without.has(method);
  return make("label", { class: "chip" }, box, swatch(colourIndex(method)), method);
}
