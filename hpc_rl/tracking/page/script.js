"use strict";
// Draws the plots with uPlot. One state holds for all of them: smoothing, log axis, zoom, hidden runs and the cursor.
(() => {
  const { xs, plots } = JSON.parse(document.getElementById("data").textContent);
  const COLOURS = 16;
  const DASHES = [[], [7, 3], [2, 2.5], [9, 3, 2, 3], [14, 3, 2, 3, 2, 3], [4, 2], [1, 3], [12, 4]];
  const MOST_ROWS = 10; // of a tip
  const MOST_FAINT = 4; // with more lines, smoothing hides the values that it smooths
  const HEIGHT = 200;
  const controls = document.getElementById("controls");
  const smoothing = document.getElementById("smoothing");
  const log = document.getElementById("log");
  const reset = document.getElementById("reset");
  const boxes = [...document.querySelectorAll("input[data-run]")];
  const groups = new Map(); // unit of the x axis -> {extent, range, members}
  let redrawing = 0;

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (style) => css(`--c${style % COLOURS}`);
  const dash = (style) => DASHES[(style + Math.floor(style / COLOURS)) % DASHES.length];
  const faded = (name, alpha) => name + Math.round(alpha * 255).toString(16).padStart(2, "0");
  const hidden = () => new Set(boxes.filter((box) => !box.checked).map((box) => Number(box.dataset.run)));

  function short(value) {
    const size = Math.abs(value);
    for (const [limit, unit, suffix] of [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]]) {
      if (size >= limit) return Number((value / unit).toPrecision(3)) + suffix;
    }
    if (size >= 100) return String(Math.round(value));
    return size !== 0 && size < 1e-3 ? Number(value.toPrecision(3)).toExponential() : String(Number(value.toPrecision(4)));
  }

  // Exponential moving average without the bias of its start (Kingma and Ba 2015, section 3).
  function smoothed(values, weight) {
    let sum = 0;
    let total = 0;
    return values.map((value) => {
      sum = weight * sum + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return sum / total;
    });
  }

  // All columns of a plot in the order that uPlot expects: x, then the series, with null for a missing value.
  function columns(plot, isLog) {
    const skip = plot.byRun ? hidden() : new Set();
    const shown = plot.series.filter((series) => !skip.has(series.style));
    const weight = plot.stacked || plot.categories.length ? 0 : Number(smoothing.value);
    const positive = (values) => (isLog ? values.map((value) => (value > 0 ? value : null)) : values);
    const tables = [];
    const drawn = []; // one entry for each column
    const add = (series, values, options) => {
      tables.push([xs[series.x], positive(values)]);
      drawn.push({ series, ...options });
    };
    if (plot.stacked) {
      // The highest sum first: each area covers the lower part of the one before.
      const sums = shown.map((_, i) => shown[0].mean.map((_, at) => shown.slice(0, i + 1).reduce((sum, s) => sum + s.mean[at], 0)));
      for (let i = shown.length - 1; i >= 0; i--) add(shown[i], sums[i], { area: true, values: shown[i].mean });
    } else {
      for (const series of shown) {
        if (series.low) {
          add(series, series.high, { edge: true });
          add(series, series.low, { edge: true });
        }
        if (weight > 0 && shown.length <= MOST_FAINT) add(series, series.mean, { faint: true });
        add(series, weight > 0 ? smoothed(series.mean, weight) : series.mean, { line: true });
      }
    }
    const data = tables.length ? uPlot.join(tables) : [[0]];
    return { data, drawn };
  }

  const mostlyPositive = (plot) => {
    const values = plot.series.flatMap((series) => series.mean);
    return values.filter((value) => value > 0).length > values.length / 2;
  };

  function bands(drawn) {
    const found = [];
    drawn.forEach((one, i) => {
      if (one.edge && drawn[i + 1]?.edge && drawn[i + 1].series === one.series && drawn[i - 1]?.series !== one.series) {
        found.push({ series: [i + 1, i + 2], fill: () => faded(colour(one.series.style), 0.2) });
      }
    });
    return found;
  }

  function line(one) {
    const { style, mean } = one.series;
    const own = { label: one.series.name, spanGaps: true, points: { show: false } };
    if (one.edge) return { ...own, stroke: "transparent", width: 0 };
    if (one.area) return { ...own, stroke: () => css("--card"), width: 0.6, fill: () => colour(style) };
    if (one.faint) return { ...own, stroke: () => faded(colour(style), 0.3), width: 1 };
    const points = { show: mean.length <= 12, size: 6, width: 0, fill: () => colour(style) };
    return { ...own, stroke: () => colour(style), width: 1.8, dash: dash(style), points };
  }

  // Positions of labels on a log axis: whole decades, or less if few of them are in the range.
  function logSplits(_u, _axis, min, max) {
    const decades = Math.log10(max / min);
    if (decades < 0.5) {
      const step = [1, 2, 5, 10].map((n) => n * 10 ** Math.floor(Math.log10((max - min) / 4))).find((size) => size >= (max - min) / 4);
      return [...Array(12).keys()].map((i) => (Math.ceil(min / step) + i) * step).filter((value) => value <= max);
    }
    const steps = decades > 3 ? [1] : decades > 1.5 ? [1, 3] : [1, 2, 5];
    const powers = [...Array(Math.ceil(decades) + 2).keys()].map((i) => 10 ** (Math.floor(Math.log10(min)) + i));
    return powers.flatMap((power) => steps.map((n) => n * power)).filter((value) => value >= min && value <= max);
  }

  function axes(plot, isLog) {
    const own = { stroke: () => css("--soft"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false }, font: "11.5px system-ui, sans-serif" };
    const x = { ...own, grid: { show: false }, size: 26, gap: 4, space: 48 };
    if (plot.categories.length) {
      const names = plot.categories;
      x.splits = (u) => {
        const widest = Math.max(...names.map((name) => name.length), 3) * 7 + 10;
        const every = Math.max(1, Math.ceil((names.length * widest) / Math.max(60, u.bbox.width / devicePixelRatio)));
        return names.map((_, i) => i).filter((i) => i % every === 0);
      };
      x.values = (_, splits) => splits.map((i) => (names[i].length > 24 ? `${names[i].slice(0, 23)}…` : names[i]));
    } else {
      x.values = (_, splits) => splits.map((value) => (value === null ? "" : short(value)));
      if (plot.x === "step") x.incrs = [...Array(10).keys()].flatMap((power) => [1, 2, 5].map((n) => n * 10 ** power));
    }
    const y = { ...own, gap: 6, values: (_, splits) => splits.map((value) => (value === null ? "" : short(value))) };
    if (isLog) Object.assign(y, { splits: logSplits, filter: (_, splits) => splits });
    y.size = (_, values) => Math.max(34, 14 + 7 * Math.max(0, ...(values ?? []).map((text) => text.length)));
    return [x, y];
  }

  function valueRange(plot, isLog) {
    return (_, min, max) => {
      if (min === null || max === null) return isLog ? [0.1, 1] : [0, 1];
      if (isLog) {
        const room = Math.max((max / min) ** 0.06, 1.02);
        return [min / room, max * room];
      }
      if (plot.zero && min >= 0) return [0, max > 0 ? max * 1.06 : 1];
      if (min === 0 && max === 0) return [0, 1];
      const room = (max - min) * 0.06 || Math.abs(max) / 2;
      return [min - room, max + room];
    };
  }

  // Upright lines where a new attempt resumed the run.
  function drawMarks(plot) {
    return (u) => {
      u.ctx.save();
      u.ctx.strokeStyle = css("--soft");
      u.ctx.lineWidth = devicePixelRatio;
      u.ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
      for (const mark of plot.marks) {
        const [from, to] = plot.group.range;
        if (mark < from || mark > to) continue;
        const at = Math.round(u.valToPos(mark, "x", true));
        u.ctx.beginPath();
        u.ctx.moveTo(at, u.bbox.top);
        u.ctx.lineTo(at, u.bbox.top + u.bbox.height);
        u.ctx.stroke();
      }
      u.ctx.restore();
    };
  }

  // Values at the cursor: in the legend of every plot with this x axis, and in a tip beside the pointer.
  function showValues(plot) {
    return (u) => {
      const rows = [];
      plot.drawn.forEach((one, i) => {
        const at = u.cursor.idxs?.[i + 1] ?? -1;
        const height = u.data[i + 1][at] ?? null; // of an area: the sum up to it
        if (height === null || !(one.line || one.area)) return;
        const x = u.data[0][at];
        const value = one.area ? one.values[xs[one.series.x].indexOf(x)] : height;
        rows.push({ name: one.series.name, value, x, height, index: plot.series.indexOf(one.series) });
      });
      for (const output of plot.figure.querySelectorAll("output")) {
        const row = rows.find((each) => each.index === Number(output.dataset.series));
        output.textContent = row && u.cursor.left >= 0 ? short(row.value) : "";
      }
      const hovered = u.cursor.left >= 0 && plot.figure.matches(":hover");
      plot.tip.hidden = !hovered || rows.length === 0;
      if (plot.tip.hidden) return;
      const place = u.posToVal(u.cursor.left, "x");
      const x = rows.reduce((best, row) => (Math.abs(row.x - place) < Math.abs(best - place) ? row.x : best), rows[0].x);
      const near = (row) => Math.abs(u.valToPos(row.height, "y") - u.cursor.top);
      const chosen = rows.length > MOST_ROWS ? [...rows].sort((a, b) => near(a) - near(b)).slice(0, MOST_ROWS) : rows;
      const where = plot.categories.length ? `${plot.x}=${plot.categories[Math.round(x)]}` : plot.x === "step" ? `step ${Math.round(x)}` : `${short(x)} ${plot.x}`;
      const more = rows.length > chosen.length ? [`and ${rows.length - chosen.length} more`] : [];
      plot.tip.textContent = [where, ...chosen.map((row) => `${row.name}: ${short(row.value)}`), ...more].join("\n");
      const right = u.cursor.left > u.over.clientWidth / 2;
      plot.tip.style.left = right ? "" : `${u.cursor.left + 14}px`;
      plot.tip.style.right = right ? `${u.over.clientWidth - u.cursor.left + 14}px` : "";
      plot.tip.style.top = "4px";
    };
  }

  function zoom(group, from, to) {
    const whole = from <= group.extent[0] && to >= group.extent[1];
    group.range = whole || !(from < to) ? group.extent : [from, to];
    for (const plot of group.members) {
      plot.u.setScale("x", { min: group.range[0], max: group.range[1] });
      plot.u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    }
    remember();
  }

  function draw(plot) {
    const { group } = plot;
    const isLog = log.checked && !plot.stacked && mostlyPositive(plot);
    const { data, drawn } = columns(plot, isLog);
    plot.u?.destroy();
    plot.drawn = drawn;
    plot.figure.querySelector(".linear").hidden = !log.checked || isLog;
    const zoomed = (u) => {
      if (u.select.width < 4) return;
      zoom(group, u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
    };
    const filters = { pub: (type) => type === "mousemove" || type === "mouseleave" };
    plot.u = new uPlot(
      {
        width: plot.holder.clientWidth,
        height: HEIGHT,
        padding: [8, 14, 0, 0],
        legend: { show: false },
        scales: {
          x: { time: false, range: () => group.range },
          y: { distr: isLog ? 3 : 1, range: valueRange(plot, isLog) },
        },
        series: [{}, ...drawn.map(line)],
        bands: bands(drawn),
        axes: axes(plot, isLog),
        cursor: {
          y: false,
          points: { size: (_, i) => (plot.drawn[i - 1]?.line ? 7 : 0) },
          drag: { x: !plot.categories.length, y: false, setScale: false },
          focus: { prox: plot.series.length > 4 ? 16 : -1 },
          hover: { skip: [null, undefined] },
          sync: { key: plot.x, filters },
          bind: { dblclick: () => () => zoom(group, ...group.extent) },
        },
        focus: { alpha: 0.25 },
        hooks: { setCursor: [showValues(plot)], setSelect: [zoomed], draw: [drawMarks(plot)] },
      },
      data,
      plot.holder,
    );
    plot.u.over.append(plot.tip);
  }

  function drawAll() {
    cancelAnimationFrame(redrawing);
    redrawing = requestAnimationFrame(() => {
      document.getElementById("smoothness").textContent = Number(smoothing.value) ? smoothing.value : "off";
      plots.forEach(draw);
      remember();
    });
  }

  // The state is in the address: a reload keeps it, and a copied address shows the same view.
  function remember() {
    const parts = [];
    if (Number(smoothing.value)) parts.push(`smooth=${smoothing.value}`);
    if (log.checked) parts.push("log=1");
    const skip = [...hidden()];
    if (skip.length) parts.push(`hide=${skip.join(".")}`);
    for (const [unit, { range, extent }] of groups) {
      if (range !== extent) parts.push(`zoom=${encodeURIComponent(unit)}:${range.map((value) => Number(value.toPrecision(6))).join(":")}`);
    }
    reset.disabled = ![...groups.values()].some(({ range, extent }) => range !== extent);
    history.replaceState(null, "", parts.length ? `#${parts.join("&")}` : location.pathname + location.search);
  }

  function recall() {
    for (const part of location.hash.slice(1).split("&")) {
      const [key, value = ""] = part.split("=");
      if (key === "smooth") smoothing.value = value;
      if (key === "log") log.checked = value === "1";
      if (key === "hide") for (const box of boxes) box.checked = !value.split(".").includes(box.dataset.run);
      if (key === "zoom") {
        const [unit, from, to] = value.split(":");
        const group = groups.get(decodeURIComponent(unit));
        if (group && Number(from) < Number(to)) group.range = [Number(from), Number(to)];
      }
    }
  }

  plots.forEach((plot, i) => {
    plot.figure = document.querySelector(`figure[data-plot="${i}"]`);
    plot.holder = plot.figure.querySelector(".plot");
    plot.byRun = plot.figure.dataset.byRun === "1";
    plot.tip = document.createElement("div");
    plot.tip.className = "tip";
    const values = plot.series.flatMap((series) => xs[series.x]);
    const room = plot.categories.length ? 0.4 : 0;
    let extent = [Math.min(...values) - room, Math.max(...values) + room];
    if (extent[0] === extent[1]) extent = [Math.max(0, extent[0] - 1), extent[1] + 1];
    const group = groups.get(plot.x) ?? { extent, members: [] };
    group.extent = [Math.min(group.extent[0], extent[0]), Math.max(group.extent[1], extent[1])];
    group.range = group.extent;
    group.members.push(plot);
    plot.group = group;
    groups.set(plot.x, group);
  });
  if (!plots.length) return;
  recall();
  controls.hidden = false;
  plots.forEach(draw);
  document.getElementById("smoothness").textContent = Number(smoothing.value) ? smoothing.value : "off";
  remember();
  smoothing.addEventListener("input", drawAll);
  log.addEventListener("change", drawAll);
  for (const box of boxes) box.addEventListener("change", drawAll);
  reset.addEventListener("click", () => groups.forEach((group) => zoom(group, ...group.extent)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  new ResizeObserver(() => {
    for (const plot of plots) if (plot.holder.clientWidth !== plot.u.width) plot.u.setSize({ width: plot.holder.clientWidth, height: HEIGHT });
  }).observe(document.querySelector("main"));
  const refresh = Number(document.body.dataset.refresh ?? 0);
  if (refresh) setInterval(() => document.querySelector("figure:active, input:active") || location.reload(), 1000 * refresh);
})();
