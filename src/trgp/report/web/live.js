// A live page polls its server, and says so when the server does not answer.

const PAUSE = 2000; // milliseconds between two requests
const live = { report: null, text: "", lost: null };

async function follow() {
  try {
    const progress = await asked("progress.json");
    if (progress.report !== live.report) {
      const report = await asked("report.json");
      live.report = progress.report;
      keepingFocus(() => showReport(report));
    }
    keepingFocus(() => showProgress(progress));
    live.lost = null;
  } catch {
    live.lost ??= new Date();
  }
  showConnection();
  setTimeout(follow, PAUSE);
}

async function asked(route) {
  const answer = await fetch(route, { cache: "no-store", signal: AbortSignal.timeout(60000) });
  if (!answer.ok) throw new Error(`${route}: ${answer.status}`);
  return answer.json();
}

function showConnection() {
  const says = live.lost
    ? `The server has not answered since ${live.lost.toLocaleTimeString()}; the page shows its last answer.`
    : "";
  const banner = byId("connection");
  if (banner.textContent !== says) banner.textContent = says;
  banner.hidden = !says;
}

/** Shows the runs in progress and their curves. */
function showProgress({ runs, charts, problems }) {
  const section = byId("progress");
  const text = JSON.stringify([runs, charts, problems, [...chosen.without], chosen.benchmark, chosen.preset]);
  if (text === live.text) return;
  live.text = text;
  live.latest = { runs, charts, problems };
  section.hidden = false;
  document.querySelector('[data-part="progress"]').hidden = false;
  placeOf(section, "runs", () => make("div", { class: "table" }), (place) => showRuns(place, runs));
  placeOf(section, "problems", () => make("div"), (place) => {
    place.replaceChildren(...problems.map((problem) => make("p", { class: "problem" }, problem)));
  });
  const figures = placeOf(section, "figures", () => make("div", { class: "figures" }));
  showFigures(figures, charts);
}

function showRuns(place, runs) {
  const among = runs.filter(isChosen);
  if (!among.length) {
    const none = runs.length ? "No run in progress is selected." : "No run is in progress.";
    return place.replaceChildren(make("p", { class: "note" }, none));
  }
  const columns = ["benchmark", "method", "configuration", "seed", "task", "epoch", "time", "saved"];
  const rows = among.map((run) =>
    make(
      "tr",
      {},
      make("td", {}, run.benchmark),
      make("td", {}, run.method),
      make("td", {}, run.configuration),
      make("td", {}, String(run.seed)),
      make("td", {}, ...of(run.task, run.tasks)),
      make("td", {}, ...of(run.epoch, run.epochs)),
      make("td", {}, run.time),
      make("td", { class: run.waiting ? "waiting" : null }, run.saved),
    ),
  );
  place.replaceChildren(
    make(
      "div",
      { class: "scroll" },
      make(
        "table",
        { "aria-label": "Runs in progress" },
        make("thead", {}, make("tr", {}, ...columns.map((column) => make("th", { scope: "col" }, column)))),
        make("tbody", {}, ...rows),
      ),
    ),
  );
}

/** Shows count of all, also as a bar. */
function of(count, all) {
  if (!all) return [String(count)];
  const says = `${count} of ${all}`;
  return [make("progress", { max: all, value: count, "aria-label": says }), ` ${says}`];
}
