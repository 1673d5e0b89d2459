"use strict";

// The page: its theme, its charts, its map and, while it is served, the news of the run.

const NEWS_EVERY = 4000; // milliseconds
const THEMES = ["auto", "light", "dark"];

function savedTheme() {
  try {
    return localStorage.getItem("dino-vit-theme") ?? "auto";
  } catch { // some browsers have no storage for files
    return "auto";
  }
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = `Theme: ${theme}`;
  try {
    localStorage.setItem("dino-vit-theme", theme);
  } catch { /* the theme is forgotten when the page is closed */ }
  report.explorer?.redraw();
}

function showCharts(charts) {
  for (const data of charts) {
    if (report.charts[data.id]) report.charts[data.id].update(data);
    else {
      const parent = document.getElementById(data.small ? "small-charts" : "charts");
      report.charts[data.id] = new Chart(parent, data);
    }
  }
}

function showNews(news) {
  for (const shown of document.querySelectorAll("[data-text]")) {
    const text = news.texts[shown.dataset.text];
    if (text !== undefined && shown.textContent !== text) shown.textContent = text;
  }
  document.getElementById("tone").dataset.tone = news.tone;
  document.getElementById("progress").value = news.progress;
  showCharts(news.charts);
  if (news.version !== report.data.version) {
    const notice = document.getElementById("news");
    notice.textContent = news.version < 0 ? "Pictures are ready. "
      : `Pictures of step ${news.version.toLocaleString("en")} are ready. `;
    element(notice, "button", { type: "button" }, "Show them").addEventListener("click", () => location.reload());
  }
}

async function watch() {
  const notice = document.getElementById("news");
  for (;;) {
    await new Promise((done) => setTimeout(done, NEWS_EVERY));
    try {
      const answer = await fetch("/news.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      if (notice.dataset.offline) {
        delete notice.dataset.offline;
        notice.textContent = "";
      }
      showNews(await answer.json());
    } catch {
      notice.dataset.offline = "yes";
      notice.textContent = "The server of this page does not answer. The page shows the last known state.";
    }
  }
}

report.data = JSON.parse(document.getElementById("data").textContent);
report.charts = {};
setTheme(savedTheme());
document.getElementById("theme").addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(savedTheme()) + 1) % THEMES.length]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => report.explorer?.redraw());
showCharts(report.data.charts);
if (report.data.explorer) report.explorer = new Explorer(document.getElementById("explorer"), report.data.explorer);
if (report.data.live) watch();
