// A disk: its last minutes with what happened beside them, its latencies, who uses it, its slow
// requests, its layers, and its cache.

import { link, site } from "./app.js";
import { HeatMap, TimeChart, curve } from "./charts.js";
import { named, problemList } from "./overview.js";
import { usageTable } from "./who.js";
import { Table, ask, bytes, element, failure, follow, number, percent, put, rate, repeat, setText, span, when } from "./parts.js";

const POINTS = 900;

function slowTable() {
  return new Table([
    { name: "When", key: "when", value: (row) => row.unix_time_ns, number: true, cell: (row, cell) => put(cell, `${row.id}`, () => when(row.unix_time_ns)) },
    { name: "Request", key: "operation", text: (row) => `${row.operation} ${bytes(row.length)}` },
    { name: "Took", key: "latency", number: true, value: (row) => row.latency_ns, text: (row) => span(row.latency_ns) },
    { name: "Of that", key: "of", text: (row) => why(row) },
    { name: "For", key: "for", wide: true, text: (row) => cause(row.facts) },
  ], { id: (row) => String(row.id), sort: "latency", rows: 10, empty: "No request of the last two minutes.", label: "Slow requests" });
}

/** Where the time of a slow request went. */
function why(row) {
  if (row.backend_ns === undefined) return "answered by a layer";
  const parts = [["layers", (row.layers_down_ns ?? 0) + (row.layers_up_ns ?? 0)], ["storage", row.backend_ns]];
  const text = parts.filter(([, ns]) => ns >= row.latency_ns / 100).map(([name, ns]) => `${name} ${span(ns)}`).join(", ");
  return row.ahead ? `${text}; ${row.ahead} ahead of it` : text;
}

/** What is known of the cause of a request. */
export function cause(facts = {}) {
  const owner = [facts.process && `${facts.process}${facts.process_id ? ` ${facts.process_id}` : ""}`, facts.cgroup].filter(Boolean).join(" in ");
  const what = facts.path || (facts.kind && facts.kind !== "unknown" ? facts.kind : "");
  return [what, owner && `by ${owner}`].filter(Boolean).join(" ") || "not known";
}

function layerList(status) {
  const rows = status.layers.map((layer) => element("li", {}, element("strong", {}, layer.kind ?? layer.name ?? ""), " ",
    element("span", { class: "quiet" }, Object.entries(layer).filter(([key, value]) => !["kind", "name", "instance"].includes(key) && typeof value !== "object")
      .map(([key, value]) => `${key} ${value}`).join(", "))));
  const backend = Object.entries(status.backend).filter(([, value]) => typeof value !== "object").map(([key, value]) => `${key} ${value}`).join(", ");
  return element("ol", { class: "layers" }, rows, element("li", {}, element("strong", {}, "store "), element("span", { class: "quiet" }, backend)));
}

function description(status) {
  const clients = status.frontends.map((front) => front.socket ?? front.export ?? "").filter(Boolean).join(", ");
  const guest = status.insight?.state === "attached" ? `Linux ${status.insight.release}` : status.insight?.reason || status.insight?.state;
  return [`${bytes(status.capacity_bytes)}${status.read_only ? ", read-only" : ""}`, status.vm && `machine ${status.vm}`, guest && `guest: ${guest}`, clients].filter(Boolean).join(" · ");
}

function cacheView(target, report, name) {
  const cache = report.caches.flatMap((one) => one.disks.map((disk) => ({ one, disk }))).find(({ disk }) => disk.name === name);
  if (!cache) return;
  const { one, disk } = cache;
  const parts = [element("h2", {}, "Cache"), element("p", {},
    `${one.name || "cache"}: ${disk.mode}, policy ${one.policy}, ${bytes(disk.used_bytes)} of ${bytes(one.size_bytes)} used. `,
    `${number(disk.counts.hits)} of ${number(disk.counts.reads)} reads were hits (${percent(disk.counts.reads ? disk.counts.hits / disk.counts.reads : null)}); saved ${span(Math.max(0, disk.counts.avoided_ns - disk.counts.hit_ns))}.`)];
  if (disk.curve?.points?.length) {
    parts.push(curve("Miss ratio by the size of the cache; the dashed line is its size now", disk.curve.points, { mark: disk.curve.size_bytes }));
  }
  target.replaceChildren(...parts);
}

export function disk(main, name) {
  const host = site.host;
  const history = { times: [], points: [], heat: [] };
  let marks = [];
  let first = 10;
  const about = element("p", { class: "quiet" });
  const moving = element("p");
  const problems = element("div");
  const rates = element("div", { class: "tiles" });
  const options = { marks: () => marks };
  const iops = new TimeChart("Requests a second", [
    { label: "reads", colour: "--read" }, { label: "writes", colour: "--write" }, { label: "flushes and others", colour: "--other" },
  ], "number", options);
  const throughput = new TimeChart("Bytes a second", [{ label: "read", colour: "--read" }, { label: "written", colour: "--write" }], "bytes", options);
  const waiting = new TimeChart("Requests that wait", [{ label: "in flight", colour: "--read" }, { label: "held by limits", colour: "--write" }], "number", options);
  const latency = new TimeChart("Latency", [{ label: "p50", colour: "--read" }, { label: "p99", colour: "--write" }, { label: "longest", colour: "--other" }], "span", { ...options, log: true });
  const heat = new HeatMap("Latencies of reads and writes.");
  const beside = element("ul", { class: "events" });
  const slow = slowTable();
  const layers = element("div");
  const figures = element("ul", { class: "figures" });
  const cache = element("section");
  const usage = usageTable(host, "container", { disk: name });
  const groupings = element("div", { class: "tabs", role: "group", "aria-label": "Group by" });
  for (const by of ["container", "process", "file", "kind", "database"]) {
    groupings.append(element("button", { type: "button", "aria-pressed": String(by === "container"), onclick: (event) => {
      for (const other of groupings.children) other.setAttribute("aria-pressed", String(other === event.currentTarget));
      usage.change(by, { disk: name });
    } }, by));
  }
  main.append(
    element("p", { class: "path" }, element("a", { href: link("disks") }, "Disks"), " › ", element("strong", {}, name)),
    about, moving, problems, rates,
    element("div", { class: "charts" }, iops.node, throughput.node, latency.node, waiting.node),
    heat.node,
    element("section", {}, element("h2", {}, "What happened beside it"), element("p", { class: "quiet" }, "The dashed lines in the charts."), beside),
    element("section", {}, element("div", { class: "bar" }, element("h2", {}, "Who uses it"), groupings), usage.node),
    element("section", {}, element("h2", {}, "Slowest requests of the last minutes"), slow.node),
    cache,
    element("section", {}, element("h2", {}, "Layers"), layers, figures));

  const tiles = ["reads", "writes", "read", "written", "p99", "hits"].map((key) => {
    const value = element("b", {}, "–");
    rates.append(element("div", { class: "tile" }, element("span", {}, key), value));
    return [key, value];
  });

  const endLive = follow(host, "disk", { name }, (message) => {
    if (message.error) { problems.replaceChildren(failure(message.error, message.remedy)); return; }
    if (message.history) {
      history.times = [...message.history.times_ms];
      history.points = message.history.points.map((values) => named(message, values));
      history.heat = [...message.history.heat];
    } else {
      history.times.push(message.unix_time_ns / 1e6);
      history.points.push(named(message, message.values));
      history.heat.push(message.heat);
      for (const list of [history.times, history.points, history.heat]) if (list.length > POINTS) list.shift();
    }
    first = message.heat_first;
    const now = named(message, message.values);
    const texts = { reads: `${number(now.reads)}/s`, writes: `${number(now.writes)}/s`, read: rate(now.read_bytes), written: rate(now.written_bytes), p99: span(now.p99), hits: percent(now.hits) };
    for (const [key, target] of tiles) setText(target, texts[key]);
    const of = (column) => history.points.map((point) => point[column]);
    iops.set(history.times, [of("reads"), of("writes"), of("others")]);
    throughput.set(history.times, [of("read_bytes"), of("written_bytes")]);
    latency.set(history.times, [of("p50"), of("p99"), of("max")]);
    waiting.set(history.times, [of("depth"), of("held")]);
    heat.set(history.times, history.heat, first);
    problems.replaceChildren(...(message.problems.length ? [problemList(message.problems)] : []));
    figures.replaceChildren(...message.layers.map((layer) => element("li", {}, element("strong", {}, layer.layer), " ",
      layer.figures.map((figure) => `${figure.name.replaceAll("_", " ").replace(/ total$/, "")} ${figure.value !== undefined ? number(figure.value) : `${number(figure.per_second)}/s`}`).join(", "))));
  });

  const path = encodeURIComponent(name);
  const endStatus = repeat(5, async (signal) => {
    const status = await ask(host, `disks/${path}`, signal);
    setText(about, description(status));
    layers.replaceChildren(layerList(status));
    const move = status.moving;
    setText(moving, move ? `Moving: ${move.state ?? ""} ${move.copied_bytes !== undefined ? `${bytes(move.copied_bytes)} of ${bytes(status.capacity_bytes)}` : ""}` : "");
  });
  const endSlow = repeat(4, async (signal) => {
    const report = await ask(host, `slow?disk=${path}&count=50`, signal);
    slow.set(report.disks.flatMap((one) => one.requests));
  });
  const endEvents = repeat(4, async (signal) => {
    const { events } = await ask(host, "events", signal);
    const begin = (history.times[0] ?? Date.now()) * 1e6;
    const found = events.filter((event) => event.level !== "debug" && (!event.disk || event.disk === name) && event.unix_time_ns >= begin);
    marks = found.map((event) => ({ ms: event.unix_time_ns / 1e6, text: event.message, level: event.level }));
    beside.replaceChildren(...(found.length ? found.slice(-20).reverse().map((event) => element("li", { class: event.level },
      when(event.unix_time_ns), " ", event.message)) : [element("li", { class: "quiet" }, "Nothing in this time.")]));
  });
  const endCache = repeat(10, async (signal) => cacheView(cache, await ask(host, `caches?disk=${path}&points=200`, signal), name));
  const drawn = [iops, throughput, latency, waiting, heat];
  return {
    end: () => { endLive(); endStatus(); endSlow(); endEvents(); endCache(); usage.end(); drawn.forEach((one) => one.end()); },
    restyle: () => drawn.forEach((one) => one.restyle()),
  };
}
