// Views of a host besides its disks: guests, pools, devices, events.

import { link, site } from "./app.js";
import { Table, ask, bytes, element, failure, number, percent, put, repeat, setText, span, when } from "./parts.js";

/** A view that asks for something now and then; `draw` gets what came. */
function polled(main, seconds, work) {
  const lost = element("div");
  main.prepend(lost);
  const end = repeat(seconds, async (signal) => {
    try {
      await work(signal);
      lost.replaceChildren();
    } catch (error) {
      if (!signal.aborted) lost.replaceChildren(failure(error.message));
    }
  });
  return { end };
}

export function guests(main) {
  const host = site.host;
  const list = new Table([
    { name: "Machine", key: "vm", value: (row) => row.vm, text: (row) => row.vm || `guest ${row.number}` },
    { name: "Kernel", key: "kernel", wide: true, text: (row) => (row.insight.state === "attached" ? `Linux ${row.insight.release}` : `${row.insight.state}: ${row.insight.reason}`) },
    { name: "Memory", key: "memory", number: true, value: (row) => row.memory_bytes, text: (row) => bytes(row.memory_bytes) },
    { name: "Free", key: "free", number: true, value: (row) => row.counters?.free_bytes ?? -1, text: (row) => bytes(row.counters?.free_bytes) },
    { name: "File cache", key: "file", number: true, value: (row) => row.counters?.file_bytes ?? -1, text: (row) => bytes(row.counters?.file_bytes) },
    { name: "Away", key: "away", title: "what a pager has taken out of the host's memory", number: true, value: (row) => row.away ?? -1, text: (row) => bytes(row.away) },
    { name: "Dirty", key: "dirty", number: true, value: (row) => row.counters?.dirty_bytes ?? -1, text: (row) => bytes(row.counters?.dirty_bytes) },
    { name: "Written back", key: "writeback", number: true, value: (row) => row.counters?.writeback_bytes ?? -1, text: (row) => bytes(row.counters?.writeback_bytes) },
    { name: "Disks", key: "disks", wide: true, cell: (row, cell) => put(cell, row.disks.join(), () => element("span", {}, row.disks.flatMap((disk, index) =>
      [index ? ", " : "", element("a", { href: link("disks", [disk]) }, disk)]))) },
  ], { id: (row) => String(row.number), sort: "vm", descending: false, empty: "No guest is connected.", label: "Guests" });
  const dirty = new Table([
    { name: "File", key: "path", wide: true, text: (row) => row.path || row.kind },
    { name: "Machine", key: "vm", text: (row) => row.vm },
    { name: "Dirty", key: "bytes", number: true, value: (row) => row.dirty_bytes, text: (row) => bytes(row.dirty_bytes) },
    { name: "Device", key: "device", text: (row) => [row.device, row.file_system].filter(Boolean).join(" · ") },
  ], { id: (row) => `${row.vm}\u0000${row.device}\u0000${row.inode}\u0000${row.path}`, sort: "bytes", rows: 20, empty: "No dirty data.", label: "Dirty files" });
  const processes = new Table([
    { name: "Process", key: "command", wide: true, value: (row) => row.command, text: (row) => `${row.command} ${row.process_id}` },
    { name: "Machine", key: "vm", text: (row) => row.vm },
    { name: "Control group", key: "cgroup", wide: true, value: (row) => row.cgroup, text: (row) => row.cgroup },
    { name: "Read", key: "read", number: true, value: (row) => row.read_bytes, text: (row) => bytes(row.read_bytes) },
    { name: "Dirtied", key: "dirtied", number: true, value: (row) => row.dirtied_bytes, text: (row) => bytes(row.dirtied_bytes) },
    { name: "Waits in", key: "calls", wide: true, text: (row) => row.calls.map((call) => `${call.call} ${call.file?.path ?? ""}`).join(", ") },
  ], { id: (row) => `${row.vm}\u0000${row.process_id}\u0000${row.start_ns}`, sort: "dirtied", rows: 30, empty: "No guest that is understood.", label: "Processes" });
  const swapped = new Table([
    { name: "Machine", key: "vm", value: (row) => row.vm, text: (row) => row.vm || row.disks.join(", ") },
    { name: "Memory", key: "memory", number: true, value: (row) => row.memory_bytes, text: (row) => bytes(row.memory_bytes) },
    { name: "In memory", key: "resident", number: true, value: (row) => row.resident_bytes ?? -1, text: (row) => bytes(row.resident_bytes) },
    { name: "Swapped out", key: "swapped", number: true, value: (row) => row.swapped_bytes ?? -1, text: (row) => bytes(row.swapped_bytes) },
    { name: "Stale reads", key: "stale", title: "came in only to be overwritten by a read", number: true, value: (row) => row.stale ?? -1, text: (row) => bytes(row.stale) },
    { name: "Double paging", key: "double", title: "came in only to be written to a disk", number: true, value: (row) => row.double ?? -1, text: (row) => bytes(row.double) },
    { name: "Silent writes", key: "silent", title: "were written to swap although a disk has them, estimated", number: true, value: (row) => row.silent ?? -1, text: (row) => bytes(row.silent) },
    { name: "Why it is not known", key: "unknown", wide: true, text: (row) => row.unknown },
  ], { id: (row) => `${row.vm}\u0000${row.disks.join()}`, sort: "swapped", empty: "No guest is on a vhost-user disk.", label: "Swapped memory" });
  const pagers = new Table([
    { name: "Machine", key: "vm", value: (row) => row.vm, text: (row) => row.vm || row.disks.join(", ") },
    { name: "Pager", key: "state", value: (row) => row.pager.state, text: (row) => (row.pager.state === "silent" ? `silent for ${span(row.pager.age_ns)}` : row.pager.state) },
    { name: "Limit", key: "limit", number: true, value: (row) => row.pager.limit_bytes, text: (row) => (row.pager.limit_bytes ? bytes(row.pager.limit_bytes) : "none") },
    { name: "In memory", key: "resident", number: true, value: (row) => row.pager.resident_bytes, text: (row) => bytes(row.pager.resident_bytes) },
    { name: "Away", key: "away", number: true, value: (row) => row.pager.away_bytes, text: (row) => bytes(row.pager.away_bytes) },
    { name: "Takes", key: "store", title: "memory of the host that holds what is away", number: true, value: (row) => row.pager.store_bytes, text: (row) => bytes(row.pager.store_bytes) },
    { name: "Swap file", key: "file", title: "what of it is in a file on a disk", number: true, value: (row) => row.pager.file_bytes, text: (row) => (row.pager.file_bytes ? bytes(row.pager.file_bytes) : "") },
    { name: "Pages out", key: "evicted", title: "pages that have left", number: true, value: (row) => row.pager.evicted_pages, text: (row) => number(row.pager.evicted_pages) },
    { name: "Pages in", key: "brought", title: "pages that have come back", number: true, value: (row) => row.pager.brought_pages, text: (row) => number(row.pager.brought_pages) },
    { name: "P99", key: "p99", title: "time of the faults of pages that were away", number: true, value: (row) => row.pager.fault_p99_ns, text: (row) => span(row.pager.fault_p99_ns) },
    { name: "Why no page leaves", key: "hold", wide: true, text: (row) => ({ none: "", looking: "the pager is looking", obstacle: "somebody is not ready", retreat: "all pages come in" })[row.pager.hold] ?? row.pager.hold },
  ], { id: (row) => `${row.vm}\u0000${row.pager.process}`, sort: "away", empty: "No guest has a pager.", label: "Pagers" });
  main.append(element("h2", {}, "Guests"), list.node, element("h2", {}, "Files with the most dirty data"), dirty.node,
    element("h2", {}, "Processes, since each began"), processes.node,
    element("h2", {}, "Memory that the host has swapped out"), swapped.node,
    element("h2", {}, "Memory that pagers have taken away"), pagers.node);
  const name = (guest) => guest.vm || `guest ${guest.number}`;
  return polled(main, 3, async (signal) => {
    // Without the count of pages, which takes long, and without which the guests are shown all the same.
    const known = await ask(host, "pager?pagers=true", signal).catch(() => ({ guests: [] }));
    const paged = known.guests.filter((guest) => guest.pager);
    pagers.set(paged);
    const of = (guest) => paged.find((other) => other.pager.state !== "detached" && guest.disks.some((disk) => other.disks.includes(disk)));
    list.set((await ask(host, "guests", signal)).guests.map((guest) => ({ ...guest, away: of(guest)?.pager.away_bytes })));
    const pages = await ask(host, "dirty?files=100", signal);
    dirty.set(pages.guests.flatMap((guest) => (guest.files?.files ?? []).map((file) => ({ ...file, vm: name(guest) }))));
    const all = await ask(host, "processes", signal);
    processes.set(all.guests.flatMap((guest) => guest.processes.filter((process) => !process.is_kernel).map((process) => ({ ...process, vm: name(guest) }))));
    const sum = (guest, of) => (guest.watched.length ? guest.watched.reduce((all, disk) => all + of(disk), 0) : undefined);
    const memory = await ask(host, "pager", signal);
    swapped.set(memory.guests.map((guest) => ({ ...guest, stale: sum(guest, (disk) => disk.stale_read_bytes),
      double: sum(guest, (disk) => disk.double_paging_bytes), silent: sum(guest, (disk) => disk.silent_writes.bytes) })));
  });
}

/** What the verification of a pool has found. */
function verified(scrub) {
  if (!scrub) return element("p", { class: "quiet" }, "Not verified since the daemon knows it: `fathom store check` does that.");
  const damaged = scrub.damaged_blocks + scrub.damaged_pages;
  const found = damaged ? `${number(damaged)} blocks and pages are damaged` : "nothing is damaged";
  const state = { running: "Being verified", complete: "Verified", ended: "Not verified to the end", interrupted: "Not verified to the end", failed: "The verification failed" };
  const list = scrub.damages.map((part) => element("li", {}, [part.volume ? `${part.volume}${part.snapshot ? `@${part.snapshot}` : ""}, byte ${part.offset}, ${bytes(part.length)}` : "maps", part.kind, part.file].filter(Boolean).join(": ")));
  return element("div", {}, element("p", { class: damaged ? "bad" : null }, `${state[scrub.phase] ?? scrub.phase}`,
    scrub.ended_s ? [" ", when(scrub.ended_s * 1e9)] : "", `: ${found}. ${number(scrub.verified_blocks)} blocks were read.`), list.length ? element("ul", {}, list) : null);
}

/** What deletions would free, as of the last search. */
function reclaimed(reclaim) {
  if (!reclaim) return element("p", { class: "quiet" }, "What deletions would free is not known: `fathom store reclaimable` finds it.");
  const table = new Table([
    { name: "Volume", key: "volume", value: (row) => row.volume ?? "", text: (row) => row.volume ?? "(deleted)" },
    { name: "Snapshot", key: "snapshot", value: (row) => row.snapshot ?? "", text: (row) => row.snapshot ?? "" },
    { name: "Deleting frees", key: "bytes", number: true, value: (row) => row.bytes, text: (row) => bytes(row.bytes) },
  ], { id: (row) => `${row.volume ?? ""}@${row.snapshot ?? ""}`, sort: "bytes", rows: 20, empty: reclaim.running ? "Being found." : (reclaim.error ?? "Nothing."), label: "What deletions would free" });
  table.set(reclaim.deletions);
  return element("div", {}, element("h3", {}, "What a deletion alone would free", reclaim.ended_s ? [", as of ", when(reclaim.ended_s * 1e9)] : ""), table.node);
}

function poolView(pool) {
  const used = pool.bytes ? pool.used_bytes / pool.bytes : 0;
  const snapshots = new Table([
    { name: "Volume", key: "volume", value: (row) => row.volume, text: (row) => row.volume },
    { name: "Snapshot", key: "name", value: (row) => row.name, text: (row) => row.name },
    { name: "Taken", key: "time", number: true, value: (row) => row.time_s, cell: (row, cell) => put(cell, `${row.time_s}`, () => (row.time_s ? when(row.time_s * 1e9) : element("span", {}, "–"))) },
    { name: "Size", key: "size", number: true, value: (row) => row.size_bytes, text: (row) => bytes(row.size_bytes) },
    { name: "Held", key: "hold", wide: true, text: (row) => row.hold ?? "" },
  ], { id: (row) => `${row.volume}@${row.name}`, sort: "time", rows: 30, empty: "No snapshot.", label: "Snapshots" });
  snapshots.set(pool.volumes.flatMap((volume) => volume.snapshots.map((snapshot) => ({ ...snapshot, volume: volume.name || "(deleted)" }))));
  const volumes = pool.volumes.filter((volume) => volume.name).map((volume) => element("li", {}, element("strong", {}, volume.name), ` ${bytes(volume.size_bytes)}`,
    volume.disk ? [", disk ", element("a", { href: link("disks", [volume.disk]) }, volume.disk)] : ", not served", volume.domain ? `, domain ${volume.domain}` : ", not shared"));
  return element("section", {}, element("h2", {}, pool.path),
    element("div", { class: "meter", role: "img", "aria-label": `${percent(used)} used` }, element("i", { class: used > 0.9 ? "bad" : "", "data-share": used.toFixed(4) })),
    element("p", {}, `${bytes(pool.used_bytes)} of ${bytes(pool.bytes)} used (${percent(used)}). ${bytes(pool.shared_bytes)} are shared, and equal blocks save ${bytes(pool.saved_bytes)}. ${bytes(pool.memory_bytes)} of memory.`),
    element("ul", {}, volumes), snapshots.node, verified(pool.scrub), reclaimed(pool.reclaim));
}

export function pools(main) {
  const list = element("div");
  main.append(list);
  let last = "";
  return polled(main, 5, async (signal) => {
    const { pools: found } = await ask(site.host, "stores", signal);
    const key = JSON.stringify(found);
    if (key === last) return;
    last = key;
    list.replaceChildren(...(found.length ? found.map(poolView) : [element("p", { class: "quiet" }, "No disk of this daemon has a pool. `fathom store create` makes one.")]));
    for (const bar of list.querySelectorAll("[data-share]")) bar.style.width = `${Number(bar.dataset.share) * 100}%`;
  });
}

export function devices(main) {
  let before = null;
  const table = new Table([
    { name: "Device", key: "name", value: (row) => row.name, text: (row) => row.name },
    { name: "Kind", key: "kind", text: (row) => `${row.kind}${row.rotational ? ", rotational" : ""}` },
    { name: "Size", key: "size", number: true, value: (row) => row.size_bytes, text: (row) => bytes(row.size_bytes) },
    { name: "Busy", key: "busy", number: true, value: (row) => row.busy ?? -1, text: (row) => percent(row.busy) },
    { name: "Read", key: "read", number: true, value: (row) => row.read ?? -1, text: (row) => (row.read === undefined ? "–" : `${bytes(row.read)}/s`) },
    { name: "Written", key: "written", number: true, value: (row) => row.written ?? -1, text: (row) => (row.written === undefined ? "–" : `${bytes(row.written)}/s`) },
    { name: "In flight", key: "flight", number: true, value: (row) => row.in_flight, text: (row) => number(row.in_flight) },
    { name: "Disks", key: "disks", wide: true, text: (row) => row.disks.join(", ") },
    { name: "Problems", key: "problems", wide: true, text: (row) => row.problems.map((problem) => problem.message ?? String(problem)).join("; ") },
  ], { id: (row) => row.name, sort: "busy", empty: "No disk lies on a device.", label: "Devices" });
  const waiting = new Table([
    { name: "Disk", key: "disk", value: (row) => row.disk, text: (row) => row.disk },
    { name: "Layer", key: "layer", text: (row) => row.layer },
    { name: "Waits", key: "bytes", number: true, value: (row) => row.bytes, text: (row) => bytes(row.bytes) },
    { name: "Due in", key: "due", number: true, value: (row) => row.deadline_in_ns ?? 0, text: (row) => span(row.deadline_in_ns) },
    { name: "Device", key: "device", text: (row) => row.device },
    { name: "State", key: "state", text: (row) => (row.is_running ? "runs" : "waits for an idle device") },
  ], { id: (row) => `${row.disk}\u0000${row.layer}`, sort: "bytes", empty: "No work waits.", label: "Background work" });
  main.append(element("h2", {}, "Devices beneath the disks"), table.node, element("h2", {}, "Background work"), waiting.node);
  return polled(main, 2, async (signal) => {
    const list = await ask(site.host, "devices", signal);
    const seconds = before ? (list.time_ns - before.time_ns) / 1e9 : 0;
    table.set(list.devices.map((device) => {
      const old = before?.devices.find((other) => other.name === device.name)?.host;
      if (!old || !device.host || seconds <= 0) return device;
      return { ...device, busy: Math.min(1, (device.host.busy_ms - old.busy_ms) / 1000 / seconds),
        read: (device.host.read_bytes - old.read_bytes) / seconds, written: (device.host.written_bytes - old.written_bytes) / seconds };
    }));
    before = list;
    const work = await ask(site.host, "background", signal);
    waiting.set(work.devices.flatMap((device) => device.waiting.map((entry) => ({ ...entry, device: device.devices.join(", ") }))));
  });
}

export function events(main) {
  const filter = element("input", { type: "search", placeholder: "Filter", "aria-label": "Filter the events", oninput: () => draw() });
  const words = element("p", { class: "quiet" });
  const list = element("ul", { class: "events" });
  main.append(element("div", { class: "bar" }, element("h2", {}, "Events"), filter), words, list);
  let all = [];
  let lost = 0;
  let last = 0;
  const draw = () => {
    const text = filter.value.toLowerCase();
    const found = all.filter((event) => `${event.disk ?? ""} ${event.message}`.toLowerCase().includes(text));
    setText(words, lost ? `${number(lost)} earlier ones are no longer kept.` : "");
    list.replaceChildren(...found.slice(-300).reverse().map((event) => element("li", { class: event.level }, when(event.unix_time_ns), " ",
      element("span", { class: "badge" }, event.level), " ",
      event.disk ? [element("a", { href: link("disks", [event.disk]) }, event.disk), ": "] : null, event.message,
      event.left_out ? element("span", { class: "quiet" }, ` (and ${event.left_out} like it)`) : null)));
    if (!found.length) list.append(element("li", { class: "quiet" }, "None."));
  };
  return polled(main, 2, async (signal) => {
    const answer = await ask(site.host, `events?after=${last}`, signal);
    if (last === 0) lost = answer.lost;
    if (answer.last === last && all.length) return;
    last = answer.last;
    all = [...all, ...answer.events].slice(-2000);
    draw();
  });
}

/** Who has changed what. */
export function changes(main) {
  const filter = element("input", { type: "search", placeholder: "Filter", "aria-label": "Filter the changes", oninput: () => draw() });
  const words = element("p", { class: "quiet" });
  const table = new Table([
    { name: "When", key: "time", number: true, value: (row) => row.unix_time_ns, cell: (row, cell) => put(cell, `${row.unix_time_ns}`, () => when(row.unix_time_ns)) },
    { name: "Who", key: "who", value: (row) => row.who, text: (row) => row.who },
    { name: "Request", key: "request", wide: true, value: (row) => row.request, text: (row) => row.request },
    { name: "What", key: "body", wide: true, text: (row) => row.body ?? "" },
    { name: "Took", key: "took", number: true, value: (row) => row.duration_us, text: (row) => span(row.duration_us * 1000) },
    { name: "Result", key: "result", wide: true, value: (row) => row.status ?? 0, text: (row) => [row.status, row.error].filter(Boolean).join(": ") },
  ], { id: (row) => row.key, sort: "time", rows: 50, empty: "Nothing.", label: "Changes" });
  main.append(element("div", { class: "bar" }, element("h2", {}, "Changes, and who asked for them"), filter), words, table.node);
  let all = [];
  const draw = () => {
    const text = filter.value.toLowerCase();
    table.set(all.filter((entry) => `${entry.who} ${entry.request} ${entry.body ?? ""} ${entry.error ?? ""}`.toLowerCase().includes(text)));
  };
  return polled(main, 5, async (signal) => {
    const report = await ask(site.host, "audit?count=1000", signal);
    const lost = report.lost || report.unreadable ? ` ${number(report.lost)} could not be written, and ${number(report.unreadable)} cannot be read.` : "";
    setText(words, `The last ${number(report.entries.length)} of ${report.path}.${report.problem ? ` ${report.problem}.` : ""}${lost}`);
    words.className = report.problem ? "bad" : "quiet";
    const seen = new Map();
    all = report.entries.map((entry) => {
      const who = entry.user_id === undefined ? "the daemon" : [entry.user || `user ${entry.user_id}`, entry.command && `(${entry.command} ${entry.process_id ?? ""})`].filter(Boolean).join(" ");
      const id = `${entry.unix_time_ns}\u0000${entry.request}`;
      seen.set(id, (seen.get(id) ?? 0) + 1);
      return { ...entry, who, key: `${id}\u0000${seen.get(id)}` };
    });
    draw();
  });
}
