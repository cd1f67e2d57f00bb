// SPDX-License-Identifier: Apache-2.0
"use strict";
const body = document.querySelector("#peers tbody"), rows = [...body.rows];
const text = new Map(rows.map(r => [r, r.textContent.toLowerCase()]));
const filter = document.getElementById("filter"), state = document.getElementById("state"), shown = document.getElementById("shown");
function apply() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  let n = 0;
  for (const r of rows) {
    const ok = (!state.value || r.dataset.state === state.value) && words.every(w => text.get(r).includes(w));
    r.hidden = !ok; n += ok;
  }
  shown.textContent = n === rows.length ? n : n + " of " + rows.length;
}
filter.addEventListener("input", apply); state.addEventListener("change", apply);
const collator = new Intl.Collator("en", {numeric: true});
document.querySelectorAll("#peers th").forEach((th, i) => th.firstElementChild.addEventListener("click", () => {
  const down = th.getAttribute("aria-sort") === "ascending";
  document.querySelectorAll("#peers th").forEach(t => t.removeAttribute("aria-sort"));
  th.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = r => r.cells[i].dataset.sort ?? r.cells[i].textContent;
  rows.sort((a, b) => (down ? -1 : 1) * collator.compare(key(a), key(b)));
  body.append(...rows);
}));
