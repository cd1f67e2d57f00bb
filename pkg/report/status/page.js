// SPDX-License-Identifier: Apache-2.0
"use strict";
const get = id => document.getElementById(id), table = get("peers"), filter = get("filter"), state = get("state");
const columns = table ? [...table.querySelectorAll("th")] : [];
let rows, text;
function apply() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  let n = 0;
  for (const r of rows) {
    const ok = (!state.value || r.dataset.state === state.value) && words.every(w => text.get(r).includes(w));
    r.hidden = !ok; n += ok;
  }
  get("shown").textContent = n === rows.length ? n : n + " of " + rows.length;
}
const collator = new Intl.Collator("en", {numeric: true});
function sort() {
  const i = columns.findIndex(th => th.ariaSort);
  if (i < 0) return;
  const down = columns[i].ariaSort === "descending", key = r => r.cells[i].dataset.sort ?? r.cells[i].textContent;
  rows.sort((a, b) => (down ? -1 : 1) * collator.compare(key(a), key(b)));
  table.tBodies[0].append(...rows);
}
function read() {
  rows = [...table.tBodies[0].rows];
  text = new Map(rows.map(r => [r, r.textContent.toLowerCase()]));
  sort(); apply();
}
if (table) {
  filter.addEventListener("input", apply); state.addEventListener("change", apply);
  columns.forEach(th => th.firstElementChild.addEventListener("click", () => {
    const next = th.ariaSort === "ascending" ? "descending" : "ascending";
    columns.forEach(t => t.ariaSort = null);
    th.ariaSort = next;
    sort();
  }));
  read();
}
// The page shows the present state, or that there is none. Details that are open stay.
async function refresh() {
  if (document.hidden) return;
  try {
    const answer = await fetch(location.href);
    if (!answer.ok) throw new Error(await answer.text());
    const now = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const id of ["headline", "facts", "events"]) get(id).replaceWith(now.getElementById(id));
    if (table && !table.querySelector("details[open]")) { table.tBodies[0].replaceWith(now.querySelector("#peers tbody")); read(); }
  } catch (e) {
    get("headline").innerHTML = '<p class="state bad">no answer: what follows is old</p>';
  }
}
setInterval(refresh, 10000);
