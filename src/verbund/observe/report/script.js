// Timelines zoom with the wheel around the pointer, move by dragging, and come back with a double click.
for (const svg of document.querySelectorAll(".zoom svg")) {
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  let left = 0, span = width, drag = null;
  const show = () => {
    span = Math.min(width, Math.max(width / 400, span));
    left = Math.min(width - span, Math.max(0, left));
    svg.setAttribute("viewBox", `${left} 0 ${span} ${height}`);
    svg.setAttribute("preserveAspectRatio", span < width ? "none" : "xMidYMid meet");
  };
  const at = (event) => left + (event.offsetX / svg.clientWidth) * span;
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    const centre = at(event), factor = event.deltaY < 0 ? 0.8 : 1.25;
    left = centre - (centre - left) * factor;
    span *= factor;
    show();
  }, { passive: false });
  svg.addEventListener("pointerdown", (event) => { drag = at(event); svg.setPointerCapture(event.pointerId); });
  svg.addEventListener("pointermove", (event) => { if (drag !== null) { left += drag - at(event); show(); } });
  svg.addEventListener("pointerup", () => { drag = null; });
  svg.addEventListener("dblclick", () => { left = 0; span = width; show(); });
}
