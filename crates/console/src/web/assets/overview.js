// All disks of a host: the totals of the last minutes, the problems, and a table.

import { link, onSample } from "./app.js";
import { TimeChart, spark } from "./charts.js";
import { Table, bytes, element, failure, number, percent, put, rate, setText, span, when } from "./parts.js";

const POINTS = 900;
const SPARK = 60;

/** The values of a message by the names of its columns. */
export const named = (message, values) =>
  Object.fromEntries(message.columns.map((name, index) => [name, values[index]]));

export const requests = (values) => (values.reads ?? 0) + (values.writes ?? 0) + (values.others ?? 0);
export const moved = (values) => (values.read_bytes ?? 0) + (values.written_bytes ?? 0);

/** What a list of problems shows. */
export function problemList(problems) {
  return element("ul", { class: "problems" }, problems.map((problem) => element("li", {},
    element("strong", {}, problem.disk ? `${problem.disk}: ` : "", problem.kind), " ", problem.message,
    problem.remedy ? element("span", { class: "quiet" }, ` → ${problem.remedy}`) : null,
    element("span", { class: "quiet" }, " since "), when(problem.since_unix_time_ns))));
}

function columns(sparks) {
  const column = (name, key, text, value, title) => ({
    name, key, number: true, title, value: (row) => value(row) ?? -1, text: (row) => text(value(row)),
  });
  return [
    { name: "Disk", key: "name", value: (row) => row.name, cell: (row, cell) =>
      put(cell, row.name, () => element("a", { href: link("disks", [row.name]) }, row.name)) },
    { name: "Machine", key: "vm", value: (row) => row.vm, text: (row) => row.vm || "–" },
    column("IOPS", "iops", number, (row) => requests(row.now), "requests a second"),
    column("Read", "read", rate, (row) => row.now.read_bytes),
    column("Written", "written", rate, (row) => row.now.written_bytes),
    column("p50", "p50", span, (row) => row.now.p50, "half of the reads and writes took less"),
    column("p99", "p99", span, (row) => row.now.p99, "99 of 100 reads and writes took less"),
    column("Depth", "depth", number, (row) => row.now.depth, "mean number of requests in flight"),
    column("Hits", "hits", percent, (row) => row.now.hits, "reads that the cache had wholly"),
    column("Dirty", "dirty", bytes, (row) => row.now.dirty, "data in the guest's memory that it has still to write"),
    { name: "Last minute", key: "spark", cell: (row, cell) => {
      put(cell, "spark", () => element("canvas", { class: "spark", role: "img", "aria-label": "requests of the last minute" }));
      spark(cell.firstChild, sparks.get(row.name) ?? []);
    } },
    { name: "State", key: "state", value: (row) => row.problems, cell: (row, cell) => {
      const key = `${row.problems}`;
      put(cell, key, () => (row.problems ? element("span", { class: "badge bad" }, `${row.problems} problem${row.problems > 1 ? "s" : ""}`)
        : element("span", { class: "badge good" }, "sound")));
    } },
  ];
}

export function overview(main) {
  const history = { times: [], points: [] };
  const sparks = new Map();
  const tiles = {};
  const tile = (key, name) => {
    tiles[key] = element("b", {}, "–");
    return element("div", { class: "tile" }, element("span", {}, name), tiles[key]);
  };
  const iops = new TimeChart("Requests a second", [
    { label: "reads", colour: "--read" }, { label: "writes", colour: "--write" }, { label: "flushes and others", colour: "--other" },
  ], "number");
  const bytesChart = new TimeChart("Bytes a second", [
    { label: "read", colour: "--read" }, { label: "written", colour: "--write" },
  ], "bytes");
  const latency = new TimeChart("Latency of reads and writes", [
    { label: "p50", colour: "--read" }, { label: "p99", colour: "--write" }, { label: "longest", colour: "--other" },
  ], "span", { log: true });
  const filter = element("input", { type: "search", placeholder: "Disk or machine", "aria-label": "Filter the disks", oninput: () => draw() });
  const table = new Table(columns(sparks), { id: (row) => row.name, sort: "iops", empty: "No disk.", label: "Disks" });
  const problems = element("section", { "aria-label": "Problems" });
  const lost = element("div");
  main.append(lost, problems,
    element("div", { class: "tiles" }, tile("iops", "Requests a second"), tile("read", "Read"), tile("written", "Written"),
      tile("p99", "p99"), tile("depth", "In flight"), tile("dirty", "Dirty in guests")),
    element("div", { class: "charts" }, iops.node, bytesChart.node, latency.node),
    element("section", {}, element("div", { class: "bar" }, element("h2", {}, "Disks"), filter), table.node));

  let rows = [];
  let last = "";
  const draw = () => {
    const text = filter.value.toLowerCase();
    table.set(rows.filter((row) => row.name.toLowerCase().includes(text) || row.vm.toLowerCase().includes(text)));
  };

  const end = onSample((message) => {
    lost.replaceChildren(...(message.error ? [failure(message.error, message.remedy)] : []));
    if (message.error) return;
    if (message.history) {
      history.times = [...message.history.times_ms];
      history.points = message.history.points.map((values) => named(message, values));
      for (const row of message.disks) sparks.set(row.name, [...(row.spark?.[0] ?? [])]);
    } else {
      history.times.push(message.unix_time_ns / 1e6);
      history.points.push(named(message, message.total));
      if (history.times.length > POINTS) { history.times.shift(); history.points.shift(); }
    }
    rows = message.disks.map((row) => ({ ...row, now: named(message, row.values) }));
    if (!message.history) {
      for (const row of rows) {
        const list = sparks.get(row.name) ?? [];
        list.push(requests(row.now));
        if (list.length > SPARK) list.shift();
        sparks.set(row.name, list);
      }
    }
    const total = named(message, message.total);
    setText(tiles.iops, number(requests(total)));
    setText(tiles.read, rate(total.read_bytes));
    setText(tiles.written, rate(total.written_bytes));
    setText(tiles.p99, span(total.p99));
    setText(tiles.depth, number(total.depth));
    setText(tiles.dirty, bytes(total.dirty));
    const of = (name) => history.points.map((point) => point[name]);
    iops.set(history.times, [of("reads"), of("writes"), of("others")]);
    bytesChart.set(history.times, [of("read_bytes"), of("written_bytes")]);
    latency.set(history.times, [of("p50"), of("p99"), of("max")]);
    const key = JSON.stringify(message.problems);
    if (key !== last) {
      last = key;
      problems.replaceChildren(...(message.problems.length ? [element("h2", {}, "Problems"), problemList(message.problems)] : []));
    }
    draw();
  });
  const charts = [iops, bytesChart, latency];
  return {
    end: () => { end(); charts.forEach((chart) => chart.end()); },
    restyle: () => { charts.forEach((chart) => chart.restyle()); draw(); },
  };
}
