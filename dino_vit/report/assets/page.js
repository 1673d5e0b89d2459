"use strict";

// The page: its theme, its charts and its map, and on a live page the news of the run.

const NEWS_EVERY = 4000; // milliseconds
const THEMES = ["auto", "light", "dark"];

function remembered() {
  try {
    return localStorage.getItem("dino-vit-theme") ?? "auto";
  } catch { // a browser may refuse to remember for a file
    return "auto";
  }
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = `Theme: ${theme}`;
  try {
    localStorage.setItem("dino-vit-theme", theme);
  } catch { /* it is chosen for this page only */ }
  report.explorer?.ask();
}

function showCharts(charts) {
  for (const data of charts) {
    if (report.charts[data.id]) report.charts[data.id].update(data);
    else {
      const place = document.getElementById(data.small ? "small-charts" : "charts");
      report.charts[data.id] = new Chart(place, data);
    }
  }
}

function showNews(news) {
  for (const place of document.querySelectorAll("[data-text]")) {
    const text = news.texts[place.dataset.text];
    if (text !== undefined && place.textContent !== text) place.textContent = text;
  }
  document.getElementById("tone").dataset.tone = news.tone;
  document.getElementById("progress").value = news.progress;
  showCharts(news.charts);
  if (news.version !== report.data.version) {
    const place = document.getElementById("news");
    place.textContent = news.version < 0 ? "Pictures are ready. "
      : `Pictures of step ${news.version.toLocaleString("en")} are ready. `;
    element(place, "button", { type: "button" }, "Show them").addEventListener("click", () => location.reload());
  }
}

async function watch() {
  const place = document.getElementById("news");
  for (;;) {
    await new Promise((done) => setTimeout(done, NEWS_EVERY));
    try {
      const answer = await fetch("/news.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      if (place.dataset.lost) {
        delete place.dataset.lost;
        place.textContent = "";
      }
      showNews(await answer.json());
    } catch {
      place.dataset.lost = "yes";
      place.textContent = "The program that serves this page does not answer; the page stays as it was.";
    }
  }
}

report.data = JSON.parse(document.getElementById("data").textContent);
report.charts = {};
setTheme(remembered());
document.getElementById("theme").addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(remembered()) + 1) % THEMES.length]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => report.explorer?.ask());
showCharts(report.data.charts);
if (report.data.explorer) report.explorer = new Explorer(document.getElementById("explorer"), report.data.explorer);
if (report.data.live) watch();
