// Queries in CQL: typed, run over live events, charted, and kept in this browser; and the daemon's
// own.

import { site } from "./app.js";
import { TimeChart } from "./charts.js";
import { Table, ask, element, follow, number, repeat, setText } from "./parts.js";

const EXAMPLES = [
  ["Requests of each disk in a second", "select VDisk, count(*) as requests from IOstream [range 1 second slide 1 second] where Type = 'Q' group by VDisk"],
  ["Writes as they come, with their files", "select VDisk, Size * 512 as bytes, Path, Cgroup from IOstream where Type = 'Q' and IOOp = 'w'"],
  ["Bytes of each container in five seconds", "select Cgroup, sum(Size) * 512 as bytes from IOstream [range 5 seconds slide 5 seconds] where Type = 'Q' group by Cgroup"],
];
const ROWS = 500;
const POINTS = 600;

function kept() {
  try { return JSON.parse(localStorage.getItem("queries") ?? "[]").filter((text) => typeof text === "string"); } catch { return []; }
}

function keep(list) { localStorage.setItem("queries", JSON.stringify(list.slice(0, 50))); }

export function query(main) {
  const host = site.host;
  let end = () => {};
  let chart = null;
  let rows = [];
  let series = new Map();
  let dirty = false;
  const text = element("textarea", { rows: 4, spellcheck: "false", "aria-label": "A query in CQL" }, EXAMPLES[0][1]);
  const run = element("button", { type: "button", class: "main", onclick: () => begin() }, "Run");
  const stop = element("button", { type: "button", disabled: true, onclick: () => finish("Stopped.") }, "Stop");
  const save = element("button", { type: "button", onclick: () => { keep([text.value, ...kept().filter((other) => other !== text.value)]); list(); } }, "Keep");
  const words = element("p", { class: "quiet", role: "status" });
  const plot = element("div");
  const result = element("div");
  const saved = element("ul", { class: "queries" });
  const own = element("div");
  text.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) begin(); });

  const list = () => {
    const use = (query) => element("button", { type: "button", class: "query", onclick: () => { text.value = query; text.focus(); } }, query);
    const remove = (query) => element("button", { type: "button", title: "Forget it", "aria-label": "Forget this query", onclick: () => { keep(kept().filter((other) => other !== query)); list(); } }, "×");
    saved.replaceChildren(
      ...kept().map((query) => element("li", {}, use(query), remove(query))),
      ...EXAMPLES.map(([name, query]) => element("li", {}, element("span", { class: "quiet" }, `${name} `), use(query))));
  };

  const finish = (message) => {
    end();
    end = () => {};
    run.disabled = false;
    stop.disabled = true;
    setText(words, message);
  };

  const begin = () => {
    finish("");
    rows = [];
    series = new Map();
    chart?.end();
    chart = null;
    plot.replaceChildren();
    result.replaceChildren();
    run.disabled = true;
    stop.disabled = false;
    setText(words, "Running: rows come as the disks work.");
    end = follow(host, "query", { text: text.value }, (message, source) => {
      if (message.ended) {
        source.close();
        finish("");
        if (message.remarks) result.prepend(element("pre", { class: "bad" }, message.remarks));
        else setText(words, "Ended.");
        return;
      }
      rows.push({ row: message, number: rows.length, at: Date.now() });
      if (rows.length > ROWS) rows = rows.slice(-ROWS);
      add(message);
      dirty = true;
    }, (isClosed) => finish(isClosed ? "Too many queries run, or the page must be opened again." : "The connection was lost."));
  };

  // The last number of a row is charted, for each text in it.
  const add = (row) => {
    if (row["@sign"] === "-") return;
    const entries = Object.entries(row).filter(([key]) => !key.startsWith("@"));
    const numbers = entries.filter(([, value]) => typeof value === "number");
    if (!numbers.length) return;
    const name = entries.filter(([, value]) => typeof value === "string").map(([, value]) => value).join(" ") || numbers.at(-1)[0];
    if (!series.has(name) && series.size >= 8) return;
    const points = series.get(name) ?? [];
    points.push([Date.now(), numbers.at(-1)[1]]);
    if (points.length > POINTS) points.shift();
    series.set(name, points);
  };

  const draw = () => {
    if (!dirty) return;
    dirty = false;
    const keys = [...new Set(rows.flatMap(({ row }) => Object.keys(row)))].slice(0, 24);
    const key = keys.join("\u0000");
    if (result.dataset.keys !== key || !result.table) {
      result.dataset.keys = key;
      result.table = new Table(keys.map((name) => ({ name, key: name, wide: true,
        text: ({ row }) => (row[name] === null || row[name] === undefined ? "" : typeof row[name] === "object" ? JSON.stringify(row[name]) : String(row[name])) })),
      { id: ({ number: at }) => String(at), rows: 100, label: "Rows" });
      result.replaceChildren(result.table.node);
    }
    result.table.set([...rows].reverse());
    setText(words, `${number(rows.length)}${rows.length === ROWS ? " last" : ""} rows`);
    if (!series.size) return;
    const names = [...series.keys()];
    if (!chart || chart.names !== names.join("\u0000")) {
      chart?.end();
      chart = new TimeChart("The last number of each row", names.map((label, index) => ({ label, colour: `--series-${index + 1}` })), "plain");
      chart.names = names.join("\u0000");
      plot.replaceChildren(chart.node);
    }
    const times = [...new Set([...series.values()].flatMap((points) => points.map(([at]) => at)))].sort((one, other) => one - other);
    chart.set(times, names.map((name) => {
      const of = new Map(series.get(name));
      return times.map((at) => of.get(at) ?? null);
    }));
  };
  const timer = setInterval(draw, 500);

  const endOwn = repeat(5, async (signal) => {
    const { queries } = await ask(host, "queries", signal);
    own.replaceChildren(...(queries.length ? [element("ul", {}, queries.map((one) => element("li", {}, element("strong", {}, one.name), ` ${one.state}: `, element("code", {}, one.text))))]
      : [element("p", { class: "quiet" }, "The daemon keeps none.")]));
  });

  main.append(element("h2", {}, "Query"), text, element("div", { class: "bar" }, run, stop, save, words), plot, result,
    element("h2", {}, "Kept here, and examples"), saved, element("h2", {}, "The daemon's own"), own);
  list();
  return { end: () => { end(); clearInterval(timer); endOwn(); chart?.end(); }, restyle: () => chart?.restyle() };
}
