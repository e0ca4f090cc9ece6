"use strict";

/** Makes an element with attributes and children; texts are never parsed as HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const byId = (id) => document.getElementById(id);

const unique = (values) => [...new Set(values)];

/** Changes the page, then restores the focus to the element with the same key. */
function keepingFocus(change) {
  const key = document.activeElement?.dataset?.key;
  change();
  if (key === undefined || document.activeElement?.dataset?.key === key) return;
  const same = [...document.querySelectorAll("[data-key]")].find((e) => e.dataset.key === key);
  same?.focus({ preventScroll: true });
}

const COLOURS = 12;
const indices = new Map();

/** Returns a name's colour, which stays the same on the whole page while it is open. */
function colourIndex(name) {
  if (!indices.has(name)) indices.set(name, indices.size);
  return indices.get(name);
}

const colour = (index) => `var(--c${index % COLOURS})`;

/** Makes a small square of a colour. */
function swatch(index) {
  const square = make("span", { class: "swatch", "aria-hidden": "true" });
  square.style.setProperty("--c", colour(index));
  return square;
}

/** Formats a number with its significant digits. */
function digits(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 1e4) return Math.round(value).toLocaleString("en-GB");
  return size >= 0.1 ? value.toFixed(2) : value.toPrecision(2);
}
