// The page: its views, which the part behind # of its address names, and the host that is shown.

import { element, follow, failure, setText, span } from "./parts.js";
import { overview } from "./overview.js";
import { disk } from "./disk.js";
import { who } from "./who.js";
import { changes, guests, pools, devices, events } from "./host.js";
import { query } from "./query.js";

const VIEWS = [
  ["disks", "Disks", overview],
  ["who", "Who", who],
  ["guests", "Guests", guests],
  ["pools", "Pools", pools],
  ["devices", "Devices", devices],
  ["events", "Events", events],
  ["changes", "Changes", changes],
  ["query", "Query", query],
];

const main = document.getElementById("main");
const nav = document.getElementById("nav");
const chooser = document.getElementById("host");
const state = document.getElementById("state");

/** What all views share. */
export const site = { hosts: [], host: "", live: null, listeners: new Set() };

let shown = null;
let endLive = () => {};

/** The parts of the address: #/HOST/VIEW/REST?PARAMETERS. */
export function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [host = "", view = "", ...rest] = path.split("/").map(decodeURIComponent);
  return { host, view, rest, parameters: new URLSearchParams(query) };
}

/** The address of a view of the host that is shown. */
export function link(view, rest = [], parameters = {}) {
  const path = [site.host, view, ...rest].map(encodeURIComponent).join("/");
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value)).toString();
  return `#/${path}${query ? "?" + query : ""}`;
}

function listen() {
  endLive();
  site.live = null;
  endLive = follow(site.host, "live", {}, (message) => {
    document.body.classList.toggle("away", Boolean(message.error));
    if (message.error) {
      site.away = message;
      setText(state, "The daemon does not answer.");
      state.title = [message.error, message.remedy].filter(Boolean).join(" → ");
      state.className = "bad";
    } else {
      site.away = null;
      site.live = { ...message, daemon: message.daemon ?? site.live?.daemon };
      describe(message);
    }
    for (const listener of site.listeners) listener(message);
  }, (isClosed) => {
    document.body.classList.add("away");
    setText(state, isClosed ? "The page must be opened again, with its token." : "Not connected; trying again…");
    state.className = "bad";
  });
}

function describe(message) {
  const problems = message.problems.length;
  const words = problems === 0 ? `${message.disks.length} disk${message.disks.length === 1 ? "" : "s"}, no problem` : `${problems} problem${problems > 1 ? "s" : ""}`;
  setText(state, words);
  state.className = problems ? "bad" : "good";
  const daemon = site.live.daemon;
  state.title = daemon ? `Fathom ${daemon.version}, running for ${span(Date.now() * 1e6 - daemon.started_unix_time_ns)}` : "";
  document.title = problems ? `(${problems}) Fathom · ${site.host}` : `Fathom · ${site.host}`;
}

function show() {
  const { host, view, rest, parameters } = place();
  const wanted = site.hosts.includes(host) ? host : site.hosts[0];
  if (wanted !== site.host) {
    site.host = wanted;
    chooser.value = wanted;
    listen();
  }
  if (host !== wanted) { location.replace(link("disks")); return; }
  shown?.end?.();
  const found = VIEWS.find(([name]) => name === view) ?? VIEWS[0];
  for (const anchor of nav.children) {
    anchor.href = link(anchor.dataset.view);
    if (anchor.dataset.view === found[0]) anchor.setAttribute("aria-current", "page");
    else anchor.removeAttribute("aria-current");
  }
  main.replaceChildren();
  const isDisk = found[0] === "disks" && rest.length > 0;
  shown = isDisk ? disk(main, rest[0], parameters) : found[2](main, parameters);
  window.scrollTo(0, 0);
}

function restyle() {
  shown?.restyle?.();
}

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const kept = localStorage.getItem("theme");
  if (kept) document.documentElement.dataset.theme = kept;
  document.getElementById("theme").addEventListener("click", () => {
    const isDark = (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
    document.documentElement.dataset.theme = isDark ? "light" : "dark";
    localStorage.setItem("theme", document.documentElement.dataset.theme);
    restyle();
  });
  dark.addEventListener("change", restyle);
}

async function start() {
  theme();
  const answer = await fetch("/api/hosts");
  if (!answer.ok) { location.assign("/login"); return; }
  const { hosts } = await answer.json();
  site.hosts = hosts;
  for (const host of hosts) chooser.append(element("option", { value: host }, host));
  chooser.hidden = hosts.length < 2;
  chooser.addEventListener("change", () => { location.hash = `#/${encodeURIComponent(chooser.value)}/${place().view || "disks"}`; });
  for (const [view, name] of VIEWS) nav.append(element("a", { "data-view": view, href: "#" }, name));
  window.addEventListener("hashchange", show);
  show();
}

/** Calls a function with each sample, now with the last one. Returns a function that ends that. */
export function onSample(listener) {
  site.listeners.add(listener);
  if (site.away) listener(site.away);
  else if (site.live) listener(site.live);
  return () => site.listeners.delete(listener);
}

start().catch((error) => main.replaceChildren(failure(String(error))));
