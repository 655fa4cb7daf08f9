// Filters the table of events. Everything on the page can be read without it.
(() => {
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

  // Closed parts are left out of a print; open them for it.
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details")) part.open = true;
  });
})();
