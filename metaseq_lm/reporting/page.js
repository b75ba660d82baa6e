"use strict";
// Sorts and filters tables, shows values of figures, switches their series. What a reader chose is
// in the state of the history, which outlasts a reload. Texts are only ever set as text.
(() => {
  const state = (history.state && history.state.page) || {};
  const of = (id) => (state[id] = state[id] || {});
  const save = () => {
    try { history.replaceState({ page: state }, ""); } catch { /* nothing is remembered, then */ }
  };
  const make = (tag, attributes = {}, text = "") => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text) element.textContent = text;
    return element;
  };

  // ------------------------------------------------------------ tables
  const collator = new Intl.Collator(undefined, { numeric: true, sensitivity: "base" });
  const FEWEST = 6; // rows of a table with a filter

  function sortable(table) {
    const body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows[0].cells];
    const chosen = of(table.id);
    const key = (row, column) => {
      const { dataset, textContent } = row.cells[column];
      if ("absent" in dataset) return null;
      return dataset.value === undefined ? textContent.trim() : Number(dataset.value);
    };
    function compare(a, b) { // numbers by size, before texts
      if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
      return typeof a === "number" ? a - b : collator.compare(a, b);
    }
    function sort() {
      const { column, direction } = chosen;
      heads.forEach((head, i) => head.setAttribute("aria-sort", i === column ? direction : "none"));
      const sign = direction === "descending" ? -1 : 1;
      const sorted = rows.map((row, i) => ({ row, i, key: column === undefined ? i : key(row, column) }));
      // What has no value stands last in either direction.
      sorted.sort((a, b) => (a.key === null) - (b.key === null)
        || (a.key !== null && sign * compare(a.key, b.key)) || a.i - b.i);
      body.append(...sorted.map((item) => item.row));
      const most = Number(table.dataset.most) || rows.length;
      sorted.forEach((item, i) => item.row.classList.toggle("more", i >= most));
    }
    heads.forEach((head, column) => {
      const button = make("button", { type: "button", id: `${table.id}-${column}` }, head.textContent);
      head.replaceChildren(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const next = { none: "ascending", ascending: "descending", descending: "none" };
        chosen.direction = next[head.getAttribute("aria-sort")];
        chosen.column = chosen.direction === "none" ? undefined : column;
        sort();
        save();
      });
    });
    if (chosen.column !== undefined) sort();
    if (rows.length >= FEWEST) filtered(table, rows, chosen);
  }

  function filtered(table, rows, chosen) {
    const name = table.dataset.name || "rows";
    const input = make("input", { type: "search", id: `${table.id}-filter`, "aria-label": `Filter ${name}`,
      placeholder: "filter: words, -words", autocomplete: "off", spellcheck: "false" });
    const count = make("span", { role: "status" });
    const tools = make("div", { class: "tools" });
    tools.append(input, count);
    const box = table.closest(".wide"), fold = box.previousElementSibling;
    const folds = fold && fold.matches("details.rows");
    (folds ? fold : box).before(tools);
    const texts = rows.map((row) => [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase());
    function filter() {
      const words = input.value.toLowerCase().split(/\s+/).filter((word) => word && word !== "-");
      let shown = 0;
      if (folds && words.length) fold.open = true;
      rows.forEach((row, i) => {
        row.hidden = !words.every((word) =>
          /^-\D/.test(word) ? !texts[i].includes(word.slice(1)) : texts[i].includes(word));
        shown += !row.hidden;
      });
      tools.classList.toggle("filtered", shown < rows.length);
      count.textContent = shown === rows.length ? `${shown} rows` : `${shown} of ${rows.length} rows`;
    }
    input.value = chosen.filter || "";
    input.addEventListener("input", () => { chosen.filter = input.value; filter(); save(); });
    filter();
  }

  // ------------------------------------------------------------ figures
  const NEAR = 16; // a mark at most so far from the pointer shows its value, in units of the figure

  function readable(figure) {
    const svg = figure.querySelector(".chart"), box = figure.querySelector(".scroll");
    const marks = [...svg.querySelectorAll(".mark")].map((circle) => {
      const text = circle.querySelector("title").textContent;
      circle.querySelector("title").remove(); // else the browser shows it as well
      const { series, panel } = circle.dataset;
      return { text, series, panel, x: circle.cx.baseVal.value, y: circle.cy.baseVal.value };
    });
    const tip = make("div", { class: "tip", role: "status" });
    tip.hidden = true;
    figure.append(tip);
    const ring = document.createElementNS(svg.namespaceURI, "circle");
    ring.setAttribute("class", "ring");
    ring.setAttribute("r", 5);
    const chosen = of(figure.id);
    chosen.off = chosen.off || [];
    const visible = () => marks.filter((mark) => !chosen.off.includes(mark.series));
    let current = null;

    function show(mark, scrolls = false) {
      current = mark;
      tip.hidden = !mark;
      if (!mark) return ring.remove();
      ring.setAttribute("cx", mark.x);
      ring.setAttribute("cy", mark.y);
      svg.append(ring);
      if (scrolls) ring.scrollIntoView({ block: "nearest", inline: "nearest" });
      tip.textContent = mark.text;
      const outer = figure.getBoundingClientRect(), at = ring.getBoundingClientRect();
      const left = Math.min(at.right + 6 - outer.left, outer.width - tip.offsetWidth);
      tip.style.left = `${Math.max(0, left)}px`;
      tip.style.top = `${Math.max(0, at.top - outer.top - tip.offsetHeight - 4)}px`;
    }
    function nearest(event) {
      const frame = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
      const x = (event.clientX - frame.left) * view.width / frame.width;
      const y = (event.clientY - frame.top) * view.height / frame.height;
      let best = null, least = NEAR;
      for (const mark of visible()) {
        const distance = Math.hypot(mark.x - x, mark.y - y);
        if (distance < least) [best, least] = [mark, distance];
      }
      return best;
    }
    svg.addEventListener("pointermove", (event) => show(nearest(event)));
    svg.addEventListener("pointerdown", (event) => show(nearest(event)));
    svg.addEventListener("pointerleave", () => show(null));

    const reach = (mark) => show(mark, true);
    // Left and right along what is drawn from left to right, up and down to what is above and below.
    function step(event) {
      const shown = visible();
      if (event.key === "Escape") return show(null);
      if (!/^(Arrow(Left|Right|Up|Down)|Home|End)$/.test(event.key) || !shown.length) return;
      event.preventDefault();
      if (!current || !shown.includes(current)) return reach(shown[0]);
      if (event.key === "Home") return reach(shown[0]);
      if (event.key === "End") return reach(shown[shown.length - 1]);
      const along = /Left|Right/.test(event.key), sign = /Right|Down/.test(event.key) ? 1 : -1;
      if (along) {
        const same = shown.filter((mark) => mark.series === current.series);
        return reach(same[same.indexOf(current) + sign] || current);
      }
      const others = shown.filter((mark) => mark.panel === current.panel && sign * (mark.y - current.y) > 0.01);
      const far = (mark) => Math.abs(mark.y - current.y) + 3 * Math.abs(mark.x - current.x);
      reach(others.length ? others.reduce((a, b) => (far(a) <= far(b) ? a : b)) : current);
    }
    box.addEventListener("keydown", step);
    box.addEventListener("focus", () => {
      // A tap gives the focus, too, and must not move what was tapped.
      if (!current && visible().length) show(visible()[0], box.matches(":focus-visible"));
    });
    box.addEventListener("blur", () => show(null));
    switched(figure, svg, chosen, () => show(null));
  }

  function switched(figure, svg, chosen, changed) {
    const items = [...figure.querySelectorAll(".legend li[data-series]")];
    const buttons = new Map();
    function apply() {
      for (const [series, button] of buttons) {
        const off = chosen.off.includes(series);
        button.setAttribute("aria-pressed", String(!off));
        for (const part of svg.querySelectorAll(`[data-series="${series}"]`)) {
          part.classList.toggle("off", off);
        }
      }
      changed();
      save();
    }
    for (const item of items) {
      const { series } = item.dataset, button = make("button", { type: "button" });
      button.append(...item.childNodes);
      item.append(button);
      buttons.set(series, button);
      button.addEventListener("click", () => {
        const { off } = chosen;
        chosen.off = off.includes(series) ? off.filter((other) => other !== series) : [...off, series];
        apply();
      });
    }
    if (items.length > 2) {
      for (const [text, off] of [["none", () => [...buttons.keys()]], ["all", () => []]]) {
        const item = make("li"), button = make("button", { type: "button", class: "all" }, text);
        button.addEventListener("click", () => { chosen.off = off(); apply(); });
        item.append(button);
        figure.querySelector(".legend").prepend(item);
      }
    }
    if (chosen.off.length) apply();
  }

  // ------------------------------------------------------------ reload of a page that is watched
  function watched(seconds) {
    const focus = state.focus && document.getElementById(state.focus.id);
    if (focus) {
      focus.focus({ preventScroll: true });
      if (focus.setSelectionRange) focus.setSelectionRange(state.focus.at, state.focus.at);
    }
    const again = () => {
      if (document.hidden || !getSelection().isCollapsed) return void setTimeout(again, 1000);
      const active = document.activeElement;
      state.focus = active && active.id ? { id: active.id, at: active.selectionStart || 0 } : null;
      save();
      location.reload();
    };
    setTimeout(again, 1000 * seconds);
  }

  document.querySelectorAll("table[id]").forEach(sortable);
  document.querySelectorAll("figure[id]").forEach(readable);
  for (const details of document.querySelectorAll("details[id]")) {
    if (of(details.id).open !== undefined) details.open = state[details.id].open;
    details.addEventListener("toggle", () => { of(details.id).open = details.open; save(); });
  }
  const seconds = Number(document.documentElement.dataset.watch);
  if (seconds) watched(seconds);
})();
