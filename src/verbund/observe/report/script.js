"use strict";
document.documentElement.classList.add("script");
const make = (name, attributes) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
};
const round = (value) => (Number.isInteger(value) ? value.toLocaleString("en") : Number(value.toPrecision(5)).toString());
// A label that follows the pointer within a figure.
const tip = (figure) => {
  const node = document.createElement("div");
  node.className = "tip";
  node.hidden = true;
  figure.append(node);
  return {
    show(text, x, y) {
      const box = figure.getBoundingClientRect();
      node.textContent = text;
      node.hidden = false;
      const half = node.offsetWidth / 2;
      node.style.left = `${Math.min(Math.max(x - box.left, half), box.width - half)}px`;
      node.style.top = `${y - box.top}px`;
    },
    hide() { node.hidden = true; },
  };
};

// Curves: the value nearest to the pointer.
for (const svg of document.querySelectorAll("svg[data-curve]")) {
  const { x, y, points } = JSON.parse(svg.dataset.curve);
  const place = ([low, high, start, end, logarithmic], value) => {
    const f = logarithmic ? Math.log10 : (v) => v;
    return start + ((f(value) - f(low)) / (f(high) - f(low))) * (end - start);
  };
  const hair = make("line", { class: "hair", y1: y[3], y2: y[2], visibility: "hidden" });
  const dot = make("circle", { class: "best", r: 4, visibility: "hidden" });
  svg.append(hair, dot);
  const label = tip(svg.parentElement);
  svg.addEventListener("pointermove", (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const step = x[0] + ((at.x - x[2]) / (x[3] - x[2])) * (x[1] - x[0]);
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < step) low = middle; else high = middle;
    }
    const point = Math.abs(points[low][0] - step) < Math.abs(points[high][0] - step) ? points[low] : points[high];
    const px = place(x, point[0]), py = place(y, point[1]);
    hair.setAttribute("x1", px); hair.setAttribute("x2", px);
    dot.setAttribute("cx", px); dot.setAttribute("cy", py);
    for (const node of [hair, dot]) node.setAttribute("visibility", "visible");
    const on = new DOMPoint(px, py).matrixTransform(svg.getScreenCTM());
    label.show(`step ${round(point[0])}: ${round(point[1])}`, on.x, on.y);
  });
  svg.addEventListener("pointerleave", () => {
    label.hide();
    for (const node of [hair, dot]) node.setAttribute("visibility", "hidden");
  });
}

// Spans and bars: what the pointer is on. The title stays in the element's label, so that it does not show twice.
for (const figure of document.querySelectorAll("figure")) {
  const rects = figure.querySelectorAll("rect");
  if (!rects.length) continue;
  const label = tip(figure);
  for (const rect of rects) {
    rect.dataset.words = rect.textContent;
    rect.replaceChildren();
  }
  figure.addEventListener("pointermove", (event) => {
    const words = event.target.dataset && event.target.dataset.words;
    if (words) label.show(words, event.clientX, event.clientY); else label.hide();
  });
  figure.addEventListener("pointerleave", () => label.hide());
}

// Timelines: zoom and move.
for (const figure of document.querySelectorAll(".timeline")) {
  const svg = figure.querySelector("svg"), lanes = svg.querySelector(".lanes"), spans = svg.querySelector(".spans");
  const axis = svg.querySelector(".axis");
  const width = Number(lanes.getAttribute("width")), left = Number(svg.dataset.left), seconds = Number(svg.dataset.seconds);
  const baseline = svg.viewBox.baseVal.height - 5;
  let scale = 1, offset = 0, held = null;
  const draw = () => {
    scale = Math.min(Math.max(scale, 1), 2000);
    offset = Math.min(Math.max(offset, 0), width - width / scale);
    spans.setAttribute("transform", `scale(${scale} 1) translate(${-offset} 0)`);
    const from = (offset / width) * seconds, length = seconds / scale;
    const [divisor, unit] = length >= 1 ? [1, "s"] : length >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
    const raw = length / divisor / 6, power = 10 ** Math.floor(Math.log10(raw));
    const size = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw);
    axis.replaceChildren();
    for (let i = Math.ceil(from / divisor / size - 1e-9); i * size * divisor < from + length * 0.98; i++) {
      const at = left + ((i * size * divisor - from) / length) * width;
      const text = make("text", { class: "tick", x: at, y: baseline, "text-anchor": at < left + 10 ? "start" : "middle" });
      text.textContent = `${round(i * size)} ${unit}`;
      axis.append(text);
    }
  };
  const zoom = (factor, at = width / 2) => {
    const fixed = offset + at / scale;
    scale = Math.min(Math.max(scale * factor, 1), 2000);
    offset = fixed - at / scale;
    draw();
  };
  const across = (event) => new DOMPoint(event.clientX, 0).matrixTransform(svg.getScreenCTM().inverse()).x - left;
  const buttons = document.createElement("div");
  buttons.className = "zoomer";
  const actions = [["−", "Zoom out", () => zoom(1 / 1.6)], ["+", "Zoom in", () => zoom(1.6)],
    ["All", "Show all", () => { scale = 1; offset = 0; draw(); }]];
  for (const [text, title, action] of actions) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.title = title;
    button.setAttribute("aria-label", title);
    button.addEventListener("click", action);
    buttons.append(button);
  }
  figure.append(buttons);
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY < 0 ? 1.25 : 0.8, across(event));
  }, { passive: false });
  svg.addEventListener("pointerdown", (event) => { held = across(event); svg.setPointerCapture(event.pointerId); });
  svg.addEventListener("pointermove", (event) => {
    if (held === null) return;
    const now = across(event);
    offset += (held - now) / scale;
    held = now;
    draw();
  });
  for (const end of ["pointerup", "pointercancel"]) svg.addEventListener(end, () => { held = null; });
  svg.addEventListener("keydown", (event) => {
    const key = { "+": () => zoom(1.6), "-": () => zoom(1 / 1.6), 0: () => { scale = 1; offset = 0; draw(); },
      ArrowLeft: () => { offset -= width / scale / 8; draw(); }, ArrowRight: () => { offset += width / scale / 8; draw(); } }[event.key];
    if (key) { event.preventDefault(); key(); }
  });
}
