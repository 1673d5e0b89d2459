"use strict";

// The page: its charts, its map and, while it is served, a look now and then whether the run has gone on.

const report = { data: JSON.parse(document.getElementById("data").textContent) }; // also for the browser's console

report.charts = report.data.charts.map((data) =>
  new Chart(document.getElementById(data.small ? "small-charts" : "charts"), data));
if (report.data.map) report.map = new Explorer(document.getElementById("explorer"), report.data.map);

// A page whose map is being looked at closely is not loaded again unasked.
async function watch() {
  const notice = document.getElementById("news"), busy = report.map && (report.map.selected !== null || report.map.scale !== 1);
  try {
    const version = await (await fetch("/version", { cache: "no-store" })).text();
    if (version === report.data.version) notice.replaceChildren();
    else if (!busy) location.reload();
    else if (!notice.firstChild) {
      element(notice, "button", { type: "button" }, "The run has gone on: show it").addEventListener("click", () => location.reload());
    }
  } catch {
    notice.textContent = "The server of this page does not answer. The page shows the last known state.";
  }
  setTimeout(watch, 4000);
}

if (report.data.version) watch();
