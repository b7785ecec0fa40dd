"use strict";
// Values under the pointer, read back from the picture's own coordinates. The page says everything without this too.
for (const svg of document.querySelectorAll("svg[data-axes]")) {
  const [left, right, x0, x1, bottom, top, y0, y1] = svg.dataset.axes.split(" ").map(Number);
  const toX = (px) => x0 + ((px - left) / (right - left)) * (x1 - x0);
  const toY = (px) => y0 + ((px - bottom) / (top - bottom)) * (y1 - y0);
  const digits = Math.max(0, 3 - Math.floor(Math.log10(y1 - y0)));
  const lines = [...svg.querySelectorAll("[data-name]")].map((shape) => {
    const points = shape.getAttribute("points").split(" ").map((pair) => pair.split(",").map(Number));
    if (shape.tagName !== "polygon") return { name: shape.dataset.name, points, value: (i) => toY(points[i][1]) };
    // An area: its upper edge, then its lower one from the right.
    const count = points.length / 2;
    const height = (i) => toY(points[i][1]) - toY(points[points.length - 1 - i][1]);
    return { name: shape.dataset.name, points: points.slice(0, count), value: height };
  });
  const rule = document.createElementNS("http://www.w3.org/2000/svg", "line");
  rule.setAttribute("class", "at");
  rule.setAttribute("y1", top);
  rule.setAttribute("y2", bottom);
  const tip = document.createElement("div");
  tip.className = "tip";
  const nearest = (points, px) => points.reduce((best, p, i) => (Math.abs(p[0] - px) < Math.abs(points[best][0] - px) ? i : best), 0);

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const scale = box.width / svg.viewBox.baseVal.width;
    const px = (event.clientX - box.left) / scale;
    const places = lines.map((line) => line.points[nearest(line.points, px)][0]);
    const place = places[nearest(places.map((x) => [x]), px)];
    const x = toX(place);
    const shown = svg.dataset.x === "step" ? `step ${Math.round(x)}` : `${x.toPrecision(3)} ${svg.dataset.x}`;
    const rows = lines.filter((line) => Math.abs(line.points[nearest(line.points, place)][0] - place) < 6);
    const values = rows.map((line) => `${line.name}: ${+line.value(nearest(line.points, place)).toFixed(digits)}`);
    tip.textContent = [shown, ...values].join("\n");
    rule.setAttribute("x1", place);
    rule.setAttribute("x2", place);
    svg.append(rule);
    svg.parentElement.append(tip);
    const at = place * scale;
    tip.style.top = `${svg.offsetTop ?? 40}px`;
    tip.style.left = at > box.width / 2 ? `${at - tip.offsetWidth}px` : `${at + 24}px`;
    tip.style.top = `${box.top - svg.parentElement.getBoundingClientRect().top + 10}px`;
  });
  svg.addEventListener("pointerleave", () => {
    rule.remove();
    tip.remove();
  });
}
