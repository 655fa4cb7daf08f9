// Filters the table of events, follows links into closed parts, and reads charts at the pointer.
// Everything on the page can be read without it.
(() => {
  const SVG = "http://www.w3.org/2000/svg";

  function filterEvents() {
    const form = document.getElementById("filter");
    const table = document.getElementById("event-table");
    if (!form || !table) return;
    const text = document.getElementById("filter-text");
    const severity = document.getElementById("filter-severity");
    const count = document.getElementById("filter-count");
    const rows = [...table.tBodies[0].rows].filter((row) => row.dataset.severity);

    function apply() {
      const wanted = text.value.trim().toLowerCase();
      const severities = severity.value ? severity.value.split(" ") : null;
      let shown = 0;
      for (const row of rows) {
        const fits =
          (!wanted || row.textContent.toLowerCase().includes(wanted)) &&
          (!severities || severities.includes(row.dataset.severity));
        row.hidden = !fits;
        if (fits) shown += 1;
      }
      count.textContent = shown === rows.length ? "" : `${shown} of ${rows.length} shown`;
    }

    form.addEventListener("input", apply);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.hidden = rows.length < 2;
  }

  // A link to something inside a closed part opens it.
  function reveal() {
    const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (!target) return;
    for (let part = target.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
    target.scrollIntoView();
  }

  // Points of a curve, in units of its drawing.
  function pointsOf(path) {
    const numbers = (point) => point.trim().split(" ").map(Number);
    return path.getAttribute("d").split("M").slice(1).flatMap((stroke) => stroke.split("L").map(numbers));
  }

  function nearest(points, x) {
    let low = 0;
    let high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle;
      else high = middle;
    }
    return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
  }

  function makeReader(chart) {
    const { start, end, low, high, log, height } = chart.dataset;
    const curves = [...chart.querySelectorAll("path[data-label]")]
      .map((path) => ({ label: path.dataset.label, points: pointsOf(path) }))
      .filter((curve) => curve.points.length);
    const line = document.createElementNS(SVG, "line");
    line.setAttribute("class", "cursor");
    line.setAttribute("y1", "0");
    line.setAttribute("y2", String(Number(height) + 12));
    const words = document.createElementNS(SVG, "text");
    words.setAttribute("class", "readout");
    words.setAttribute("y", "9");
    for (const part of [line, words]) {
      part.setAttribute("visibility", "hidden");
      part.setAttribute("aria-hidden", "true");
      chart.append(part);
    }

    function show(at) {
      const place = `${at * 100}%`;
      line.setAttribute("x1", place);
      line.setAttribute("x2", place);
      const told = [];
      for (const { label, points } of curves) {
        const [x, y] = nearest(points, at * 1000);
        if (x < points[0][0] || Math.abs(x - at * 1000) > 40) continue;
        const value = Number(low) + (1 - y / height) * (high - low);
        told.push(`${label} ${Number((log ? 10 ** value : value).toPrecision(3))}`);
      }
      const step = Math.round(Number(start) + at * (end - start)).toLocaleString("en");
      words.textContent = [step, ...told].join(" · ");
      words.setAttribute("x", at < 0.5 ? "100%" : "0");
      words.setAttribute("text-anchor", at < 0.5 ? "end" : "start");
      line.setAttribute("visibility", "visible");
      words.setAttribute("visibility", told.length ? "visible" : "hidden");
    }

    function hide() {
      for (const part of [line, words]) part.setAttribute("visibility", "hidden");
    }

    return { chart, show, hide };
  }

  // Charts on one axis are read together, at the step under the pointer.
  function readCharts() {
    let readers = null;
    const group = (chart) => `${chart.dataset.start} ${chart.dataset.end}`;
    for (const chart of document.querySelectorAll("svg.chart")) {
      chart.addEventListener("pointermove", (event) => {
        readers ??= [...document.querySelectorAll("svg.chart")].map(makeReader);
        const box = chart.getBoundingClientRect();
        const at = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
        for (const reader of readers) if (group(reader.chart) === group(chart)) reader.show(at);
      });
      chart.addEventListener("pointerleave", () => readers?.forEach((reader) => reader.hide()));
    }
  }

  filterEvents();
  readCharts();
  reveal();
  addEventListener("hashchange", reveal);

  // Closed parts are left out of a print; open them for it.
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details")) part.open = true;
  });
})();
