// Who causes the I/O: machines, their containers, processes and files.

import { link, site } from "./app.js";
import { Table, bytes, element, failure, follow, number, percent, put, rate, setText, span } from "./parts.js";

const GROUPINGS = [["vm", "Machines"], ["container", "Containers"], ["process", "Processes"], ["file", "Files"], ["kind", "Kinds"], ["database", "Databases"]];

function identity(row) {
  return [row.machine, row.disk, row.container, row.process, row.process_id, row.device, row.path, row.inode, row.kind, row.name, row.database_part, row.database_index].join("\u0000");
}

/** Where a line leads: from a machine to its containers, from a container to its files. */
function below(by, row, scope) {
  if (by === "vm") return link("who", [], { by: "container", vm: row.machine ?? row.name });
  if (by === "container" && row.container) return link("who", [], { ...scope, by: "file", vm: scope.vm ?? row.machine, container: row.container });
  return null;
}

function detail(by, row) {
  const parts = by === "file"
    ? [row.file_system, row.device, row.file_size_bytes && bytes(row.file_size_bytes), row.database_system, row.process, row.container]
    : by === "process" ? [row.container, row.hottest_file] : [row.hottest_file, by === "kind" ? row.container : null];
  return parts.filter(Boolean).join(" · ");
}

/** A table that follows the usage of a host. */
export function usageTable(host, by, scope) {
  const current = { by, scope, end: () => {} };
  const numbers = (name, key, text, value, title) => ({ name, key, number: true, title, value: (row) => value(row) ?? -1, text: (row) => text(value(row)) });
  const table = new Table([
    { name: "Name", key: "name", wide: true, value: (row) => row.name, cell: (row, cell) => put(cell, identity(row) + current.by, () => {
      const target = below(current.by, row, current.scope);
      return target ? element("a", { href: target }, row.name) : element("span", {}, row.name);
    }) },
    numbers("IOPS", "iops", number, (row) => row.per_second ?? row.requests),
    numbers("Bytes", "bytes", rate, (row) => row.bytes_per_second ?? row.bytes),
    numbers("Read", "read", rate, (row) => row.read?.bytes_per_second ?? row.read?.bytes ?? 0),
    numbers("Written", "written", rate, (row) => row.write?.bytes_per_second ?? row.write?.bytes ?? 0),
    numbers("Mean", "mean", span, (row) => row.latency_ns_mean, "mean latency"),
    numbers("p99", "p99", span, (row) => row.latency_ns_p99),
    numbers("Hits", "hits", percent, (row) => row.hit_ratio),
    { name: "", key: "detail", wide: true, text: (row) => detail(current.by, row) },
  ], { id: identity, sort: "bytes", rows: 50, empty: "No I/O in this interval, or no guest that is understood.", label: "Usage" });
  const words = element("p", { class: "quiet" });
  const node = element("div", {}, words, table.node);
  const change = (nextBy, nextScope, filter = "") => {
    current.end();
    Object.assign(current, { by: nextBy, scope: nextScope });
    current.end = follow(host, "usage", { by: nextBy, ...nextScope, filter }, (message) => {
      if (message.error) { words.replaceChildren(failure(message.error.message, message.error.remedy)); return; }
      const guests = message.guests.map((guest) => `${guest.vm || `guest ${guest.number}`}: ${guest.insight.state === "attached" ? `Linux ${guest.insight.release}` : guest.insight.reason || guest.insight.state}`);
      setText(words, `${message.seconds ? `of the last ${message.seconds.toFixed(0)} s` : "since counting began"}; ${guests.join("; ") || "no guest is connected"}`);
      table.set(message.usage);
    });
  };
  change(by, scope);
  return { node, change, end: () => current.end() };
}

export function who(main, parameters) {
  const by = parameters.get("by") ?? "container";
  const scope = Object.fromEntries(["vm", "container", "disk"].map((key) => [key, parameters.get(key)]).filter(([, value]) => value));
  const usage = usageTable(site.host, by, scope);
  const tabs = element("div", { class: "tabs" }, GROUPINGS.map(([name, text]) =>
    element("a", { href: link("who", [], { ...scope, by: name }), "aria-current": name === by ? "true" : null }, text)));
  const path = element("p", { class: "path" }, element("a", { href: link("who", [], { by: "vm" }) }, site.host),
    scope.vm ? [" › ", element("a", { href: link("who", [], { by: "container", vm: scope.vm }) }, scope.vm)] : null,
    scope.container ? [" › ", element("strong", {}, scope.container)] : null);
  let timer = 0;
  const filter = element("input", { type: "search", placeholder: "Filter", "aria-label": "Filter the lines", oninput: () => {
    clearTimeout(timer);
    timer = setTimeout(() => usage.change(by, scope, filter.value), 400);
  } });
  main.append(path, element("div", { class: "bar" }, tabs, filter), usage.node);
  return { end: () => { clearTimeout(timer); usage.end(); } };
}
