/* A field that filters the rows of the table after it: <div class="filter" data-rows="architectures">. */

for (const box of document.querySelectorAll(".filter[data-rows]")) {
  const table = document.querySelectorAll(".md-content table");
  const rows = [...table].find(t => box.compareDocumentPosition(t) & 4).tBodies[0].rows;
  const field = document.createElement("input");
  const count = document.createElement("span");
  field.type = "search";
  field.placeholder = `Filter ${rows.length} ${box.dataset.rows}`;
  field.setAttribute("aria-label", field.placeholder);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of rows)
      row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
    const shown = [...rows].filter(row => !row.hidden).length;
    count.textContent = field.value ? `${shown} of ${rows.length}` : "";
  });
  box.append(field, count);
}
