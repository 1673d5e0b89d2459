"use strict";

// The page: its charts and its map.

const report = { data: JSON.parse(document.getElementById("data").textContent) }; // also for the browser's console

report.charts = report.data.charts.map((data) =>
  new Chart(document.getElementById(data.small ? "small-charts" : "charts"), data));
if (report.data.map) report.map = new Explorer(document.getElementById("explorer"), report.data.map);
