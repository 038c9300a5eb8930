// Four charts of the last ten minutes, drawn by uPlot with the colours of the style sheet.

import { element } from "./dom.js";
import { count, duration, percent } from "./format.js";
import { hitRates } from "./series.js";

const HEIGHT = 132;
const TICK_S = [60, 120, 300];

const CHARTS = [
  {
    title: "Hit rate",
    key: [
      ["read", "hit"],
      ["line-ideal", "without evictions"],
    ],
    data: (series, rates) => [rates.hit, rates.ideal],
    options: (colour) => ({
      series: [area(colour("--accent")), { ...line(colour("--ideal")), dash: [4, 3] }],
      range: [0, 1],
      ticks: (value) => percent(value),
    }),
    latest: (series, rates) => percent(lastOf(rates.hit)),
  },
  {
    title: "Prompt tokens",
    key: [
      ["read", "read"],
      ["shared", "shared"],
      ["computed", "computed"],
    ],
    // Stacked: the tallest bar is drawn first, the others over it.
    data: ({ read, shared, computed }) => [
      read.map((value, at) => value + shared[at] + computed[at] || null),
      read.map((value, at) => value + shared[at] || null),
      read.map((value) => value || null),
    ],
    options: (colour) => ({
      series: [bars(colour("--computed")), bars(colour("--shared")), bars(colour("--read"))],
      range: (_, __, most) => [0, Math.max(10, most)],
      ticks: short,
    }),
    latest: ({ times, read, shared, computed }) => {
      const last = read.length - 2;
      const seconds = times[1] - times[0];
      return `${count((read[last] + shared[last] + computed[last]) / seconds)} a second`;
    },
  },
  {
    title: "Time to first token",
    key: [
      ["read", "mean"],
      ["line-ideal", "slowest"],
    ],
    data: ({ ttft, worst }) => [worst, ttft],
    options: (colour) => ({
      series: [line(colour("--ideal")), area(colour("--accent"))],
      range: (_, __, most) => [0, Math.max(0.01, most)],
      ticks: duration,
    }),
    latest: ({ ttft }) => duration(lastOf(ttft)),
  },
  {
    title: "Requests",
    key: [
      ["read", "answering"],
      ["line-ideal", "before the first token"],
    ],
    data: ({ running, waiting }) => [running, waiting],
    options: (colour) => ({
      series: [bare(area(colour("--accent"))), bare(line(colour("--ideal")))],
      range: (_, __, most) => [0, Math.max(4, most)],
      ticks: (value) => (Number.isInteger(value) ? count(value) : ""),
    }),
    latest: (series, rates, live) => `${count(live.running + live.waiting)} now`,
  },
];

/** The charts of a section; `show` redraws them. */
export class TimeCharts {
  constructor(section) {
    this.charts = CHARTS.map((chart) => new Chart(section, chart));
    const redraw = () => this.charts.forEach((chart) => chart.rebuild());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  }

  /** Draw `bucketSeries` of a history, and the requests that are live now. */
  show(history, series, live) {
    const rates = hitRates(history, series);
    for (const chart of this.charts) chart.show(series, rates, live);
  }
}

class Chart {
  constructor(section, chart) {
    this.chart = chart;
    this.value = element("span");
    this.place = element("div", { role: "img" });
    const key = chart.key.map(([kind, name]) =>
      element("span", {}, element("i", { class: kind }), name),
    );
    section.append(
      element(
        "figure",
        {},
        element(
          "figcaption",
          {},
          element("b", {}, chart.title),
          this.value,
          element("span", { class: "key" }, key),
        ),
        this.place,
      ),
    );
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.place);
  }

  size() {
    return { width: Math.max(120, this.place.clientWidth), height: HEIGHT };
  }

  show(series, rates, live) {
    this.data = [series.times, ...this.chart.data(series, rates)];
    const latest = this.chart.latest(series, rates, live);
    this.value.textContent = latest;
    this.place.setAttribute("aria-label", `${this.chart.title}: ${latest}`);
    if (this.plot) this.plot.setData(this.data);
    else this.rebuild();
  }

  rebuild() {
    if (!this.data) return;
    this.plot?.destroy();
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const { series, range, ticks } = this.chart.options(colour);
    const axis = {
      stroke: colour("--soft"),
      font: "11px system-ui, sans-serif",
      ticks: { show: false },
      grid: { stroke: colour("--line"), width: 1 },
    };
    this.plot = new window.uPlot(
      {
        ...this.size(),
        padding: [8, 18, 0, 0],
        cursor: { show: false },
        legend: { show: false },
        scales: { y: { range } },
        axes: [
          { ...axis, grid: { show: false }, space: 60, incrs: TICK_S, values: clock, size: 22 },
          { ...axis, size: 46, space: 28, values: (_, values) => values.map(ticks) },
        ],
        series: [{}, ...series],
      },
      this.data,
      this.place,
    );
  }
}

function clock(_, times) {
  return times.map((time) =>
    new Date(time * 1000).toLocaleTimeString([], { timeStyle: "short", hourCycle: "h23" }),
  );
}

function line(stroke) {
  return { stroke, width: 1.5, spanGaps: true, points: { show: false } };
}

/** A line without points, for values that are there in every bucket. */
function bare(series) {
  return { ...series, points: { show: false } };
}

function area(stroke) {
  const points = { show: true, size: 4, fill: stroke, stroke };
  return { ...line(stroke), width: 2, fill: `${stroke}22`, points };
}

function bars(fill) {
  return {
    fill,
    stroke: fill,
    width: 0,
    points: { show: false },
    paths: window.uPlot.paths.bars({ size: [0.9, 40] }),
  };
}

function short(value) {
  return value >= 1000 ? `${value / 1000}k` : count(value);
}

function lastOf(values) {
  return values.findLast((value) => value !== null) ?? null;
}
