// Parts of all views: elements, texts and tables. Every text becomes a text node, never markup.

/** Makes an element. Attributes that begin with "on" are listeners. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

/** Sets a text only if it differs, so that selections stay. */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

const UNITS = ["", "K", "M", "G", "T", "P"];

function scaled(value, base) {
  if (!Number.isFinite(value)) return "–";
  let unit = 0;
  while (Math.abs(value) >= base * 0.9995 && unit < UNITS.length - 1) { value /= base; unit += 1; }
  const size = Math.abs(value);
  const digits = Number.isInteger(value) || size >= 100 ? 0 : size >= 10 ? (unit ? 1 : 0) : size >= 1 ? (unit ? 2 : 1) : 2;
  return (digits ? value.toFixed(digits).replace(/\.?0+$/, "") : value.toFixed(0)) + UNITS[unit];
}

export const number = (value) => (value === null || value === undefined ? "–" : scaled(value, 1000));
export const bytes = (value) => (value === null || value === undefined ? "–" : scaled(value, 1024));
export const rate = (value) => (value === null || value === undefined ? "–" : `${bytes(value)}/s`);
export const percent = (value) => (value === null || value === undefined ? "–" : `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`);

/** A time span in nanoseconds. */
export function span(ns) {
  if (ns === null || ns === undefined) return "–";
  if (ns === 0) return "0";
  for (const [unit, size] of [["ns", 1], ["µs", 1e3], ["ms", 1e6]]) {
    if (ns < size * 1000) return `${(ns / size).toFixed(ns / size < 10 && size > 1 ? 1 : 0)} ${unit}`;
  }
  const seconds = ns / 1e9;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

const two = (value) => String(value).padStart(2, "0");

/** A local time; with its day if it is not today's. */
export function clock(unixNs) {
  const time = new Date(unixNs / 1e6);
  const day = time.toDateString() === new Date().toDateString()
    ? "" : `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())} `;
  return `${day}${two(time.getHours())}:${two(time.getMinutes())}:${two(time.getSeconds())}`;
}

/** A time as an element, with the instant in full behind it. */
export function when(unixNs) {
  const iso = new Date(unixNs / 1e6).toISOString();
  return element("time", { datetime: iso, title: iso }, clock(unixNs));
}

/** Fetches a document of a host. Throws an Error with the reason. */
export async function ask(host, path, signal) {
  const answer = await fetch(`/api/${encodeURIComponent(host)}/v1/${path}`, { signal });
  if (answer.status === 401) { location.assign("/login"); }
  const body = await answer.json();
  if (!answer.ok) throw new Error([body.error?.message, body.error?.remedy].filter(Boolean).join(" → "));
  return body;
}

/** Listens to an answer that goes on. Returns a function that ends it. */
export function follow(host, path, parameters, onmessage, onlost) {
  const query = new URLSearchParams(parameters).toString();
  const source = new EventSource(`/api/${encodeURIComponent(host)}/${path}${query ? "?" + query : ""}`);
  source.onmessage = (event) => onmessage(JSON.parse(event.data), source);
  source.onerror = () => onlost?.(source.readyState === EventSource.CLOSED);
  return () => source.close();
}

/** Calls a function now and then, until the returned function is called. */
export function repeat(seconds, work) {
  const control = new AbortController();
  let timer = 0;
  const round = async () => {
    if (!document.hidden) await work(control.signal).catch(() => {});
    if (!control.signal.aborted) timer = setTimeout(round, seconds * 1000);
  };
  round();
  return () => { control.abort(); clearTimeout(timer); };
}

/** A message about what failed, with what to do. */
export function failure(error, remedy) {
  return element("p", { class: "bad", role: "alert" }, error, remedy ? element("span", { class: "quiet" }, ` → ${remedy}`) : null);
}

/**
 * A table whose rows are kept: `columns` are { name, key, text, title, number, cell, value }. Rows
 * are told apart by `id(row)`. Headings sort.
 */
export class Table {
  constructor(columns, { id, sort, descending = true, rows = 100, empty = "Nothing.", label }) {
    Object.assign(this, { columns, id, sort, descending, shown: rows, empty, kept: new Map(), all: [] });
    this.head = element("tr");
    for (const column of columns) {
      const button = element("button", { type: "button", title: column.title, onclick: () => this.order(column) }, column.name);
      this.head.append(element("th", { scope: "col", class: column.number ? "number" : null, "data-key": column.key }, column.value ? button : column.name));
    }
    this.body = element("tbody");
    this.more = element("button", { type: "button", class: "more", hidden: true, onclick: () => { this.shown *= 4; this.draw(); } });
    this.node = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label ?? "Table" },
      element("table", {}, element("thead", {}, this.head), this.body), this.more);
  }

  order(column) {
    if (this.sort === column.key) this.descending = !this.descending;
    else { this.sort = column.key; this.descending = Boolean(column.number); }
    this.draw();
  }

  set(rows) { this.all = rows; this.draw(); }

  draw() {
    const by = this.columns.find((column) => column.key === this.sort);
    const sign = this.descending ? -1 : 1;
    const rows = by?.value ? [...this.all].sort((one, other) => {
      const [a, b] = [by.value(one), by.value(other)];
      return (a < b ? -1 : a > b ? 1 : 0) * sign || (this.id(one) < this.id(other) ? -1 : 1);
    }) : this.all;
    for (const cell of this.head.children) {
      const isBy = cell.dataset.key === this.sort;
      if (isBy) cell.setAttribute("aria-sort", this.descending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    const visible = rows.slice(0, this.shown);
    const before = this.kept;
    this.kept = new Map();
    let place = this.body.firstChild;
    for (const row of visible) {
      const id = this.id(row);
      const line = before.get(id) ?? this.line();
      before.delete(id);
      this.kept.set(id, line);
      this.columns.forEach((column, index) => {
        const cell = line.children[index];
        if (column.cell) column.cell(row, cell);
        else setText(cell, column.text(row));
      });
      if (line !== place) this.body.insertBefore(line, place);
      else place = place.nextSibling;
    }
    for (const line of before.values()) line.remove();
    this.none?.remove();
    if (visible.length === 0) {
      this.none = element("tr", {}, element("td", { class: "quiet", colspan: this.columns.length }, this.empty));
      this.body.append(this.none);
    }
    this.more.hidden = rows.length <= this.shown;
    setText(this.more, `${rows.length - visible.length} more`);
  }

  line() {
    const cells = this.columns.map((column) => element("td", { class: [column.number ? "number" : "", column.wide ? "wide" : ""].join(" ").trim() || null }));
    return element("tr", {}, cells);
  }
}

/** Puts one child into an element, unless it has an equal one already. */
export function put(target, key, make) {
  if (target.dataset.shown === key) return;
  target.dataset.shown = key;
  target.replaceChildren(make());
}
